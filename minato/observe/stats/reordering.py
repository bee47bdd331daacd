"""How far what a loader delivers is from the sampler's order, and where its slow samples lie."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from minato._core.histogram import Histogram
from minato.observe.stats.reservoir import Reservoir

__all__ = ["Lateness"]


class Lateness:
    """One pass, batch by batch.

    Attributes:
        lags: How many samples came so many batches later than in the sampler's order; negative: earlier.
        latest: Of each delivered batch, by how many batches its latest sample was late, 0 if none was.
        slow_shares: Of each delivered batch, the share of its samples that were slow, from 0 to 1.
    """

    def __init__(self) -> None:
        self.lags: Counter[int] = Counter()
        self.latest = Histogram()
        self.slow_shares = array("f")
        self.late = Histogram()
        """Of each delivered batch, how many thousandths of its samples were late."""
        self.reservoir: Reservoir | None = None
        """Keeps some of the samples, where they can be late."""
        self._ends = array(
            "q"
        )  # ordinal after the last sample of each batch, as the sampler gave them

    def asked(self, count: int) -> None:
        """The sampler gave a batch of so many samples."""
        self._ends.append((self._ends[-1] if self._ends else 0) + count)

    def delivered(
        self,
        positions: list[int],
        start: int,
        num_slow: int,
        samples: Callable[[], Sequence[tuple[int, int, int, int]]] | None = None,
    ) -> None:
        """The consumer got a batch.

        Args:
            positions: Of its samples, negative for none.
            start: Position of the first sample of the pass.
            num_slow: How many of them were slow.
            samples: Gives ``(position, key, cost in ns, bytes)`` of them; None: not to be looked at.
        """
        late = 0
        turn, ends = len(self.slow_shares), self._ends
        numbers = sorted(positions)
        at = first = bisect_left(numbers, 0)
        while at < len(numbers):
            home = bisect_right(ends, numbers[at] - start)
            stop = (
                bisect_left(numbers, ends[home] + start, at) if home < len(ends) else len(numbers)
            )
            if at == first:
                self.latest.record(max(turn - home, 0))
            self.lags[turn - home] += stop - at
            late += stop - at if turn > home else 0
            at = stop
        count = max(len(numbers) - first, 1)
        self.slow_shares.append(num_slow / count)
        if self.reservoir is not None and samples is not None:
            self.late.record(1000 * late // count)
            self.reservoir.offer(
                samples, lambda position: turn - bisect_right(ends, position - start)
            )
