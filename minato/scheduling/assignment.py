"""Which worker a batch is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from minato.sampling.resume import DatasetStates, Reported

__all__ = ["AnyWorker", "Assignment", "RoundRobin"]


class Assignment(Protocol):
    """Decides which worker runs the samples of a batch.

    An owner is the number of a worker + 1, or 0 for any worker.
    """

    runs_cancelled: bool
    """Whether cancelled batches still run to their end, because the content of later ones depends on it."""

    @property
    def over(self) -> bool:
        """Whether no worker takes another batch of this epoch."""

    def reset(self) -> None:
        """Begin an epoch."""

    def choose(self, held: Callable[[int], int]) -> int | None:
        """The owner of the next batch; None if no worker can take one now.

        Args:
            held: Returns how many open batches an owner has.
        """

    def opened(self, owner: int) -> None:
        """Record that the next batch was opened for this owner."""

    def returns(self, owner: int) -> Callable[[], None] | None:
        """The function that records that a batch of this owner was returned, if there is something to record."""

    def ended(self, owner: int, record: int) -> None:
        """Record that the stream of this owner has ended, as its batch ``record`` says."""


class AnyWorker:
    """Each batch is for the first worker that is free."""

    runs_cancelled = False
    over = False

    def reset(self) -> None:
        """Does nothing."""

    def choose(self, held: Callable[[int], int]) -> int | None:
        """Any worker."""
        return 0

    def opened(self, owner: int) -> None:
        """Does nothing."""

    def returns(self, owner: int) -> None:
        """Nothing."""

    def ended(self, owner: int, record: int) -> None:
        """Does nothing."""


class RoundRobin:
    """torch's assignment: batch k is for worker k mod n, without workers whose streams have ended.

    Args:
        in_order: Whether batches are returned in order. If not, a worker holds at most its share of ``capacity``.
        capacity: Batches that all workers may hold together.
        dataset_states: States of the workers' datasets, which decide where an epoch begins; None: at worker 0.
        state_of: Returns the worker and the state of its dataset, if they came with a record.
    """

    runs_cancelled = True

    def __init__(
        self,
        num_workers: int,
        in_order: bool,
        capacity: int,
        dataset_states: DatasetStates | None = None,
        state_of: Callable[[int], tuple[int, Reported] | None] = lambda record: None,
    ) -> None:
        self._num_workers = num_workers
        self._in_order = in_order
        self._capacity = capacity
        self._dataset_states = dataset_states
        self._state_of = state_of
        self._next = 0
        self._active = [True] * num_workers

    @property
    def over(self) -> bool:
        """Whether the streams of all workers have ended."""
        return not any(self._active)

    def reset(self) -> None:
        """Begin an epoch at worker 0 with all workers, or where the resumed state was taken."""
        self._next = 0
        self._active = [True] * self._num_workers
        if self._dataset_states is not None:
            self._dataset_states.begin()
            self._next = self._dataset_states.next_worker
            self._active = [not state.ended for state in self._dataset_states.each]

    def choose(self, held: Callable[[int], int]) -> int | None:
        """The next active worker that can take a batch."""
        for i in range(self._num_workers):
            worker = (self._next + i) % self._num_workers
            if self._active[worker] and (
                self._in_order or held(worker + 1) < self._capacity // sum(self._active)
            ):
                return worker + 1
        return None

    def opened(self, owner: int) -> None:
        """Record that the next batch was opened for this worker."""
        self._next = owner % self._num_workers

    def returns(self, owner: int) -> Callable[[], None] | None:
        """The function that records that a batch of this worker was returned."""
        return None if self._dataset_states is None else self._dataset_states.counts(owner - 1)

    def ended(self, owner: int, record: int) -> None:
        """Leave out this worker from now on, and store the last state of its dataset."""
        self._active[owner - 1] = False
        if self._dataset_states is not None:
            self._dataset_states.end_stream(owner - 1)
            if (state := self._state_of(record)) is not None:
                self._dataset_states.update(*state)
