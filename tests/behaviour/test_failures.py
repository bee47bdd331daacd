"""Samples that raise, hang or kill: skipped, replaced, tried again, counted and kept in quarantine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import minato
from minato import SKIP, Arrival, DataLoader, ErrorPolicy, SampleFailure
from minato.workers.error_policy import FailureCount, FailureLog
from tests.behaviour.states import Stateful
from tests.datasets import ORDERS, Numbers, drain, flat, rows, wait_until
from tests.disks import file_size_limit, small_disk
from tests.pairwise import pairwise
from tests.selection import WORKERS, each, each_of, sweep

BAD = {3, 4, 17, 30, 31, 32, 33, 39}


class Flawed:
    """Forty samples, some of which raise."""

    def __init__(self, bad: set[int] = BAD, length: int = 40) -> None:
        self.bad = bad
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"sample {index} is torn")
        return index, torch.rand(2)


class FlawedArrays(Flawed):
    """The same, each an array."""

    def __getitem__(self, index: int) -> Any:
        return np.full(3, super().__getitem__(index)[0])


class FlawedLists(Flawed):
    """The same, for a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class ChanceLists(Numbers):
    """A call for a batch fails by chance, and names its indices."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        drawn = [random.random() for _ in indices]
        if min(drawn) < 0.2:
            raise ValueError("a sample is torn")
        return [(index, len(indices), number) for index, number in zip(indices, drawn, strict=True)]


def as_list(samples: list[Any]) -> list[int]:
    return [index for index, _ in samples]


def replaced(failure: SampleFailure) -> Any:
    return failure.index + 1000, torch.zeros(2)


def choosy(failure: SampleFailure) -> Any:
    if failure.index == 3:
        return SKIP
    if failure.index == 4:
        raise KeyError("four")
    return replaced(failure)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A worker that is stuck tells its stack, however busy the machine.
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 3600.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*of this epoch w.* skipped")
        warnings.filterwarnings("ignore", ".*Another worker takes its place")
        yield


def indices(loader: DataLoader[Any]) -> list[list[int]]:
    """The indices of each batch, whichever way it was collated."""
    return [batch[0].tolist() if torch.is_tensor(batch[0]) else batch for batch in loader]


def records_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


class Skips(Numbers):
    def __getitem__(self, index: int) -> Any:
        return SKIP if index == 1 else index


@pytest.mark.parametrize("order", ORDERS)
def test_where_no_sample_is_skipped_the_mark_of_one_is_no_sample(order: str) -> None:
    loader = DataLoader(Skips(4), 4, num_workers=1, order=order, timeout=60)
    with pytest.raises((RuntimeError, TypeError), match="cannot be collated"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("kind", "order", "collate", "lists"),
    pairwise(itertools.product(WORKERS, ORDERS, (None, as_list), (False, True))),
)
def test_skip(kind: str, order: str, collate: Any, lists: bool) -> None:
    """What is left comes once; full batches where places are free, whole ones where they are not."""
    flawed = FlawedLists if lists else Flawed
    options = {"order": order, "errors": "skip", "seed": 1, **WORKERS[kind]}
    loader = DataLoader(flawed(), 4, collate_fn=collate, **options)
    left = sorted(set(range(40)) - BAD)
    for _ in range(2):
        batches = indices(loader)
        assert sorted(flat(batches)) == left
        sizes = [len(batch) for batch in batches]
        assert 0 not in sizes
        if order == "arrival" and options["num_workers"]:
            assert sizes == [4] * 8
    alone = DataLoader(Flawed(), None, **options)
    assert sorted(index for index, _ in alone) == left
    all_bad = flawed(set(range(40)))
    assert indices(DataLoader(all_bad, 4, collate_fn=collate, **options)) == []


@each
def test_skip_keeps_the_members_of_strict_batches(workers: dict[str, Any]) -> None:
    loader = DataLoader(Flawed(), 4, errors="skip", **workers)
    left = [[n for n in range(start, start + 4) if n not in BAD] for start in range(0, 40, 4)]
    assert indices(loader) == [batch for batch in left if batch]
    given = [[], [0, 1], [*BAD], [2]]  # the first one is empty as with torch
    loader = DataLoader(Flawed(), batch_sampler=given, collate_fn=as_list, errors="skip", **workers)
    assert list(loader) == [[], [0, 1], [2]]


@each
def test_skip_of_samples_that_are_arrays(workers: dict[str, Any]) -> None:
    """They answer ``==`` by an array."""
    loader = DataLoader(FlawedArrays({3}, 6), 2, errors="skip", **workers)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2], [4, 5]]


@each_of({name: workers for name, workers in WORKERS.items() if name != "inline"})
def test_incomplete_batches_are_dropped_where_places_are_free(workers: dict[str, Any]) -> None:
    loader = DataLoader(Flawed({5}), 4, order="arrival", drop_last=True, errors="skip", **workers)
    batches = indices(loader)
    assert [len(batch) for batch in batches] == [4] * 9
    assert len(set(flat(batches))) == 36


@each
@pytest.mark.parametrize("order", ORDERS)
def test_substitutes(workers: dict[str, Any], order: str) -> None:
    loader = DataLoader(Flawed(), 4, order=order, errors=replaced, **workers)
    batches = indices(loader)
    assert [len(batch) for batch in batches] == [4] * 10
    expected = [n + 1000 if n in BAD else n for n in range(40)]
    assert sorted(flat(batches)) == sorted(expected)
    if order == "strict":
        assert flat(batches) == expected


@each
def test_a_function_may_skip_or_raise(workers: dict[str, Any]) -> None:
    iterator = iter(DataLoader(Flawed(), 4, errors=choosy, **workers))
    assert next(iterator)[0].tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="four") as told:
        next(iterator)
    text = "".join(traceback.format_exception(told.value))
    assert "sample 4 is torn" in text  # what the function was called for
    assert next(iterator)[0].tolist() == [8, 9, 10, 11]


class Shaky(Flawed):
    """Bad samples raise twice, each time after a draw."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir()

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(2, generator=minato.torch_rng())
        path = self.folder / str(index)
        tries = int(path.read_text()) if path.exists() else 0
        path.write_text(str(tries + 1))
        if index in self.bad and tries < 2:
            raise OSError(5, "connection lost")
        return index, drawn


