"""Which chunks lie in the store already, and what their samples were: a file to go on with."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from minato.errors import MinatoError

__all__ = ["Done", "Journal", "JournalError"]


_LOOK_EVERY_S = 0.05


class JournalError(MinatoError, ValueError):
    """A journal belongs to something else, or somebody is writing it."""


class Done(NamedTuple):
    """A chunk that was written.

    Attributes:
        chunk: Its number.
        stored_bytes: What its samples take.
        digests: One of each sample, in their order.
    """

    chunk: int
    stored_bytes: int
    digests: list[int]


class Journal:
    """One line for what is ingested, and one for each chunk, appended when the store has it.

    Args:
        path: The file; made if there is none.
        about: What is ingested, where to and how, as JSON; a file about something else is refused.
        patience_s: How long to wait for others who write it. Workers of one that was killed end by themselves, but not
            in the middle of a chunk.
    """

    def __init__(self, path: Path, about: dict[str, Any], patience_s: float = 20.0) -> None:
        self.done: dict[int, Done] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="ascii")
        try:
            self._lock(path, patience_s)
            self._read(path, about)
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise JournalError(
                        f"another ingest is writing {path}: wait for its end"
                    ) from None
            time.sleep(_LOOK_EVERY_S)  # flock() itself knows no time limit

    def _read(self, path: Path, about: dict[str, Any]) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file.read().splitlines(keepends=True)):
            if not line.endswith("\n"):  # it was killed while it wrote
                break
            found = json.loads(line)
            if number:
                self.done[found[0]] = Done(*found)
            elif found != about:
                raise JournalError(
                    f"{path} is about something else, {found}, and this is {about}: delete it to begin anew, or name "
                    "another journal"
                )
            whole += len(line)
        self._file.truncate(whole)
        if not whole:
            self._append(about)

    def _append(self, line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def add(self, done: Done) -> None:
        """Record a chunk."""
        self.done[done.chunk] = done
        self._append(done)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
