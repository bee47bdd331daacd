"""Starting threads."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from minato._support.threads import start_thread


class InterruptedThread(threading.Thread):
    """A signal's handler raises after the wait for the start has released its lock."""

    def start(self) -> None:
        started: threading.Condition = self._started._cond  # type: ignore[attr-defined]

        def interrupted() -> NoReturn:
            started.release()
            raise KeyboardInterrupt

        started._release_save = interrupted  # type: ignore[attr-defined]
        super().start()


def test_a_signal_while_a_thread_starts_is_raised() -> None:
    go_on = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        start_thread(InterruptedThread(target=go_on.wait, daemon=True))
    go_on.set()


class TooMany(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_the_limit_of_threads_is_raised() -> None:
    try:
        raise ValueError
    except ValueError:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            start_thread(TooMany())