@each
def test_retries_draw_the_same(workers: dict[str, Any], tmp_path: Path) -> None:
    shaky, sound = (Shaky(tmp_path / name) for name in ("shaky", "sound"))
    sound.bad = set()
    policy = ErrorPolicy(on_error="retry", log=tmp_path / "log")
    tried = DataLoader(shaky, 4, errors=policy, seed=3, **workers)
    found = [(i.tolist(), x.tolist()) for i, x in tried]
    assert found == [(i.tolist(), x.tolist()) for i, x in DataLoader(sound, 4, seed=3)]
    records = records_of(tmp_path / "log")
    assert {record["index"] for record in records} == BAD
    assert {(record["outcome"], record["attempts"]) for record in records} == {("recovered", 3)}


class Scripted(Numbers):
    def __init__(self, scripts: list[list[type[BaseException]]]) -> None:
        super().__init__(len(scripts))
        self.scripts = scripts

    def __getitem__(self, index: int) -> int:
        if self.scripts[index]:
            raise self.scripts[index].pop(0)
        return index


class Interrupted(Numbers):
    """The first calls for a whole batch are interrupted."""

    def __init__(self, size: int, times: int = 2) -> None:
        super().__init__(size)
        self.times = times
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append([*indices])
        if len(self.calls) <= self.times:
            raise KeyboardInterrupt
        return [*indices]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "workers": "thread"}])
def test_an_interrupted_call_for_a_batch_is_no_bad_sample(workers: dict[str, Any]) -> None:
    """Single calls would draw other random numbers."""
    dataset = Interrupted(12)
    iterator = iter(DataLoader(dataset, 4, errors="skip", **workers))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert next(iterator).tolist() == dataset.calls[2]
    assert [len(call) for call in dataset.calls] == [4] * len(dataset.calls)


