"""Which reads take so long that a second request is worth it."""

from __future__ import annotations

from collections.abc import Iterable

from minato._core.histogram import Histogram
from minato.workers.reads import Read

__all__ = ["Hedging"]

_LEAST_READS = 20
"""So many reads have to be known before any is called a straggler."""
_LEAST_NS = 1_000_000
"""A second request for what takes less would win nothing."""
_MOST_SAVED = 2.0
"""Second requests that a time without stragglers allows at once, so that a jam is not met by a burst."""


class Hedging:
    """Finds stragglers among the reads of one worker, each at most once.

    In a jam every read is a straggler. So more than the expected share of all is asked for again only one at a time.

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
        """Learn how long a read took."""
        self._durations.record(duration_ns)
        self._allowed = min(self._allowed + 1 - self._quantile, _MOST_SAVED)
        if self._durations.count >= _LEAST_READS:
            self._limit_ns = max(self._durations.percentile(self._quantile), _LEAST_NS)

    def straggler(self, underway: Iterable[Read], now_ns: int) -> tuple[Read | None, float | None]:
        """The read that is to be asked for again now, if there is one; otherwise in how many seconds there may be one.

        Whoever asks for it again says so by ``spent``.
        """
        if not self._limit_ns or (self._allowed < 1 and self._pending):
            return None, None
        late = (read for read in underway if read.started_ns and not read.duration_ns)
        waiting = (read for read in late if read.attempts == 1)
        oldest = min(waiting, key=lambda read: read.started_ns, default=None)
        if oldest is None:
            return None, None
        left_ns = oldest.started_ns + self._limit_ns - now_ns
        return (oldest, None) if left_ns <= 0 else (None, left_ns / 1e9)

    def spent(self) -> None:
        """Say that a read was asked for again."""
        self._allowed = max(self._allowed - 1, 0.0)
        self._pending += 1

    def ended(self) -> None:
        """Say that a second request has been answered."""
        self._pending -= 1
