"""Indices that come more than once in an epoch: how often each came before travels with it from sampler to worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minato._support.hashes import index_hash

__all__ = ["Again", "Recurring", "hash_of", "indices_of", "marked", "unmarked"]


class Again:
    """An index that came before in its epoch.

    Args:
        index: What the sampler gave.
        occurrence: How often it came before, at least once.
    """

    __slots__ = ("index", "occurrence")

    def __init__(self, index: Any, occurrence: int) -> None:
        self.index = index
        self.occurrence = occurrence


class Recurring:
    """A batch some of whose indices came before; as a sequence, it has an ``Again`` in the place of each of those.

    Args:
        indices: The batch as the sampler gave it.
        occurrences: How often each of its indices came before.
    """

    __slots__ = ("indices", "occurrences")

    def __init__(self, indices: Any, occurrences: list[int]) -> None:
        self.indices = indices
        self.occurrences = occurrences

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        for index, occurrence in zip(self.indices, self.occurrences, strict=True):
            yield Again(index, occurrence) if occurrence else index


def indices_of(batch: object) -> Any:
    """Return the indices of a batch as the sampler yielded it."""
    return batch.indices if type(batch) is Recurring else batch


def marked(indices: list[Any]) -> Any:
    """Return a batch that was cut again of such sequences: a ``Recurring`` if some of its indices came before."""
    found = [index.occurrence if type(index) is Again else 0 for index in indices]
    if not any(found):
        return indices
    return Recurring([index.index if type(index) is Again else index for index in indices], found)


def unmarked(batch: Any) -> tuple[Any, list[int] | None]:
    """The indices of a batch, and how often each came before; None: none did."""
    if type(batch) is Recurring:
        return batch.indices, batch.occurrences
    return batch, None


def hash_of(index: Any) -> int:
    """Return the hash of an index, which does not depend on whether it came before."""
    return index_hash(index.index if type(index) is Again else index)