@pytest.mark.parametrize("errors", ["raise", "skip"])
def test_an_interrupted_call_for_free_samples_is_raised(errors: str) -> None:
    dataset = Interrupted(12, times=1)
    options = {"order": "arrival", "num_workers": 1, "workers": "thread", "errors": errors}
    iterator = iter(DataLoader(dataset, 4, **options))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert flat(iterator) == list(range(4, 12))


@sweep(workers=WORKERS, on_error=["skip", "raise"], retries=[0, 1, 3])
def test_every_attempt_is_judged_and_counted(
    workers: dict[str, Any], on_error: str, retries: int, tmp_path: Path
) -> None:
    """What would end a process is never retried or skipped, at whichever attempt it comes."""
    draw, log, size = random.Random(retries), tmp_path / "log", 80
    kinds = [ValueError, OSError, SystemExit]
    scripts = [draw.choices(kinds, [3, 3, 1], k=draw.randrange(5)) for _ in range(size)]
    exit_error = RuntimeError if workers == WORKERS["2-processes"] else SystemExit
    given, raised, records = list[int](), list[tuple[type, str]](), list[tuple[int, str, int]]()
    for index, script in enumerate(scripts):
        tried = script[: retries + 1]
        note = f"raised by the sample with index {index}"
        if SystemExit in tried:
            raised.append((exit_error, note))
        elif len(tried) <= retries:
            given.append(index)
            records += [(index, "recovered", len(tried) + 1)] if tried else []
        else:
            raised += [(tried[-1], note)] if on_error == "raise" else []
            records.append((index, {"skip": "skipped"}.get(on_error, "raised"), retries + 1))
    policy = ErrorPolicy(on_error, retries=retries, log=log)
    loader = DataLoader(Scripted(scripts), 1, errors=policy, **workers)
    found, errors = drain(loader)
    assert found == given
    assert [(type(error), *error.__notes__) for error in errors] == raised
    told = ((each["index"], each["outcome"], each["attempts"]) for each in records_of(log))
    assert sorted(told) == records
    counted = loader.report().run.errors
    assert counted.retries == sum(attempts - 1 for *_, attempts in records)
    assert counted.recovered == [outcome for _, outcome, _ in records].count("recovered")


@each
@pytest.mark.usefixtures("collected_on_request")
def test_samples_that_were_skipped_or_recovered_keep_nothing(workers: dict[str, Any]) -> None:
    """The tracebacks of their errors hold the iterator and the dataset."""
    scripted = Scripted([[ValueError] * failures for failures in range(4)])
    loader = DataLoader(scripted, errors=ErrorPolicy("skip", retries=2), **workers)
    dataset = weakref.ref(scripted)
    del scripted
    assert drain(loader) == ([0, 1, 2], [])
    del loader
    wait_until(lambda: dataset() is None)  # its threads end


def torn(sample: Any) -> Any:
    if sample[0] % 10 == 7:
        raise RuntimeError("a", "b")
    return sample


def test_quarantine_tells_what_is_needed_to_repeat_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    policy = ErrorPolicy(on_error="skip", log=path)
    loader = DataLoader(Flawed({3}), 4, transforms=[torn], errors=policy, num_workers=2)
    for _ in range(2):
        list(loader)
    records = records_of(path)
    assert sorted((record["epoch"], record["index"]) for record in records) == [
        (epoch, index) for epoch in range(2) for index in (3, 7, 17, 27, 37)
    ]
    for record in records:
        assert (record["outcome"], record["attempts"]) == ("skipped", 1)
        assert record["worker"] in (0, 1)
        if record["index"] == 3:
            assert record["exception"] == "builtins.ValueError"
            assert record["message"] == "sample 3 is torn"
        transform, place = (None, "__getitem__") if record["index"] == 3 else ("torn", "torn")
        assert record["transform"] == transform
        assert f"in {place}" in record["traceback"]


