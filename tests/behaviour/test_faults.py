"""Faults of the world around: processes that are killed or stopped, a clock that jumps."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, call

import psutil
import pytest
import torch

from minato import Arrival, DataLoader, ErrorPolicy
from minato._core.codes import LeaseState
from minato.workers.sample_timeout import RunningSamples, SampleWatchdog, StackFile
from minato.workers.shared_state import CurrentSample
from tests.datasets import Sleepy, indices, wait_until
from tests.subprocesses import TIMEOUT_S, at_work, run, session, started

# ---- the end of the training process --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_end_when_their_parent_becomes_another_program(method: str) -> None:
    with started("faulted.py", "exec", method) as process:
        workers = at_work(process)
        wait_until(lambda: not set(workers) & set(session(process.pid)), 30)
        assert process.poll() is None
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_workers_outlive_the_thread_that_started_them() -> None:
    loader = DataLoader(range(64), 4, num_workers=2, persistent_workers=True)
    first: list[Any] = []

    def run() -> None:
        iterator: Any = iter(loader)
        iterator._source._pool.grow(2)
        first.extend(indices(iterator))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    pool = loader._iterator._source._pool
    pids = [process.pid for process in pool.processes]
    time.sleep(0.1)
    assert indices(loader) == first
    assert loader._iterator._source._pool is pool
    assert [process.pid for process in pool.processes] == pids


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["fork", "spawn", "thread"])
def test_a_thread_that_iterates_at_the_end_starts_no_workers(workers: str) -> None:
    assert run("faulted.py", "exits", workers) == ""


# ---- processes that are stopped -------------------------------------------------------------


def test_a_stopped_worker_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.workers.supervision._GRACE_S", 3600.0)
    # So many that no worker has ended with the epoch before it is stopped.
    iterator: Any = iter(DataLoader(range(1_000_000), 4, num_workers=2))
    iterator._source._pool.grow(2)
    next(iterator)
    pid = iterator._source._pool.processes[1].pid
    assert pid is not None  # which psutil would take for this process
    worker = psutil.Process(pid)
    worker.suspend()
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED)
    del iterator
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_training_that_was_stopped_does_not_exceed_its_timeouts() -> None:
    with started("faulted.py", "stopped") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        os.killpg(process.pid, signal.SIGSTOP)  # as Ctrl-Z does
        time.sleep(12.0)  # longer than the limits
        os.killpg(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (out, err) == ("complete\n", "")


@contextlib.contextmanager
def listening(file: StackFile) -> Iterator[None]:
    """This process answers, too."""
    file.listen()
    try:
        yield
    finally:
        faulthandler.unregister(StackFile._SIGNAL)


def test_the_stack_of_a_worker_needs_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    file = StackFile()
    with listening(file):
        for _ in range(2):
            file.request(os.getpid())
            wait_until(lambda: file.answer() is not None)
            assert "test_the_stack_of_a_worker" in (file.answer() or "")


LIMIT_S, HOUR_NS = 60.0, 3600 * 10**9
"""A sample that has just begun does not reach the limit within a test; one that began an hour ago has."""


class Lease:
    """Stands for the ledger of one worker, which began a sample an hour ago."""

    def __init__(self) -> None:
        self.state = LeaseState(0, time.monotonic_ns() - HOUR_NS, 1)

    def lease(self, number: int) -> LeaseState:
        return self.state


def test_a_sample_is_timed_anew_after_the_processes_were_stopped() -> None:
    """Else a worker that has had no time would be ended."""
    process, stacks = Mock(pid=1 << 30), Mock()
    stacks.request.side_effect = ProcessLookupError
    watchdog = SampleWatchdog(Lease(), LIMIT_S, stacks)  # type: ignore[arg-type]
    watchdog.restart_timers()
    watchdog.end_overdue([process])
    assert stacks.request.mock_calls == []
    watchdog._since_ns -= HOUR_NS
    watchdog.end_overdue([process])
    assert stacks.request.mock_calls == [call(process.pid)]


def listens_and_hangs(stacks: StackFile, listening: Any) -> None:
    stacks.listen()
    listening.set()
    time.sleep(600)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SampleWatchdog, Lease, Any]]:
    """What times a worker process, its ledger, and the process, which is on a sample for too long.

    It answers, however busy the machine.
    """
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 3600.0)
    context = multiprocessing.get_context("fork")
    stacks, ledger, listening = StackFile(), Lease(), context.Event()
    process = context.Process(target=listens_and_hangs, args=(stacks, listening), daemon=True)
    process.start()
    try:
        assert listening.wait(TIMEOUT_S)
        yield SampleWatchdog(ledger, LIMIT_S, stacks), ledger, process  # type: ignore[arg-type]
    finally:
        process.kill()
        process.join()


def wait_for_the_end(watchdog: SampleWatchdog, process: Any) -> str:
    """Wait until a worker is ended; returns why."""

    def is_ended() -> bool:
        watchdog.end_overdue([process])
        return watchdog.cause(0) is not None

    wait_until(is_ended)
    return str(watchdog.cause(0))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stuck_worker_is_ended_with_its_stack_or_without(
    hanging: tuple[SampleWatchdog, Lease, Any], stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, _, process = hanging
    if stopped:
        monkeypatch.undo()
        os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    watchdog.end_overdue([process])
    assert watchdog.cause(0) is None
    assert watchdog.interval_s < 0.1  # the answer is taken soon after it has come
    cause = wait_for_the_end(watchdog, process)
    assert (time.monotonic() - began >= 1.0) or not stopped
    assert ("(none: the process did not answer)" if stopped else "in listens_and_hangs") in cause
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    assert watchdog.interval_s == LIMIT_S / 4


@pytest.mark.parametrize("how", ["the sample ended", "all were stopped"])
def test_a_worker_that_was_asked_for_its_stack_may_go_on(
    hanging: tuple[SampleWatchdog, Lease, Any], how: str
) -> None:
    watchdog, ledger, process = hanging
    watchdog.end_overdue([process])
    if how == "the sample ended":
        ledger.state = LeaseState(0, time.monotonic_ns(), 2)
    else:
        watchdog.restart_timers()
    wait_until(lambda: watchdog.stacks.answer() is not None)
    for _ in range(2):
        watchdog.end_overdue([process])
    assert watchdog.cause(0) is None
    assert process.is_alive()
    assert watchdog.interval_s == LIMIT_S / 4


def test_the_stack_of_another_worker_is_not_taken_for_that_of_a_stuck_one(
    hanging: tuple[SampleWatchdog, Lease, Any],
) -> None:
    """Torch's timeout asks all workers, by the same file, while the stuck one is being asked."""
    watchdog, _, process = hanging
    watchdog.end_overdue([process])
    with listening(watchdog.stacks):
        watchdog.stacks.request(os.getpid())
        wait_until(lambda: watchdog.stacks.answer() is not None)
    cause = wait_for_the_end(watchdog, process)
    assert "in listens_and_hangs" in cause
    assert "in test_the_stack_of_another" not in cause


