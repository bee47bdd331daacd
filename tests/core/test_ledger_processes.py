"""The ledger between processes: killed and stopped workers, and no ticket lost or repeated."""

from __future__ import annotations

import mmap
import os
import signal
import time
from types import ModuleType
from typing import Any

from minato._core.segment import Segment
from tests.core.ledger_tools import Desk, exactly
from tests.subprocesses import fork

TWIN = "ledger"
PATIENCE_S = 60.0


def share(twin: ModuleType) -> tuple[Desk, Segment]:
    """A ledger in a segment, with the pure twin's lock."""
    segment = Segment(1 << 16)
    desk = Desk(twin, memory=segment.array, lock_fd=segment.descriptor)
    desk.ledger.open_epoch(0)
    return desk, segment


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
        assert time.monotonic() - begun < PATIENCE_S
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
