"""How a slow sample that one worker has set aside comes to another one that has nothing to do."""

from __future__ import annotations

from minato._core.ledger import Ledger
from minato.scheduler.parties import Rooms
from minato.scheduler.stepper import Partial

__all__ = ["Handover"]


class Handover:
    """One worker's offers to the others, and what it takes of theirs.

    It offers one sample at a time: a copy lies in its room, the sample itself stays here until somebody has taken the
    copy. Whose the sample is says its ticket alone, which changes hands by one compare-and-swap. So it is finished by
    one of the two; and if that one dies, the sample goes out again from the start, wherever its copy was.

    Args:
        number: The worker's.
        rooms: Where the copies lie.
    """

    def __init__(self, number: int, ledger: Ledger, rooms: Rooms) -> None:
        self._number = number
        self._ledger = ledger
        self._rooms = rooms
        self.offered: Partial | None = None
        """What this worker has offered, until it has seen that it is taken."""

    def offer(self, partial: Partial) -> None:
        """Let another worker go on with a sample, if its value can travel and the room is free."""
        position, _ = self._ledger.offered(self._number)
        if position is not None:
            return
        partial.stays = True  # it is copied once, whatever becomes of it
        try:
            nbytes = self._rooms.put(self._number, partial)
        except Exception:  # whatever its pickling raises
            return
        self.offered = partial
        self._ledger.offer(self._number, partial.position, nbytes)

    def taken(self) -> Partial | None:
        """What was offered, once another worker has taken it; told once."""
        partial = self.offered
        if partial is None or self._ledger.offered(self._number) == (partial.position, True):
            return None
        self.offered = None
        return partial

    def withdraw(self) -> bool:
        """Take back what is offered; False if another worker has been faster."""
        self.offered = None
        return self._ledger.withdraw(self._number)

    def accept(self) -> Partial | None:
        """Take what another worker offers; None if none does."""
        found = self._ledger.accept(self._number)
        if found is None:
            return None
        giver, _, nbytes = found
        partial: Partial = self._rooms.get(giver, nbytes)
        self._ledger.accepted(giver)
        return partial