@pytest.mark.parametrize("seed", [None, 11])
def test_reproduce(seed: int | None) -> None:
    loader = DataLoader(Flawed({3}), 4, seed=seed, num_workers=2, shuffle=True, errors="skip")
    state = torch.get_rng_state()
    if seed is None:
        with pytest.raises(ValueError, match="give seed="):
            loader.reproduce(5)
    epochs = [
        {i: x for batch in loader for i, x in zip(batch[0].tolist(), batch[1], strict=True)}
        for _ in range(2)
    ]
    torch.set_rng_state(state)
    before = np.random.get_state()[1].tolist()
    index, drawn = loader.reproduce(20)
    assert index == 20
    assert torch.equal(drawn, epochs[1][20])
    if seed is not None:
        assert torch.equal(loader.reproduce(20, epoch=0)[1], epochs[0][20])
    with pytest.raises(ValueError, match="sample 3 is torn"):
        loader.reproduce(3)
    with pytest.raises(TypeError, match="epoch='1' is a str: give an integer"):
        loader.reproduce(20, epoch="1")  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == before


class Late(Numbers):
    """One sample raises when its place in a batch is settled, because it is late."""

    def __getitem__(self, index: int) -> int:
        if index == 1:
            time.sleep(0.5)
            raise ValueError("sample 1 is torn")
        return index


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_late_sample_that_is_skipped_makes_its_batch_a_short_one(drop_last: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "order": Arrival(max_lag=2), "errors": "skip"}
    loader = DataLoader(Late(40), 4, drop_last=drop_last, **options)
    batches = [batch.tolist() for batch in loader]
    account = loader.coverage()
    assert {len(batch) for batch in batches} == ({4} if drop_last else {3, 4})
    assert len(flat(batches)) == account.delivered.samples == 40 - account.skipped.samples
    assert account.complete
    if not drop_last:
        assert sorted(flat(batches)) == [0, *range(2, 40)]


# ---- how many ---------------------------------------------------------------------------------


@each
@pytest.mark.parametrize(("budget", "enough"), [(8, True), (7, False), (0.2, True), (0.1, False)])
def test_error_budget(workers: dict[str, Any], budget: float, enough: bool) -> None:
    policy = ErrorPolicy(on_error="skip", max_failures=budget)
    loader = DataLoader(Flawed(), 4, errors=policy, **workers)
    for _ in range(2):
        if enough:
            assert len(flat(indices(loader))) == 32
        else:
            iterator = iter(loader)
            with pytest.raises(minato.ErrorBudgetError, match=f"max_failures={budget} .*is torn"):
                list(iterator)
            assert list(iterator) == []


def test_failures_of_the_next_epoch_are_not_those_of_this_one() -> None:
    policy = ErrorPolicy(on_error="skip", max_failures=8)
    options: dict[str, Any] = {"workers": "thread", "persistent_workers": "next_epoch"}
    loader = DataLoader(Flawed(), 4, num_workers=2, errors=policy, **options)
    for failed in (8, 16, 24):
        iterator = iter(loader)
        for _ in range(9):  # of ten
            next(iterator)
        # The next epoch has begun.
        wait_until(functools.partial(_skips_more, loader, failed))
        next(iterator)
        with pytest.warns(minato.MinatoWarning, match="^8 samples of this epoch were skipped"):
            assert list(iterator) == []


def test_failures_of_a_wrong_guess_of_the_next_epoch_are_not_those_of_that() -> None:
    sampler = DistributedSampler(Numbers(40), 1, 0)
    sampler.set_epoch(1)
    bad = {next(iter(sampler))}
    sampler.set_epoch(0)  # and nothing else: the second epoch repeats the order of the first
    options: dict[str, Any] = {"workers": "thread", "persistent_workers": "next_epoch"}
    loader = DataLoader(Flawed(bad), 4, sampler=sampler, num_workers=2, errors="skip", **options)
    iterator: Any = iter(loader)
    list(iterator)
    # Between two epochs a report has the figures of the last one.
    wait_until(lambda: iterator._source._failures._log.counts()["skipped"] > 1)
    with pytest.warns(minato.MinatoWarning, match="^1 sample of this epoch was skipped"):
        list(loader)


