"""Which worker a batch is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minato.scheduling.dataset_state import DatasetStates

__all__ = ["AnyWorker", "Assignment", "RoundRobin"]


class Assignment(Protocol):
    """Decides who may run the samples of a batch."""

    exact: bool
    """Whether what is begun must also be run, because later content depends on it."""

    @property
    def over(self) -> bool:
        """Whether nobody will take a batch of this pass any more."""

    def reset(self) -> None:
        """Start a pass."""

    def choose(self) -> int | None:
        """Number + 1 of the worker that the next batch is for, 0 for any, None if nobody can take one."""

    def delivered(self, owner: int) -> None:
        """Learn that a batch of this owner has been delivered."""

    def ended(self, owner: int, record: int) -> None:
        """Learn by this record that its owner has nothing more to give in this pass."""


class AnyWorker:
    """Whoever is free."""

    exact = False
    over = False

    def reset(self) -> None:
        """Nothing to forget."""

    def choose(self) -> int | None:
        """Any worker."""
        return 0

    def delivered(self, owner: int) -> None:
        """Nothing to learn."""

    def ended(self, owner: int, record: int) -> None:
        """Nothing to learn."""


class RoundRobin:
    """torch's assignment: batch k to worker k mod n, leaving out workers that have ended.

    Args:
        in_order: Whether batches are delivered in order; if not, a worker takes no more than its share of ``capacity``.
        capacity: Batches that all workers may hold together.
        dataset_states: Told which worker's batches were delivered; says where a pass begins. None: at worker 0.
        state_of: Worker and state of its dataset, if that came with a record.
    """

    exact = True

    def __init__(
        self,
        num_workers: int,
        in_order: bool,
        capacity: int,
        dataset_states: DatasetStates | None = None,
        state_of: Callable[[int], tuple[int, Any] | None] = lambda record: None,
    ) -> None:
        self._num_workers = num_workers
        self._in_order = in_order
        self._capacity = capacity
        self._dataset_states = dataset_states
        self._state_of = state_of
        self._next = 0
        self._active = [True] * num_workers
        self._held = [0] * num_workers

    @property
    def over(self) -> bool:
        """Whether all workers have ended."""
        return not any(self._active)

    def reset(self) -> None:
        """Start a pass: at worker 0, with all workers, unless it goes on where another run ended."""
        self._next = 0
        self._active = [True] * self._num_workers
        self._held = [0] * self._num_workers
        if self._dataset_states is not None:
            self._dataset_states.begin()
            self._next = self._dataset_states.next_worker
            self._active = [not state.ended for state in self._dataset_states.each]

    def choose(self) -> int | None:
        """The next worker in turn that can take a batch."""
        for _ in range(self._num_workers):
            worker = self._next
            self._next = (worker + 1) % self._num_workers
            if self._active[worker] and (
                self._in_order or self._held[worker] < self._capacity // sum(self._active)
            ):
                self._held[worker] += 1
                return worker + 1
        return None

    def delivered(self, owner: int) -> None:
        """A batch of this worker has been delivered."""
        self._held[owner - 1] -= 1
        if self._dataset_states is not None:
            self._dataset_states.count_batch(owner - 1)

    def ended(self, owner: int, record: int) -> None:
        """This worker's copy of the dataset is exhausted."""
        self._active[owner - 1] = False
        if self._dataset_states is not None:
            self._dataset_states.end_stream(owner - 1)
            if (state := self._state_of(record)) is not None:
                self._dataset_states.update(*state)
