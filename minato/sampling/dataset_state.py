"""The states of the workers' copies of the dataset."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from minato._compat import ExceptionWrapper

__all__ = ["DatasetState", "DatasetStates"]


@dataclass
class DatasetState:
    """The state of one worker's copy of the dataset after a returned batch.

    Attributes:
        dataset: Result of the dataset's ``state_dict()``, None if it has none.
        iterator: Result of the ``state_dict()`` of ``iter(dataset)``, if that is another object.
        batches: Batches of the epoch that were returned after this state was taken, or since the epoch began.
        ended: Whether the stream of this copy has ended in this epoch.
    """

    dataset: Any = None
    iterator: Any = None
    batches: int = 0
    ended: bool = False


class DatasetStates:
    """The states of all copies, as the training process knows them, and the worker whose batch comes next.

    Args:
        count: Number of copies.
        persist: Whether the states at the end of an epoch are those at the start of the next: the workers stay.
        resumed: Result of ``to_plain``; the first epoch resumes it.

    Attributes:
        each: The state of each worker's copy.
        next_worker: Number of the worker whose batch comes next in round-robin order.
        present: Without workers: returns the state of the only copy now, None before it has resumed.
    """

    def __init__(self, count: int, persist: bool, resumed: dict[str, Any] | None = None) -> None:
        self._persist = persist
        self._resumes = resumed is not None
        self.each = [DatasetState() for _ in range(count)]
        self.next_worker = 0
        self.present: Callable[[], DatasetState | None] | None = None
        self._errors: dict[int, ExceptionWrapper] = {}
        if resumed is not None:
            self.each = [DatasetState(**copy.deepcopy(state)) for state in resumed["each"]]
            self.next_worker = resumed["turn"]

    def begin(self) -> None:
        """Begin an epoch."""
        if not self._resumes:
            self.next_worker = 0
            self.each = [
                DatasetState(dataset=state.dataset if self._persist else None)
                for state in self.each
            ]
            self._errors.clear()
        self._resumes = False

    def counts(self, number: int) -> Callable[[], None]:
        """Return a function that counts a returned batch of worker ``number``. A second call changes nothing."""
        state = self.each[number]
        return functools.partial(self._count, number, state, state.batches + 1)

    def _count(self, number: int, state: DatasetState, batches: int) -> None:
        self.next_worker = (number + 1) % len(self.each)
        state.batches = batches

    def end_stream(self, number: int) -> None:
        """Mark the stream of worker ``number`` as ended."""
        self.next_worker = (number + 1) % len(self.each)
        self.each[number].ended = True

    def update(self, number: int, state: DatasetState | ExceptionWrapper) -> None:
        """Store the state that came with a batch of worker ``number``, or the error of its ``state_dict()``."""
        if isinstance(state, ExceptionWrapper):
            self._errors[number] = state
        else:
            self._errors.pop(number, None)
            self.each[number] = state

    def keep_present(self) -> None:
        """Store the state of the copy in this process, whose iterator is about to be dropped."""
        present, self.present = self.present, None
        if present is None:
            return
        try:
            state = copy.deepcopy(present())
        except Exception:
            where = "in state_dict() at the end of an iterator"
            self.update(0, ExceptionWrapper(sys.exc_info(), where))
        else:
            if state is not None:
                self.update(0, state)

    def between_epochs(self) -> dict[str, Any] | None:
        """The states that the next epoch starts with, as plain data; None if it starts with fresh copies.

        Raises:
            Exception: Raised by the ``state_dict()`` of a worker's dataset.
        """
        if not self._persist:
            return None
        self._check()
        kept = [asdict(DatasetState(dataset=state.dataset)) for state in self.each]
        return copy.deepcopy({"turn": 0, "each": kept})

    def to_plain(self) -> dict[str, Any]:
        """All states as plain data, apart from the results of ``state_dict()``.

        Raises:
            Exception: Raised by the ``state_dict()`` of a dataset or its iterator.
        """
        present = None if self.present is None else self.present()
        if present is not None:
            self.update(0, present)
        self._check()
        return copy.deepcopy(
            {"turn": self.next_worker, "each": [asdict(state) for state in self.each]}
        )

    def _check(self) -> None:
        for error in self._errors.values():
            error.reraise()
