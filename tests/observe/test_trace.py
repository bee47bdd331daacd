"""``trace=``: every run leaves a file that viewers read, in which each sample is told once."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.datapipes.iter import IterableWrapper

from minato import DataLoader, ErrorPolicy, MinatoWarning, Observe, StragglerPolicy
from minato._core import now_ns
from minato.delivery import device
from minato.observe import trace as trace_module
from minato.observe.observers import LoaderSnapshot
from minato.observe.trace import LoopTrack, Tracks
from minato.observe.tracer import Tracer
from minato.sampling.progress import Progress
from minato.workers import pools, runner, supervision, worker
from tests.datasets import (
    DiesOnce,
    Failing,
    Filled,
    Lists,
    Numbers,
    Sleepy,
    Stream,
    double,
    flat,
    indices,
    plus_one,
)
from tests.delivery.recorder import Recorder
from tests.disks import file_size_limit, small_disk
from tests.edges.test_forks import code_of, forked
from tests.observe.events import Event, check_nesting, names, parents, read, samples, tracks

SIZE, BATCH = 24, 4


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that other programs hold up is not ended before it has written its last lines."""
    monkeypatch.setattr(supervision, "_GRACE_S", 60.0)
    monkeypatch.setattr(pools, "_GRACE_S", 60.0)


def whole(path: Path) -> list[Event]:
    events = read(path)
    check_nesting(events)
    return events


@pytest.fixture
def traced(tmp_path: Path) -> Callable[..., list[Event]]:
    """The events of a loader that has run and is gone."""
    paths = (tmp_path / f"run-{number}.json" for number in itertools.count())

    def trace(dataset: Any, size: int = BATCH, epochs: int = 1, **options: Any) -> list[Event]:
        run(
            DataLoader(dataset, size, observe=Observe(trace=(path := next(paths))), **options),
            epochs,
        )
        return whole(path)

    return trace


class DrawsLate(Numbers):
    """Draws random numbers, but not at first, so that minato believes that it never does."""

    def __getitem__(self, index: int) -> int:
        if index > 200:
            random.random()
        return index


