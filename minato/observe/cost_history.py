"""Costs of samples that are kept in a file for the next run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from minato._core import HISTOGRAM_NBYTES, Histogram
from minato._support.files import open_regular, write_atomically
from minato._support.hashes import fingerprint
from minato._support.text import message_of
from minato.errors import warn
from minato.observe.size import length_of

__all__ = ["CostHistory", "from_words", "to_words"]

_FORMAT = 2
_MOST = 1 << 62
"""Larger counts and sums are corrupt."""
_LONGEST_FILE_BYTES = 64 << 20
"""Larger files are corrupt and not read."""


class CostHistory:
    """A directory with a file of costs for each dataset, list of transforms and machine.

    The fingerprint of the three names the file. Without a fingerprint, no costs are kept, and a warning says so.

    Args:
        directory: Created with mode 0700 when the first costs are saved.
    """

    def __init__(
        self, directory: str, dataset: object, transforms: Sequence[Callable[..., object]]
    ) -> None:
        self._directory = directory
        self._warned = False
        self._file: Path | None = None
        host = platform.node(), platform.machine(), platform.processor(), os.cpu_count()
        try:
            name = fingerprint(dataset, length_of(dataset), *transforms, host).hex()[:24]
            self._file = Path(directory) / f"{name}.json"
        except Exception as error:  # also of a method of the dataset's or of a transform
            warn(
                f"history={directory!r} of stragglers= is not used, as the costs have no name: {message_of(error)}",
                stacklevel=2,
            )

    def costs(self) -> Histogram | None:
        """Costs of recent samples in the last run; None if none are saved, or if they cannot be read."""
        if self._file is None:
            return None
        try:
            with open(open_regular(self._file, os.O_RDONLY), "rb") as file:
                content = json.loads(file.read(_LONGEST_FILE_BYTES))
            if content["format"] != [_FORMAT, HISTOGRAM_NBYTES]:
                return None
            return from_words(content["recent"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def save(self, costs: Histogram) -> None:
        """Save the costs of recent samples, atomically and with mode 0600; warns if that is not possible."""
        if self._file is None:
            return
        content = {"format": [_FORMAT, HISTOGRAM_NBYTES], "recent": to_words(costs)}
        try:
            self._file.parent.mkdir(0o700, parents=True, exist_ok=True)
            write_atomically(self._file, json.dumps(content))
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"history={self._directory!r} of stragglers= cannot be written, so the next run starts without it: "
                    f"{message_of(error)}",
                    stacklevel=2,
                )


def to_words(values: Histogram) -> dict[str, int]:
    """The words of a histogram that are not zero, by their number as a string, for JSON."""
    memory = bytearray(HISTOGRAM_NBYTES)
    Histogram(memory).merge(values)
    return {str(i): word for i, word in enumerate(memoryview(memory).cast("Q")) if word}


def from_words(words: Mapping[str, int]) -> Histogram:
    """A histogram from the result of :func:`to_words`.

    Raises:
        ValueError, IndexError, TypeError: The words are corrupt.
    """
    memory = bytearray(HISTOGRAM_NBYTES)
    view = memoryview(memory).cast("Q")
    for i, word in words.items():
        view[int(i)] = word
    found = Histogram(memory)
    values = (found.count, found.total, found.max)
    if sum(view) != found.count + sum(values) or max(values) >= _MOST:
        raise ValueError("the counts of the buckets do not add up")
    whole = Histogram()
    whole.merge(found)
    return whole
