"""The journal of an ingest: a file that records the chunks in the store, with checksums of their samples."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from minato._support.files import cut_torn_line, gets_lock, open_regular, write_all
from minato.errors import MinatoError

__all__ = ["Completed", "Journal", "JournalError"]

_LONGEST_HEAD_BYTES = 1 << 16


class JournalError(MinatoError, ValueError):
    """A journal belongs to another ingest, is damaged, or another process writes it."""


class Completed(NamedTuple):
    """A chunk that is in the store.

    Attributes:
        chunk: Its number.
        stored_bytes: Bytes of its samples.
        digests: The checksum of each sample, in their order.
    """

    chunk: int
    stored_bytes: int
    digests: list[int]


class Journal:
    """A line that describes the ingest, and a line for each chunk, appended when the store has it.

    Args:
        path: The file; created with mode 0600 if it does not exist.
        about: Describes data, store and chunks, for JSON; a journal with another description is refused.
        patience_s: How long to wait for other processes that write it. The workers of a killed process end by
            themselves, but not in the middle of a chunk.

    Raises:
        JournalError: The file is no journal of this ingest and stays unchanged, or is damaged; or other processes write
            it for too long.
        OSError: It cannot be written, or is a link or no regular file.
    """

    def __init__(self, path: Path, about: dict[str, Any], patience_s: float = 20.0) -> None:
        self.done: dict[int, Completed] = {}
        self._path = path
        self._head = json.dumps(about).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            if not gets_lock(self._descriptor, patience_s):
                raise JournalError(f"another ingest is writing {path}: wait for its end")
            self._check_head(about)
            cut_torn_line(self._descriptor)
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _check_head(self, about: dict[str, Any]) -> None:
        head = os.pread(self._descriptor, max(len(self._head), _LONGEST_HEAD_BYTES), 0)
        if self._head.startswith(head[: len(self._head)]):
            return
        found = _parsed(head.partition(b"\n")[0])
        if isinstance(found, dict) and found.keys() == about.keys():
            raise JournalError(
                f"{self._path} is about something else, {found}, and this is {about}: delete it to start again, or "
                "name another journal"
            )
        raise JournalError(
            f"{self._path} holds something else than a journal of an ingest, and is left as it is: name another file"
        )

    def _read(self) -> None:
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if number == 1:
                    continue
                done = _done(_parsed(line))
                if done is None:
                    raise JournalError(
                        f"{self._path}, line {number}: it is no chunk that was written; delete the file to start again"
                    )
                self.done[done.chunk] = done
        if not os.fstat(self._descriptor).st_size:
            write_all(self._descriptor, self._head, self._path)

    def add(self, done: Completed) -> None:
        """Record a chunk."""
        self.done[done.chunk] = done
        write_all(self._descriptor, json.dumps(done).encode() + b"\n", self._path)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _done(line: object) -> Completed | None:
    """The chunk that a line describes; None if it describes none."""
    if type(line) is not list or len(line) != len(Completed._fields) or type(line[2]) is not list:
        return None
    numbers = [*line[:2], *line[2]]
    return Completed(*line) if all(type(each) is int and each >= 0 for each in numbers) else None
