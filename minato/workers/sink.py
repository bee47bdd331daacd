"""Where a worker writes its samples and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Sink"]


class Sink(Protocol):
    """The writer of a worker's results, as the worker sees it; ``minato.batching.writer`` implements it.

    ``state`` is the state of the worker's copy of the dataset after these samples, if it has one.
    """

    collates: bool
    run_again: Callable[[], Callable[[int], list[Any]] | None]

    @property
    def has_unsendable(self) -> bool:
        """Whether a sample could not be pickled for another worker."""

    def write_run(self, batch: int, k: int, place: int, samples: list[Any]) -> None:
        """Write samples to consecutive places, the first of which belongs to sample k of the batch."""

    def write_batch(
        self, batch: int, samples: list[Any], state: tuple[int, Callable[[], Any]] | None = None
    ) -> None:
        """Build a whole batch that has one place, of any number of samples."""

    def write_error(
        self,
        batch: int,
        place: int,
        error: BaseException,
        key: Any,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Write the error of a sample to its place."""

    def write_end(self, batch: int, place: int, state: Callable[[], Any] | None) -> None:
        """Write that the worker's stream has ended."""

    def write_collated(
        self,
        batch: int,
        samples: list[Any],
        skipped: Sequence[int] = (),
        state: tuple[int, Callable[[], Any]] | None = None,
    ) -> None:
        """Collate the samples of a batch, without the skipped ones."""

    def write_skipped(self, batch: int, skipped: Sequence[int]) -> None:
        """Write that all samples of a batch are skipped."""

    def publish_if_full(self, batch: int, outcome: int) -> None:
        """Complete a batch if the ledger's ``outcome`` of filling a place says that it is full."""

    def publish_collated(self, batch: int) -> None:
        """Collate a full batch whose worker died."""
