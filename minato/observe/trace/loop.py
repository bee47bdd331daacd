"""The track of the training loop: its steps, its waiting, and the state of the loader."""

from __future__ import annotations

from collections.abc import Callable

from minato._core import now_ns
from minato.errors import warn
from minato.observe.stats.snapshot import LoaderSnapshot
from minato.observe.trace.track import Track

__all__ = ["LoopTrack"]

_COUNT_EVERY_NS = 5_000_000
"""Minimum interval between two records of the counters."""


class LoopTrack:
    """Records the calls of an engine; has the methods of a :class:`EpochLog` that the engine calls."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._epoch = self._batches = 0
        self._entered_ns = self._counted_ns = 0
        self._left_ns: int | None = None  # when a batch was returned, until the next is asked for
        self._warned = False

    def begin(self, epoch: int, _progress: object, _source: object) -> None:
        """An epoch begins."""
        self._epoch, self._batches, self._left_ns = epoch, 0, None
        self._entered_ns = now_ns()

    def started(self) -> None:
        """The workers of the epoch have started."""
        self._track.slice("iter()", self._entered_ns, args={"epoch": self._epoch})
        self._track.flush()

    def enter(self) -> None:
        """``next()`` is called."""
        self._entered_ns = now = now_ns()
        if self._left_ns is not None:
            self._track.slice("step", self._left_ns, now, self._batch())
            self._left_ns = None

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        """``next()`` returns a batch."""
        self._batches += 1
        track, now = self._track, now_ns()
        args = {**self._batch(), "samples": samples, "bytes": nbytes}
        track.slice("next()", self._entered_ns, now, args)
        if now - self._counted_ns >= _COUNT_EVERY_NS:
            self._counted_ns, state = now, loader()
            loading = state.in_flight - state.ready
            track.counter("batches in flight", now, ready=state.ready, loading=loading)
            track.counter("prefetch window (batches)", now, limit=state.limit)
            track.counter("workers", now, active=state.workers)
            track.counter("memory in flight (bytes)", now, bytes=state.memory_bytes)
        track.flush()
        self._left_ns = now_ns()
        self._warn()

    def pinned(self, duration_ns: int) -> None:
        """A batch was copied to pinned memory, after ``next()`` of the engine."""
        now = now_ns()
        self._track.slice("pin memory", now - duration_ns, now, self._batch())
        self._left_ns = now

    def finish(self) -> None:
        """The epoch ends, in a call of ``next()``."""
        self._track.slice("next()", self._entered_ns, args={"epoch": self._epoch, "end": True})
        self._track.flush()

    def _batch(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batch": self._batches - 1}

    def _warn(self) -> None:
        error = self._track.file.error
        if error is not None and not self._warned:
            self._warned = True
            warn(f"the trace ends here: {error}", stacklevel=2)
