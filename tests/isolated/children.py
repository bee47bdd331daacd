"""Use loaders in processes that multiprocessing starts: ``children.py PROGRAM METHOD``; prints their exit codes.

Those that are forked need no program of their own: ``tests.subprocesses.children``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minato import DataLoader, Readers, SharedPool
from tests.datasets import Sleepy


def late_at_the_end(late_s: float) -> Sleepy:
    return Sleepy(24, 0.01, dict.fromkeys(range(20, 24), late_s))


NEVER_S = 3600.0
"""How late samples are that no rank gets, however late it learns of the end of another one."""


class Uneven(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from range(8 if info is not None and info.id == 0 else 32)


def shared(late_s: float) -> DataLoader:
    dataset = late_at_the_end(late_s)
    return DataLoader(dataset, 4, num_workers=1, workers=SharedPool(), order="strict")


def pool(rank: int) -> None:
    """Rank 0 has its last batch long before rank 1, for which its workers run."""
    assert len(list(shared(0.25))) == 3


begun = multiprocessing.get_context("fork").Event()


def broken_pool(rank: int) -> None:
    """Rank 0 fails: the others need not wait until it has served them."""
    loader = shared(NEVER_S)
    try:
        for _ in loader:
            if rank == 1:
                begun.set()
            else:
                assert not begun.wait(60), "on purpose"
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(5)


def broken_rank(rank: int) -> None:
    """Rank 1 fails: the other one learns it."""
    loader = shared(NEVER_S)
    try:
        for _ in loader:
            assert rank == 0, "on purpose"
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(5)


def ends(rank: int) -> None:
    """Rank 0 hosts the store, which the slower rank 1 needs longer."""
    loader = DataLoader(Uneven(), 4, readers=Readers(2, ranks="auto", epoch_end="pad"))
    steps = [time.sleep(0.1 * rank) for _ in loader]
    assert len(steps) == 8


def report(_: int) -> None:
    list(DataLoader(range(8), 4))


class Terminal:
    """What this process writes to stderr, which claims to be a terminal."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return True


def live(_: int) -> None:
    """It ends in the middle of an epoch."""
    global kept
    sys.stderr = Terminal()
    loader = DataLoader(late_at_the_end(0.25), 2)
    loader.live()
    kept = iter(loader)
    next(kept)


def run(program: str, rank: int) -> None:
    names = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
    if program not in ("report", "live"):
        os.environ.update(dict.fromkeys(names, str(rank)) | dict.fromkeys(names.values(), "2"))
    globals()[program](rank)


def run_all(method: str, target: Callable[..., None], *arguments: Any) -> list[int | None]:
    """The exit codes of both processes, which are given their rank, too."""
    context: Any = multiprocessing.get_context(method)
    processes = [context.Process(target=target, args=(*arguments, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


if __name__ == "__main__":
    print(run_all(sys.argv[2], run, sys.argv[1]))
