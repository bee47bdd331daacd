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
from torch.utils.data import BatchSampler, DistributedSampler

from minato import DataLoader, SharedPool
from minato.delivery.device import Accelerator
from minato.shared_pool import source
from tests.datasets import Numbers

_FORK = multiprocessing.get_context("fork")
_jobs = itertools.count()
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""
TIMEOUT_S = 90
BARRIER_S = 60
"""Less, so that a rank that waits for one that has failed says so."""


class Failure(Exception):
    """What a rank raised, as text."""


class Job:
    """Ranks that run a function of rank and barrier, each in a process; the first ``local`` are on this node."""

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
        """What a rank returned; ``Failure``: it raised."""
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


def pooled(dataset: Any, batch_size: int | None = 4, **arguments: Any) -> DataLoader[Any]:
    """A loader of a rank, whose worker all share."""
    given = {"num_workers": 1, "workers": SharedPool(), **arguments}
    return DataLoader(dataset, batch_size, **given)


def pretended_device() -> str:
    """A device on which batches are what they are here; to be called in the process of a rank."""
    source.accelerator_of = lambda device: Accelerator(torch.device("cpu"))
    return "meta"


def dealt(size: int, batch_size: int, ranks: int, epochs: int, seed: int = 0) -> list[Any]:
    """What torch's sampler gives each rank in each epoch."""
    found = []
    for rank in range(ranks):
        sampler = DistributedSampler(Numbers(size), ranks, rank, shuffle=True, seed=seed)
        found.append([])
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            found[-1].append(list(BatchSampler(sampler, batch_size, drop_last=False)))
    return found


def in_turn(size: int, batch_size: int = 4) -> list[list[list[int]]]:
    """The batches of each of two ranks that do not shuffle; a size that they can divide."""
    starts = range(0, size, 2 * batch_size)
    return [[[*range(i + rank, i + 2 * batch_size, 2)] for i in starts] for rank in (0, 1)]


def refused(
    loader: Any, rank: int, together: Any, words: str, kind: type[Exception] = RuntimeError
) -> list[int] | None:
    """The second rank cannot begin an epoch while the first one has begun; returns what that gets first."""
    try:
        if rank == 0:
            batches = iter(loader)
            return next(batches).tolist()
        with pytest.raises(kind, match=words):
            iter(loader)
        return None
    finally:
        together.wait()
