"""The live view of a loader, drawn by a thread while an epoch runs."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from minato._fork_safety import at_work, forget_in_children
from minato.observe.report.live_display import Screen, screen_for
from minato.observe.report.live_progress import EpochProgress, ProgressEstimator
from minato.observe.report.text import format_value
from minato.observe.stats.epoch_log import EpochLog, EpochRecord

__all__ = ["Live"]

_COST = 0.01
"""Share of a core that drawing may take; expensive views are drawn less often, but once a second."""


class Live:
    """The result of ``loader.live()``: shows the progress of each epoch while it runs.

    Args:
        name: Of the loader.
        stages: Names of the dataset's stage and of the transforms.
    """

    def __init__(self, log: EpochLog, name: str, stages: Sequence[str]) -> None:
        self._log = log
        self._name = name
        self._estimator = ProgressEstimator(name, stages)
        log.observers.append(self)

    def started(self) -> None:
        """Show the epoch that has started."""
        _board.add(self)

    def ended(self) -> None:
        """Replace the view by a summary: the epoch has ended."""
        _board.remove(self)

    def progress(self) -> EpochProgress | None:
        """The progress of the current epoch; None between two."""
        snapshot = self._log.snapshot()
        return None if snapshot is None else self._estimator.add(snapshot)

    def summary(self) -> str:
        """The last epoch in a line."""
        return f"{self._name}, {_summary(self._log.past[-1])}"

    def close(self) -> None:
        """End the view."""
        if self in self._log.observers:
            self._log.observers.remove(self)
            _board.remove(self, summarize=False)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _summary(record: EpochRecord) -> str:
    counts = record.metrics.counts
    wall_s = counts["wall_ns"] / 1e9
    waited_s = (counts["start_ns"] + record.waits.total) / 1e9
    rate = format_value(counts["samples"] / wall_s if wall_s else 0.0, "").strip()
    return (
        f"epoch {record.epoch}{'' if record.finished else ' (not finished)'}: {counts['batches']} batches, "
        f"{counts['samples']} samples in {format_value(wall_s, 's')}, {rate} samples/s, "
        f"waiting {format_value(waited_s / wall_s if wall_s else 0.0, 'share')}"
    )


class _Board:
    """The live views of this process, and the thread that draws them."""

    def __init__(self) -> None:
        self._views: list[Live] = []
        self._screen: Screen | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, view: Live) -> None:
        """Show a loader's epoch."""
        if view in self._views or sys.stderr is None or sys.stderr.closed:
            return
        self._views.append(view)
        if self._thread is None:
            self._screen = screen_for(sys.stderr)
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._screen, self._stop), name="minato-live", daemon=True
            )
            self._thread.start()

    def remove(self, view: Live, summarize: bool = True) -> None:
        """Remove a loader's view, and print its summary if ``summarize``."""
        if view not in self._views:
            return
        self._views.remove(view)
        if self._screen is not None and summarize:
            _quietly(self._screen.print_line, view.summary())
        if not self._views:
            self.close()

    def close(self) -> None:
        """End the thread and remove the panel."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        # The collection of an iterator may end its epoch in this thread.
        if thread is not threading.current_thread():
            thread.join()
        if self._screen is not None:
            _quietly(self._screen.hide)
        self._screen = None

    def forget(self) -> None:
        """Forget everything: the parent of this forked process owns it."""
        self._views, self._thread, self._screen = [], None, None

    def _run(self, screen: Screen, stop: threading.Event) -> None:
        pause_s = screen.every_s
        while not stop.wait(pause_s):
            start_s = time.thread_time()
            with at_work() as may_run:
                if not may_run:
                    continue
                shown = [
                    found for view in list(self._views) if (found := view.progress()) is not None
                ]
                if not stop.is_set() and not _quietly(screen.show, shown):
                    return
            least_s = (time.thread_time() - start_s) / _COST
            pause_s = max(screen.every_s, min(least_s, 1.0))


def _quietly(write: Callable[..., None], *values: object) -> bool:
    """Write, and return whether that succeeded: a closed stream must not end the training."""
    try:
        write(*values)
    except (OSError, ValueError):
        return False
    return True


_board = _Board()
atexit.register(_board.close)
forget_in_children(_board.forget)
