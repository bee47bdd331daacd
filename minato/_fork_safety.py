"""Forks: no child inherits a held lock, or loses memory that its parent lends to it."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 10.0
"""How long a fork waits for calls of other threads that it would interrupt; a disk may hang."""

_lock = threading.RLock()
_forgotten: list[Callable[[], None]] = []


@contextmanager
def at_work() -> Iterator[bool]:
    """Hold forks back while a thread of minato works, so that no child inherits a held lock.

    Yields False during a fork; the thread must then skip its work. Waiting for the fork could deadlock with code that
    waits for the thread.
    """
    entered = _lock.acquire(blocking=False)
    try:
        yield entered
    finally:
        if entered:
            _lock.release()


this_process = SimpleNamespace(pid=os.getpid())
"""The number of this process. Where the kernel is far away, to ask takes as long as a small sample."""


def forget_in_children(forget: Callable[[], None]) -> None:
    """Call ``forget`` in each forked child, where the thread that it belongs to does not exist."""
    _forgotten.append(forget)


# ---- locks ----

_renewed: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}


def renew_in_children(owner: T, renew: Callable[[T], None]) -> None:
    """Call ``renew(owner)`` in forked children, if it lives: a lock of another thread is never released there."""
    key = id(owner)
    _renewed[key] = weakref.ref(owner), renew
    weakref.finalize(owner, _renewed.pop, key, None).atexit = False


# ---- calls of libraries ----

_calls: dict[int, int] = {}  # number of calls that a fork must not interrupt, by thread
_calls_changed = threading.Condition()
_forking: int | None = None
_interrupted = False


@contextmanager
def held_off_forks() -> Iterator[None]:
    """Hold forks of other threads back during a call of a library whose locks a forked child would inherit."""
    thread = threading.get_ident()
    with _calls_changed:
        if thread not in _calls:
            _calls_changed.wait_for(lambda: _forking in (None, thread), _PATIENCE_S)
        _calls[thread] = _calls.get(thread, 0) + 1
    try:
        yield
    finally:
        with _calls_changed:
            left = _calls.pop(thread, 1) - 1  # a child does not count the calls of its parent
            if left > 0:
                _calls[thread] = left
            _calls_changed.notify_all()


def interrupted_calls() -> bool:
    """Whether the fork of this child interrupted calls of other threads, as they took longer than it waits."""
    return _interrupted


# ---- memory ----


class Borrower:
    """A process that may read what its parent's memory held at a fork, until its pool sets ``ended``, or it has."""

    ended = False

    def has_ended(self) -> bool:
        """Whether it cannot read any more."""
        return self.ended


class Loans:
    """What the program holds of some memory when it forks, kept until the child has ended.

    As long as an object of the ``leases`` lives, its part of the memory is not overwritten.
    """

    def __init__(self, leases: Mapping[int, weakref.ref[object]]) -> None:
        self._leases = leases
        self._kept: dict[Borrower, list[Any]] = {}
        self._owner = os.getpid()
        _loans[id(self)] = self

    def held(self) -> list[Any]:
        """The objects that live."""
        if self._owner != os.getpid():
            return []
        return [held for lease in list(self._leases.values()) if (held := lease()) is not None]

    def keep(self, held: list[object], borrower: Borrower) -> None:
        """Keep objects until the borrower has ended."""
        self.settle()  # of a loader that rests, nothing else does
        self._kept.setdefault(borrower, []).extend(held)

    def settle(self) -> None:
        """Drop what no child can read any more."""
        if self._kept:
            for borrower in list(self._kept):  # another thread may fork, and so add one
                if borrower.has_ended():
                    self._kept.pop(borrower, None)


class _Child(Borrower):
    """A forked child, and its own children: they keep one end of a pipe open until they end or run another program."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def begin_in_parent(self) -> None:
        os.close(self._write)
        self._poll = select.poll()
        self._poll.register(self._read)  # for the end of the pipe only, which is always reported
        weakref.finalize(self, os.close, self._read).atexit = False

    def begin_in_child(self) -> None:
        os.close(self._read)
        _inherited.append(self)  # with the other end

    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))


_loans: weakref.WeakValueDictionary[int, Loans] = weakref.WeakValueDictionary()
"""By identity. Not a set: another thread may add some during a fork, and no loop over a set bears that."""
_lent: list[tuple[Loans, list[Any]]] = []  # during a fork: what the child shares
_child: _Child | None = None  # during a fork: the child to be
_inherited: list[_Child] = []  # in a child: itself, as its parent sees it
_worker = threading.local()  # the borrower for which this thread starts a worker of ours


@contextmanager
def starting_worker(borrower: Borrower) -> Iterator[None]:
    """Mark forks of this thread as starts of a worker of ours, whose end the borrower knows."""
    _worker.borrower = borrower
    try:
        yield
    finally:
        _worker.borrower = None


def starts_worker() -> bool:
    """Whether this thread forks for a worker of ours. In the child: only for what runs at once after the fork."""
    return getattr(_worker, "borrower", None) is not None


# ---- copies of workers and of their program ----


def check_owner(owner: int) -> None:
    """Raise RuntimeError in a forked child that uses workers of the process ``owner``."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"this iterator and its workers belong to the process with pid {owner}, and a forked child (pid "
            f"{os.getpid()}) cannot go on with them: make a DataLoader of its own there"
        )


