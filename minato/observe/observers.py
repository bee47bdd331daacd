"""The observers of an engine, switched off one by one where they raise: what is measured never stops what is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from minato._support.text import message_of, type_name
from minato.errors import warn
from minato.observe.stats.epoch_log import EpochLog, EpochState, MetricsSource
from minato.observe.stats.snapshot import LoaderSnapshot

__all__ = ["Observer", "Observers", "settle"]


class Observer(Protocol):
    """Follows the calls of an engine: an :class:`EpochLog`, the loop's track of a trace."""

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> None:
        """An epoch begins."""

    def started(self) -> None:
        """The workers of the epoch have started."""

    def enter(self) -> None:
        """``next()`` is called."""

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        """``next()`` returns a batch."""

    def pinned(self, duration_ns: int) -> None:
        """A batch was copied to pinned memory, after ``next()`` of the engine."""

    def finish(self) -> None:
        """The epoch ends, in a call of ``next()``."""


def settle(log: EpochLog, source: MetricsSource) -> None:
    """End a log's epoch because its engine ends; an error is a warning, as the end of the engine goes on."""
    try:
        log.settle(source)
    except Exception as error:
        if isinstance(error, Warning):
            raise
        _warn(log, error)


def _warn(observer: object, error: Exception) -> None:
    warn(
        f"{type_name(observer)} of this loader is switched off, because it raised {type_name(error)}: "
        f"{message_of(error)}. Batches come as before, and what it shows ends here",
        stacklevel=5,
    )


class Observers:
    """Calls all observers. One that raises is switched off, with a warning; the training loop gets its batch.

    Where warnings are errors, the next call of ``next()`` raises the warning, before it takes a batch.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._all: Sequence[Observer] = tuple(observers)
        self._late: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> None:
        """An epoch begins."""
        self._call("begin", epoch, progress, source)

    def started(self) -> None:
        """The workers of the epoch have started."""
        self._call("started")

    def enter(self) -> None:
        """``next()`` is called.

        Raises:
            Warning: Warnings are errors, and an observer warned since the last call.
        """
        if self._late is not None:
            self._raise_late()
        for observer in self._all:
            try:
                observer.enter()
            except Exception as error:
                self._failed(observer, error)

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        """``next()`` returns a batch."""
        for observer in self._all:
            try:
                observer.leave(samples, nbytes, loader)
            except Exception as error:
                self._failed(observer, error)

    def pinned(self, duration_ns: int) -> None:
        """A batch was copied to pinned memory, after ``next()`` of the engine."""
        self._call("pinned", duration_ns)

    def finish(self) -> None:
        """The epoch ends, in a call of ``next()``.

        Raises:
            Warning: Warnings are errors, and an observer warned since the last call.
        """
        self._call("finish")
        self._raise_late()

    def _call(self, name: str, *arguments: Any) -> None:
        for observer in self._all:
            try:
                getattr(observer, name)(*arguments)
            except Exception as error:
                self._failed(observer, error)

    def _raise_late(self) -> None:
        error, self._late = self._late, None
        if error is not None:
            raise error.with_traceback(None)

    def _failed(self, observer: Observer, error: Exception) -> None:
        if isinstance(error, Warning):  # it warned, and goes on
            self._late = error
            return
        self._all = tuple(each for each in self._all if each is not observer)
        try:
            _warn(observer, error)
        except Exception as raised:
            self._late = raised
