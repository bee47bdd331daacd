"""A warning where forked workers copy a dataset's Python objects by reading them."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from minato.errors import MinatoWarning
from minato.sharing import large_containers

__all__ = ["CopiedObjects"]

_AFTER_BATCHES = (50, 500, 5000)
_LEAST_ITEMS = 50_000
_LEAST_NBYTES = 256 << 20
"""Of all workers together: a warning is not worth less."""
_SAMPLE = 256


class _Processes(Protocol):
    @property
    def processes(self) -> Sequence[BaseProcess]: ...


class CopiedObjects:
    """Compares the private memory of forked workers with what a dataset keeps in Python objects, three times.

    Args:
        dataset: Its largest list, tuple or dictionary is looked for.
        pool: The workers.

    Attributes:
        nbytes: Size of that container with its items; 0: there is none of notable size.
    """

    warned = False
    """Whether this process has warned: once is enough."""

    def __init__(self, dataset: object, pool: _Processes) -> None:
        found = [
            (_nbytes_of(value), len(value), path)
            for path, value in large_containers(dataset, _LEAST_ITEMS)
        ]
        self.nbytes, self._items, self._path = max(found, default=(0, 0, ""))
        self._pool = pool
        self._batches = 0

    def begin(self, *_: object) -> None:
        """An epoch begins."""

    def started(self) -> None:
        """The workers have been started."""

    def enter(self) -> None:
        """The loop waits for a batch."""

    def pinned(self, duration_ns: int) -> None:
        """A batch was pinned."""

    def finish(self) -> None:
        """The epoch is over."""

    def leave(self, *_: object) -> None:
        """The loop gets a batch."""
        self._batches += 1
        if self._batches in _AFTER_BATCHES and self.nbytes and not CopiedObjects.warned:
            self._check()

    def _check(self) -> None:
        pids = [process.pid for process in self._pool.processes if process.pid is not None]
        private, count = sum(map(_private_dirty, pids)), len(pids)
        if private < max(_LEAST_NBYTES, count * self.nbytes // 2):
            return
        CopiedObjects.warned = True
        warnings.warn(
            f"{count} forked workers have {private >> 20} MiB of memory of their own. {self._path} holds {self._items} "
            f"Python objects (about {self.nbytes >> 20} MiB), which each worker copies page by page as it reads them. "
            "Keep them once for all workers: dataset = minato.share(dataset)",
            MinatoWarning,
            stacklevel=2,
        )


def _nbytes_of(container: Any) -> int:
    """The memory of a container with its items, extrapolated from the first ones."""
    values = container.items() if isinstance(container, Mapping) else container
    sample = [*itertools.islice(values, _SAMPLE)]
    return sys.getsizeof(container) + sum(map(_size, sample)) * len(container) // len(sample)


def _size(item: object) -> int:
    parts: Iterable[Any] = ()
    if isinstance(item, Mapping):
        parts = item.values()
    elif isinstance(item, (list, tuple)):
        parts = item
    return sys.getsizeof(item) + sum(map(sys.getsizeof, itertools.islice(parts, _SAMPLE)))


def _private_dirty(pid: int) -> int:
    """Memory that a process has written and shares with no other, in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return sum(1024 * int(line[1]) for line in lines if line[0] == "Private_Dirty:")
