"""Starting workers, noticing when one is gone, and ending them."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from minato import DataLoader
from minato._core import EventCount
from minato._core.segment import Segment
from minato.workers import supervision
from minato.workers.pools import ProcessPool, ThreadPool
from minato.workers.shared_state import SharedState
from minato.workers.supervision import WorkerRecovery
from minato.workers.worker_process import WorkerContext, parent_watch
from tests.datasets import Numbers, wait_until
from tests.edges.test_forks import code_of, forked
from tests.threads import run_together

FORK = multiprocessing.get_context("fork")


class OfServer(type(FORK)):  # type: ignore[misc]  # a base class that is computed
    """Forks, and says that a server does so: a pool may start such processes late."""

    def get_start_method(self, allow_none: bool = False) -> str:
        return "forkserver"


INTERRUPTED: Any = Mock(side_effect=KeyboardInterrupt)
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""


class Stage:
    """In the place of the shared state and of the recovery: flags of both, and what was said of dead workers."""

    watchdog = None

    def __init__(self) -> None:
        self.segment = Segment(4096)
        self.ready = EventCount(self.segment.array, 0)
        self.left = False
        self.works = True
        self.ledger = SimpleNamespace(stopping=False)
        self.begun = False
        self.at_once = 2
        self.deaths: list[tuple[Any, ...]] = []

        self.may_leave = lambda number: self.left
        self.has_work = lambda: self.works
        self.has_begun = lambda number: self.begun
        self.wait_until_active = lambda number, parent_lives: True

    def stop(self) -> None:
        self.segment.array[100] = 1

    def __call__(self, number: int, pid: int | None, code: int | None) -> None:
        self.deaths.append((number, pid, code))
        if len(self.deaths) > 2:
            raise RuntimeError("too many")

    def processes(self, work: Any, context: Any = FORK) -> ProcessPool:
        counts = {"num_workers": 2, "first": 2, "max_starting": self.at_once}
        work = functools.partial(work, stage=self)
        parts = cast(SharedState, self), cast(WorkerRecovery, self)
        return ProcessPool(*parts, work, context=context, **counts)

    def started(self, work: Any) -> ProcessPool:
        pool = self.processes(work)
        pool.start()
        self.segment.array[102] = 1
        return pool


def obedient(number: int, stage: Stage) -> None:
    while not stage.segment.array[100]:
        time.sleep(0.002)


def mortal(number: int, stage: Stage) -> None:
    if number == 1 and not stage.segment.array[101]:  # whoever takes its place stays
        while not stage.segment.array[102]:  # the start of another process would reap it
            time.sleep(0.002)
        stage.segment.array[101] = 1
        os._exit(7)
    obedient(number, stage)


def deaf(number: int, stage: Stage) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stage.segment.array[200 + number] = 1
    time.sleep(60)


def exit_codes(pool: ProcessPool) -> list[int | None]:
    return [worker.exitcode for worker in pool.processes]


def test_a_pool_that_was_not_started_can_be_shut_down() -> None:
    stage = Stage()
    stage.processes(obedient).shut_down()
    assert stage.segment.array[100] == 1


def test_processes_may_leave_when_there_is_nothing_left_to_do() -> None:
    pool = (stage := Stage()).started(obedient)
    stage.stop()
    stage.left = True
    wait_until(lambda: not any(worker.is_alive() for worker in pool.processes))
    pool.check()
    assert stage.deaths == []
    pool.shut_down()


@pytest.mark.parametrize("told", [True, False], ids=["told", "never told"])
def test_an_exit_code_that_another_thread_has_taken(
    monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """The start of a process in any thread reaps our workers, and says only a moment later how they ended."""
    monkeypatch.setattr(supervision, "_RECORDING_S", 30.0 if told else 0.01)
    pool = (stage := Stage()).started(mortal)
    dead = pool.processes[1]
    assert dead.pid is not None
    wait_until(lambda: pool._watch.first_ended() is not None)
    _, status = os.waitpid(dead.pid, 0)

    def write_down() -> None:
        time.sleep(0.05)
        dead._popen.returncode = os.waitstatus_to_exitcode(status)  # type: ignore[attr-defined]

    other = threading.Thread(target=write_down)
    if told:
        other.start()
    pool.check()
    assert stage.deaths == [(1, dead.pid, 7 if told else None)]
    if told:
        other.join()
    dead._popen.returncode = 7  # type: ignore[attr-defined]  # multiprocessing waits for it at the end
    pool.shut_down()


@pytest.mark.parametrize("blocked", [False, True], ids=["killed", "the kill is blocked"])
def test_processes_that_do_not_listen(monkeypatch: pytest.MonkeyPatch, blocked: bool) -> None:
    monkeypatch.setattr(supervision, "_GRACE_S", 0.05)
    monkeypatch.setattr(supervision, "_TERMINATION_S", 0.05)
    pool = (stage := Stage()).started(deaf)
    wait_until(lambda: all(stage.segment.array[200:202]))
    kill = BaseProcess.kill

    def kill_or_not(process: BaseProcess) -> None:
        if not blocked:
            monkeypatch.setattr(supervision, "_TERMINATION_S", PATIENCE_S)
            kill(process)

    # As by a driver that hangs: neither the end nor the exit of the program waits for it.
    monkeypatch.setattr(BaseProcess, "kill", kill_or_not)
    assert pool.shut_down() is not blocked
    assert not set(pool.processes) & set(multiprocessing.active_children())
    monkeypatch.undo()
    for worker in pool.processes:
        worker.kill()
        worker.join()
    assert exit_codes(pool) == [-signal.SIGKILL] * 2


def test_a_collection_within_threading_ends_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that notices the end of processes needs the lock of threading.enumerate() to end."""
    monkeypatch.setattr(supervision, "_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(supervision, "_TERMINATION_S", 0.05)
    pool = Stage().started(obedient)

    def collect() -> None:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            pool.shut_down()

    run_together(collect, limit_s=PATIENCE_S)
    assert exit_codes(pool) == [0, 0]


def test_two_deaths_are_handled_though_the_first_recovery_is_interrupted() -> None:
    pool = (stage := Stage()).started(obedient)
    ends = [(number, worker.pid) for number, worker in enumerate(pool.processes)]
    for worker in pool.processes:
        worker.kill()
    wait_until(lambda: len(pool._watch._ended) == 2)
    recover, pool._recover = pool._recover, INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        pool.check()
    pool._recover = recover
    pool.check()
    assert sorted(death[:2] for death in stage.deaths) == ends
    assert all(worker.is_alive() for worker in pool.processes)
    pool.shut_down()


def test_an_interrupted_end_is_a_sudden_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_TERMINATION_S", PATIENCE_S)
    pool = Stage().started(deaf)
    pool._started._stop = INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        pool.shut_down()
    assert exit_codes(pool) == [-signal.SIGKILL] * 2


def test_workers_end_where_no_more_threads_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_GRACE_S", PATIENCE_S)
    pool = Stage().processes(obedient)
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.start()
    pool.shut_down()
    assert exit_codes(pool) == [0, 0]


def parental(number: int, stage: Stage) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    stage.segment.array[208 + 8 * number : 216 + 8 * number].view(np.int64)[0] = child
    obedient(number, stage)


def test_the_end_does_not_wait_for_children_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_GRACE_S", 3600.0)
    pool = (stage := Stage()).started(parental)
    children = stage.segment.array[208:224].view(np.int64)
    try:
        wait_until(children.all)
        pool.shut_down()
        assert exit_codes(pool) == [0, 0]
    finally:
        for child in children.tolist():
            os.kill(child, signal.SIGKILL)


def test_a_forked_copy_of_a_pool_ends_nobody() -> None:
    pool = (stage := Stage()).started(obedient)
    assert code_of(forked(lambda: pool.shut_down() or True)) == 0
    assert stage.segment.array[100] == 0
    assert all(worker.is_alive() for worker in pool.processes)
    pool.shut_down()


def test_what_is_not_needed_yet_is_started_while_the_consumer_waits() -> None:
    stage = Stage()
    pool = stage.processes(mortal, OfServer())
    pool.start(lambda: pool.processes[0].pid is not None)
    stage.works = False
    pool.wait(stage.ready.events, 0.01)
    assert pool.processes[1].pid is None
    stage.works = True
    seen = stage.ready.events
    pool.wait(seen, 60)  # does not sleep
    assert pool.processes[1].pid is not None
    stage.segment.array[102] = 1
    pool.wait(seen, 10)  # until one ends, or a signal comes: from now on somebody watches
    wait_until(lambda: pool.check() or bool(stage.deaths))
    assert stage.deaths[0][::2] == (1, 7)
    pool.shut_down()


def test_no_more_are_on_their_way_than_can_come_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.workers.pools._ARRIVAL_S", 3600.0)
    stage = Stage()
    stage.at_once = 1
    pool, late = (stage.processes(obedient, OfServer()) for _ in range(2))
    pool.start(lambda: False)
    pool.wait(stage.ready.events, 0.01)
    assert [worker.pid is None for worker in pool.processes] == [False, True]
    stage.begun = True
    pool.wait(stage.ready.events, 0.01)
    assert all(worker.pid for worker in pool.processes)
    pool.shut_down()
    stage.begun = False
    monkeypatch.setattr("minato.workers.pools._ARRIVAL_S", 0.0)
    late.start(lambda: False)
    assert all(worker.pid for worker in late.processes)
    late.shut_down()


def test_waiting_ends_with_an_event() -> None:
    stage = Stage()
    stage.works = False
    pool = stage.processes(obedient)
    seen = stage.ready.events
    start = time.monotonic()
    pool.wait(seen, 0.02)
    assert time.monotonic() - start >= 0.02
    stage.ready.notify()
    begun = time.monotonic()
    pool.wait(seen, PATIENCE_S)
    assert time.monotonic() - begun < PATIENCE_S / 2


@pytest.mark.parametrize("late", [False, True], ids=["alive-at-first", "dead-already"])
def test_parent_watch(late: bool) -> None:
    reader, writer = os.pipe()
    child = FORK.Process(target=has_child, args=(writer, late))
    child.start()
    child.join()
    os.close(writer)
    with os.fdopen(reader) as answers:
        assert answers.read() == ("False" if late else "True False")


def has_child(writer: int, late: bool) -> None:
    ready, steady = os.pipe()
    FORK.Process(target=watches_parent, args=(writer, steady, late)).start()
    os.read(ready, 1)
    os._exit(0)


def watches_parent(writer: int, steady: int, late: bool) -> None:
    parent = os.getppid()
    lives = parent_watch()
    if not late:
        os.write(writer, f"{lives()} ".encode())
    os.write(steady, b"x")
    while os.getppid() == parent:
        time.sleep(0.002)
    if late:
        lives = parent_watch()
    while not late and lives():
        time.sleep(0.002)
    os.write(writer, str(lives()).encode())


# ---- threads --------------------------------------------------------------------------------


@dataclass
class Worker:
    """Stands for a worker in a thread."""

    number: int
    leave: threading.Event

    def work(self, parent_lives: Any) -> None:
        assert parent_lives()
        self.leave.wait(20)

    def close(self) -> None:
        """It has begun nothing in other threads."""


class Threads(ThreadPool):
    """Two threads with such workers."""

    def __init__(self, may_leave: bool = False, make: Callable[..., Any] = Worker) -> None:
        self.leaving, self.make, stage = threading.Event(), make, Stage()
        stage.left = may_leave
        context = SimpleNamespace(
            plan=SimpleNamespace(most_workers=2, worker_info=lambda number: None)
        )
        super().__init__(cast(SharedState, stage), cast(WorkerContext, context), self.leaving.set)

    def make_worker(self, number: int) -> Any:
        return self.make(number, self.leaving)


@pytest.mark.parametrize("may_leave", [False, True])
def test_threads_that_are_gone_are_noticed(may_leave: bool) -> None:
    pool = Threads(may_leave)
    pool.start()
    pool.leaving.set()
    for thread in pool.threads:
        thread.join()
    if may_leave:
        pool.check()
    else:
        with pytest.raises(RuntimeError, match=r"worker thread\(s\) minato-0, minato-1 ended unex"):
            pool.check()


def test_a_thread_may_end_its_own_pool() -> None:
    # As when the garbage collector runs in a worker and finds the last reference to a loader.
    ended = threading.Event()

    class Ending(Worker):
        """Shuts the pool down itself."""

        def work(self, parent_lives: Any) -> None:
            if self.number == 0:
                pool.shut_down()
                ended.set()
            else:
                super().work(parent_lives)

    pool = Threads(make=Ending)
    pool.start()
    assert ended.wait(PATIENCE_S)
    for thread in pool.threads:
        thread.join()


# ---- exceptions on their way ----------------------------------------------------------------


class Collecting(Numbers):
    """Each sample is the number of the oldest generation's objects: all that a collection would look at."""

    def __getitem__(self, index: int) -> int:
        return len(gc.get_objects(generation=2))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_leaves_what_it_starts_with_out_of_collections(method: str) -> None:
    """A collection writes to every object, and so copies the pages that a forked worker shares with its parent."""
    kept: list[list[int]] = [[] for _ in range(20_000)]
    gc.collect()
    assert len(gc.get_objects(generation=2)) > len(kept)
    loader = DataLoader(Collecting(4), num_workers=1, multiprocessing_context=method)
    assert max(int(count) for count in loader) < 10_000
