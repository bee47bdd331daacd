"""The workers that a plan asks for: processes, threads, or Ray actors; a warning where forked ones copy objects."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sized
from contextlib import suppress
from pathlib import Path
from typing import Any

from minato._compat import preload_in_server
from minato._support.objects import Search, path_of
from minato._system import available_cores
from minato.engine.plan import Plan
from minato.errors import log, warn
from minato.observe.observers import Observer
from minato.sharing import is_looked_through
from minato.transforms import rng_memory
from minato.workers.pools import ProcessPool, ThreadPool, WorkerPool
from minato.workers.shared_state import SharedState
from minato.workers.supervision import WorkerRecovery
from minato.workers.worker_process import WorkerContext, run_worker_process


def make_pool(
    plan: Plan, context: WorkerContext, state: SharedState, recovery: WorkerRecovery
) -> WorkerPool:
    """Make the workers of a plan, which are not started yet."""
    work, starts = plan.worker, plan.context
    if work.method == "thread":
        return ThreadPool(state, context)
    if work.method == "ray":
        from minato.ray import ActorPool

        return ActorPool(state, context, recovery, plan.options.actor_options)
    if work.seeds_samples:
        rng_memory.found_in_memory()  # not in each forked worker
    method = starts.get_start_method()
    if method == "forkserver":
        preload_in_server(run_worker_process.__module__)
        log("%d workers start from the fork server of multiprocessing", work.most_workers)
    return ProcessPool(
        state,
        recovery,
        functools.partial(run_worker_process, context=context),
        context=starts,
        num_workers=work.most_workers,
        first=plan.first,
        # A fork is fast. Other processes first import the script, or even torch, which occupies a core.
        max_starting=work.most_workers if method == "fork" else max(int(available_cores()), 1),
    )


# ---- objects that workers copy --------------------------------------------------------------


_AFTER_BATCHES = (50, 500, 5000)
_LEAST_ITEMS = 50_000
_LEAST_NBYTES = 256 << 20  # of all workers together: a warning is not worth less
_SAMPLE = 256
_SIZED = {id(each) for each in (dict, list, tuple, str, bytes, int, float)}


class CopiedObjects(Observer):
    """Compares the private memory of forked workers with what a dataset keeps in Python objects, three times.

    The containers are looked for at the first comparison, so that short epochs pay nothing.
    """

    warned = False  # whether this process has warned: once is enough

    def __init__(self, dataset: object, pool: WorkerPool) -> None:
        self._dataset, self._pool = dataset, pool
        self._batches = 0

    def leave(self, *_: object) -> None:
        self._batches += 1
        if self._batches in _AFTER_BATCHES and not CopiedObjects.warned:
            with suppress(Exception):
                self._check()

    def _check(self) -> None:
        found = large_containers(self._dataset)
        if not found:
            return
        nbytes, items, path = max(found)
        pids = [process.pid for process in self._pool.processes if process.pid is not None]
        private, count = sum(map(_private_dirty, pids)), len(pids)
        if private < max(_LEAST_NBYTES, count * nbytes // 2):
            return
        CopiedObjects.warned = True
        warn(
            f"{count} forked workers have {private >> 20} MiB of memory of their own. {path} holds {items} "
            f"Python objects (about {nbytes >> 20} MiB), which each worker copies page by page as it reads them. "
            "Keep them once for all workers: dataset = minato.share(dataset)"
        )


def large_containers(dataset: object) -> list[tuple[int, int, str]]:
    """Bytes, length and path of each large list, tuple and dictionary that ``minato.share`` finds in a dataset."""
    search = Search(
        lambda kind: any(kind.kind is each for each in (list, tuple, dict)),
        wants=lambda value: len(value) >= _LEAST_ITEMS,
        opens=is_looked_through,
    )
    found = search.run({"dataset": dataset})
    return [(_nbytes_of(node.thing), len(node.thing), path_of(node)) for node in found]


def _nbytes_of(container: Sized) -> int:
    """The memory of a container with its items, extrapolated from the first ones."""
    sample, count = _first(container), min(len(container), _SAMPLE)
    return sys.getsizeof(container) + sum(map(_size, sample)) * len(container) // count


def _size(item: object) -> int:
    return _size_of_one(item) + sum(map(_size_of_one, _first(item)))


def _size_of_one(item: object) -> int:
    # sys.getsizeof asks the object.
    return sys.getsizeof(item) if id(type(item)) in _SIZED else object.__sizeof__(item)


def _first(container: Any) -> list[Any]:
    """The first items of a container, those of a dictionary with their keys; empty for other objects."""
    kind = type(container)
    if kind is dict:
        return [*itertools.chain.from_iterable(itertools.islice(container.items(), _SAMPLE))]
    return [*itertools.islice(container, _SAMPLE)] if kind is list or kind is tuple else []


def _private_dirty(pid: int) -> int:
    """Memory that a process has written and shares with no other, in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return sum(1024 * int(line[1]) for line in lines if line[0] == "Private_Dirty:")
