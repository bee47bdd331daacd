"""Workers that stand in for others which a long sample holds up, for as long as it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minato._core.clock import now_ns
from minato._core.histogram import Histogram
from minato._core.ledger import Ledger
from minato._core.wait import Gate
from minato.scheduler.roster import Roster

__all__ = ["Standby"]

_WORTH_NS = 1_000_000
"""A sample that holds its worker up for less is over before anybody could have done its work."""
_LEAST_SLEEP_NS = 2_000_000
_FULL_SLEEP_NS = 5_000_000
"""It sleeps so long at least, and so long while nothing is left to claim …"""
_CALM_SLEEP_NS = 50_000_000
"""… or nothing can be overdue: costs are uniform, or nobody works."""
_PATIENCE_NS = 1_000_000_000
"""So often it looks whether its parent lives."""


class Standby(Roster):
    """The roster as a worker sees it that only stands in for others.

    Of those, the one of rank r works while more than r samples are overdue, its own included. So there are always as
    many workers that make progress as are wanted, as far as standby workers go. Nobody has to call them: the leases of
    all workers lie in shared memory, and each standby worker sleeps until one sample more could be overdue than others
    of its kind see to. The worker that is held up goes on with its sample, so nothing is done twice.

    Args:
        buffer, offset, work: As :class:`Roster` has them.
        first: Number of the worker of rank 0.
        late: Receives how many ns after it could this worker stepped in, each time.
    """

    def __init__(
        self, buffer: Any, offset: int, work: Gate, ledger: Ledger, first: int, late: Histogram
    ) -> None:
        super().__init__(buffer, offset, work)
        self._ledger = ledger
        self._first = first
        self._late = late

    def rests(self, number: int) -> bool:
        """Whether nobody is held up for whom this worker could do something."""
        return self._due_in_ns(number) > 0

    def stand_by(
        self, number: int, over: Callable[[], bool], parent_lives: Callable[[], bool]
    ) -> bool:
        """Sleep until this worker has to stand in.

        Returns:
            False if it shall leave: the loader ends, or its process is gone.
        """
        ledger = self._ledger
        looked_ns = asked_ns = now_ns()
        while True:
            seen = self._gate.events
            # What is left to claim while the last batches are made is left to standby workers, too.
            if over() and (ledger.stopping or not ledger.unclaimed()):
                return False
            due_ns = self._due_in_ns(number)
            if due_ns <= 0:
                # At the look before there was nothing to do for it, whatever was overdue.
                self._late.record(min(-due_ns, now_ns() - looked_ns))
                return True
            looked_ns = now_ns()
            if looked_ns - asked_ns > _PATIENCE_NS:
                asked_ns = looked_ns
                if not parent_lives():
                    return False
            self._gate.wait(seen, max(due_ns, _LEAST_SLEEP_NS) / 1e9)

    def _due_in_ns(self, number: int) -> int:
        """In how many ns this worker may be needed; 0 or less: since so many ns it is."""
        ledger, rank = self._ledger, number - self._first
        begun_ns, may_claim = ledger.begun(), ledger.unclaimed() > 0
        limit_ns = max(ledger.slow_ns, _WORTH_NS)
        if not ledger.slow_ns or not (begun_ns or may_claim):
            return _CALM_SLEEP_NS
        due_ns = limit_ns
        if rank < len(begun_ns):
            due_ns += begun_ns[rank] - now_ns()
        return due_ns if may_claim else max(due_ns, _FULL_SLEEP_NS)
