"""Whether the worker that made a sample may hand it to another one, which collates its batch: a loader-wide answer."""

from __future__ import annotations

from minato._core import SharedWords

__all__ = ["Handover"]

_PLAIN, _OTHERS = 0, 1


class Handover:
    """What is known of the samples of a loader, in memory that its workers share.

    A sample arrives in another process as a copy. Where the copy may differ, ``collate_fn`` would get something else
    than with torch. Then the worker that makes the samples of a batch collates them: from the first such sample on,
    each worker claims whole batches, and each sample keeps its place, whatever the order.

    Each word is only ever set, so that workers may do it at the same time.

    Args:
        buffer: Writable memory that every party maps; zeros mean that nothing is known.
        offset: Where its ``NBYTES`` start; a multiple of 8.
    """

    NBYTES = 64

    def __init__(self, buffer: object, offset: int) -> None:
        self._words = SharedWords(buffer, offset, 2)

    @property
    def refused(self) -> bool:
        """Whether a sample has turned out to be one that must stay in its worker."""
        return self._words.load(_OTHERS) != 0

    @property
    def keeps_batches(self) -> bool:
        """Whether batches stay in one worker: samples were refused, or nothing is known of them."""
        return self.refused or not self._words.load(_PLAIN)

    @property
    def answer(self) -> bool | None:
        """Whether samples may be handed over; None while nothing is known."""
        return None if not self.refused and self.keeps_batches else not self.refused

    def settle(self, may_travel: bool) -> None:
        """Say that samples may be handed over, or that one may not be; a refusal is final."""
        self._words.store(_PLAIN if may_travel else _OTHERS, 1)
