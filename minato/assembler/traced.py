"""A writer that tells when it copies and collates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minato._core.clock import now_ns
from minato.assembler.writer import BatchWriter
from minato.trace.lanes import Lane

__all__ = ["TracedWriter"]


class TracedWriter(BatchWriter):
    """Writes batches as ever, and tells a lane how long it took."""

    def __init__(self, lane: Lane, *args: Any) -> None:
        super().__init__(*args)
        self._lane = lane

    def write_run(self, batch: int, k: int, place: int, samples: list[Any]) -> None:
        """As ever."""
        begun_ns = now_ns()
        super().write_run(batch, k, place, samples)
        self._lane.slice("copy", begun_ns, now_ns())

    def write_batch(self, batch: int, samples: list[Any], state: Any = None) -> None:
        """As ever."""
        line, begun_ns = self._lane.begin(), now_ns()
        super().write_batch(batch, samples, state)
        self._lane.end(line, "copy", begun_ns)

    def write_collated(
        self,
        batch: int,
        samples: list[Any],
        skipped: Sequence[int] = (),
        state: Any = None,
        named: str | None = None,
    ) -> None:
        """As ever."""
        begun_ns = now_ns()
        super().write_collated(batch, samples, skipped, state, named)
        self._lane.slice("collate", begun_ns, now_ns())

    def collate(self, batch: int) -> None:
        """As ever."""
        line, begun_ns = self._lane.begin(), now_ns()
        super().collate(batch)
        self._lane.end(line, "collate", begun_ns)
