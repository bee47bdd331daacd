"""Records the order of batches in a file, and replays it: JSON lines, one per batch.

An epoch begins with ``{"minato_order": 2, "epoch": e, "seed": s, "first_batch": b, "batched": y, "length": n}``: y says
whether the loader makes batches, and n is the length of the dataset, or null. Each delivered batch is a list of
its indices in the order of their places. ``[index, n]`` is an index that occurred n times before in the epoch.
``{"end": n}`` ends an epoch of n batches. A resumed run appends: its record of an epoch from batch b on replaces the
earlier one.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import index as as_integer
from typing import Any, BinaryIO, NamedTuple, SupportsIndex

from minato._support.files import cut_torn_line, open_lines, open_regular, write_all
from minato._support.values import text_of

_VERSION = 2
_INT64 = 1 << 63
_BEGINS = b'{"minato_order":'


class Origin(NamedTuple):
    """What a recorded order belongs to."""

    batched: bool
    length: int | None


class OrderRecord:
    """Records one epoch while it runs; each batch is in the file before ``next()`` returns it.

    Args:
        path: File to append to; an incomplete last line is cut off. A new file has mode 0600.
        first_batch: Number of batches of the epoch that were delivered before.

    Raises:
        ValueError: The file holds something else, and is not changed.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, epoch: int, seed: int, first_batch: int, origin: Origin) -> None:
        self._path = path
        self._descriptor = open_lines(path, _BEGINS, "a recorded order (Record)")
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._owner = os.getpid()
        cut_torn_line(self._descriptor)
        self._waiting: dict[int, int | str | list[Any]] = {}
        self._requested = self._requested_batches = self._written_batches = 0
        self._first = first_batch
        self._size = os.fstat(self._descriptor).st_size
        head = {"minato_order": _VERSION, "epoch": epoch, "seed": seed, "first_batch": first_batch}
        self._size += self._write({**head, "batched": origin.batched, "length": origin.length})

    def requested(self, indices: Sequence[Any], occurrences: list[int] | None, batch: int) -> None:
        """Number the indices of a batch that the sampler yields; a batch that was numbered before stays as it is.

        Args:
            occurrences: How often each of them came before in the epoch; None: none did.

        Raises:
            TypeError: An index is neither an integer nor a string.
        """
        if batch < self._requested_batches:
            return
        items: Iterator[Any] = map(_to_json, indices)
        if occurrences is not None:
            pairs = zip(items, occurrences, strict=True)
            items = ([index, before] if before else index for index, before in pairs)
        self._waiting.update(enumerate(items, self._requested))
        end = self._requested + (len(indices) or 1)
        self._requested, self._requested_batches = end, batch + 1

    def delivered(self, numbers: list[int], batch: int) -> None:
        """Record a batch, given the numbers of the indices at its places, once."""
        if batch < self._written_batches:
            return
        found = (self._waiting.get(number) for number in numbers)
        end = self._size + self._write([index for index in found if index is not None])
        self._size, self._written_batches = end, batch + 1
        for number in numbers:
            self._waiting.pop(number, None)

    def finish(self) -> None:
        """Record the end of the epoch."""
        if self._close.alive:
            self._write({"end": self._first + self._written_batches})
            self._close()

    def _write(self, line: object) -> int:
        """Append a line, without the part that an interrupted call has written; returns its size in bytes."""
        if os.getpid() != self._owner:  # a forked child that goes on without workers
            return 0
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = os.fstat(self._descriptor).st_size - self._size
        begun = os.pread(self._descriptor, len(data) + 1, self._size) if written else b""
        if written < 0 or begun != data[:written]:
            raise ValueError(
                f"{self._path!r} has changed since this epoch began: another iterator or process writes to it, too. "
                "Give each its own file, and run through one epoch after the other"
            )
        write_all(self._descriptor, data[written:], self._path)
        return len(data)


def _to_json(index: str | SupportsIndex) -> int | str:
    if isinstance(index, str):
        return index
    try:
        return as_integer(index)
    except TypeError:
        raise TypeError(
            f"Record(...) can only write indices that are integers or strings, and {text_of(index)} is a "
            f"{type(index).__name__}: leave recording= out, or let the sampler yield such indices"
        ) from None