def end_copy(owner: int | None, error: BaseException | None) -> None:
    """End this process, as Python ends a process, if it is a copy of a worker that user code has forked.

    Two processes must not be one worker: user code that forks returns to minato in both. The ``owner`` is the worker's
    process; None: the main process, whose copies go on. User code has raised ``error`` here; None: it has returned.
    """
    if owner is None or os.getpid() == owner:
        return
    code: object = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there is none, or it is closed
            stream.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)


# ---- signals ----

_getsignal: Callable[[int], Any] = importlib.import_module("_signal").getsignal
"""``signal.getsignal``, which looks each handler up in an enum: 100 times slower."""
_deferred: dict[int, Any] = {}  # handlers of the signals that are deferred at present, by number
_arrived: set[int] = set()  # the signals that have come meanwhile


def _defer(number: int, frame: object) -> None:
    _arrived.add(number)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Run the handlers of signals that come in this block at its end.

    Python runs a handler in the main thread between any two instructions. What it raises (KeyboardInterrupt, the
    SystemExit of a trainer that is preempted) is printed and forgotten if these belong to what modules have Python call
    around a fork. It does the same in finalizers, where no code can help. In other threads than the main one, where no
    handler runs, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or _deferred:
        yield
        return
    # From Python 3.13 on, what is raised at the jump behind a condition that ends a loop leads to no handler around it.
    handlers = [(number, _getsignal(number)) for number in range(1, signal.NSIG)]
    handlers = [pair for pair in handlers if callable(pair[1])]
    try:
        for number, handler in handlers:
            _deferred[number] = handler
            signal.signal(number, _defer)
        yield
    finally:
        _restore()


def _restore() -> None:
    """Install the handlers again and run those of signals that have arrived; all run, even if some raise."""
    try:
        for number, handler in list(_deferred.items()):
            if _getsignal(number) is _defer:  # not one that the block has installed
                signal.signal(number, handler)
            _deferred.pop(number, None)
        for number in list(_arrived):
            _arrived.discard(number)
            _run(number)
    finally:
        if _deferred or _arrived:
            _restore()


def _run(number: int) -> None:
    handler = _getsignal(number)
    if callable(handler):
        # Not by a signal, of which Python would tell an event loop a second time (``signal.set_wakeup_fd``).
        handler(number, sys._getframe())
    else:
        signal.raise_signal(number)


def _forget_arrived() -> None:
    _arrived.clear()  # they are the parent's
    _restore()


# A forked child has its handlers at once.
forget_in_children(_forget_arrived)


# ---- around each fork ----


def _before() -> None:
    global _child, _forking
    _lock.acquire()
    thread = threading.get_ident()
    with _calls_changed:
        _forking = thread
        _calls_changed.wait_for(lambda: not _calls.keys() - {thread}, _PATIENCE_S)
    living = [loans for each in _loans.valuerefs() if (loans := each()) is not None]
    _lent[:] = [(loans, held) for loans in living if (held := loans.held())]
    if _lent and not starts_worker():
        with suppress(OSError):  # no descriptor is left: what is lent is kept for good
            _child = _Child()


def _in_parent() -> None:
    global _child, _forking
    try:
        child, _child = _child, None
        borrower: Borrower = getattr(_worker, "borrower", None) or child or Borrower()
        if child is not None:
            child.begin_in_parent()
        for loans, held in reversed(list(_lent)):
            loans.keep(held, borrower)
            _lent.pop()
    finally:  # also if Ctrl-C comes here: what is left is kept for good, and other threads wait to fork
        for loans, held in _lent:
            loans.keep(held, Borrower())
        _lent.clear()
        with _calls_changed:
            _forking = None
            _calls_changed.notify_all()
        with suppress(RuntimeError):  # a signal's handler has interrupted _before
            _lock.release()


def _in_child() -> None:
    global _child, _calls_changed, _forking, _interrupted
    this_process.pid = os.getpid()
    child, _child = _child, None
    if child is not None:
        child.begin_in_child()
    _lent.clear()
    _interrupted = bool(_calls.keys() - {threading.get_ident()})
    _calls.clear()
    _calls_changed, _forking = threading.Condition(), None
    with suppress(RuntimeError):
        _lock.release()
    for forget in _forgotten:
        forget()
    for reference, renew in list(_renewed.values()):
        if (owner := reference()) is not None:
            renew(owner)
    _worker.borrower = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
