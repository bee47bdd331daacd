"""Jobs of several ranks on this machine: forked, so that they begin at once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.datasets import TOO_MANY_WORKERS

MARKS = [
    pytest.mark.filterwarnings(TOO_MANY_WORKERS),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
"""Of the tests of such jobs."""
_FORK = multiprocessing.get_context("fork")
_jobs = itertools.count()
TIMEOUT_S = 90
BARRIER_S = 60
"""Less, so that a rank that waits for one that has failed says so."""


class Failure(Exception):
    """What a rank raised, as text."""


class Job:
    """Several ranks that run one function, each in a process.

    Args:
        program: Called in each with its rank and a barrier of all; returns what can be pickled.
        count: How many there are.
        local: How many of these, the first ones, are on this node; all by default.
    """

    def __init__(
        self, program: Callable[[int, Any], Any], count: int = 2, local: int | None = None
    ):
        self.count = local or count
        self._program = program
        self._ranks = count
        self._name = f"{os.getpid()}-{next(_jobs)}"
        self._barrier = _FORK.Barrier(self.count, timeout=BARRIER_S)
        self.processes: list[Any] = []
        self._results: list[Connection[Any, Any]] = []
        for rank in range(self.count):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start the process of a rank, or another one in its place."""
        received, sent = _FORK.Pipe()
        places = {"RANK": rank, "WORLD_SIZE": self._ranks, "LOCAL_RANK": rank}
        places["LOCAL_WORLD_SIZE"] = self.count
        arguments = (self._program, rank, self._barrier, sent, places, self._name)
        process = _FORK.Process(target=_run, args=arguments)
        if rank < len(self.processes):
            self.processes[rank].close()
            self._results[rank].close()
        self.processes[rank : rank + 1] = [process]
        self._results[rank : rank + 1] = [received]
        process.start()
        sent.close()

    def result(self, rank: int) -> Any:
        """What a rank returned.

        Raises:
            Failure: It raised.
        """
        assert self._results[rank].poll(TIMEOUT_S), f"rank {rank} hangs"
        found, value = self._results[rank].recv()
        if found == "raised":
            raise Failure(value)
        return value

    def results(self) -> list[Any]:
        """What all returned."""
        return [self.result(rank) for rank in range(self.count)]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process, results in zip(self.processes, self._results, strict=True):
            with suppress(OSError):  # it was killed
                results.send("end")
            process.join(5)
            process.kill()
            process.join()
            process.close()
        for results in self._results:
            results.close()


def _run(
    program: Callable[[int, Any], Any],
    rank: int,
    barrier: Any,
    results: Any,
    places: dict[str, int],
    name: str,
) -> None:
    torch.set_num_threads(1)
    os.environ.update({key: str(value) for key, value in places.items()}, TORCHELASTIC_RUN_ID=name)
    try:
        results.send(("returned", program(rank, barrier)))
    except BaseException:
        results.send(("raised", traceback.format_exc()))
    results.poll(TIMEOUT_S)  # others may need its workers


def run(program: Callable[[int, Any], Any], count: int = 2, local: int | None = None) -> list[Any]:
    """What each rank of a job returns."""
    with Job(program, count, local) as job:
        return job.results()