def _skips_more(loader: DataLoader[Any], than: int) -> bool:
    return loader.report().run.errors.skipped > than


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"on_error": "ignore"}, ValueError, "on_error='ignore' is not possible"),
        ({"retries": -1}, ValueError, "retries=-1 is too small"),
        ({"max_failures": 1.5, "on_error": "skip"}, ValueError, "max_failures=1.5 is not"),
        ({"max_failures": "1", "on_error": "skip"}, TypeError, "max_failures='1' is a str"),
        ({"max_failures": 1}, ValueError, "max_failures=1 has no meaning with on_error='raise'"),
        ({"on_worker_death": "skip"}, ValueError, "on_worker_death='skip'.*'raise'"),
        ({"sample_timeout": 0}, ValueError, "sample_timeout=0 is too small"),
        ({"sample_timeout": "1"}, TypeError, "give seconds"),
        ({"sample_timeout": 1.0}, ValueError, "needs worker processes"),
        ({"log": 3}, TypeError, "log=3 is a int: give a path"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DataLoader(Flawed(), errors=ErrorPolicy(**arguments))


def test_a_quarantine_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none/file") as caught:
        DataLoader(Flawed(), errors=ErrorPolicy(log=tmp_path / "none" / "file", on_error="skip"))
    (note,) = caught.value.__notes__
    assert "(ErrorPolicy.log) cannot be written: give a file in a directory" in note


@each
def test_a_full_disk_under_the_quarantine_costs_records_and_nothing_else(
    workers: dict[str, Any], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.path / "bad.jsonl"
        policy = ErrorPolicy(on_error="skip", log=path)
        loader = DataLoader(Flawed(), 4, order="strict", errors=policy, **workers)
        disk.fill(left_bytes=4096)  # enough for two or three
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a failed sample could not be recorded")
            for _ in range(2):
                assert flat(indices(loader)) == [n for n in range(40) if n not in BAD]
        errors = loader.report().run.errors
        kept = recorded(path)
        assert errors.skipped == 2 * len(BAD)
        assert errors.unrecorded == 2 * len(BAD) - len(kept) > 0
        disk.clear()
        assert len(flat(indices(loader))) == 40 - len(BAD)
        assert loader.report().run.errors.unrecorded == errors.unrecorded
        assert recorded(path)[: len(kept)] == kept
        assert sorted(recorded(path)[len(kept) :]) == sorted(BAD)


def recorded(path: Path) -> list[int]:
    """The samples of all whole records of a quarantine."""
    found = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line)["index"])
    return found


def test_a_full_disk_under_the_quarantine_warns_once_and_keeps_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    policy = ErrorPolicy(on_error="skip", log=path, max_failures=4)
    batches = iter(DataLoader(Flawed(), 4, errors=policy))
    with (
        file_size_limit(100),
        pytest.warns(RuntimeWarning, match="File too large|No space left") as caught,
        pytest.raises(minato.ErrorBudgetError, match="^5 samples of this epoch failed"),
    ):
        list(batches)
    assert len(caught) == 1
    assert path.stat().st_size == 100


