"""What minato raises of its own. Everything else keeps the type that torch or the user's code gave it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from enum import Enum
from pickle import PicklingError
from types import FrameType, TracebackType
from typing import Final, NoReturn, TypeVar

__all__ = [
    "CLOSED",
    "SKIP",
    "UNGUARDED",
    "CoverageError",
    "ErrorBudgetError",
    "MinatoError",
    "MinatoWarning",
    "NotPicklableError",
    "Postponed",
    "SampleTimeoutError",
    "WorkerDiedError",
    "add_note",
    "causes",
    "forget_callers",
    "is_lost_connection",
    "is_refused",
    "is_skip",
    "log",
    "missing",
    "not_the_end",
    "outside",
    "refuse",
    "shortened",
    "unguarded_error",
    "warn",
]

UNGUARDED = 250
"""Exit code of a worker whose main module starts workers itself."""

CLOSED = "the loader of this iterator was closed before the end of the epoch: call iter(loader) to start again"
"""Why the iterator of an epoch whose workers were ended cannot go on."""

E = TypeVar("E", bound=BaseException)

_LOADERS = (
    *("minato.", "torch.utils.data.dataloader", "torch.utils.data.sampler"),
    "torch.utils.data._utils",
)
_REFUSING = (
    *("minato.checks", "minato.options", "minato.loader", "minato.transforms.compose"),
    *("minato.engine.caching", "torch.utils.data.dataloader", "torch.utils.data.sampler"),
)
"""Modules whose exceptions say what to do."""
_STARTERS = ("multiprocessing", "threading", "minato")  # modules in whose frames workers begin
_DATASETS = ("minato.sources", "minato.sharing")
"""Modules whose frames stay, as those of any dataset."""

_LOST = re.compile("Connect|Timeout|Payload|Protocol|Transport|IncompleteRead")
"""In the names of the classes that libraries have for a lost connection, and Python itself."""


class MinatoError(Exception):
    """Base of minato's own exceptions."""


class MinatoWarning(RuntimeWarning):
    """The category of all warnings of minato."""


class NotPicklableError(MinatoError, TypeError, AttributeError, PicklingError):
    """Something must be sent to workers that are not forked, and a part of it cannot be pickled.

    Its bases are what Python raises then, depending on what it is that cannot be pickled.
    """


class CoverageError(MinatoError, RuntimeError):
    """An epoch has ended, and what it delivered is not what the sampler asked for."""


class ErrorBudgetError(MinatoError, RuntimeError):
    """More samples of an epoch failed than ``ErrorPolicy.max_failures`` allows."""


class SampleTimeoutError(MinatoError, TimeoutError):
    """A sample took longer than ``ErrorPolicy.sample_timeout``; the text holds the stack of the worker that ran it."""


class WorkerDiedError(MinatoError, RuntimeError):
    """A sample ended every worker that ran it, or what a dead worker had read does not come again."""


class _Skip(Enum):
    SKIP = "skip"

    def __repr__(self) -> str:
        return "minato.SKIP"


SKIP: Final = _Skip.SKIP
"""An ``on_error`` function returns it to skip the sample."""
is_skip = functools.partial(operator.is_, SKIP)
"""Whether a sample is that; not by ``==``, which an array does not answer by one truth."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which may be raised again and again; one that allows no attributes gets none."""
    with contextlib.suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


_REFUSES = "_minato_refuses"


def refuse(error: BaseException) -> None:
    """Mark what loading a state has raised: to leave it out as a sample would leave out all that follows."""
    vars(error)[_REFUSES] = True


def is_refused(error: BaseException) -> bool:
    """Whether ``refuse`` has marked an exception."""
    return _REFUSES in vars(error)


def not_the_end(source: str, error: E) -> E | RuntimeError:
    """Return the RuntimeError that replaces a StopIteration of user code (PEP 479); other exceptions as they are."""
    if not isinstance(error, StopIteration):
        return error
    stopped = RuntimeError(f"{source} raised StopIteration")
    stopped.__cause__ = BaseException.with_traceback(error, outside(error.__traceback__))
    return stopped


