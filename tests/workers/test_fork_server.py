"""Workers of the start method ``forkserver`` come from the server of multiprocessing, which has imported minato."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from minato import DataLoader, MinatoWarning
from tests.datasets import wait_until
from tests.subprocesses import python


class Processes(Dataset[Any]):
    """Each sample is its index, the pid of its worker and the parent's."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        time.sleep(0.005)
        return index, os.getpid(), os.getppid()


def loader_of(batch_size: int, **more: Any) -> DataLoader[Any]:
    workers: Any = {"num_workers": 2, "multiprocessing_context": "forkserver", **more}
    return DataLoader(Processes(), batch_size, **workers)


def load() -> list[tuple[int, int, int]]:
    return [tuple(sample) for batch in loader_of(4) for sample in torch.stack(batch, 1).tolist()]


def server_pid() -> int:
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


SCRIPT = """\
import sys
EARLY = {"minato.workers.worker_process", "graphlib"} & set(sys.modules)
import multiprocessing
import torch
from minato import DataLoader

class Early(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return sorted(EARLY)

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["graphlib"])
    loader = DataLoader(Early(), num_workers=2, multiprocessing_context="forkserver")
    iterator = iter(loader)
    print(next(iterator), flush=True)
    input()
"""

AS_LATER_PYTHONS = """
from multiprocessing import spawn
given = spawn.get_preparation_data
spawn.get_preparation_data = lambda name: {**given(name), "main_path": __file__}
"""
"""From Python 3.13.1 on the server itself imports the main module."""


def write(path: Path, text: str) -> Path:
    script = path / "script.py"
    script.write_text(text)
    return script


def test_all_workers_of_all_loaders_come_from_one_server() -> None:
    first, second = load(), load()
    assert [index for index, *_ in first] == [index for index, *_ in second] == list(range(24))
    assert {parent for *_, parent in first + second} == {server_pid()}
    assert not {pid for _, pid, _ in first} & {pid for _, pid, _ in second}


def test_the_server_imports_what_the_program_and_the_workers_need(tmp_path: Path) -> None:
    """Before a worker imports the script: that comes after it, except from Python 3.13.1 on."""
    script = write(tmp_path, SCRIPT)
    ended = python(script, given="\n")
    assert ended.returncode == 0, ended.stderr
    assert "'graphlib'" in ended.stdout
    if sys.version_info < (3, 13):
        assert "'minato.workers.worker_process'" in ended.stdout


@pytest.mark.slow
def test_a_script_without_a_guard_is_refused_and_named(tmp_path: Path) -> None:
    starts = "next(iter(DataLoader([1, 2], num_workers=1, multiprocessing_context='forkserver')))"
    script = write(tmp_path, f"{AS_LATER_PYTHONS}from minato import DataLoader\n{starts}\n")
    ended = python(script)
    assert ended.returncode == 1
    assert 'if __name__ == "__main__":' in ended.stderr
    assert f"and {script} starts workers when it is imported" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 8


def test_a_killed_server_is_started_again() -> None:
    load()
    killed = server_pid()
    os.kill(killed, signal.SIGKILL)
    assert [index for index, *_ in load()] == list(range(24))
    assert server_pid() != killed


def test_a_server_that_cannot_fork_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no more processes can be had each server ends with a traceback, and the program sees the end of a pipe."""
    monkeypatch.setattr("minato.workers.pools._SERVER_ENDS_S", 0.1)
    start = Mock(side_effect=EOFError("unexpected EOF"))
    monkeypatch.setattr(BaseProcess, "start", start)
    with pytest.raises(RuntimeError, match=r"cannot start a worker process: the fork server ends"):
        next(iter(loader_of(4)))
    assert start.call_count == 4  # after pauses of 0.02, 0.04 and 0.08 s


@pytest.mark.slow
def test_a_killed_server_of_a_program_without_a_file_is_started_again() -> None:
    """No process imports that program, so a guard says nothing there."""
    program = (
        "import os, signal, minato\n"
        "from multiprocessing import forkserver\n"
        "loader = minato.DataLoader(range(24), 4, num_workers=2, multiprocessing_context='forkserver')\n"
        "first = sum(len(batch) for batch in loader)\n"
        "os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)\n"
        "print(first, sum(len(batch) for batch in loader))\n"
    )
    ran = python("-c", program)
    assert ran.stdout == "24 24\n", ran.stderr


@pytest.mark.slow
def test_server_and_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline(), "the program has ended"
        descendants = psutil.Process(program.pid).children(recursive=True)
        assert len(descendants) >= 3
        program.kill()
    _, alive = psutil.wait_procs(descendants, timeout=60)
    assert not alive


def test_a_killed_worker_is_replaced_from_the_server() -> None:
    # Neither has ended with the epoch by then.
    iterator: Any = iter(loader_of(1, prefetch_factor=2))
    pids = [int(next(iterator)[1]) for _ in range(3)]
    os.kill(pids[-1], signal.SIGKILL)
    # The other one might complete the epoch before anybody knows.
    wait_until(lambda: iterator._source._pool._watch.first_ended() is not None)
    with pytest.warns(MinatoWarning, match="Another worker takes its place"):
        rest = [tuple(map(int, batch)) for batch in iterator]
    assert len(rest) == 21
    assert {parent for *_, parent in rest} == {server_pid()}
