"""Functions side by side, in daemon threads: one that hangs fails its test alone; and where the main thread is."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from tests.datasets import wait_until


def wait_for_main(file: str, function: str) -> None:
    """Wait until the main thread is inside a function of a file whose name ends so: another is to disturb it there."""
    main = threading.main_thread().ident or 0

    def is_inside() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[main])
        codes = [frame.f_code for frame, _ in stack]
        return any(code.co_filename.endswith(file) and code.co_name == function for code in codes)

    wait_until(is_inside)


def run_together(*works: Callable[[], object], limit_s: float) -> None:
    """Call each function in a thread of its own; all must end, and none may raise."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "it hangs"
    assert failures == []
