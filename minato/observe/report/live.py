"""The live view of a loader: drawn by a thread of its own, as long as an epoch runs."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from minato._fork_safety import at_work, forget_in_children
from minato.observe.report.live_display import Screen, screen_for
from minato.observe.report.live_rates import Pace, Paced
from minato.observe.report.rows import in_words
from minato.observe.stats.epoch_log import EpochNotes, Journal

__all__ = ["Live"]

_COST = 0.01
"""Drawing may take this share of a core; what takes longer is drawn less often, but once a second."""


class Live:
    """Shows how a loader's epochs go, from each one's begin to its end; what ``loader.live()`` gives.

    Args:
        name: Of the loader.
        stages: Names of the dataset's stage and of the transforms.
    """

    def __init__(self, journal: Journal, name: str, stages: Sequence[str]) -> None:
        self._journal = journal
        self._name = name
        self._paced = Paced(name, stages)
        journal.watchers.append(self)

    def begun(self) -> None:
        """An epoch has begun."""
        _stage.add(self)

    def settled(self) -> None:
        """It is over."""
        _stage.remove(self)

    def pace(self) -> Pace | None:
        """How the epoch goes; None between two."""
        glance = self._journal.glance()
        return None if glance is None else self._paced.add(glance)

    def summary(self) -> str:
        """The last epoch in a line."""
        notes = self._journal.past[-1]
        return f"{self._name}, {_told(notes)}"

    def close(self) -> None:
        """Show nothing from now on."""
        if self in self._journal.watchers:
            self._journal.watchers.remove(self)
            _stage.remove(self, over=False)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _told(notes: EpochNotes) -> str:
    counts = notes.readings.counts
    wall_s = counts["wall_ns"] / 1e9
    waited_s = (counts["start_ns"] + notes.waits.total) / 1e9
    rate = in_words(counts["samples"] / wall_s if wall_s else 0.0, "").strip()
    return (
        f"epoch {notes.epoch}{'' if notes.finished else ' (not finished)'}: {counts['batches']} batches, "
        f"{counts['samples']} samples in {in_words(wall_s, 's')}, {rate} samples/s, "
        f"waiting {in_words(waited_s / wall_s if wall_s else 0.0, 'share')}"
    )


class _Stage:
    """All that is live in this process, and the thread that draws it."""

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

    def remove(self, view: Live, over: bool = True) -> None:
        """Show it no more; leave a line if its epoch is over."""
        if view not in self._views:
            return
        self._views.remove(view)
        if self._screen is not None and over:
            _quietly(self._screen.say, view.summary())
        if not self._views:
            self.close()

    def close(self) -> None:
        """End the thread and take the panel away."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        # An iterator may be collected, and its epoch end, in this very thread.
        if thread is not threading.current_thread():
            thread.join()
        if self._screen is not None:
            _quietly(self._screen.hide)
        self._screen = None

    def forget(self) -> None:
        """In a forked child: none of it is ours."""
        self._views, self._thread, self._screen = [], None, None

    def _run(self, screen: Screen, stop: threading.Event) -> None:
        pause_s = screen.every_s
        while not stop.wait(pause_s):
            begun_s = time.thread_time()
            with at_work() as undisturbed:
                if not undisturbed:
                    continue
                paces = [pace for view in list(self._views) if (pace := view.pace()) is not None]
                if not stop.is_set() and not _quietly(screen.show, paces):
                    return
            costly_s = (time.thread_time() - begun_s) / _COST
            pause_s = max(screen.every_s, min(costly_s, 1.0))


def _quietly(tell: Callable[..., None], *what: Any) -> bool:
    """Whether somebody could be told; a stream that is closed must not end the training."""
    try:
        tell(*what)
    except (OSError, ValueError):
        return False
    return True


_stage = _Stage()
atexit.register(_stage.close)
forget_in_children(_stage.forget)
