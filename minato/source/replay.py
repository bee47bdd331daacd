"""The order of batches in a file, to be repeated: JSON lines, one per batch.

An epoch begins with ``{"minato_order": 1, "epoch": e, "seed": s, "first_batch": b}``. Then each delivered batch is a
list of its keys in the order of their places, where ``[key, n]`` is a key that came n times before in the epoch, and
``{"end": n}`` says that there were n batches. A run that goes on after an interruption appends: what it says of an
epoch from batch b on takes the place of what was there.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import index as as_integer
from typing import Any

from minato._occurrences import Again

__all__ = ["OrderRecord", "RecordedOrder"]

_VERSION = 1


class OrderRecord:
    """Writes down one pass while it runs; each batch is in the file before the consumer has it.

    Args:
        path: Appended to; a last line that is not complete is cut off.
        first_batch: How many batches of the pass were delivered before.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, epoch: int, seed: int, first_batch: int) -> None:
        self._file = open(path, "ab+")  # noqa: SIM115 - open for as long as the pass
        self._close = weakref.finalize(self, self._file.close)
        _cut_last_line(self._file)
        self._waiting: dict[int, int | str | list[Any]] = {}
        self._asked = 0
        self._batches = first_batch
        self._write(
            {"minato_order": _VERSION, "epoch": epoch, "seed": seed, "first_batch": first_batch}
        )

    def asked(self, keys: Any) -> None:
        """Number the keys of the next batch that the sampler gives.

        Raises:
            TypeError: A key is neither an integer nor a string.
        """
        for key in keys:
            self._waiting[self._asked] = _plain(key)
            self._asked += 1
        self._asked += not len(keys)

    def delivered(self, numbers: list[int]) -> None:
        """Write down a batch, by the numbers of the keys at its places."""
        found = (self._waiting.pop(number, None) for number in numbers)
        self._write([key for key in found if key is not None])
        self._batches += 1

    def finish(self) -> None:
        """Write down that the pass is complete."""
        self._write({"end": self._batches})
        self._close()

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def _plain(key: Any) -> int | str | list[Any]:
    if type(key) is Again:
        return [_plain(key.key), key.occurrence]
    if isinstance(key, str):
        return key
    try:
        return as_integer(key)
    except TypeError:
        raise TypeError(
            f"record_order can only write keys that are integers or strings, and {key!r} is a "
            f"{type(key).__name__}: leave record_order out, or let the sampler give such keys"
        ) from None


def _is_key(key: Any) -> bool:
    if type(key) is list:
        return len(key) == 2 and type(key[0]) in (int, str) and type(key[1]) is int and key[1] > 0
    return type(key) in (int, str)


def _cut_last_line(file: Any) -> None:
    """Remove what a killed process has left of a line."""
    size = file.seek(0, os.SEEK_END)
    end = size
    while end > 0:
        step = min(end, 4096)
        file.seek(end - step)
        newline = file.read(step).rfind(b"\n")
        if newline >= 0:
            end = end - step + newline + 1
            break
        end -= step
    if end < size:
        file.truncate(end)
    file.seek(0, os.SEEK_END)


@dataclass
class _Epoch:
    """Where the batches of an epoch stand in the file."""

    seed: int
    line: int
    offsets: array[int] = field(default_factory=lambda: array("q"))
    complete: bool = False


class RecordedOrder:
    """Reads what ``OrderRecord`` has written.

    The file is read twice: at once, to see that it is whole, and batch by batch while it is replayed.

    Raises:
        ValueError: It is no such file; the message names it and the line.
        OSError: It cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._epochs: dict[int, _Epoch] = {}
        with open(path, "rb") as file:
            self._scan(file)
        if not self._epochs:
            raise ValueError(f"{path} is empty: it is no record of an order (record_order=)")

    def _scan(self, file: Any) -> None:
        epoch: _Epoch | None = None
        offset = 0
        for number, raw in enumerate(file, 1):
            line = self._parsed(raw, number)
            if isinstance(line, dict) and "minato_order" in line:
                epoch = self._begun(line, number)
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

    def _parsed(self, raw: bytes, number: int) -> Any:
        try:
            line = json.loads(raw) if raw.endswith(b"\n") else None
        except ValueError:
            line = None
        if isinstance(line, list) and all(map(_is_key, line)):
            return line
        if isinstance(line, dict) and ("end" in line or "minato_order" in line):
            return line
        raise self._wrong(number, "it is no line of a recorded order")

    def _begun(self, line: dict[str, Any], number: int) -> _Epoch:
        if line["minato_order"] != _VERSION:
            raise self._wrong(
                number, f"version {line['minato_order']!r}, and this minato reads {_VERSION}"
            )
        head: list[Any] = [line.get(name) for name in ("epoch", "seed", "first_batch")]
        if any(type(value) is not int for value in head):
            raise self._wrong(number, "it must give epoch, seed and first_batch as integers")
        epoch, seed, first = head
        before = self._epochs.get(epoch, _Epoch(seed, number))
        if first > len(before.offsets) or (first and seed != before.seed):
            raise self._wrong(number, "what it goes on from does not stand before it")
        self._epochs[epoch] = _Epoch(seed, number, before.offsets[:first])
        return self._epochs[epoch]

    def _wrong(self, number: int, why: str) -> ValueError:
        return ValueError(f"{self._path}, line {number}: {why}")

    def seed(self, epoch: int) -> int:
        """What the randomness of the epoch's samples started from.

        Raises:
            ValueError: The epoch is not in the file, or not to its end.
        """
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

    def batches(self, epoch: int) -> Iterator[list[int | str | Again]]:
        """The keys of each batch of a complete epoch."""
        with open(self._path, "rb") as file:
            for offset in self._epochs[epoch].offsets:
                file.seek(offset)
                yield [
                    Again(*key) if type(key) is list else key for key in json.loads(file.readline())
                ]
