"""Running ``programs.py`` as one or more ranks of a job over gloo, and what such programs share."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.subprocesses import environment

PROGRAMS = Path(__file__).parent / "programs.py"
TIMEOUT_S = 50


def run_ranks(program: str, num_ranks: int = 2, killed: Container[int] = ()) -> list[Any]:
    """What each rank of a program returns; ranks that fail or hang are ended and shown.

    Args:
        killed: Ranks that are to be killed meanwhile: theirs is None.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        **environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAMS, program],
            env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        ends = [rank.communicate(timeout=deadline - time.monotonic()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    wanted = [-signal.SIGKILL if number in killed else 0 for number in range(num_ranks)]
    ended = zip(ranks, wanted, ends, strict=True)
    failed = [err for rank, code, (_, err) in ended if rank.returncode != code]
    assert not failed, "\n".join(failed)
    return [
        None if code else json.loads(out.splitlines()[-1])
        for code, (out, _) in zip(wanted, ends, strict=True)
    ]


@contextmanager
def engines() -> Iterator[Callable[[], list[str]]]:
    """Watch which kinds of iterators, torch's or ours, deliver batches; the result lists them when called."""
    seen: set[str] = set()
    original = _BaseDataLoaderIter.__init__

    def watched(self: _BaseDataLoaderIter, loader: Any) -> None:
        seen.add(type(self).__name__)
        original(self, loader)

    _BaseDataLoaderIter.__init__ = watched
    try:
        yield lambda: sorted(seen)
    finally:
        _BaseDataLoaderIter.__init__ = original


def rank_and_count() -> tuple[int, int]:
    """This process among those of the job."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
