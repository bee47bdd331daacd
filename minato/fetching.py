"""How samples are fetched ahead, where more is to be said than how many reads a worker has under way."""

from __future__ import annotations

from typing import NamedTuple

from minato._support.counters import Counters

__all__ = ["FetchReport", "Fetching"]


class FetchReport(NamedTuple):
    """What the reads came to, in all workers and epochs.

    Attributes:
        reads: Samples that were asked for, each once.
        hedged: Of these, so many were asked for a second time.
        hedges_won: And so often the second answer came first.
    """

    reads: int
    hedged: int
    hedges_won: int


class Fetching:
    """Reads several samples at once in each worker; given as ``fetch_concurrency``.

    Args:
        concurrency: Reads that each worker has under way at most.
        most: Reads that all workers of a loader have under way together at most, at least one for each. They share
            them: who needs none leaves them to the others.
        slow_start: Batches that are delivered before one more than these is asked for, until as many are in flight as
            memory allows. Nothing begins with a burst: at most ``1 + 1/slow_start`` times as much is asked for as is
            delivered. None: everything that there is room for is asked for at once.
        hedge_percentile: Reads that take longer than this percentile of their worker's reads are asked for a second
            time, and the first answer counts; where more than the remaining percents of all reads are so late, only one
            at a time is. The dataset must give the same sample again. None: never.
    """

    def __init__(
        self,
        concurrency: int,
        *,
        most: int | None = None,
        slow_start: int | None = None,
        hedge_percentile: float | None = None,
    ) -> None:
        for name, value in (
            ("concurrency", concurrency),
            ("most", most),
            ("slow_start", slow_start),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is too small: give at least 1")
        if hedge_percentile is not None and not 0 < hedge_percentile < 100:
            raise ValueError(
                f"hedge_percentile={hedge_percentile} is not possible: give a number between 0 and 100, as 95"
            )
        self.concurrency = concurrency
        self.most = most
        self.slow_start = slow_start
        self.hedge_percentile = hedge_percentile
        self.counters: Counters | None = Counters(*FetchReport._fields)
        """None where nobody can ask for a report."""

    def __repr__(self) -> str:
        if self.counters is None:
            return str(self.concurrency)
        return (
            f"Fetching({self.concurrency}, most={self.most}, slow_start={self.slow_start}, "
            f"hedge_percentile={self.hedge_percentile})"
        )

    @classmethod
    def of(cls, given: int | Fetching) -> Fetching:
        """What a loader's ``fetch_concurrency`` says."""
        if isinstance(given, Fetching):
            return given
        fetching = cls.__new__(cls)  # without counters, which take shared memory
        fetching.concurrency = given
        fetching.most = fetching.slow_start = fetching.hedge_percentile = fetching.counters = None
        return fetching

    @property
    def at_once(self) -> bool:
        """Whether workers do not simply read one sample after the other."""
        return self.concurrency > 1 or self.most is not None or self.hedge_percentile is not None

    def report(self) -> FetchReport:
        """What the reads came to so far."""
        return FetchReport(*(self.counters.totals() if self.counters is not None else (0, 0, 0)))
