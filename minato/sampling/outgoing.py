"""Batches on their way from ``next()`` to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Outgoing"]


class Outgoing:
    """What ``next()`` gives to the training loop: a batch, or the error of one.

    The handler of a signal may raise at any moment of ``next()``. Until ``next()`` has returned, the batch stays here,
    and the next call gives it again. So it is recorded later: by the next call, or when somebody asks.

    Attributes:
        batch: The batch, until it is given.
        error: What is raised in its place; None: nothing is.
        is_pinned: Whether the batch, or its error, is that of the copy to pinned memory.
        is_given: Whether the training loop has it.
        records: Functions that record the batch. Each may be called again, without effect.
    """

    __slots__ = ("batch", "error", "is_given", "is_pinned", "records")

    def __init__(self, batch: Any = None, error: BaseException | None = None) -> None:
        self.batch = batch
        self.error = error
        self.is_given = self.is_pinned = False
        self.records: Sequence[Callable[[], object]] = ()

    def give(self) -> Any:
        """Return the batch, or raise its error, where no signal is handled: not in the main thread."""
        batch, error = self.batch, self.error
        self.batch, self.error, self.is_given = None, None, True
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return batch
