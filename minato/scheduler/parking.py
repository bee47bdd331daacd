"""Slow samples that a worker has set aside: when it may, and when it goes on with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from minato._core.ledger import Ledger
from minato.scheduler.stepper import Partial

__all__ = ["MOST_PARKED", "Parking"]

MOST_PARKED = 4
"""Samples that one worker sets aside at most: more would pile up as work for the end of the epoch."""


class Parking:
    """Sets slow samples aside while others are wanted more.

    It changes who waits, not how much there is to do. So a sample is only set aside while the consumer waits for a
    batch, which quicker samples can fill, and it is taken up again as soon as the consumer has what it needs, or
    little else is left. With ``always``, as the paper has it, slow samples wait for the latter.

    What a worker has set aside must not wait until nothing else is left: then the others would idle while this one
    works on what is its own. It goes on with them when no more samples are left to claim than all workers claim while
    one completes these, if they cost the same.

    Args:
        left: What the stepper has left and nobody has put here yet.
        always: Set samples aside whether or not the consumer waits.
        bound: Every sample has its own place from the start; if not, one that has a place is overdue.
        most: How many.
        most_bytes: How many bytes they may hold together.
        workers: Tells how many share what is left to claim.
    """

    def __init__(
        self,
        ledger: Ledger,
        left: list[Partial],
        always: bool,
        bound: bool,
        most: int = MOST_PARKED,
        most_bytes: int = 1 << 62,
        workers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._ledger = ledger
        self._left = left
        self._always = always
        self._bound = bound
        self._most = most
        self._most_bytes = most_bytes
        self._workers = workers
        self.num_put = 0
        """How many were ever set aside here."""
        self._parked: deque[Partial] = deque()

    def __len__(self) -> int:
        return len(self._parked)

    def may_leave(self, position: int, nbytes: int) -> bool:
        """Whether the sample at this position, so far of so many bytes, is better set aside now.

        One that began before its turn is not: that was to have it done by then.
        """
        ledger = self._ledger
        return (
            (held := len(self._parked) + len(self._left)) < self._most
            and self._others_have_work(held + 1)
            and not ledger.draining
            and (self._always or ledger.waiting)
            and position < ledger.front
            and not self._is_overdue(position)
            and sum(each.nbytes for each in (*self._parked, *self._left)) + nbytes
            <= self._most_bytes
        )

    def put(self, partial: Partial) -> None:
        """Set a sample aside."""
        self.num_put += 1
        self._parked.append(partial)

    def due(self) -> bool:
        """Whether one of them goes before samples that nobody has begun."""
        ledger = self._ledger
        return bool(self._parked) and (
            ledger.draining
            or not (self._always or ledger.waiting)
            or not self._others_have_work(len(self._parked))
            or any(self._is_overdue(partial.position) for partial in self._parked)
        )

    def take(self) -> Partial | None:
        """The oldest of them, an overdue one first; None if there is none."""
        overdue = (each for each in self._parked if self._is_overdue(each.position))
        partial = next(overdue, self._parked[0] if self._parked else None)
        if partial is not None:
            self._parked.remove(partial)
        return partial

    def _others_have_work(self, held: int) -> bool:
        """Whether enough is left to claim to let so many samples wait."""
        return self._ledger.unclaimed() > held * self._workers()

    def _is_overdue(self, position: int) -> bool:
        """Whether ``max_lag`` is reached, so that the batch of this sample is settled."""
        return not self._bound and self._ledger.is_placed(position)
