"""Those that the scheduler works with, as it sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["IndexStore", "Pool", "Progress", "Sink", "Slots"]


class Pool(Protocol):
    """The workers, as the dispatcher sees them."""

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep, or work, until the ready gate has had an event since ``seen``."""

    def check(self) -> None:
        """Raise if a worker is gone."""


class Slots(Protocol):
    """Where slots come from (the assembler's arena)."""

    def acquire(self) -> Any:
        """Take a slot, a pair of arena offsets."""

    def release(self, slot: Any, used_bytes: int = 0) -> None:
        """Give it back."""


class IndexStore(Protocol):
    """Where keys lie that are no integers (the assembler's store)."""

    def put(self, allocate: Callable[[int], int], value: Any) -> tuple[int, int]:
        """Keep the keys of a batch; returns their offset and size."""

    def drop(self, offset: int) -> None:
        """Forget them."""


class Progress(Protocol):
    """Who is told what becomes of a pass (the source's account of it)."""

    def delivered(
        self,
        positions: list[int],
        start: int,
        num_slow: int = 0,
        samples: Callable[[], list[tuple[int, int, int, int]]] | None = None,
    ) -> None:
        """The consumer got a batch in which these samples lay, so many of them slow.

        ``start`` is the pass's first position; ``samples`` gives position, key, cost in ns and bytes of each.
        """

    def skipped(self, positions: list[int], start: int) -> None:
        """These samples were given up."""

    def finish(self, dropped: bool = False) -> None:
        """The pass is over; ``dropped``: the workers had nothing for what is still open."""


class Sink(Protocol):
    """Where a worker's samples go (the assembler's writer)."""

    collates: bool
    run_again: Callable[[], Callable[[int], list[Any]] | None]

    @property
    def has_unsendable(self) -> bool:
        """Whether a sample could not be pickled for another worker."""

    def write_run(self, batch: int, k: int, place: int, samples: list[Any]) -> None:
        """Put samples at consecutive places, the first of which is number k of the batch."""

    def write_batch(
        self, batch: int, samples: list[Any], state: tuple[int, Callable[[], Any]] | None = None
    ) -> None:
        """Build a whole batch, of however many samples, that has one place."""

    def write_error(
        self,
        batch: int,
        place: int,
        error: BaseException,
        key: Any,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """The same for a sample that raised, and the state of the worker's dataset, if it has one."""

    def write_end(self, batch: int, place: int, state: Callable[[], Any] | None) -> None:
        """Say that there is nothing more to come, and the state of the worker's dataset, if it has one."""

    def write_collated(
        self,
        batch: int,
        samples: list[Any],
        skipped: Sequence[int] = (),
        state: tuple[int, Callable[[], Any]] | None = None,
    ) -> None:
        """Collate all samples of a batch, or those of them that are not skipped, with the dataset's state after it."""

    def write_skipped(self, batch: int, skipped: Sequence[int]) -> None:
        """Say that all samples of a batch are skipped."""

    def publish_if_full(self, batch: int, outcome: int) -> None:
        """Act on what the ledger said when a place was filled."""

    def publish_collated(self, batch: int) -> None:
        """Collate a full batch that a dead worker left."""
