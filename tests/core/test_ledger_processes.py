"""The ledger between processes: killed and stopped workers, and no ticket lost or repeated."""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from minato._core import codes
from minato._core.segment import Segment
from tests.core.ledger_tools import Desk, Hands, exactly
from tests.stress.bare import ROOT, fork
from tests.stress.ledger_steps import UNTRACEABLE

TWIN = "ledger"


def run(program: str, *arguments: object) -> dict[str, int]:
    """Run a program of ``tests.stress``; returns the figures it prints."""
    command = [sys.executable, "-m", f"tests.stress.{program}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == UNTRACEABLE:
        pytest.skip(done.stdout.splitlines()[-1])
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    return {name: int(figure) for name, figure in map(str.split, done.stdout.splitlines())}


def half(twin: ModuleType) -> str:
    return twin.__name__.rpartition("_")[2]


@pytest.mark.stress
def test_random_kills_lose_and_repeat_nothing(twin: ModuleType, stress_s: float) -> None:
    figures = run("ledger_stress", "--seconds", stress_s, "--twin", half(twin))
    assert figures["kills"] > 10 * stress_s
    assert figures["batches"] > 20 * stress_s


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(1800)  # it steps through each operation, which takes long on a busy machine
def test_a_kill_or_a_stop_at_any_instant_loses_and_repeats_nothing(
    twin: ModuleType, stress_s: float
) -> None:
    thorough = ["--all"] if stress_s >= 100 else []  # every instruction: takes minutes
    figures = run("ledger_steps", "--seconds", stress_s, "--twin", half(twin), *thorough)
    assert figures["kills"] > 100


def share(twin: ModuleType) -> tuple[Desk, Segment]:
    """A ledger in a segment, with the pure twin's lock."""
    segment = Segment(1 << 16)
    desk = Desk(twin, memory=segment.array, lock_fd=segment.descriptor)
    desk.ledger.open_epoch(0)
    return desk, segment


def work_elsewhere(name: str, segment: Segment, worker: int) -> None:
    """A worker in another process, whatever its start method."""
    twin = importlib.import_module(name)
    hands = Hands(twin, twin.Ledger(segment.array, None, segment.descriptor))
    while not hands.ledger.stopping:
        hands.work(worker)
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
        ledger = twin.Ledger(segment.array, None, segment.descriptor)
        while True:
            ledger.state(batch)
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
        ledger = twins[0].Ledger(segment.array, None, segment.descriptor)
        mine: Any = memoryview(offsets).cast("q")[me * rounds : (me + 1) * rounds]
        for k in range(rounds):
            mine[k] = ledger.allocate(batch, 64)

    pids = [fork(lambda me=me: allocate(me)) for me in range(processes)]
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    given = memoryview(offsets).cast("q").tolist()
    assert len(set(given)) == rounds * processes
