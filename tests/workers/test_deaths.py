"""Worker processes that die: they are replaced, nothing is lost, and a deadly sample is named."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from minato import DataLoader
from minato.scheduling import dispatcher
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.workers import supervision
from minato.workers.shared_state import CurrentSample
from minato.workers.supervision import UNREADABLE, RestartPolicy
from tests.datasets import wait_until
from tests.selection import mostly_slow


class Drawing:
    """Samples of a millisecond whose content is drawn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(0.001)
        return index, torch.rand(2)


class Deadly(Drawing):
    """Sample 37 ends the process that runs it."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 37:
            os._exit(3)
        return super().__getitem__(index)


class DeadlyOnce(Drawing):
    """Sample 37 kills the first worker that runs it."""

    def __init__(self, length: int, mark: str) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 37 and not os.path.exists(self.mark):
            with open(self.mark, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def content(loader: Iterable[Any]) -> dict[int, list[float]]:
    """What one epoch delivers; every index may come once."""
    found: dict[int, list[float]] = {}
    for indices, drawn in loader:
        for index, values in zip(indices.tolist(), drawn.tolist(), strict=True):
            assert index not in found
            found[index] = values
    return found


class Killer:
    """Kills a random worker every 40 ms, but only while batches come: three deaths without progress would be an error.

    Attributes:
        killed: Their process ids.
        batches: Counted by whoever iterates.
    """

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.batches = 0
        self._stop = threading.Event()

    def run(self) -> None:
        choice, seen = random.Random(1), 0
        while not self._stop.wait(0.04):
            children = multiprocessing.active_children()
            if children and self.batches > seen:
                seen = self.batches
                victim = choice.choice(children).pid
                assert victim is not None
                with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(victim, signal.SIGKILL)
                    self.killed.append(victim)

    def watch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over a loader under fire, after the first shot."""
        for batch in loader:
            self.batches += 1
            wait_until(lambda: bool(self.killed))
            yield batch

    def stop(self) -> None:
        self._stop.set()


@pytest.fixture
def killer() -> Iterator[Killer]:
    killer = Killer()
    thread = threading.Thread(target=killer.run)
    thread.start()
    yield killer
    killer.stop()
    thread.join()


@pytest.mark.parametrize("order", mostly_slow(["strict", "arrival"]))
def test_random_kills_lose_nothing(order: str, killer: Killer) -> None:
    """Two epochs under fire deliver every sample once, with the content of a quiet run."""
    arguments: dict[str, Any] = {"batch_size": 8, "seed": 1, "order": order}
    with warnings.catch_warnings(action="ignore"):
        loader = DataLoader(Drawing(400), num_workers=3, persistent_workers=True, **arguments)
        under_fire = [content(killer.watch(loader)) for _ in range(2)]
    quiet = DataLoader(Drawing(400), **arguments)
    assert under_fire == [content(quiet) for _ in range(2)]


def test_a_death_wakes_whoever_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The consumer does not look again and again: it would wait for an hour here."""
    monkeypatch.setattr(dispatcher, "_LIVENESS_S", 3600.0)
    dataset = DeadlyOnce(80, str(tmp_path / "mark"))
    with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
        found = content(DataLoader(dataset, 4, num_workers=1, seed=0))
    assert sorted(found) == list(range(80))


class Slow(Drawing):
    """Samples of 50 ms."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(0.05)
        return super().__getitem__(index)


def test_dead_workers_are_replaced_although_the_loop_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: Any = iter(DataLoader(Slow(400), 4, num_workers=2, prefetch_factor=8))
    next(batches)
    engine = batches._source
    dispatcher = engine._dispatcher
    wait_until(lambda: dispatcher._is_ready(dispatcher._open[0]))
    dead = list(engine.workers)
    for process in dead:
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: len(engine._pool._watch._ended) == 2)
    monkeypatch.setattr(engine._pool, "wait", lambda *_: pytest.fail("the loop waits"))
    with pytest.warns(RuntimeWarning, match="takes its place"):
        next(batches)
    monkeypatch.undo()
    assert {process.pid for process in engine.workers}.isdisjoint(one.pid for one in dead)
    assert all(process.is_alive() for process in engine.workers)


class LeavesChild(Drawing):
    """Sample 37 kills the first worker that runs it, whose child lives on."""

    def __init__(self, length: int, mark: str) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 37 and not os.path.exists(self.mark):
            with open(self.mark, "w") as file:
                child = os.fork()
                if child == 0:
                    time.sleep(60)
                    os._exit(0)
                file.write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_death_is_noticed_although_a_child_lives_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(dispatcher, "_LIVENESS_S", 3600.0)
    mark = tmp_path / "mark"
    try:
        with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
            found = content(DataLoader(LeavesChild(80, str(mark)), 4, num_workers=1, seed=0))
        assert sorted(found) == list(range(80))
    finally:
        os.kill(int(mark.read_text()), signal.SIGKILL)


class DeadlyAlone(Deadly):
    """The same, asked for lists or tensors too."""

    def __getitem__(self, key: Any) -> Any:
        first = key[0] if isinstance(key, list) else int(key)
        return super().__getitem__(first)


