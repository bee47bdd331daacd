"""What is done with a chunk, in whichever process or thread: write it, or compare it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minato._support.text import printable
from minato.errors import MinatoError
from minato.sources.ingest.encoding import as_bytes, as_row, digest
from minato.sources.ingest.journal import Completed
from minato.sources.ingest.store import Store

__all__ = ["Work"]


class Work:
    """Writes and compares chunks.

    Args:
        dataset: Map-style; None if samples are handed over. If it has ``keys``, as sources do, these name its samples,
            and otherwise their numbers.
        encode: Makes of a sample what the store holds.
    """

    def __init__(
        self,
        store: Store,
        dataset: Any,
        chunk_samples: int,
        encode: Callable[[Any], Any] | None,
    ) -> None:
        self._store = store
        self._dataset = dataset
        self._chunk_samples = chunk_samples
        self._own_encode = encode
        self._encode = as_row if store.takes_rows else as_bytes
        names: Any = getattr(dataset, "keys", None)
        self._names: Sequence[Any] | None = None if callable(names) else names

    def _key(self, chunk: int, number: int) -> Any:
        index = chunk * self._chunk_samples + number
        return self._store.key(index if self._names is None else self._names[index])

    def write(self, chunk: int, samples: Sequence[Any] | None = None) -> Completed:
        """Write a chunk: the given samples, or those of the dataset."""
        if samples is None:
            first = chunk * self._chunk_samples
            numbers = range(first, min(first + self._chunk_samples, len(self._dataset)))
            samples = [self._dataset[index] for index in numbers]
        items = [
            (self._key(chunk, number), self._encoded(chunk, number, sample))
            for number, sample in enumerate(samples)
        ]
        self._store.write(chunk, items)
        return Completed(chunk, sum(map(_size, items)), [digest(value) for _, value in items])

    def _encoded(self, chunk: int, number: int, sample: Any) -> Any:
        try:
            return self._encode(sample if self._own_encode is None else self._own_encode(sample))
        except Exception as error:
            raise MinatoError(
                f"the sample with key {self._key(chunk, number)!r} cannot be encoded: "
                f"{type(error).__name__}: {printable(str(error), lines=True)}"
            ) from error

    def wrong(self, done: Completed) -> tuple[int, list[str]]:
        """Compare a chunk with what was written: how many samples it has, and which are wrong."""
        keys = [self._key(done.chunk, number) for number in range(len(done.digests))]
        try:
            found = self._store.read(done.chunk, keys)
        except Exception as error:
            return len(keys), [f"{keys[0]!r} … ({type(error).__name__}: {printable(str(error))})"]
        pairs = zip(keys, found, done.digests, strict=True)
        return len(keys), [repr(key) for key, value, was in pairs if self._digest(value) != was]

    def _digest(self, value: Any) -> int:
        return digest(self._encode(value))


def _size(item: tuple[Any, Any]) -> int:
    value = item[1]
    if not isinstance(value, dict):
        return len(value)
    return sum(len(cell) if isinstance(cell, (bytes, str)) else 8 for cell in value.values())