def test_a_quarantine_that_is_gone_at_a_later_epoch(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        policy = ErrorPolicy(on_error="skip", log=disk.path / "bad.jsonl")
        loader = DataLoader(Flawed(), 4, errors=policy)
        disk.make_read_only()
        with pytest.warns(RuntimeWarning, match=r"can no longer be opened: Read-only file"):
            assert len(flat(indices(loader))) == 40 - len(BAD)
        assert loader.report().run.errors.skipped == len(BAD)


@each
def test_no_temporary_directory_is_needed(
    workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", refuse)
    monkeypatch.setattr(tempfile, "tempdir", None)
    limit_s = 30 if workers == WORKERS["2-processes"] else None
    loader = DataLoader(Flawed(), 4, **workers, errors=ErrorPolicy("skip", sample_timeout=limit_s))
    assert len(flat(indices(loader))) == 40 - len(BAD)


def failure_of(index: Any) -> SampleFailure:
    return SampleFailure(index, 0, 0, 0, 1, ValueError(""), None)


LOG_PARTS = st.lists(
    st.one_of(
        st.integers(-5, 5).map(failure_of),
        st.text(max_size=9).map(failure_of),
        st.binary(max_size=30),
        st.sampled_from([b"\n", b'{"index":', b"[" * 9999, b"\xff\n", b'{"index":[]}\n', b"1\n"]),
    ),
    max_size=12,
)


@settings(max_examples=80)
@given(parts=LOG_PARTS)
def test_a_log_with_torn_and_foreign_lines_gives_the_last_record(parts: list[Any]) -> None:
    check_log(parts)


def check_log(parts: list[Any]) -> None:
    """Of records, and of bytes that somebody else has appended between them, the last record is found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bad.jsonl"
        log = FailureLog(str(path))
        start, expected = log.size(), list[Any]()
        for part in parts:
            if isinstance(part, bytes):
                with path.open("ab") as file:
                    file.write(part)
            else:
                log.append(part, "skipped")
                expected.append(part.index)
            last = log.last(start)
            assert (last and last["index"]) == (expected[-1] if expected else None)
            assert log.last(log.size()) is None
        assert log.counts()["skipped"] == len(expected)
        assert log.counts()["unrecorded"] == 0


def test_a_failure_of_the_next_epoch_never_counts_in_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker may be stopped between two of the numbers that it changes."""
    log = FailureLog()
    counted, add = FailureCount(log, 1, None), log._counters.add
    counted.begin(2, 9)

    def slowly(**counts: int) -> None:
        for name, count in counts.items():
            add(**{name: count})
            counted.check()  # at most one sample may fail

    monkeypatch.setattr(log._counters, "add", slowly)
    for epoch in (2, 3, 3):
        log.append(SampleFailure(0, epoch, 0, 0, 1, KeyError(), None), "skipped")
    assert log.counts()["skipped"] == 3


def test_a_line_that_another_worker_is_writing_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.jsonl"
    log = FailureLog(str(path))
    log.append(failure_of(1), "skipped")
    whole = path.read_bytes()
    pieces = [whole[:9], whole[9:90], whole[90:]]

    def write(_: float) -> None:
        with path.open("ab") as file:
            file.write(pieces.pop(0))

    write(0)
    monkeypatch.setattr(time, "sleep", write)
    log.append(failure_of(2), "skipped")
    assert [record["index"] for record in records_of(path)] == [1, 1, 2]


# ---- stuck and deadly -------------------------------------------------------------------------


MOST_TIMED_OUT = 5
"""One sample, and those whose workers get no time on a busy machine."""


class Stuck(Flawed):
    """Sample 5 takes a minute, sample 9 ends its process."""

    deadly = True

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            time.sleep(60)
        if index == 9 and self.deadly:
            os._exit(1)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("order", "collate"),
    [("strict", None), ("batch", as_list), ("arrival", None), ("fast_first", as_list)],
)
def test_stuck_and_deadly_samples_are_skipped(order: str, collate: Any, tmp_path: Path) -> None:
    policy = ErrorPolicy(on_error="skip", sample_timeout=1, log=tmp_path / "log")
    options = {"num_workers": 2, "order": order, "collate_fn": collate}
    found = flat(indices(DataLoader(Stuck({3}), 4, errors=policy, **options)))
    records = {record["index"]: record for record in records_of(tmp_path / "log")}
    timeout = "minato.errors.SampleTimeoutError"
    timed_out = {index for index, record in records.items() if record["exception"] == timeout}
    assert sorted(found) == sorted(set(range(40)) - {3, 9} - timed_out)
    assert 5 in timed_out
    assert len(timed_out) <= MOST_TIMED_OUT
    for words in ("sample_timeout=1", "in __getitem__"):
        assert words in records[5]["message"]
    assert records[9]["exception"] == "minato.errors.WorkerDiedError"
    assert (records[9]["attempts"], records[9]["outcome"]) == (3, "skipped")


class StuckLists(Stuck):
    """The same, for a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_of_a_batch_in_one_call_only_the_cause_is_skipped(order: str, tmp_path: Path) -> None:
    policy = ErrorPolicy(on_error="skip", sample_timeout=2, log=tmp_path / "log")
    loader = DataLoader(StuckLists(set()), 20, num_workers=1, order=order, errors=policy)
    found = flat(indices(loader))
    assert sorted(found) == sorted(set(range(40)) - {5, 9})
    assert {record["index"] for record in records_of(tmp_path / "log")} == {5, 9}


def test_a_stuck_sample_is_an_error_by_default() -> None:
    dataset = Stuck(set())
    dataset.deadly = False
    iterator = iter(DataLoader(dataset, 4, num_workers=2, errors=ErrorPolicy(sample_timeout=3)))
    assert next(iterator)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(minato.SampleTimeoutError, match=r"(?s)in __getitem__"):
        next(iterator)


class Counting(Stateful, Flawed):
    kept = ("length",)


def test_a_worker_whose_state_would_be_lost_is_not_ended() -> None:
    loader = DataLoader(Counting(), 4, num_workers=2, errors=ErrorPolicy(sample_timeout=1))
    with pytest.raises(ValueError, match="sample_timeout=1 .* state_dict.* use torch's timeout="):
        iter(loader)


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_failed_call_for_a_batch_leads_to_is_the_same_with_workers(order: str) -> None:
    def found(**options: Any) -> list[Any]:
        loader = DataLoader(ChanceLists(40), 4, seed=5, errors="skip", **options)
        return sorted(flat(map(rows, loader)))

    expected = found()
    assert {size for _, size, _ in expected} == {1, 4}
    assert found(num_workers=2, order=order) == expected


def drawn(failure: SampleFailure) -> Any:
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return failure.index + 1000, torch.tensor(numbers)


class Still(Flawed):
    """Samples that draw nothing."""

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"sample {index} is torn")
        return index, torch.zeros(3)


class StillStuck(Stuck, Still):
    """Sample 5 takes a minute."""

    deadly = False


def substitutes(dataset: Any, errors: Any = drawn, **options: Any) -> dict[int, Any]:
    """What the substitutes of an epoch have drawn, by index; the program's generators stay as they are."""
    random.seed(3)
    before = random.getstate()
    batches = list(DataLoader(dataset, 8, seed=5, errors=errors, **options))
    assert random.getstate() == before
    return {index - 1000: drawn for index, drawn in flat(map(rows, batches)) if index >= 1000}


def test_what_a_substitute_draws_follows_from_the_sample() -> None:
    dataset = Still(set(range(5, 400, 7)), 400)
    expected = substitutes(dataset)
    assert expected.keys() == dataset.bad
    assert len(set(map(tuple, expected.values()))) == len(dataset.bad)
    for order in ORDERS:
        assert substitutes(dataset, num_workers=3, order=order) == expected
    # Where a worker was ended, the training process calls the function.
    policy = ErrorPolicy(on_error=drawn, sample_timeout=2)
    stuck = substitutes(StillStuck(set()), policy, num_workers=2)
    assert stuck[5] == expected[5]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_stuck_samples_of_other_start_methods(method: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    policy = ErrorPolicy(on_error=replaced, sample_timeout=2)
    found = flat(indices(DataLoader(Stuck({3}), 4, errors=policy, **options)))
    assert [n % 1000 for n in found] == list(range(40))
    others = {n - 1000 for n in found if n >= 1000} - {3, 9}
    assert 5 in others
    assert len(others) <= MOST_TIMED_OUT
