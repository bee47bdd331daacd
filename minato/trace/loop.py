"""The training loop's lane: its steps, its waiting, and how things stand meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from minato._core.clock import now_ns
from minato.stats.journal import Gauges, Journal, Standing
from minato.trace.lanes import Lane

__all__ = ["TracedJournal"]

_COUNT_EVERY_NS = 5_000_000
"""How things stand is noted no more often."""


class TracedJournal:
    """Tells a lane what a journal is told.

    Args:
        journal: Is told too; None: there is none.
    """

    def __init__(self, journal: Journal | None, lane: Lane) -> None:
        self._journal = journal
        self._lane = lane
        self._epoch = self._batches = 0
        self._entered_ns = self._counted_ns = 0
        self._left_ns: int | None = None  # when a batch was handed out, until the next is asked for
        self._told_of_error = False

    def begin(self, epoch: int, progress: Any, gauges: Gauges) -> None:
        """An epoch begins."""
        self._epoch, self._batches, self._left_ns = epoch, 0, None
        self._entered_ns = now_ns()
        if self._journal is not None:
            self._journal.begin(epoch, progress, gauges)

    def begun(self) -> None:
        """Its workers have been started."""
        if self._journal is not None:
            self._journal.begun()
        self._lane.slice("iter()", self._entered_ns, now_ns(), f'"epoch":{self._epoch}')
        self._lane.flush()

    def enter(self) -> None:
        """``next()`` is called."""
        if self._journal is not None:
            self._journal.enter()
        self._entered_ns = now = now_ns()
        if self._left_ns is not None:
            self._lane.slice("step", self._left_ns, now, self._batch())
            self._left_ns = None

    def leave(self, samples: int, nbytes: int, standing: Callable[[], Standing]) -> None:
        """``next()`` returns a batch of so many samples and bytes."""
        if self._journal is not None:
            self._journal.leave(samples, nbytes, standing)
        self._batches += 1
        lane, now = self._lane, now_ns()
        args = f'{self._batch()},"samples":{samples},"bytes":{nbytes}'
        lane.slice("next()", self._entered_ns, now, args)
        if now - self._counted_ns >= _COUNT_EVERY_NS:
            self._counted_ns, stands = now, standing()
            loading = stands.in_flight - stands.ready
            lane.counter("batches in flight", now, ready=stands.ready, loading=loading)
            lane.counter("window (batches)", now, limit=stands.limit)
            lane.counter("workers", now, working=stands.workers)
            lane.counter("memory in flight (bytes)", now, bytes=stands.memory_bytes)
        lane.flush()
        self._left_ns = now_ns()
        self._complain()

    def pinned(self, duration_ns: int) -> None:
        """A batch was copied to page-locked memory, after ``next()`` of the engine."""
        if self._journal is not None:
            self._journal.pinned(duration_ns)
        now = now_ns()
        self._lane.slice("pin memory", now - duration_ns, now, self._batch())
        self._left_ns = now

    def finish(self) -> None:
        """The epoch has come to its end, in a call of ``next()``."""
        if self._journal is not None:
            self._journal.finish()
        self._lane.slice("next()", self._entered_ns, now_ns(), f'"epoch":{self._epoch},"end":true')
        self._lane.flush()

    def _batch(self) -> str:
        return f'"epoch":{self._epoch},"batch":{self._batches - 1}'

    def _complain(self) -> None:
        error = self._lane.file.error
        if error is not None and not self._told_of_error:
            self._told_of_error = True
            warnings.warn(f"the trace ends here: {error}", RuntimeWarning, stacklevel=2)
