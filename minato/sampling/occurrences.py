"""Indices that come more than once in an epoch: how often each came before travels with it from sampler to worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Again", "Recurring", "keys_of", "unmarked"]


class Again:
    """An index that came before in its epoch.

    Args:
        key: What the sampler gave.
        occurrence: How often it came before, at least once.
    """

    __slots__ = ("key", "occurrence")

    def __init__(self, key: Any, occurrence: int) -> None:
        self.key = key
        self.occurrence = occurrence


class Recurring:
    """A batch some of whose indices came before; as a sequence, it has an ``Again`` in the place of each of those.

    Args:
        keys: The batch as the sampler gave it.
        occurrences: How often each of its indices came before.
    """

    __slots__ = ("keys", "occurrences")

    def __init__(self, keys: Any, occurrences: list[int]) -> None:
        self.keys = keys
        self.occurrences = occurrences

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        for key, occurrence in zip(self.keys, self.occurrences, strict=True):
            yield Again(key, occurrence) if occurrence else key


def keys_of(batch: Any) -> Any:
    """Return the indices of a batch as the sampler yielded it; ``Again`` stays in a batch that was cut again."""
    return batch.keys if type(batch) is Recurring else batch


def unmarked(batch: Any) -> tuple[Any, list[int] | None]:
    """The indices of a batch, and how often each came before; None: none did."""
    if type(batch) is Recurring:
        return batch.keys, batch.occurrences
    found = [key.occurrence if type(key) is Again else 0 for key in batch]
    if not any(found):
        return batch, None
    return [key.key if type(key) is Again else key for key in batch], found
