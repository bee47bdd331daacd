"""Starting threads."""

from __future__ import annotations

from threading import Thread

__all__ = ["start_thread"]


def start_thread(thread: Thread) -> None:
    """Start a thread; what a signal's handler raises meanwhile, is raised.

    ``Thread.start`` waits until the thread runs. If a handler raises at the wrong moment of that wait, CPython releases
    a lock twice and raises RuntimeError instead.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raised = error.__context__
        if raised is None or str(error) != "release unlocked lock":
            raise  # the limit of threads is reached
        raise raised from None
