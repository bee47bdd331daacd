"""Reports of all loaders of a process at its end: for ``minato run`` and ``MINATO_REPORT``."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from minato._fork_safety import forget_in_children
from minato._support.files import open_lines, write_atomically
from minato._support.threads import at_end
from minato._support.values import counted, printable
from minato._system import file_of_process, local_rank
from minato.errors import warn
from minato.observe.epoch_log import EpochLog
from minato.observe.figures import Setup
from minato.observe.report import Report, report_of
from minato.observe.text import BEGINS, format_value, page

MOST_LOADERS = 32
"""The reports of the loaders that were used last are kept: a program may make one for each epoch."""
_TEXT, _JSON = "minato: ", '{"minato_reports": '


@dataclass
class _AtExit:
    """What a process does at its end. A process that was forked from it does nothing."""

    owner: int = 0
    prints: bool = False
    full: bool = False
    says_none: bool = True
    path: Path | None = None
    refused: bool = False
    kept: dict[EpochLog, Callable[[], Report]] = field(default_factory=dict)
    dropped: int = 0

    @property
    def active(self) -> bool:
        return self.owner == os.getpid() and (self.prints or self.path is not None)

    def finish(self) -> None:
        if not self.active:
            return
        reports = [report() for report in list(self.kept.values())]  # daemon threads go on
        # What is read first is on the last screen: the loader that cost most.
        reports.sort(key=lambda each: each.run.waiting.total_s)
        if self.path is not None:
            try:
                write_atomically(self.path, _content(reports, self.dropped, self.path.suffix))
            except OSError as error:
                _tell(f"{_TEXT}MINATO_REPORT={self.path}: {error}\n")
        if self.prints and local_rank() == 0 and (reports or self.says_none):
            _tell(f"\n{_text(reports, self.dropped, full=self.full)}")


_at_exit = _AtExit()
_lock = threading.RLock()
"""Several threads may begin loaders at a time."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


forget_in_children(_renew_lock)


def _tell(text: str) -> None:
    # If it is closed, print() would take the program's standard output.
    if sys.stderr is not None:
        print(text, file=sys.stderr, end="")


def _of_this_process() -> _AtExit:
    global _at_exit
    with _lock:
        if _at_exit.owner != os.getpid():
            _at_exit = _AtExit(os.getpid())
            at_end(_at_exit.finish)
        return _at_exit


def print_at_exit(*, full: bool = False, says_none: bool = True) -> None:
    """Print a line of each loader to stderr when this process ends, and last the report of the one that cost most time.

    ``full``: the report and all figures of each loader instead. ``says_none``: it also says that no loader ran. The
    last call decides. Under a launcher, only local rank 0 prints.
    """
    mine = _of_this_process()
    mine.prints, mine.full, mine.says_none = True, full, says_none


def write_at_exit(path: str) -> None:
    """Write the reports of all loaders to a file when this process ends; the first call decides the file.

    A name that ends with ``.json`` has JSON, with ``.html`` a page, any other one text. Local ranks above 0 write
    ``NAME.rank1.json`` and so on, child processes ``NAME.pid1234.json``. A file that cannot be written, or has other
    content, is a warning.
    """
    mine = _of_this_process()
    if mine.path is not None or mine.refused:
        return
    file = Path(file_of_process(path))
    begins = {".json": _JSON, ".html": BEGINS}.get(file.suffix, _TEXT)
    try:
        os.close(open_lines(file, begins.encode(), "a file of reports of minato"))
    except (OSError, ValueError) as error:
        mine.refused = True
        warn(f"the report cannot be written: MINATO_REPORT={path!r}: {error}")
    else:
        mine.path = file


def keep(setup: Callable[[], Setup], steps: Sequence[str], log: EpochLog) -> None:
    """Keep what the report of a loader needs, which is neither the loader nor its dataset, until the process ends."""
    if not _at_exit.active:
        return
    report = partial(report_of, setup(), tuple(steps), log)
    with _lock:
        _at_exit.kept[log] = report
        if len(_at_exit.kept) > MOST_LOADERS:
            *others, _ = _at_exit.kept  # the new one begins only now
            del _at_exit.kept[min(others, key=lambda each: each.active_ns)]
            _at_exit.dropped += 1


def _content(reports: Sequence[Report], dropped: int, suffix: str) -> str:
    if suffix == ".json":
        return f"{_JSON}{json.dumps([each.to_dict() for each in reports])}}}\n"
    if suffix == ".html":
        return page(reports[::-1], dropped)
    return _text(reports, dropped, full=True)


def _text(reports: Sequence[Report], dropped: int, *, full: bool) -> str:
    parts = [f"{_TEXT}not shown: {counted(dropped, 'earlier loaders')}"] if dropped else []
    for number, each in enumerate(reports, 1):
        epochs = counted(each.run.epochs, "epochs")
        head = printable(f"{_TEXT}loader {each.setup.name!r}, {epochs}")
        if full:
            parts.append(f"{head}\n{each.details()}\n\n{each}")
        elif number == len(reports):
            parts.append(f"{head}\n{each}")
        else:
            waiting = format_value(each.run.waiting.share, "share")
            parts.append(f"{head}, waiting {waiting}: {each.verdict.summary}")
    parts = parts or [f"{_TEXT}no loader of minato ran in this process"]
    return ("\n\n" if full else "\n").join(parts) + "\n"
