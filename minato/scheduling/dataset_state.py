"""The states of the workers' copies of the dataset, where they have any."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from minato._compat import ExceptionWrapper

__all__ = ["DatasetStates", "Replica"]


@dataclass
class Replica:
    """One worker's copy of the dataset, as it was after a batch that has been delivered.

    Attributes:
        dataset: What the dataset's ``state_dict()`` gave, None if it has none.
        iterator: The same of ``iter(dataset)``, if that is another object.
        batches: How many batches of the pass were delivered after these states, or since the beginning.
        ended: Whether its stream has ended in this pass.
    """

    dataset: Any = None
    iterator: Any = None
    batches: int = 0
    ended: bool = False


class DatasetStates:
    """What the consumer knows of all copies, and whose turn it is.

    Args:
        count: How many there are.
        lasting: Whether what they have become in one pass counts in the next: the workers stay.
        state: What ``plain`` gave; then the first pass is the one in which it was taken.
    """

    def __init__(self, count: int, lasting: bool, state: dict[str, Any] | None = None) -> None:
        self._lasting = lasting
        self._resumes = state is not None
        self.each = [Replica() for _ in range(count)]
        """One for each worker."""
        self.turn = 0
        """Number of the worker whose batch comes next, where batches are dealt out in turn."""
        self.present: Callable[[], Replica | None] | None = None
        """Without workers: the only copy as it is now, None while it has not begun to resume."""
        self._errors: dict[int, ExceptionWrapper] = {}
        if state is not None:
            self.each = [Replica(**copy.deepcopy(replica)) for replica in state["each"]]
            self.turn = state["turn"]

    def begin(self) -> None:
        """Note that a pass begins."""
        if not self._resumes:
            self.turn = 0
            self.each = [
                Replica(dataset=replica.dataset if self._lasting else None) for replica in self.each
            ]
            self._errors.clear()
        self._resumes = False

    def delivered(self, number: int) -> None:
        """Note that a batch of this worker was delivered."""
        self.turn = (number + 1) % len(self.each)
        self.each[number].batches += 1

    def ended(self, number: int) -> None:
        """Note that this worker's stream has ended."""
        self.turn = (number + 1) % len(self.each)
        self.each[number].ended = True

    def heard(self, number: int, state: Replica | ExceptionWrapper) -> None:
        """Note the state that came with a batch, or what asking for it raised."""
        if isinstance(state, ExceptionWrapper):
            self._errors[number] = state
        else:
            self._errors.pop(number, None)
            self.each[number] = state

    def settle(self) -> None:
        """Keep the state of the copy in this process, of whose iterator nothing will be left."""
        present, self.present = self.present, None
        if present is None:
            return
        try:
            state = copy.deepcopy(present())
        except Exception:
            where = "in state_dict() at the end of an iterator"
            self.heard(0, ExceptionWrapper(sys.exc_info(), where))
        else:
            if state is not None:
                self.heard(0, state)

    def between(self) -> dict[str, Any] | None:
        """What counts after the end of a pass, as plain data; None if the next one begins anew.

        Raises:
            Exception: What the ``state_dict()`` of a worker's dataset raised.
        """
        if not self._lasting:
            return None
        self._check()
        kept = [asdict(Replica(dataset=replica.dataset)) for replica in self.each]
        return copy.deepcopy({"turn": 0, "each": kept})

    def plain(self) -> dict[str, Any]:
        """All of it as plain data, as far as the states are.

        Raises:
            Exception: What the ``state_dict()`` of a dataset or its iterator raised.
        """
        present = None if self.present is None else self.present()
        if present is not None:
            self.heard(0, present)
        self._check()
        return copy.deepcopy({"turn": self.turn, "each": [asdict(one) for one in self.each]})

    def _check(self) -> None:
        for error in self._errors.values():
            error.reraise()
