"""The ledger between processes: killed and stopped workers, and no ticket lost or repeated."""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import signal
import time
from types import ModuleType
from typing import Any

import pytest

from minato._core import codes
from minato._core.segment import Segment
from tests.core.ledger_tools import Desk, Hand, exactly
from tests.stress.bare import fork

TWIN = "ledger"


def share(twin: ModuleType) -> tuple[Desk, Segment]:
    """A ledger in a segment, with the pure twin's lock."""
    segment = Segment(1 << 16)
    desk = Desk(twin, memory=segment.array, lock_fd=segment.descriptor)
    desk.ledger.open_epoch(0)
    return desk, segment


def work_elsewhere(name: str, segment: Segment, worker: int) -> None:
    """A worker in another process, whatever its start method."""
    twin = importlib.import_module(name)
    hand = Hand(twin.WorkerLedger(segment.array, worker, segment.descriptor))
    while not hand.ledger.stopping:
        hand.work()
        time.sleep(0.001)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_share_the_work(twin: ModuleType, method: str) -> None:
    desk, segment = share(twin)
    context = multiprocessing.get_context(method)
    arguments = [(twin.__name__, segment, worker) for worker in range(2)]
    processes = [context.Process(target=work_elsewhere, args=each) for each in arguments]
    for process in processes:
        process.start()
    seen = []
    deadline = time.monotonic() + 40
    for number in range(60):
        batch = desk.open(5, bound=number % 2 == 0)
        while desk.ledger.state(batch) != codes.READY or not desk.ledger.settled(batch):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        seen += desk.deliver(batch)
        desk.ledger.retire(batch)
    assert exactly(seen, range(300))
    desk.ledger.shut_down()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_a_process_killed_inside_an_operation_leaves_no_lock(twin: ModuleType) -> None:
    desk, segment = share(twin)
    batch = desk.open(8)

    def claim_for_ever() -> None:
        ledger = twin.WorkerLedger(segment.array, 0, segment.descriptor)
        while True:
            ledger.describe(batch)
            ledger.allocate(batch, 0)

    for _ in range(20):
        pid = fork(claim_for_ever)
        time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        begun = time.monotonic()
        desk.ledger.release(0)
        assert time.monotonic() - begun < 5
    assert exactly(desk.work(1), range(8))


def test_processes_wait_for_each_other_at_the_pure_lock(
    twins: tuple[ModuleType, ModuleType],
) -> None:
    """Each process allocates bytes of one slot: a lost update would give some of them out twice."""
    desk, segment = share(twins[0])
    batch = desk.open(1)
    rounds, processes = 2000, 3
    offsets = mmap.mmap(-1, 8 * rounds * processes)

    def allocate(me: int) -> None:
        ledger = twins[0].WorkerLedger(segment.array, me, segment.descriptor)
        mine: Any = memoryview(offsets).cast("q")[me * rounds : (me + 1) * rounds]
        for k in range(rounds):
            mine[k] = ledger.allocate(batch, 64)

    pids = [fork(lambda me=me: allocate(me)) for me in range(processes)]
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    given = memoryview(offsets).cast("q").tolist()
    assert len(set(given)) == rounds * processes
