"""Running functions side by side, in daemon threads: one that hangs fails its test alone."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
