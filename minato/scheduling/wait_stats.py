"""What the dispatcher tells of the consumer."""

from __future__ import annotations

from dataclasses import dataclass

from minato._core.clock import now_ns

__all__ = ["ConsumerWait"]


@dataclass
class ConsumerWait:
    """How long the consumer waits, and how much is ready for it.

    Attributes:
        waited_ns: How long it has waited for batches so far, the present wait not included.
        waiting_since_ns: Since when it waits now, 0 if it does not.
        delivered: Batches that it has got so far.
        watched: Whether somebody wants to know the rest:
        ready: Batches that were ready at the last look.
        ending: Whether nothing is left to open, so that workers soon idle.
    """

    waited_ns: int = 0
    waiting_since_ns: int = 0
    delivered: int = 0
    watched: bool = False
    ready: int = 0
    ending: bool = False

    def begin_wait(self) -> None:
        """The consumer begins to wait."""
        self.waiting_since_ns = now_ns()

    def end_wait(self) -> None:
        """It has what it waited for, or looks again."""
        self.waited_ns = self.waited_until(now_ns())
        self.waiting_since_ns = 0

    def waited_until(self, now: int) -> int:
        """The whole wait, the present one included."""
        return self.waited_ns + (now - self.waiting_since_ns if self.waiting_since_ns else 0)