class Unsendable(Sleepy):
    """Gives functions that no other process can be sent, in its second half."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return (lambda: index) if index > self.size // 2 else index


def slow_step(value: Any) -> Any:
    time.sleep(0.02 if value % 5 == 0 else 0.001)
    return value


def called(functions: list[Any]) -> list[Any]:
    return [function() if callable(function) else function for function in functions]


def once(epochs: int, size: int = SIZE) -> Counter[tuple[int, int]]:
    return Counter(itertools.product(range(epochs), range(size)))


def run(loader: Any, epochs: int = 1) -> None:
    for _ in range(epochs):
        for _ in loader:
            pass


def loader() -> LoaderSnapshot:
    return LoaderSnapshot(
        workers=1, in_flight=2, ready=1, limit=2, memory_bytes=64, budget_bytes=1024
    )


def train_until_killed(path: Path) -> None:
    loader: Any = DataLoader(Sleepy(400, 0.001), BATCH, num_workers=2, observe=Observe(trace=path))
    for number, _ in enumerate(loader):
        if number == 20:
            os.kill(os.getpid(), signal.SIGKILL)


WORKERS = [
    pytest.param({}, id="none"),
    pytest.param({"num_workers": 2, "workers": "thread"}, id="thread"),
    pytest.param(
        {"num_workers": 2, "persistent_workers": "next_epoch"},
        id="fork, persistent, next epoch ahead",
    ),
    pytest.param({"num_workers": 2, "seed": 1, "order": "arrival"}, id="fork, arrival"),
    *(
        pytest.param({"num_workers": 1, "multiprocessing_context": method}, id=method)
        for method in ("spawn", "forkserver")
    ),
]


ATTEMPTS = 10
"""Runs, one of which has what happens unless other programs hold a process up for long."""


def test_waiting_for_a_batch_is_told(traced: Any) -> None:
    for _ in range(ATTEMPTS):
        events = traced(Sleepy(8, 0.03), num_workers=1)
        if waits := parents(tracks(events)["training loop"], "wait"):
            assert set(waits) == {"next()"}
            return
    pytest.fail("the loop never waited")


@pytest.mark.parametrize("workers", WORKERS)
def test_each_sample_is_told_once(workers: dict[str, Any], traced: Any) -> None:
    epochs = 1 if "multiprocessing_context" in workers else 2
    events = traced(Filled(SIZE, 8), epochs=epochs, transforms=[double, plus_one], **workers)
    told_samples = samples(events)
    assert set(told_samples.values()) == {1}
    # Of the next epoch, which may have been begun ahead, some too.
    assert {key for key in told_samples if key[0] < epochs} == set(once(epochs))
    by_track = tracks(events)
    used = {f"worker {number}" for number in range(workers.get("num_workers", 1))}
    assert {"training loop"} < by_track.keys() <= {"training loop", *used}
    for name in ("dataset", "double", "plus_one"):
        found = [each for track in by_track.values() for each in parents(track, name)]
        assert found == ["sample"] * told_samples.total()
    loop = by_track["training loop"]
    batches = epochs * SIZE // BATCH
    told = Counter(each.name for each in loop)
    assert (told["next()"], told["step"], told["iter()"]) == (batches + epochs, batches, epochs)
    assert parents(loop, "read") == ["next()"] * batches
    assert set(parents(loop, "load")) == (set() if workers else {"next()"})
    assert set(parents(loop, "wait")) <= {"next()"}  # nobody waits where workers are ahead
    handed = [each.args for each in loop if each.name == "next()" and "end" not in each.args]
    assert [each["batch"] for each in handed] == [*range(batches // epochs)] * epochs
    assert {each["samples"] for each in handed} == {BATCH}
    assert names(events, "b") == names(events, "e") == {"batch": batches}
    assert names(events, "C").keys() == {
        "batches in flight",
        "prefetch window (batches)",
        "workers",
        "memory in flight (bytes)",
    }


@pytest.mark.parametrize("order", ["batch", "fast_first"])
def test_a_sample_that_was_deferred_is_told_once(order: str, traced: Any) -> None:
    options = {"stragglers": StragglerPolicy(after_s=0.01), "transforms": [slow_step, plus_one]}
    events = traced(Numbers(120), num_workers=2, order=order, **options)
    assert samples(events) == once(1, 120)
    if order == "fast_first":
        assert samples(events, "sample (deferred)")


def test_samples_that_are_run_again_are_told_as_such(
    traced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only cheap samples are run before it is known whether they draw: here all are, however long they take.
    monkeypatch.setattr(runner, "WORTH_BINDING_NS", 1 << 60)
    events = traced(DrawsLate(2000), 250, seed=1, shuffle=False)
    assert samples(events) == once(1, 2000)
    assert samples(events, "sample (repeated)")


def test_samples_that_run_again_to_be_collated_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stores samples slowly would count these as cheap: one worker would run whole batches.
    monkeypatch.setattr(worker, "_HANDOVERS", 0)
    for attempt in range(ATTEMPTS):
        observe = Observe(trace=(path := tmp_path / f"run-{attempt}.json"))
        dataset, options = Unsendable(SIZE, 0.01), {"num_workers": 2, "collate_fn": called}
        assert flat(DataLoader(dataset, BATCH, observe=observe, **options)) == [*range(SIZE)]
        events = whole(path)
        assert samples(events) == once(1)
        if samples(events, "sample (repeated)"):
            return
    pytest.fail("one worker ran all samples of each batch")


def test_what_raised_is_told_with_its_error(traced: Any) -> None:
    policy = ErrorPolicy(on_error="skip", retries=1)
    with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
        events = traced(Failing(SIZE, {3: ValueError}), errors=policy)
    assert samples(events, "sample (failed)") == {(0, 3): 2}
    errors = [event["args"]["error"] for event in events if "error" in event.get("args", {})]
    assert errors == ["ValueError"] * 2
    assert samples(events) == once(1) - Counter([(0, 3)])


@pytest.mark.parametrize("dataset", [Lists(SIZE), Stream(SIZE)], ids=["lists", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_come_as_a_whole(dataset: Any, num_workers: int, traced: Any) -> None:
    events = traced(dataset, num_workers=num_workers)
    counts = [event["args"]["count"] for event in events if event["name"] == "samples"]
    assert counts == [BATCH] * (SIZE // BATCH)
    assert names(events)["copy"] == SIZE // BATCH


def test_reads_that_overlap(traced: Any) -> None:
    events = traced(Sleepy(SIZE, 0.01), num_workers=1, fetch_concurrency=4, transforms=[double])
    assert samples(events) == once(1)
    assert names(events, "b") == {"read": SIZE, "batch": SIZE // BATCH}
    worker = tracks(events)["worker 0"]
    assert parents(worker, "double") == ["sample"] * SIZE
    assert "wait (for reads)" in {each.name for each in worker}


def test_keys_that_are_no_integers_and_own_collation(traced: Any) -> None:
    dataset = {'a "b"': 1, "é": 2}
    events = traced(dataset, 2, sampler=list(dataset), collate_fn=list)
    assert samples(events) == {(0, 'a "b"'): 1, (0, "é"): 1}
    assert names(events)["collate"] == 1


def test_integers_that_the_viewer_would_round_are_texts(traced: Any) -> None:
    indices = [2**53, np.int64(-(2**53)), 2**53 - 1, np.int64(3)]
    events = traced(dict.fromkeys(indices, 0), sampler=indices)
    shown = {index for _, index in samples(events)}
    assert shown == {str(2**53), str(-(2**53)), 2**53 - 1, 3}


def test_two_iterators_at_once_have_tracks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    loader: Any = DataLoader(Filled(SIZE, 2), BATCH, num_workers=1, observe=Observe(trace=path))
    for _ in zip(loader, loader, strict=True):
        pass
    run(loader)
    assert tracks(whole(path)).keys() == {
        "training loop",
        "worker 0",
        "training loop of iterator 1",
        "worker 0 of iterator 1",
    }


def test_an_iterator_that_cannot_be_made_leaves_its_tracks_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no descriptor is left")

    trace = Observe(trace=tmp_path / "run.json")
    loader = DataLoader(Numbers(SIZE), BATCH, num_workers=1, workers="thread", observe=trace)
    with monkeypatch.context() as limited:
        limited.setattr("minato.engine.engine.make_pool", refuse)
        with pytest.raises(OSError, match="no descriptor"):
            iter(loader)
    gc.collect()
    run(loader, 1)
    assert tracks(whole(tmp_path / "run.json")).keys() == {"training loop", "worker 0"}


def test_a_worker_that_is_killed_leaves_a_readable_trace(traced: Any, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="is killed by signal"):
        events = traced(DiesOnce(80, tmp_path / "mark"), num_workers=2)
    assert set(samples(events)) == set(once(1, 80))
    (death,) = (name for name in names(events, "i") if "has died" in name)
    assert "exit code -9" in death


def test_a_training_process_that_is_killed_leaves_a_readable_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    process = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # The kernel ends its workers, which tell of what a lease has after they have handed it on.
    assert len(set(once(1, 21 * BATCH)) - set(samples(read(path)))) <= 2 * BATCH
    told = [event["args"]["batch"] for event in whole(path) if event["name"] == "next()"]
    assert told == [*range(21)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_file_is_bounded(
    num_workers: int, traced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 20_000
    monkeypatch.setattr(trace_module, "LIMIT_BYTES", limit)
    events = traced(Sleepy(200, 0.0005), epochs=2, num_workers=num_workers, order="batch")
    (path,) = tmp_path.iterdir()
    # The last line of each track says that it is one, and two workers may look at the size at once.
    assert limit - 3000 < path.stat().st_size < limit + 5000
    last = f"the trace is full ({limit} bytes): nothing more of this track"
    assert names(events, "i")[last] >= 1 + num_workers


def test_an_epoch_that_is_abandoned(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = {"num_workers": 2, "persistent_workers": True}
    loader: Any = DataLoader(Sleepy(60, 0.001), BATCH, observe=Observe(trace=path), **options)
    for _ in range(3):
        next(iter(loader))
    run(loader)
    del loader
    told = samples(whole(path))
    assert all(told[3, index] == 1 for index in range(60))


def test_the_file_is_made_anew_when_iteration_starts_and_headroom_is_not_traced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.json"
    run(first := DataLoader(Numbers(6), 2, observe=Observe(trace=path)))
    another = path.read_text()
    run(first.headroom(2))
    loader: Any = DataLoader(Numbers(4), 2, observe=Observe(stats=False, trace=path))
    assert path.read_text() == another
    assert loader.observe.trace == str(path)
    run(loader)
    assert samples(read(path)) == once(1, 4)  # without measuring, too


def test_without_a_trace_no_call_is_made_for_single_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        method = getattr(Tracer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        return call

    for name in ("now", "slice", "sample", "span", "instant", "flush"):
        monkeypatch.setattr(Tracer, name, counted(name))
    counts = []
    for batch_size in (4, 400):
        calls.clear()
        run(DataLoader(Numbers(20 * batch_size), batch_size, compat="torch"))
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 20 * 8


def loop_into(path: Path) -> LoopTrack:
    path.write_text("[\n")
    loop = LoopTrack(Tracks(str(path), 1, 0, "loader").loop())
    loop.begin(0, Progress(0), None)
    loop.started()
    return loop


def test_pinning_is_part_of_neither_next_nor_step(tmp_path: Path) -> None:
    loop = loop_into(path := tmp_path / "run.json")
    for _ in range(2):
        loop.enter()
        loop.leave(4, 16, loader)
        begun_ns = now_ns()
        loop.pinned(now_ns() - begun_ns)
    loop.finish()
    assert names(whole(path))["pin memory"] == 2


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="trace='.*missing.*' cannot be written .No such"):
        DataLoader(Numbers(4), observe=Observe(trace=tmp_path / "missing" / "run.json"))
    with pytest.raises(IsADirectoryError):
        DataLoader(Numbers(4), observe=Observe(trace=tmp_path))


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path: Path) -> None:
    loop = loop_into(tmp_path / "run.json")
    loop.enter()
    with (
        file_size_limit(10),
        pytest.warns(RuntimeWarning, match="the trace ends here: .*(No space left|File too large)"),
    ):
        loop.leave(1, 1, loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("message", ["No space left", "Read-only file system"])
def test_a_disk_that_fails_from_the_start_costs_the_trace(
    message: str, num_workers: int, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        loader: Any = DataLoader(
            Numbers(40), 4, observe=Observe(trace=disk.path / "run.json"), num_workers=num_workers
        )
        disk.fill()
        if "Read-only" in message:
            disk.make_read_only()
        with pytest.warns(RuntimeWarning, match=f"the trace ends here: .*{message}"):
            assert flat(indices(loader)) == list(range(40))


def test_data_pipes_are_refused(traced: Any) -> None:
    with pytest.raises(ValueError, match="trace=.* is not for data pipes"):
        traced(IterableWrapper(range(4)))


@pytest.mark.large
@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ({}, "minato: load samples"),
        ({"num_workers": 1, "workers": "thread"}, "minato: wait for workers"),
        ({"num_workers": 1}, "minato: wait for workers"),
    ],
)
def test_ranges_in_the_profiler(workers: dict[str, Any], expected: str) -> None:
    for _ in range(ATTEMPTS):
        loader: Any = DataLoader(Sleepy(8, 0.03), 4, **workers)  # so long that the loop has to wait
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            run(loader)
        found = {each.key: each.count for each in recorded.key_averages()}
        assert found["enumerate(DataLoader)#BatchIterator.__next__"] == 3
        if expected in found:
            break
    assert found[expected] >= 1
    assert not [name for name in found if name.startswith("minato") and name != expected]


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a range was made")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    loader: Any = DataLoader(Filled(8, 2), 4)
    assert len([np.asarray(batch) for batch in loader]) == 2


def test_copies_to_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(device, "accelerator_of", lambda device: recorder)
    path = tmp_path / "run.json"
    loader: Any = DataLoader(
        Filled(SIZE, 8), BATCH, num_workers=1, device="meta", observe=Observe(trace=path)
    )
    for number, _ in enumerate(loader):
        if number % 2:
            recorder.run()
    del loader
    events = whole(path)
    sends = parents(tracks(events)["training loop"], "send to device")
    assert len(sends) == SIZE // BATCH
    assert set(sends) <= {"next()", "read"}
    assert 0 < names(events, "b")["copy to device"] <= SIZE // BATCH


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_each_process_traces_into_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into that of its parent, whose engine it inherits, nor one with other content."""
    monkeypatch.setenv("MINATO_TRACE", str(tmp_path / "run.json"))
    monkeypatch.setattr(trace_module, "_numbers", itertools.count(1))
    loader: Any = DataLoader(Numbers(8), 4)
    assert not list(tmp_path.iterdir())  # the rank may not be known yet
    monkeypatch.setenv("LOCAL_RANK", "1")
    run = tmp_path / "run.rank1.json"

    def in_child() -> bool:
        return len(list(loader)) == 2

    def in_hindered_child() -> bool:
        notes = run.with_suffix(f".pid{os.getpid()}.json")
        notes.write_text("notes")
        with pytest.warns(MinatoWarning, match="not traced: MINATO_TRACE=.* something else"):
            return len(list(loader)) == 2 and notes.read_text() == "notes"

    assert in_child()
    child, hindered = forked(in_child), forked(in_hindered_child)
    assert (code_of(child), code_of(hindered)) == (0, 0)
    assert in_child()
    pids = {
        each: {event["pid"] for event in read(each)}
        for each in tmp_path.glob("run*.json")
        if each.read_text() != "notes"
    }
    assert pids == {run: {os.getpid()}, run.with_suffix(f".pid{child}.json"): {child}}
