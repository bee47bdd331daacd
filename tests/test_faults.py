"""Faults of the world around: processes that are killed or stopped, a clock that jumps."""

from __future__ import annotations

import ast
import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import minato
from minato import DataLoader
from minato.scheduler.overdue import Overdue, StackFile
from tests.datasets import wait_until
from tests.subprocesses import TIMEOUT_S, run, session, started, wait_for_end

PACKAGE = Path(minato.__file__).parent


def at_work(process: Any) -> list[int]:
    """Wait until a ``faulted.py`` is in the state that is meant; returns the pids of its workers."""
    *pids, are, at, work = process.stdout.readline().split()
    assert (are, at, work) == ("are", "at", "work")
    return [int(pid) for pid in pids]


# ---- the end of the training process --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sleep", "compiled"])
def test_workers_that_are_stuck_end_with_their_parent(kind: str) -> None:
    """Also in compiled code that lets no Python run."""
    with started("faulted.py", "stuck", kind) as process:
        workers = at_work(process)
        os.kill(workers[0], signal.SIGSTOP)
        assert set(session(process.pid)) == {process.pid, *workers}
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert wait_for_end(process.pid, 2.0) == []
        process.communicate(timeout=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_end_when_their_parent_becomes_another_program(method: str) -> None:
    with started("faulted.py", "exec", method) as process:
        workers = at_work(process)
        wait_until(lambda: not set(workers) & set(session(process.pid)), 10)
        assert process.poll() is None
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def test_workers_outlive_the_thread_that_started_them() -> None:
    loader = DataLoader(range(64), 4, num_workers=2, persistent_workers=True)
    first: list[Any] = []
    thread = threading.Thread(target=lambda: first.extend(loader))
    thread.start()
    thread.join()
    pids = [process.pid for process in loader._iterator._source._pool.processes]
    time.sleep(0.1)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in first]
    assert [process.pid for process in loader._iterator._source._pool.processes] == pids


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_thread_that_iterates_at_the_end_starts_no_workers(method: str) -> None:
    assert run("faulted.py", "exits", method) == ""


# ---- processes that are stopped -------------------------------------------------------------


def test_a_stopped_worker_does_not_hold_up_the_end() -> None:
    iterator = iter(DataLoader(range(64), 4, num_workers=2))
    next(iterator)
    worker = psutil.Process(iterator._source._pool.processes[1].pid)  # type: ignore[attr-defined]
    worker.suspend()
    wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, 5)
    begin = time.monotonic()
    del iterator
    gc.collect()
    assert time.monotonic() - begin < 2.0


@pytest.mark.slow
def test_a_training_that_was_stopped_does_not_exceed_its_timeouts() -> None:
    with started("faulted.py", "stopped") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGSTOP)  # as Ctrl-Z does
        time.sleep(4.0)
        os.killpg(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (out, err) == ("complete\n", "")


def test_the_stack_of_a_worker_needs_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    file = StackFile()
    file.listen()
    try:
        assert "test_the_stack_of_a_worker" in file.ask(os.getpid())
        assert "test_the_stack_of_a_worker" in file.ask(os.getpid())
    finally:
        __import__("faulthandler").unregister(StackFile._SIGNAL)


def test_a_sample_is_timed_anew_after_the_processes_were_stopped() -> None:
    """Else a worker that has had no time would be ended."""

    class Ledger:
        """One worker is on a sample."""

        def lease(self, number: int) -> tuple[int, int, int]:
            return 0, begun_ns, 1

    class Process:
        """Stands for a worker process."""

        pid = 1 << 30

        def is_alive(self) -> bool:
            return True

    class Stacks:
        """Takes note of who is asked."""

        def ask(self, pid: int) -> str:
            asked.append(pid)
            raise ProcessLookupError

    asked: list[int] = []
    begun_ns = time.monotonic_ns() - 10**10
    overdue = Overdue(Ledger(), 5.0, Stacks())  # type: ignore[arg-type]
    overdue.excuse()
    overdue.end([Process()])  # type: ignore[list-item]
    assert asked == []
    overdue._since_ns = 0
    overdue.end([Process()])  # type: ignore[list-item]
    assert asked == [Process.pid]


# ---- a clock that jumps ---------------------------------------------------------------------

WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "CLOCK_REALTIME"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}


def test_no_module_waits_or_measures_by_the_wall_clock() -> None:
    """It jumps; text for people is made by strftime and fromtimestamp, and the age of a file is told by no other."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(
                node.value, (ast.Name, ast.Attribute)
            ):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if (owner, node.attr) in WALL_CLOCKS and ".st_mtime" not in lines[node.lineno - 1]:
                    found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                found += [path.name for name in node.names if ("time", name.name) in WALL_CLOCKS]
    for path in (*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.h")):
        text = path.read_text(encoding="utf-8")
        found += [
            path.name for word in ("CLOCK_REALTIME", "gettimeofday", "time.time") if word in text
        ]
    assert found == []


class Numbers:
    """Numbers of a millisecond."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return index


@pytest.mark.parametrize("method", ["process", "thread"])
def test_a_wall_clock_that_jumps_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: draw.uniform(-1e9, 4e9))
    options: dict[str, Any] = {"worker_method": method, "timeout": 20, "on_error": "retry"}
    if method == "process":
        options["sample_timeout_s"] = 20
    loader = DataLoader(Numbers(), 4, num_workers=2, **options)
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(64))
