"""Worker processes that die: they are replaced, nothing is lost, and a deadly sample is named."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minato import DataLoader, ErrorPolicy
from minato.scheduling import dispatcher
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.workers import supervision
from minato.workers.shared_state import CurrentSample
from minato.workers.supervision import UNREADABLE, RestartPolicy
from tests.datasets import Numbers, wait_until
from tests.edges.test_forks import forked
from tests.selection import mostly_slow


class Drawing(Numbers):
    """Samples of a millisecond whose content is drawn."""

    seconds = 0.001

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, torch.rand(2)


class DeadlyOnce(Drawing):
    """Sample 37 kills the first worker that runs it, whose child may live on."""

    def __init__(self, length: int, mark: Path, child: bool = False) -> None:
        super().__init__(length)
        self.mark = mark
        self.child = child

    def __getitem__(self, index: int) -> Any:
        if index == 37 and not self.mark.exists():
            self.mark.touch()
            if self.child:
                self.mark.write_text(str(forked(lambda: time.sleep(60))))
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
    """Kills a random worker every 40 ms while batches come: three deaths without progress would be an error."""

    def __init__(self) -> None:
        self.killed: list[int] = []  # their process ids
        self.batches = 0  # counted by whoever iterates
        self.stop = threading.Event()

    def run(self) -> None:
        choice, seen = random.Random(1), 0
        while not self.stop.wait(0.04):
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


@pytest.fixture
def killer() -> Iterator[Killer]:
    killer = Killer()
    thread = threading.Thread(target=killer.run)
    thread.start()
    yield killer
    killer.stop.set()
    thread.join()


@mostly_slow("order", ["strict", "arrival"])
def test_random_kills_lose_nothing(order: str, killer: Killer) -> None:
    """Two epochs under fire deliver every sample once, with the content of a quiet run."""
    arguments: dict[str, Any] = {"batch_size": 8, "seed": 1, "order": order}
    with warnings.catch_warnings(action="ignore"):
        loader = DataLoader(Drawing(400), num_workers=3, persistent_workers=True, **arguments)
        under_fire = [content(killer.watch(loader)) for _ in range(2)]
    quiet = DataLoader(Drawing(400), **arguments)
    assert under_fire == [content(quiet) for _ in range(2)]


@pytest.mark.parametrize(
    ("child", "limit_s"),
    [(False, None), (True, None), (False, math.inf)],
    ids=["alone", "a child of it lives on", "without end"],
)
def test_a_death_wakes_whoever_waits(
    child: bool, limit_s: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The consumer does not look again and again: it would wait for an hour here."""
    monkeypatch.setattr(dispatcher, "_LIVENESS_S", 3600.0)
    errors = ErrorPolicy(sample_timeout=limit_s)
    dataset = DeadlyOnce(80, tmp_path / "mark", child)
    try:
        with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
            found = content(DataLoader(dataset, 4, num_workers=1, seed=0, errors=errors))
        assert sorted(found) == list(range(80))
    finally:
        if child:
            os.kill(int(dataset.mark.read_text()), signal.SIGKILL)


def test_dead_workers_are_replaced_although_the_loop_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Drawing(400)
    dataset.seconds = 0.05
    batches: Any = iter(DataLoader(dataset, 4, num_workers=2, prefetch_factor=8))
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


class DeadlyAlone(Drawing):
    """Sample 37 ends the process that runs it; asked for lists or tensors too."""

    def __getitem__(self, key: Any) -> Any:
        first = key[0] if isinstance(key, list) else int(key)
        if first == 37:
            os._exit(3)
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


def test_workers_with_state_are_not_replaced(tmp_path: Path) -> None:
    """Round-robin workers hold random streams that a new one would not have."""
    dataset = DeadlyOnce(80, tmp_path / "mark")
    loader = DataLoader(dataset, 4, num_workers=2, compat="torch", persistent_workers=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
            content(loader)
        assert "call loader.close() to start new ones" in str(caught.value.__cause__)
    loader.close()
    assert len(content(loader)) == 80


def borne(code: int, words: str, deaths: list[tuple[int, int]]) -> RestartPolicy:
    """A policy that warns of each of these deaths: the worker's number, and how many samples had been run."""
    policy = RestartPolicy(restarts=True)
    for number, progress in deaths:
        warning, error = policy.report(number, 7, code, None, progress)
        assert re.search(words, str(warning))
        assert error is None
    return policy


@pytest.mark.parametrize(
    ("code", "words", "deaths"),
    [
        (UNREADABLE, "Another worker takes its place", [(0, 0)]),  # it may have started
        (-signal.SIGBUS, "between samples", [(number, 5) for number in range(10)]),  # all at once
        (-signal.SIGSEGV, "Segmentation fault", [(0, progress) for progress in range(10)]),
    ],
)
def test_workers_that_die_at_once_do_not_add_up(code: int, words: str, deaths: Any) -> None:
    assert borne(code, words, deaths).total == len(deaths)


def last_word(policy: RestartPolicy, code: int) -> str:
    """What a policy says of a death before any sample that it does not bear."""
    with pytest.raises(RuntimeError, match=r"pid\(s\) 7") as caught:
        policy.report(0, 7, code, None, 0)
    return str(caught.value.__cause__)


def test_deaths_before_any_sample_add_up() -> None:
    words = "signal: Segmentation fault .* between samples"
    policy = borne(-signal.SIGSEGV, words, [(0, 0)] * 2)
    assert "3 workers died there: none got further." in last_word(policy, -signal.SIGSEGV)


def test_a_death_that_raises_counts_once_however_often_the_program_asks() -> None:
    policy = borne(-signal.SIGSEGV, "between samples", [(0, 0)] * 2)
    told = [last_word(policy, -signal.SIGSEGV) for _ in range(3)]
    assert told == [told[0]] * 3
    assert policy.total == 3


def test_kills_from_outside_before_any_sample_are_borne_longer_but_not_for_ever() -> None:
    policy = borne(-signal.SIGKILL, "by signal: Killed .* between samples", [(0, 0)] * 9)
    assert "10 workers died there" in last_word(policy, -signal.SIGKILL)


def test_a_start_that_fails_by_an_exception_is_not_tried_again() -> None:
    told = last_word(RestartPolicy(restarts=True), 1)
    assert "exited with code 1 before its first sample" in told


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_workers_that_are_killed_while_they_start_are_replaced(tmp_path: Path) -> None:
    def die_at_first(number: int) -> None:
        starts = len(list(tmp_path.iterdir()))
        (tmp_path / str(starts)).touch()
        if starts < 5:
            os.kill(os.getpid(), signal.SIGKILL)

    loader = DataLoader(Drawing(8), 4, num_workers=1, worker_init_fn=die_at_first)
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
    for words in ("Memory ran out", "123456 bytes", "memory_budget=999", "at most 2."):
        assert words in told
    assert window.limit == 2
    kills = 5
    assert "at most 1." in die(3)
    kills = 6
    assert "Use fewer workers" in die(4)
    assert "Memory ran out" not in die(5)
