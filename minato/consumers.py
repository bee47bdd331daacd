"""One loader for several consumers, each in its own thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minato._fork_safety import renew_in_children
from minato._support.threads import living
from minato.checks import check_device, given_whole, refuse_one
from minato.delivery.device import Accelerator, accelerator_of, copy_batch, memory_pinner
from minato.delivery.iterator import BatchIterator
from minato.errors import shortened

_LIVENESS_S = 1.0
"""How often a waiting consumer checks whether the threads that it waits for are alive."""
_MOST = 4096  # each is for a thread


_Outcome = tuple[Any, Exception | None]  # a batch, or the error in its place


class _Member:
    """A consumer's membership in one epoch of the group, with at most one batch that was fetched for it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.thread = threading.current_thread()
        self.inbox: deque[_Outcome] = deque()


class Group:
    """Distributes the batches of a loader: each goes to the consumer that has waited longest.

    A consumer that waits gets one batch before any other gets two. The waiting threads fetch for all, one at a time.
    """

    def __init__(self, open_epoch: Callable[[], Iterator[object]]) -> None:
        self._open_epoch = open_epoch
        self._epoch = -1
        self._batches: Iterator[Any] = iter(())
        self._over = True
        # Re-entrant: the garbage collector may call leave() inside it.
        self._renew()
        renew_in_children(self, Group._renew)
        self._fetcher: threading.Thread | None = None
        self._members: list[_Member] = []
        self._waiting: deque[_Member] = deque()
        self._left_over: deque[_Outcome] = deque()

    def _renew(self) -> None:
        self._changed = threading.Condition()

    def enter(self, number: int) -> _Member:
        """Join the epoch with this number, from 0, or a later one; it opens when all consumers have left the last.

        RuntimeError: The last epoch cannot end, because this thread itself is in the middle of it.
        """
        with self._changed:
            here = threading.current_thread()
            while number > self._epoch and (self._fetching() or self._others()):
                if not self._fetching() and all(each.thread is here for each in self._others()):
                    raise RuntimeError(
                        "the next epoch begins when all consumers have finished the last one, and this thread is "
                        "itself in the middle of that with another consumer: go on with it, or drop its iterator"
                    )
                self._changed.wait(_LIVENESS_S)
            if number > self._epoch:
                self._left_over.clear()
                self._batches = self._open_epoch()
                self._epoch, self._over = self._epoch + 1, False
            member = _Member(self._epoch)
            self._members.append(member)
            return member

    def _fetching(self) -> bool:
        return self._fetcher is not None and bool(living(self._fetcher))

    def _others(self) -> list[_Member]:
        """Members of an epoch that is not over, whose threads live."""
        if self._over:
            return []
        here = [each for each in self._members if each.epoch == self._epoch]
        running = living(*(each.thread for each in here))
        return [each for each in here if each.thread in running]

    def next(self, member: _Member) -> Any:
        """The next batch for a member, or what its samples raised; StopIteration: its epoch is over."""
        with self._changed:
            member.thread = threading.current_thread()
            self._waiting.append(member)
            try:
                while not member.inbox:
                    if member.epoch == self._epoch and self._left_over:
                        member.inbox.append(self._left_over.popleft())
                    elif member.epoch != self._epoch or self._over:
                        raise StopIteration
                    elif self._fetching():
                        self._changed.wait(_LIVENESS_S)
                    else:
                        self._fetch()
            finally:
                self._waiting.remove(member)
            batch, error = member.inbox.popleft()
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _fetch(self) -> None:
        self._fetcher = threading.current_thread()
        outcome: _Outcome | None = None
        changed = self._changed
        changed.release()
        try:
            outcome = next(self._batches), None
        except StopIteration:
            pass
        except Exception as error:
            outcome = None, error
        finally:
            changed.acquire(changed is self._changed)  # not in a child that a sample has forked
            self._fetcher = None
            changed.notify_all()
        if outcome is None:
            self._over, self._batches = True, iter(())
        else:
            # Others may not have woken up yet: those with a batch, and those of the last epoch.
            waiting = (each for each in self._waiting if each.epoch == self._epoch)
            next(member for member in waiting if not member.inbox).inbox.append(outcome)
            del outcome  # an error's traceback holds this frame

    def leave(self, member: _Member) -> None:
        """Leave an epoch; its remaining batches are for the other members."""
        with self._changed:
            self._members.remove(member)
            if member.epoch == self._epoch:
                self._left_over.extend(member.inbox)
                member.inbox.clear()  # its thread may still wait
            self._changed.notify_all()


class Consumer:
    """One of several consumers of a loader; ``for`` iterates over its part of an epoch.

    The number of its batches depends on how often it asks for one. Made by ``loader.consumers()``; to be used by one
    thread at a time.

    Args:
        device: Where its batches are copied to, None for host memory.
    """

    def __init__(self, group: Group, device: torch.device | None) -> None:
        self.device, self._group = device, group
        self._accelerator = None if device is None else accelerator_of(device)
        # Its device copies from pinned memory by itself.
        self.pins_memory = self._accelerator is not None and self._accelerator.pins_memory
        self._next = 0
        self._part: Callable[[], _Part | None] = lambda: None

    def __iter__(self) -> Iterator[Any]:
        """Its part of the next epoch, which begins when all consumers have left the last one.

        The n-th iteration of each consumer is the n-th epoch, or the one that the others are in by then. A part that
        ends early, by ``break`` or an exception, leaves the rest of the epoch to the other consumers.
        """
        self.close()
        part = _Part(self._group, self._next, self._accelerator)
        self._next = part.epoch + 1
        self._part = weakref.ref(part)
        return part

    def close(self) -> None:
        """End its present part, even if the iterator is still referenced; the next iteration is the next epoch."""
        part = self._part()
        if part is not None:
            part.close()


class _Part(Iterator[Any]):
    """The iterator of a consumer."""

    def __init__(self, group: Group, number: int, accelerator: Accelerator | None) -> None:
        self._group, self._accelerator = group, accelerator
        self._member = group.enter(number)
        self.epoch = self._member.epoch
        self.close = weakref.finalize(self, group.leave, self._member)
        self.close.atexit = False

    def __next__(self) -> Any:
        if not self.close.alive:
            raise StopIteration
        try:
            if self._accelerator is None:
                return self._group.next(self._member)
            batch, event = copy_batch(self._accelerator, [self._group.next(self._member)].pop)
        except StopIteration:
            self.close()
            raise
        except Exception as error:
            shortened(error)
            raise
        self._accelerator.wait_event(event)
        return batch


def make_consumers(
    open_epoch: Callable[[], Iterator[object]],
    n: int | None,
    devices: Sequence[str | torch.device] | None,
) -> tuple[Consumer, ...]:
    """Consumers of one loader; see ``DataLoader.consumers``."""
    if (n is None) == (devices is None):
        raise ValueError(f"n={n} and devices={devices}: give one of the two")
    if devices is None:
        places: list[torch.device | None] = [None] * given_whole("n", n, 1, _MOST)
    else:
        refuse_one("devices", devices)
        found = [check_device(device) for device in devices]
        places = [None if each is None or each.type == "cpu" else each for each in found]
        if not places:
            raise ValueError(f"devices={devices!r} is empty: give a device for each consumer")

    def open_locked() -> Iterator[Any]:
        batches = open_epoch()
        if locker is not None and isinstance(batches, BatchIterator):
            batches.pin_slots(locker)
        return batches

    group = Group(open_locked)
    consumers = tuple(Consumer(group, place) for place in places)
    locker = memory_pinner() if any(each.pins_memory for each in consumers) else None
    return consumers