def _line(raw: bytes) -> Any:
    """Return the content of a line; None if it is incomplete."""
    try:
        return json.loads(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None


def _is_batch(line: object) -> bool:
    return isinstance(line, list) and all(map(_is_key, line))


def _is_key(index: object) -> bool:
    if type(index) is list and len(index) == 2:
        index, before = index
        if type(before) is not int or not 0 < before < 1 << 32:
            return False
    return type(index) in (int, str)


@dataclass
class _Epoch:
    """Offsets of the batches of an epoch in the file."""

    seed: int
    origin: Origin
    line: int
    offsets: array[int] = field(default_factory=lambda: array("q"))
    complete: bool = False


class RecordedOrder:
    """Reads a file that ``OrderRecord`` wrote: at once, to check it, and batch by batch during the replay.

    Raises:
        ValueError: It is no such file; the message names the file and the line.
        OSError: The file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._epochs: dict[int, _Epoch] = {}
        with self._opened() as file:
            self._scan(file)
        if not self._epochs:
            raise ValueError(f"{path} is empty: it is no record of an order (Record)")

    def _opened(self) -> BinaryIO:
        return open(open_regular(self._path, os.O_RDONLY), "rb")

    def _scan(self, file: Iterable[bytes]) -> None:
        epoch: _Epoch | None = None
        offset = 0
        for number, raw in enumerate(file, 1):
            line = _line(raw)
            heads = isinstance(line, dict) and ("end" in line or "minato_order" in line)
            if not heads and not _is_batch(line):
                raise self._wrong(number, "it is no line of a recorded order")
            if isinstance(line, dict) and "minato_order" in line:
                epoch = self._begin_epoch(line, number)
            elif epoch is None:
                raise self._wrong(number, "an epoch must begin with a line that names it")
            elif isinstance(line, list):
                if epoch.complete:
                    raise self._wrong(number, "a batch after the end of its epoch")
                epoch.offsets.append(offset)
            elif line.get("end") == len(epoch.offsets):
                epoch.complete = True
            else:
                raise self._wrong(number, f"{len(epoch.offsets)} batches stand before it")
            offset += len(raw)

    def _begin_epoch(self, line: dict[str, Any], number: int) -> _Epoch:
        if type(line["minato_order"]) is not int or line["minato_order"] != _VERSION:
            raise self._wrong(
                number,
                f"version {line['minato_order']!r}, and this minato reads {_VERSION}: record the order again",
            )
        head: list[Any] = [line.get(name) for name in ("epoch", "seed", "first_batch")]
        if any(type(value) is not int for value in head):
            raise self._wrong(number, "it must give epoch, seed and first_batch as integers")
        epoch, seed, first = head
        if first < 0 or not all(-_INT64 <= value < _INT64 for value in head):
            raise self._wrong(number, "epoch, seed or first_batch is out of range")
        batched, length = line.get("batched"), line.get("length")
        is_length = length is None or (type(length) is int and length >= 0)
        if type(batched) is not bool or not is_length:
            raise self._wrong(number, "it must give batched and the length of the dataset")
        origin = Origin(batched, length)
        before = self._epochs.get(epoch, _Epoch(seed, origin, number))
        is_other = (seed, origin) != (before.seed, before.origin)
        if first > len(before.offsets) or (first and is_other):
            raise self._wrong(number, "what it goes on from does not stand before it")
        self._epochs[epoch] = _Epoch(seed, origin, number, before.offsets[:first])
        return self._epochs[epoch]

    def _wrong(self, number: int, why: str) -> ValueError:
        return ValueError(f"{self._path}, line {number}: {why}")

    def seed(self, epoch: int) -> int:
        """Return the seed of the epoch's samples; ValueError: the file does not hold it, or not to its end."""
        found = self._epochs.get(epoch)
        if found is None:
            raise ValueError(
                f"{self._path} holds no epoch {epoch}, only {sorted(self._epochs)}: choose one with set_epoch()"
            )
        if not found.complete:
            raise ValueError(
                f"{self._path}, line {found.line}: epoch {epoch} was recorded only for its first "
                f"{len(found.offsets)} batches, not to its end"
            )
        return found.seed

    def check(self, epoch: int, origin: Origin) -> None:
        """Raise ValueError if an epoch does not belong to a loader, or the file does not hold it."""
        self.seed(epoch)
        found = self._epochs[epoch]
        if found.origin.batched != origin.batched:
            kinds = {True: "batches", False: "single samples (batch_size=None)"}
            raise self._wrong(
                found.line,
                f"epoch {epoch} was recorded as {kinds[found.origin.batched]}, and this loader returns "
                f"{kinds[origin.batched]}: make them as it was made",
            )
        if None not in (found.origin.length, origin.length) and found.origin != origin:
            raise self._wrong(
                found.line,
                f"epoch {epoch} was recorded of a dataset of {found.origin.length} samples, and this one has "
                f"{origin.length}: give the dataset that was recorded, or record the order again",
            )

    def batches(self, epoch: int) -> Iterator[tuple[list[Any], list[int]]]:
        """Yield the indices of each batch of a complete epoch, and how often each came before."""
        with self._opened() as file:
            for number, offset in enumerate(self._epochs[epoch].offsets):
                file.seek(offset)
                indices = _line(file.readline())
                if not _is_batch(indices):
                    raise ValueError(
                        f"{self._path} has changed since it was opened: batch {number} of epoch {epoch} is gone"
                    )
                pairs = [index if type(index) is list else (index, 0) for index in indices]
                yield [index for index, _ in pairs], [before for _, before in pairs]
