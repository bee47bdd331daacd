"""The lanes of a trace: who writes to which, and what an event looks like."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from minato._core.clock import now_ns
from minato.trace.file import LIMIT_BYTES, EventFile, begin, check

__all__ = ["REPEATED", "SAMPLE", "Lane", "Lanes", "Trace", "in_json"]

SAMPLE = "sample"
"""Name of the slice in which a sample became complete: there is one for each that is delivered."""
REPEATED = "sample (repeated)"
"""Of one whose result was not used."""
_LOOP, _FIRST_WORKER, _LANES = 1, 10, 10_000
"""Numbers of the training loop's lane and the first worker's; how many numbers an iterator has."""
_LONGEST_TEXT = 200


class Trace:
    """A loader's trace.

    Args:
        path: The file; made anew when the loader is first iterated over, and only opened before.

    Raises:
        ValueError: The file holds something else, which is untouched.
        OSError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._begun = False
        self._taken: set[int] = set()
        try:
            check(self._path)
        except OSError as error:
            raise OSError(
                error.errno,
                f"trace={path!r} cannot be written ({error.strerror}): give a file in a folder where you may write",
            ) from None

    def take(self) -> Lanes:
        """Lanes for another engine: those of one that has ended, if there is one."""
        if not self._begun:
            with contextlib.suppress(
                OSError
            ):  # of which the lanes will speak, as they cannot be written either
                begin(self._path)
                self._begun = True
        number = next(each for each in range(len(self._taken) + 1) if each not in self._taken)
        self._taken.add(number)
        return Lanes(self._path, LIMIT_BYTES, os.getpid(), number)

    def give_back(self, lanes: Lanes) -> None:
        """An engine has ended."""
        self._taken.discard(lanes.number)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_taken": set()}


@dataclass(frozen=True)
class Lanes:
    """The lanes of one engine; travels to its workers.

    Attributes:
        pid: Of the training process, under which all lanes are shown.
        number: 0, unless several iterators of the loader live at once.
    """

    path: str
    limit_bytes: int
    pid: int
    number: int

    def loop(self) -> Lane:
        """The lane of the training loop."""
        return self._lane(_LOOP, "training loop")

    def worker(self, number: int) -> Lane:
        """The lane of a worker."""
        return self._lane(_FIRST_WORKER + number, f"worker {number}")

    def _lane(self, number: int, name: str) -> Lane:
        suffix = f" of iterator {self.number}" if self.number else ""
        file = EventFile(self.path, self.limit_bytes)
        return Lane(file, self.pid, self.number * _LANES + number, name, suffix)


class Lane:
    """Where one thread tells what it does. Nothing is written before ``flush``.

    Slices must be told so that two of them overlap only if one contains the other; the outer one is begun first.

    Attributes:
        epoch: Of the samples that are told of.
        file: What is written to.
    """

    def __init__(self, file: EventFile, pid: int, number: int, name: str, suffix: str = "") -> None:
        self.file = file
        self.epoch = 0
        self._suffix = suffix
        self._where = f'"pid":{pid},"tid":{number}'
        self._pid, self._number = pid, number
        self._samples: dict[int, int] = {}  # line of the sample at each position
        self._count = 0
        self._lines = [
            self._meta("process_name", name=f"minato, process {pid}"),
            self._meta("thread_name", name=name + suffix),
            self._meta("thread_sort_index", sort_index=number),
        ]

    def _meta(self, what: str, **args: Any) -> str:
        return f'{{"ph":"M",{self._where},"name":"{what}","args":{json.dumps(args)}}},\n'

    def slice(self, name: str, begun_ns: int, ended_ns: int, args: str = "") -> None:
        """Something was done.

        Args:
            args: Members of a JSON object.
        """
        self._lines.append(self._slice(name, begun_ns, ended_ns, args))

    def _slice(self, name: str, begun_ns: int, ended_ns: int, args: str) -> str:
        return (
            f'{{"ph":"X",{self._where},"ts":{begun_ns / 1e3:.3f},"dur":{(ended_ns - begun_ns) / 1e3:.3f},'
            f'"name":{_quoted(name)},"args":{{{args}}}}},\n'
        )

    def begin(self) -> int:
        """Something begins of which parts will be told before its end; returns what ``end`` wants to know."""
        self._lines.append("")
        return len(self._lines) - 1

    def end(self, line: int, name: str, begun_ns: int, args: str = "") -> None:
        """It has ended now."""
        self._lines[line] = self._slice(name, begun_ns, now_ns(), args)

    def sample(self, line: int, position: int, name: str, begun_ns: int, args: str) -> None:
        """A sample has ended now; if it had before, it has been run again, and the latter counts."""
        earlier = self._samples.get(position)
        if earlier is not None:
            self._lines[earlier] = self._lines[earlier].replace(_quoted(SAMPLE), _quoted(REPEATED))
        self._samples[position] = line
        self.end(line, name, begun_ns, args)

    def span(self, name: str, begun_ns: int, ended_ns: int, args: str = "") -> None:
        """Something took so long that went on beside other things."""
        self._count += 1
        identity = f'"cat":"minato","id":"{self._number}.{os.getpid()}.{self._count}","name":{_quoted(name)}'
        self._lines.append(
            f'{{"ph":"b",{self._where},"ts":{begun_ns / 1e3:.3f},{identity},"args":{{{args}}}}},\n'
            f'{{"ph":"e",{self._where},"ts":{ended_ns / 1e3:.3f},{identity},"args":{{}}}},\n'
        )

    def instant(self, name: str) -> None:
        """Something has happened now."""
        self._lines.append(self._instant(name))

    def _instant(self, name: str) -> str:
        return f'{{"ph":"i","s":"t",{self._where},"ts":{now_ns() / 1e3:.3f},"name":{_quoted(name)}}},\n'

    def counter(self, name: str, at_ns: int, **values: int) -> None:
        """So much there was of several things, which are shown on top of one another."""
        self._lines.append(
            f'{{"ph":"C",{self._where},"ts":{at_ns / 1e3:.3f},"name":{_quoted(name + self._suffix)},'
            f'"args":{json.dumps(values)}}},\n'
        )

    def flush(self) -> None:
        """Write what was told."""
        if self._lines:
            full = f"the trace is full ({self.file.limit_bytes} bytes): nothing more of this lane"
            self.file.append("".join(self._lines), self._instant(full))
            self._lines.clear()
        self._samples.clear()


def in_json(key: Any) -> str:
    """A sample's key, or any other thing that is short."""
    if type(key) is int:
        return str(key)
    return json.dumps((key if type(key) is str else repr(key))[:_LONGEST_TEXT])


@functools.lru_cache(maxsize=1000)
def _quoted(text: str) -> str:
    return json.dumps(text)