def missing(what: str, package: str, extra: str) -> ModuleNotFoundError:
    """Return the error of something that needs a package of an extra, which is not installed."""
    text = f"{what} needs the package {package}: pip install 'minatoloader[{extra}]'"
    return ModuleNotFoundError(text, name=package)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what caused it, each once: a program may have made a ring of them."""
    seen: list[BaseException] = []
    found: object = error
    while isinstance(found, BaseException) and not any(found is each for each in seen):
        seen.append(found)
        yield found
        reason = _read(found, "reason")  # of urllib's
        found = reason if isinstance(reason, BaseException) else found.__cause__


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error, or one that caused it, says that a connection was lost or a server is busy for now."""
    for each in causes(error):
        response = _read(each, "response")
        response = each if response is None else response  # one that says no may be false
        for name in ("status", "status_code"):
            status = _read(response, name)
            if isinstance(status, int):
                return status in (408, 425, 429) or status >= 500
        if _LOST.search(" ".join(kind.__name__ for kind in type(each).__mro__)):
            return True
    return False


def _read(thing: object, name: str) -> object:
    """An attribute; None: it has none, or reading it fails."""
    with contextlib.suppress(Exception):
        return getattr(thing, name, None)
    return None


def outside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is no loader's; None if all are."""
    while trace is not None and _is_loaders(trace.tb_frame):
        trace = trace.tb_next
    return trace


def shortened(error: E) -> E:
    """Return an exception after the frames between the program and its dataset were taken from its traceback.

    Of an exception that began in the loader itself they stay, unless its text says what to do.
    """
    trace = outside(error.__traceback__)
    if trace is not None or isinstance(error, (RuntimeError, MinatoError)) or _is_refusal(error):
        # Also of exceptions that allow no attributes.
        BaseException.with_traceback(error, trace)
    return error


def forget_callers(error: BaseException) -> None:
    """Clear the loader's frames of an exception's traceback, and those below, to which these refer, once they have run.

    They may hold the exception: such a circle keeps the iterator and its dataset until a collection.
    """
    for one in (error, error.__cause__):
        trace = None if one is None else one.__traceback__
        frames = [frame for frame, _ in traceback.walk_tb(trace)]
        below = frames[0] if frames else None
        while (below := below and below.f_back) is not None:
            frames.append(below)
        for frame in frames:
            if _is_loaders(frame) and not frame.f_code.co_flags & inspect.CO_GENERATOR:
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()


def _is_refusal(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") in _REFUSING


def _is_loaders(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    if type(name) is not str or name.startswith(_DATASETS):
        return False
    return name.startswith(_LOADERS)


def unguarded_error(pid: int | None) -> RuntimeError:
    """Return the error of a training process whose workers ended with ``UNGUARDED``."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    which = "" if pid is None else f" (pid(s) {pid})"
    return RuntimeError(
        f"DataLoader worker{which} exited unexpectedly: workers that are not forked import the main module,\n"
        f"and {path} starts workers when it is imported. Put what the script does under the guard:\n"
        '    if __name__ == "__main__":\n'
        "        main()  # with the loop over the loader"
    )


class Postponed:
    """An exception that is raised later, without its frames, which would keep their objects alive.

    The traceback becomes a note of the exception, as text.
    """

    def __init__(self, error: Exception) -> None:
        add_note(error, f"raised earlier:\n{''.join(traceback.format_tb(error.__traceback__))}")
        self._error = BaseException.with_traceback(error, None)  # by no method of its class

    def reraise(self) -> NoReturn:
        """Raise the exception."""
        error = self._error
        try:
            raise error
        finally:
            del error, self  # its traceback holds this frame


_logger = logging.getLogger("minato")


def log(text: str, *arguments: object, level: int = logging.INFO) -> None:
    """Log something to the logger ``minato``; a handler that raises does not stop the program."""
    with contextlib.suppress(Exception):
        _logger.log(level, text, *arguments, stacklevel=2)


def warn(text: str) -> None:
    """Do what ``warnings.warn`` does with a :class:`MinatoWarning`, except that a warning that cannot be shown is lost.

    Standard error may be closed, and a program may show warnings in its own way. The warning names the program's line
    that led here, where there is one.

    Raises:
        Warning: Warnings are errors.
    """
    try:
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and _is_loaders(frame):
            frame, level = frame.f_back, level + 1
        is_programs = not str(frame.f_globals.get("__name__")).startswith(_STARTERS)
        warnings.warn(text, MinatoWarning, stacklevel=level if is_programs else 2)
    except Warning:
        raise
    except Exception:
        return