@pytest.mark.parametrize(
    "keys", [[[0], [37], [2]], torch.tensor([0, 37, 2])], ids=["lists", "tensors"]
)
def test_keys_that_cannot_be_told_apart_by_hash(keys: Any) -> None:
    loader = DataLoader(DeadlyAlone(80), None, sampler=keys, num_workers=1)
    with (
        pytest.warns(RuntimeWarning, match="Another worker takes its place"),
        pytest.raises(RuntimeError, match="exited unexpectedly") as caught,
    ):
        list(loader)
    assert "37" in str(caught.value.__cause__)
    assert "3 workers died there" in str(caught.value.__cause__)


def test_workers_with_state_are_not_replaced(tmp_path: Any) -> None:
    """Round-robin workers hold random streams that a new one would not have."""
    dataset = DeadlyOnce(80, str(tmp_path / "mark"))
    loader = DataLoader(dataset, 4, num_workers=2, compat="torch", persistent_workers=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
            content(loader)
        assert "call loader.close() to start new ones" in str(caught.value.__cause__)
    loader.close()
    assert len(content(loader)) == 80


def test_deaths_before_any_sample_add_up() -> None:
    restart_policy = RestartPolicy(restarts=True)
    for _ in range(2):
        warning, error = restart_policy.report(0, 7, -signal.SIGSEGV, None, 0)
        assert re.search(r"signal: Segmentation fault .* between samples", str(warning))
        assert error is None
    with pytest.raises(RuntimeError, match=r"pid\(s\) 7"):
        restart_policy.report(0, 7, -signal.SIGSEGV, None, 0)


def test_kills_from_outside_before_any_sample_are_borne_longer_but_not_for_ever() -> None:
    restart_policy = RestartPolicy(restarts=True)
    for _ in range(9):
        warning, error = restart_policy.report(0, 7, -signal.SIGKILL, None, 0)
        assert re.search("killed by signal: Killed .* between samples", str(warning))
        assert error is None
    with pytest.raises(RuntimeError, match=r"pid\(s\) 7") as caught:
        restart_policy.report(0, 7, -signal.SIGKILL, None, 0)
    assert "10 workers died there" in str(caught.value.__cause__)


class KilledAtTheStart:
    """A ``worker_init_fn`` whose process is killed the first five times."""

    def __init__(self, directory: Any) -> None:
        self.directory = directory

    def __call__(self, number: int) -> None:
        starts = len(list(self.directory.iterdir()))
        (self.directory / str(starts)).touch()
        if starts < 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_workers_that_are_killed_while_they_start_are_replaced(tmp_path: Any) -> None:
    loader = DataLoader(Drawing(8), 4, num_workers=1, worker_init_fn=KilledAtTheStart(tmp_path))
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(list(tmp_path.iterdir())) == 6


def test_a_delivered_batch_is_progress() -> None:
    """A worker that is killed before it has counted its samples may have made progress all the same."""
    iterator = iter(DataLoader(Drawing(12), 4, num_workers=1))
    engine: Any = iterator._source
    for delivered in range(3):
        counted, progress = -1, 0
        while counted != engine.ledger.activity(0).samples:  # the worker counts samples meanwhile
            counted = engine.ledger.activity(0).samples
            progress = engine._pool._recover.progress()
        assert progress - counted == delivered
        next(iterator)


def test_workers_that_die_at_once_do_not_add_up() -> None:
    restart_policy = RestartPolicy(restarts=True)
    for number in range(10):
        warning, error = restart_policy.report(number, 7, -signal.SIGBUS, None, 5)
        assert "between samples" in str(warning)
        assert error is None


def test_an_exit_code_that_is_unknown_is_no_failure_to_start() -> None:
    warning, error = RestartPolicy(restarts=True).report(0, 7, UNREADABLE, None, 0)
    assert "Another worker takes its place" in str(warning)
    assert error is None


def test_a_start_that_fails_by_an_exception_is_not_tried_again() -> None:
    with pytest.raises(RuntimeError, match=r"pid\(s\) 7") as caught:
        RestartPolicy(restarts=True).report(0, 7, 1, None, 0)
    assert "exited with code 1 before its first sample" in str(caught.value.__cause__)


def test_deaths_between_samples_do_not_add_up_while_work_goes_on() -> None:
    restart_policy = RestartPolicy(restarts=True)
    for progress in range(10):
        warning, error = restart_policy.report(0, 7, -signal.SIGSEGV, None, progress)
        assert "Segmentation fault" in str(warning)
        assert error is None
    assert restart_policy.total == 10


def test_less_is_loaded_ahead_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 3
    monkeypatch.setattr(supervision, "memory_kills", lambda: kills)
    monkeypatch.setattr(supervision, "memory_limit_bytes", lambda: 123456)
    window = PrefetchWindow(2, fixed=None, budget_bytes=999)
    restart_policy = RestartPolicy(restarts=True, window=window)

    def die(sample: int) -> str:
        in_hand = CurrentSample(sample, sample, 0, 0, None, 0)
        warning, error = restart_policy.report(0, 7, -signal.SIGKILL, in_hand, 0)
        assert error is None
        return str(warning)

    assert "Memory ran out" not in die(1)  # somebody killed it
    kills = 4
    told = die(2)
    assert "Memory ran out" in told
    assert "123456 bytes" in told
    assert "memory_budget=999" in told
    assert "at most 2." in told
    assert window.limit == 2
    kills = 5
    assert "at most 1." in die(3)
    kills = 6
    assert "Use fewer workers" in die(4)
    assert "Memory ran out" not in die(5)
