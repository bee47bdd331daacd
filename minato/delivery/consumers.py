"""One loader for several consumers, each in a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from minato.delivery.accelerator import Accelerator, accelerator_of
from minato.delivery.device import move_leaves

__all__ = ["Consumer", "Group"]

_LIVENESS_S = 1.0
"""How often a waiting consumer looks whether the threads that it waits for are still there."""


class _Outcome(NamedTuple):
    """What came of asking for a batch."""

    batch: Any
    error: Exception | None


class _Seat:
    """A consumer's part in one epoch.

    Attributes:
        epoch: Number of that, among those of the group.
        thread: Which uses it.
        inbox: What was fetched for it: one at most.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.thread = threading.current_thread()
        self.inbox: deque[_Outcome] = deque()


class Group:
    """Deals the batches of a loader out to consumers: to whoever has waited longest.

    So a consumer that asks gets one before any other gets two, and one that does not ask gets none. Whoever waits does
    the fetching for all.

    Args:
        open_epoch: Gives the iterator of the next epoch.
    """

    def __init__(self, open_epoch: Callable[[], Iterator[Any]]) -> None:
        self._open_epoch = open_epoch
        self._epoch = -1
        self._batches: Iterator[Any] = iter(())
        self._over = True
        self._news = (
            threading.Condition()
        )  # re-entrant: the garbage collector may have a seat left inside it
        self._fetcher: threading.Thread | None = None
        self._seats: list[_Seat] = []
        self._waiting: deque[_Seat] = deque()
        self._left_over: deque[_Outcome] = deque()

    def enter(self, passes: int) -> _Seat:
        """Take part in an epoch, or open the next one as soon as nobody is in the last.

        Args:
            passes: Number of the consumer's pass, from 0; it takes part in this epoch, or in a later one if the others
                have gone on.

        Raises:
            RuntimeError: Those that are in the last epoch wait for this very thread.
        """
        with self._news:
            while passes > self._epoch and (self._fetching() or self._others()):
                if not self._fetching() and all(
                    seat.thread is threading.current_thread() for seat in self._others()
                ):
                    raise RuntimeError(
                        "the next epoch begins when all consumers are through with the last one, and this thread is "
                        "itself in the middle of that with another consumer: go on with it, or drop its iterator"
                    )
                self._news.wait(_LIVENESS_S)
            if passes > self._epoch:
                self._left_over.clear()
                self._batches = self._open_epoch()
                self._epoch, self._over = self._epoch + 1, False
            seat = _Seat(self._epoch)
            self._seats.append(seat)
            return seat

    def _fetching(self) -> bool:
        """Whether somebody is fetching a batch: a thread that is gone is not."""
        return self._fetcher is not None and self._fetcher.is_alive()

    def _others(self) -> list[_Seat]:
        """Seats that somebody uses in an epoch that is not over."""
        if self._over:
            return []
        return [
            each for each in self._seats if each.epoch == self._epoch and each.thread.is_alive()
        ]

    def next(self, seat: _Seat) -> Any:
        """The next batch for a seat.

        Raises:
            StopIteration: Its epoch is over.
            Exception: What the batch's samples raised; the next call goes on.
        """
        with self._news:
            seat.thread = threading.current_thread()
            self._waiting.append(seat)
            try:
                while not seat.inbox:
                    if seat.epoch == self._epoch and self._left_over:
                        seat.inbox.append(self._left_over.popleft())
                    elif seat.epoch != self._epoch or self._over:
                        raise StopIteration
                    elif self._fetching():
                        self._news.wait(_LIVENESS_S)
                    else:
                        self._fetch()
            finally:
                self._waiting.remove(seat)
            outcome = seat.inbox.popleft()
        batch, error = outcome
        del outcome
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _fetch(self) -> None:
        """Fetch a batch for whoever has waited longest."""
        self._fetcher = threading.current_thread()
        outcome: _Outcome | None = None
        self._news.release()
        try:
            outcome = _Outcome(next(self._batches), None)
        except StopIteration:
            pass
        except Exception as error:
            outcome = _Outcome(None, error)
        finally:
            self._news.acquire()
            self._fetcher = None
            self._news.notify_all()
        if outcome is None:
            self._over, self._batches = True, iter(())
        else:
            # Whoever was given one may not have woken up yet; the one that fetches has none.
            next(seat for seat in self._waiting if not seat.inbox).inbox.append(outcome)
            del outcome  # an error's traceback holds this frame

    def leave(self, seat: _Seat) -> None:
        """Give up a seat; what the epoch still holds is for the others."""
        with self._news:
            self._seats.remove(seat)
            if seat.epoch == self._epoch:
                self._left_over.extend(seat.inbox)
            self._news.notify_all()


class Consumer:
    """One of several that a loader's batches are dealt out to; ``for`` goes through its part of an epoch.

    The number of batches it gets is not known before: whoever asks gets the next one. Made by ``loader.consumers()``;
    to be used by one thread at a time.

    Args:
        group: Shared by all consumers.
        device: Where its batches go, None for main memory.

    Attributes:
        device: The same.
    """

    def __init__(self, group: Group, device: torch.device | None) -> None:
        self.device = device
        self._group = group
        self._accelerator = None if device is None else accelerator_of(device)
        self._passes = 0
        self._part: Callable[[], _Part | None] = lambda: None

    @property
    def pins_memory(self) -> bool:
        """Whether its device copies from page-locked memory by itself."""
        return self._accelerator is not None and self._accelerator.pins_memory

    def __iter__(self) -> Iterator[Any]:
        """Its part of the next epoch, which begins when no consumer is in the last one any more.

        The n-th pass of each consumer is the n-th epoch, or the one that the others are in by then. A part that is
        broken off, by ``break`` or an exception, leaves what is left of the epoch to the other consumers.
        """
        self.close()
        part = _Part(self._group, self._passes, self._accelerator)
        self._passes = part.epoch + 1
        self._part = weakref.ref(part)
        return part

    def close(self) -> None:
        """Break its present part off, whoever still holds the iterator; the next pass is the next epoch."""
        part = self._part()
        if part is not None:
            part.close()


class _Part:
    """What ``iter(consumer)`` gives."""

    def __init__(self, group: Group, passes: int, accelerator: Accelerator | None) -> None:
        self._group = group
        self._accelerator = accelerator
        self._seat = group.enter(passes)
        self.epoch = self._seat.epoch
        self.close = weakref.finalize(self, group.leave, self._seat)
        self.close.atexit = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.close.alive:
            raise StopIteration
        try:
            if self._accelerator is None:
                return self._group.next(self._seat)
            return self._sent(self._accelerator)
        except StopIteration:
            self.close()
            raise

    def _sent(self, accelerator: Accelerator) -> Any:
        # The batch in main memory is dropped inside: then its slot waits for the stream that copies it.
        batch = [self._group.next(self._seat)]
        with accelerator.copying():
            sent = move_leaves(batch.pop(), accelerator.copy)
            mark = accelerator.record_event()
        accelerator.wait_event(mark)
        return sent
