"""Starting threads, and how processes end."""

from __future__ import annotations

import itertools
import linecache
import multiprocessing
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest

from minato._support.threads import at_end, ends_by_exception, living, start_thread


class InterruptedThread(threading.Thread):
    """A signal's handler raises after the wait for the start has released its lock."""

    def start(self) -> None:
        started: threading.Condition = self._started._cond  # type: ignore[attr-defined]
        self.may_begin = threading.Event()

        def interrupted() -> NoReturn:
            started.release()
            self.may_begin.set()
            raise KeyboardInterrupt

        started._release_save = interrupted  # type: ignore[attr-defined]
        super().start()

    def _set_ident(self) -> None:
        super()._set_ident()  # type: ignore[misc]
        self.may_begin.wait(60.0)  # nobody waits for a thread that has begun already


def test_a_signal_while_a_thread_starts_is_raised() -> None:
    go_on = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        start_thread(InterruptedThread(target=go_on.wait, daemon=True))
    go_on.set()


def test_a_signal_at_any_line_of_a_look_at_a_thread_does_not_end_it() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    assert living(thread) == set()
    thread.start()
    left = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename == threading.__file__ and event == "line":
            # Python handles no signal between the end of a block and the release of its lock.
            if linecache.getline(threading.__file__, frame.f_lineno).lstrip().startswith("with "):
                return trace
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    for lines in itertools.count(1):
        left = lines
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert living(thread, threading.main_thread()) == {thread, threading.main_thread()}
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(before)
        break
    assert lines > 3
    go_on.set()
    thread.join()
    assert living(thread) == set()


class TooMany(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_the_limit_of_threads_is_named() -> None:
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(
            RuntimeError, match=r"can't start new thread: .*\(ulimit -u, pids.max\)"
        ):
            start_thread(TooMany())


def failing() -> None:
    raise ValueError("on purpose")


def test_which_end_of_a_child_of_multiprocessing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.multiprocessing ends a rank that raised with ``sys.exit(1)``."""
    # By a notebook, which then forks its ranks.
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    context = multiprocessing.get_context("fork")

    def run(end: Callable[..., object], sent: Any) -> None:
        at_end(lambda: sent.send(ends_by_exception()))
        end()

    found = []
    for end in (int, failing, sys.exit, partial(sys.exit, 1)):
        received, sent = context.Pipe(duplex=False)
        child = context.Process(target=run, args=(end, sent))
        child.start()
        assert received.poll(30)
        found.append(received.recv())
        child.join()
    assert found == [False, True, False, True]
