"""The counters of a loader's sources, reads and cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from minato._support.counters import Counters

__all__ = ["StorageCounters"]


class StorageCounters:
    """The counters of a loader's storage, in all processes.

    Args:
        dataset: A source, or a dataset with sources in its attributes, at any depth.
        cache: The loader's, or None.
        reads: The counters of concurrent reads, or None.
    """

    def __init__(self, dataset: object, cache: Any, reads: Counters | None) -> None:
        self._counters = [("source", counters) for counters in _counters_of(dataset)]
        if cache is not None:
            self._counters.append(("cache", cache.counters))
        if reads is not None:
            self._counters.append(("fetch", reads))

    def counts(self) -> Counter[str]:
        """All of them so far, by name."""
        found: Counter[str] = Counter()
        for kind, counters in self._counters:
            found.update({f"{kind}_{name}": n for name, n in counters.by_name().items()})
        return found


def _counters_of(dataset: object) -> Iterator[Counters]:
    seen: set[int] = set()
    left: list[Any] = [dataset]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Counters):
            yield value
        elif isinstance(value, Dataset):
            left += getattr(value, "__dict__", {}).values()
        elif type(value) in (list, tuple) and value and isinstance(value[0], Dataset):
            left += value
