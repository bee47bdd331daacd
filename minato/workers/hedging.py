"""Which reads take so long that a second request is worth it."""

from __future__ import annotations

from collections.abc import Iterable

from minato._core.histogram import Histogram
from minato.workers.reads import Read

__all__ = ["Hedging"]

_LEAST_READS = 20
"""Reads that must have finished before a read counts as a straggler."""
_LEAST_NS = 1_000_000
"""A second request for a faster read saves nothing."""
_MOST_SAVED = 2.0
"""Second requests that may accumulate in a time without stragglers, so that congestion causes no burst of them."""


class Hedging:
    """Finds stragglers among the reads of one worker, each at most once.

    Under congestion every read is a straggler. Beyond the expected share, only one read at a time is hedged.

    Args:
        percentile: Between 0 and 100; a read that takes longer than this one of all reads is a straggler.
    """

    def __init__(self, percentile: float) -> None:
        self._quantile = percentile / 100
        self._durations = Histogram()
        self._allowed = 0.0
        self._limit_ns = 0
        self._pending = 0

    def note(self, duration_ns: int) -> None:
        """Record the duration of a read."""
        self._durations.record(duration_ns)
        self._allowed = min(self._allowed + 1 - self._quantile, _MOST_SAVED)
        if self._durations.count >= _LEAST_READS:
            self._limit_ns = max(self._durations.percentile(self._quantile), _LEAST_NS)

    def straggler(self, in_flight: Iterable[Read], now_ns: int) -> tuple[Read | None, float | None]:
        """The read to hedge now, if there is one; otherwise after how many seconds there may be one.

        The caller that hedges it calls ``on_hedge``.
        """
        if not self._limit_ns or (self._allowed < 1 and self._pending):
            return None, None
        late = (read for read in in_flight if read.started_ns and not read.duration_ns)
        waiting = (read for read in late if read.attempts == 1)
        oldest = min(waiting, key=lambda read: read.started_ns, default=None)
        if oldest is None:
            return None, None
        remaining_ns = oldest.started_ns + self._limit_ns - now_ns
        return (oldest, None) if remaining_ns <= 0 else (None, remaining_ns / 1e9)

    def on_hedge(self) -> None:
        """Count a second request."""
        self._allowed = max(self._allowed - 1, 0.0)
        self._pending += 1

    def on_answer(self) -> None:
        """Count the answer to a second request."""
        self._pending -= 1
