"""Reports of all loaders of a process at its end: for ``minato run`` and ``MINATO_REPORT``."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from minato._support.files import open_lines, write_atomically
from minato._system import local_rank
from minato.errors import warn
from minato.observe.epoch_log import EpochLog
from minato.observe.figures import Setup
from minato.observe.report import Report, report_of
from minato.observe.text import plain

__all__ = ["MOST_LOADERS", "keep", "print_at_exit", "write_at_exit"]

MOST_LOADERS = 32
"""The reports of the latest loaders are kept: a program may make one for each epoch."""
_TEXT, _JSON = "minato: ", '{"minato_reports": '
"""How a file of reports begins."""


@dataclass
class _AtExit:
    """What a process does at its end. A process that was forked from it does nothing."""

    owner: int = 0
    prints: bool = False
    path: Path | None = None
    refused: bool = False
    kept: dict[int, Callable[[], Report]] = field(default_factory=dict)
    dropped: int = 0

    @property
    def active(self) -> bool:
        return self.owner == os.getpid() and (self.prints or self.path is not None)

    def finish(self) -> None:
        if not self.active:
            return
        reports = [report() for report in self.kept.values()]
        if self.path is not None:
            try:
                write_atomically(self.path, _text(reports, self.dropped, self.path.suffix))
            except OSError as error:
                print(f"minato: MINATO_REPORT={self.path}: {error}", file=sys.stderr)
        if self.prints and local_rank() == 0:
            print(f"\n{_text(reports, self.dropped)}", file=sys.stderr, end="")


_at_exit = _AtExit()


def _of_this_process() -> _AtExit:
    global _at_exit
    if _at_exit.owner != os.getpid():
        _at_exit = _AtExit(os.getpid())
        atexit.register(_at_exit.finish)
    return _at_exit


def print_at_exit() -> None:
    """Print a report of each loader to stderr when this process ends; under a launcher, only in local rank 0."""
    _of_this_process().prints = True


def write_at_exit(path: str) -> None:
    """Write the reports of all loaders to a file when this process ends; the first call decides the file.

    A file that cannot be written, or has other content, is a warning.

    Args:
        path: A name that ends with ``.json`` has JSON, any other one text. Local ranks above 0 write
            ``NAME.rank1.json`` and so on.
    """
    mine = _of_this_process()
    if mine.path is not None or mine.refused:
        return
    file, rank = Path(path).absolute(), local_rank()
    if rank:
        file = file.with_name(f"{file.stem}.rank{rank}{file.suffix}")
    begins = _JSON if file.suffix == ".json" else _TEXT
    try:
        os.close(open_lines(file, begins.encode(), "a file of reports of minato"))
    except (OSError, ValueError) as error:
        mine.refused = True
        warn(f"the report cannot be written: MINATO_REPORT={path!r}: {error}", stacklevel=5)
    else:
        mine.path = file


def keep(setup: Setup, steps: Sequence[str], log: EpochLog) -> None:
    """Keep what the report of a loader needs, which is neither the loader nor its dataset, until the process ends."""
    if not _at_exit.active:
        return
    _at_exit.kept[id(log)] = partial(report_of, setup, tuple(steps), log)
    if len(_at_exit.kept) > MOST_LOADERS:
        del _at_exit.kept[next(iter(_at_exit.kept))]
        _at_exit.dropped += 1


def _text(reports: Sequence[Report], dropped: int, suffix: str = "") -> str:
    if suffix == ".json":
        return f"{_JSON}{json.dumps([each.to_dict() for each in reports])}}}\n"
    parts = [
        f"{_TEXT}loader {each.setup.name!r}, {each.run.epochs} epochs\n{plain(each)}\n"
        for each in reports
    ]
    if dropped:
        parts.append(f"{_TEXT}{dropped} earlier loaders are not shown\n")
    return "\n\n".join(parts) or f"{_TEXT}no loader of minato ran in this process\n"