def test_a_worker_without_a_stack_is_named_with_the_others() -> None:
    work = Mock(ledger=Lease())  # every worker runs the sample of its number
    work.collation.return_value = None
    work.sample = lambda number: CurrentSample(0, number, 0, 0, None, 0)
    done = threading.Event()
    waits = threading.Thread(target=done.wait, daemon=True)
    waits.start()
    ended = Mock(pid=1 << 30)
    workers: list[Any] = [threading.Thread(), ended, waits]
    try:
        told = RunningSamples(work, StackFile(), workers, None, recommends=True)()
    finally:
        done.set()
    for number in range(len(workers)):
        assert f"worker {number} runs the sample with index {number} for" in told
    assert "threading.py, line" in told
    assert "sample_timeout" in told


class StopsAtThree:
    """Sample 3 stops its process; others take 10 ms."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)
        return index


@pytest.mark.filterwarnings("ignore:.*of this epoch w.* skipped")
def test_batches_come_while_a_stuck_worker_is_asked_for_its_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A process that is stopped does not answer.
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 3600.0)
    asked: list[StackFile] = []
    real = StackFile.request

    def request(file: StackFile, pid: int) -> None:
        asked.append(file)
        real(file, pid)

    monkeypatch.setattr(StackFile, "request", request)

    class UntilSome:
        """Indices, until some batches have come since the worker was asked."""

        since = drawn = 0

        def __iter__(self) -> Iterator[int]:
            while self.since < 5:
                self.drawn += 1
                yield self.drawn - 1

    sampler = UntilSome()
    policy = ErrorPolicy("skip", sample_timeout=1.0)
    options: dict[str, Any] = {"num_workers": 2, "order": Arrival(100_000), "errors": policy}
    loader = DataLoader(StopsAtThree(), 1, sampler=sampler, **options)
    found: list[int] = []
    for batch in loader:
        found.append(int(batch))
        sampler.since += bool(asked)
        if sampler.since == 5:
            assert len(asked) == 1
            asked[0]._deadline_s = 0.0  # now it is given up
    account = loader.coverage()
    assert account.complete
    assert 3 not in found
    assert len({*found}) == len(found)
    # Another one is skipped where its worker has got no time.
    assert account.skipped.samples == sampler.drawn - len(found)


# ---- a clock that jumps ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["process", "thread"])
def test_a_wall_clock_that_jumps_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: draw.uniform(-1e9, 4e9))
    policy = ErrorPolicy("retry", sample_timeout=20 if method == "process" else None)
    options: dict[str, Any] = {"workers": method, "timeout": 20, "errors": policy}
    loader = DataLoader(Sleepy(64, 0.001), 4, num_workers=2, **options)
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(64))
