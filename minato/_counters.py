"""Counts that several processes add to."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.data import get_worker_info

__all__ = ["Counters"]

_MOST_WORKERS = 256


class Counters:
    """Named counts, each worker's in a row of its own, so that none is lost.

    They are shared with forked children, and with processes that are given them when they are started.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        size = _MOST_WORKERS + 1, len(names)
        self._counts = torch.zeros(size, dtype=torch.int64).share_memory_()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_names": self._names, "_counts": self._counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def add(self, **by: int) -> None:
        """Add to some of them."""
        worker = get_worker_info()
        row = self._counts[0 if worker is None else 1 + worker.id % _MOST_WORKERS]
        with self._lock:
            for name, number in by.items():
                row[self._names.index(name)] += number

    def totals(self) -> list[int]:
        """What all processes have counted, in the order of the names."""
        totals: list[int] = self._counts.sum(0).tolist()
        return totals
