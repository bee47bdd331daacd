"""The counters of a loader's sources, reads and cache."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from torch.utils.data import Dataset

from minato._support.counters import Counters
from minato._support.objects import Search

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


def _counters_of(dataset: object) -> list[Counters]:
    if "minato.sources.base" not in sys.modules:  # there is no source, and searching takes time
        return []
    search = Search(
        lambda kind: issubclass(kind.kind, Counters),
        opens=lambda kind: issubclass(kind.kind, Dataset),
    )
    return [node.thing for node in search.run({"dataset": dataset})]
