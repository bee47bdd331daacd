"""A reader that tells a trace which batches it sends to a device."""

from __future__ import annotations

from collections import deque
from typing import Any

from minato._core.clock import now_ns
from minato.assembler.arena import Slot
from minato.assembler.page_locks import Mark
from minato.delivery.staging import Staged, StagedReader
from minato.trace.lanes import Lane

__all__ = ["TracedStagedReader"]


class TracedStagedReader(StagedReader):
    """Sends batches as ever, and tells how long asking for it took and when it was seen to be done."""

    def __init__(self, lane: Lane, *args: Any) -> None:
        super().__init__(*args)
        self._lane = lane
        self._under_way: deque[tuple[int, Mark]] = deque()

    def read(self, record: int, slot: Slot) -> Any:
        """As ever."""
        try:
            return super().read(record, slot)
        finally:
            self._tell_done()

    def _begin(self, record: int, slot: Slot) -> Staged:
        begun_ns = now_ns()
        try:
            staged = super()._begin(record, slot)
        finally:
            self._lane.slice("send to device", begun_ns, now_ns())
        self._under_way.append((begun_ns, staged.mark))
        self._tell_done()
        return staged

    def _tell_done(self) -> None:
        # Nobody is told when a copy has run. Asked at every batch, this is late by a batch at most.
        while self._under_way and self._under_way[0][1].query():
            begun_ns, _ = self._under_way.popleft()
            self._lane.span("copy to device", begun_ns, now_ns())
