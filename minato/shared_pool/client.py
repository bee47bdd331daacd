"""The client of a shared pool: a rank that receives batches from local rank 0."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from minato._compat import exit_code
from minato._core.segment import Segment
from minato._fork_safety import Loans, signals_deferred
from minato._support.threads import at_end, ends_by_exception
from minato.batching.arena import Slot
from minato.batching.serialization import SharedStore
from minato.errors import CLOSED
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Completed
from minato.scheduling.dispatcher import waited_s
from minato.shared_pool.channel import (
    LIVENESS_S,
    BatchDescriptor,
    BatchMessage,
    Channel,
    Hello,
    RankMessage,
    connected,
    meet,
)
from minato.shared_pool.ranks import PREFETCH_BATCHES
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.server import RANK_TIMEOUT_S
from minato.shared_pool.source import SUPERSEDED, BatchHandle, LeasedBatch

_LOADS = "which loads for all ranks of this node"
_ENDED = f"{_LOADS}, has ended or dropped this loader"
_CONNECTED: set[PoolClient] = set()
"""All connected clients: a batch needs its client, even after the loader is gone."""


class PoolClient:
    """A rank's connection to the server of its node, which must listen and begin epochs within ``timeout_s`` seconds.

    RuntimeError: It does not, has another loader under this number, or has ended. PermissionError: The listening
    process belongs to another user, or does not know the key.
    """

    def __init__(
        self, rendezvous: Rendezvous, me: Hello, timeout_s: float = RANK_TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._dropped: deque[tuple[int, int]] = deque()
        self._outbox: deque[RankMessage] = deque()
        self._sending = threading.Lock()
        self._remote_arenas: dict[int, RemoteArena] = {}
        self._given_back: set[tuple[int, Slot]] = set()
        self._next_epoch = 0
        self._epoch = -1  # none
        # That, or the one that is waited for, until a batch is asked for.
        self._entered: Epoch | None = None
        self._holder: Epoch | None = None  # as the last iterator has it, which alone may leave it
        self._arrived: deque[BatchHandle] = deque()  # of the present epoch
        self._end: tuple[Any, ...] | None = None  # the message that ends it
        self._stopped = -1  # the epoch in which it waits for no more batches
        self._closed = False
        self._broken: str | None = None  # why the pool cannot continue, as the server has reported
        try:
            self._channel: Channel = connected(rendezvous, timeout_s)
        except TimeoutError as error:
            raise RuntimeError(str(error)) from None
        except ConnectionError:
            raise RuntimeError(f"local rank 0, {_ENDED}, or refuses this process") from None
        meet(0, self._channel.pid)
        _CONNECTED.add(self)
        self._stay_no_longer = at_end(lambda: self.close(ends_by_exception()))
        self._send("hello", 0, me)
        try:
            late = "has not given this rank its place in the pool of this loader"
            _, self._next_epoch = self._receive("welcome", late=late)
        except BaseException:
            self.close()
            raise

    def enter(self, epoch: Epoch, batches: object = None) -> tuple[int, bool]:
        """Begin the next epoch as soon as the server does; return its number in the pool, and True.

        The server has a copy of this rank's sampler, so ``batches`` are not used. RuntimeError: A rank has ended, or
        the server begins no epoch, or another one. The next call is for the same epoch.
        """
        with self._lock:
            last = self._entered
            if self._epoch < 0 or last is None or last.has_started or _wish(last) != _wish(epoch):
                self._leave()
                self._entered = epoch
                self._send("enter", self._next_epoch, _wish(epoch))
                self._receive("open", late="has not begun the next epoch of this loader")
            self._entered = self._holder = epoch
            return self._epoch, True

    def next(self, number: int) -> BatchHandle:
        """Return the next batch, which views the server's memory: the same one until it is dropped.

        StopIteration: The epoch is over. RuntimeError: Nothing comes any more; the text says why.
        """
        with self._lock:
            if number != self._epoch:
                raise RuntimeError(self._broken or SUPERSEDED)
            self._entered = None
            if not self._arrived and self._end is None:
                self._receive("batch")
                if self._epoch not in (-1, number):  # a signal's handler has begun another one
                    raise RuntimeError(SUPERSEDED)
                if self._epoch < 0 or number == self._stopped:
                    raise RuntimeError(CLOSED)
            if self._arrived:
                return self._arrived[0]
            if self._end is not None and self._end[0] == "failed":
                raise RuntimeError(f"local rank 0, {_LOADS}: {self._end[2]}")
            raise StopIteration

    def arrived(self, number: int) -> list[BatchHandle]:
        """The batches that are there, and not dropped."""
        with self._lock, signals_deferred():
            while self._first() is None and not self._channel.over and self._channel.wait(0):
                pass
            return list(self._arrived) if number == self._epoch else []

    def ask(self, number: int, handle: BatchHandle) -> None:
        """Ask for one more batch, in place of one that is used now."""
        with signals_deferred():
            handle.is_replaced = True
            self._send("next", number)

    def drop(self, handle: BatchHandle) -> None:
        """Forget the first batch that has arrived, if it is this one."""
        with self._lock:
            if self._arrived and self._arrived[0] is handle:
                self._arrived.popleft()

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages the server has returned to the system since the last call."""
        slots, self._given_back = self._given_back, set()
        return [(self._remote_arenas[arena].segment, slot) for arena, slot in slots]

    def stop(self, number: int) -> None:
        """Have ``next()``, in any thread, wait no more in an epoch."""
        self._stopped = number

    def leave(self, number: int, epoch: Epoch) -> None:
        """Leave an epoch, unless its ``iter()`` was interrupted: the next one begins it."""
        is_interrupted = self._entered is not None and not self._entered.has_started
        if number == self._epoch and epoch is self._holder and not is_interrupted:
            self._leave()

    def _leave(self) -> None:
        if self._epoch >= 0:
            with signals_deferred():
                self._send("leave", self._epoch)
                self._epoch, self._end, self._entered, self._holder = -1, None, None, None
                self._arrived.clear()

    def close(self, fails: bool = False) -> None:
        """Deregister; the connection ends when no batch views the server's memory any more."""
        if os.getpid() != self._owner or self._closed:
            return
        self._stay_no_longer()
        self._leave()
        # If an exception ends the process, the other ranks must notice.
        if not (fails or exit_code()):
            self._send("bye", 0)
        self._closed = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not any(remote.num_leased for remote in self._remote_arenas.values()):
            self._channel.close()
            _CONNECTED.discard(self)

    def _returned(
        self, arena: int, start: int, exits: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        # The garbage collector may call this in the middle of any operation here.
        self._dropped.append((arena, start))
        # At the end of the interpreter this module is empty; then the connection ends with the process.
        if not exits() and os.getpid() == self._owner:
            self._close_if_unused()

    def _send(self, kind: str, number: int, more: object = None) -> None:
        if os.getpid() != self._owner:
            return
        self._outbox.append(RankMessage(kind, number, (), more))
        # The thread that holds the lock sends what others append meanwhile, and looks once more after releasing it.
        with signals_deferred():
            while self._outbox and not self._channel.over and self._sending.acquire(blocking=False):
                try:
                    message = self._outbox.popleft()
                    dropped = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
                    self._channel.send(message._replace(dropped=dropped))
                except IndexError:
                    pass  # another has sent it
                except OSError:
                    self._channel.hang_up()  # the receiving call reports the reason
                finally:
                    self._sending.release()

    def _receive(self, kind: str, late: str | None = None) -> tuple[Any, ...]:
        """Return the next message of a kind; ``batch``: once a batch or the end is there, or the epoch was left.

        ``late`` says what the server has not done when the time is up; None: no time limit.
        """
        left_s = self._timeout_s
        while True:
            # What is taken from the channel is nowhere else until it is in its place.
            with signals_deferred():
                message = self._heard(kind)
            if message is not None:
                return message
            if late is not None and left_s <= 0:
                raise RuntimeError(
                    f"local rank 0 (process {self._channel.pid}) {late}, for which this rank has waited "
                    f"{self._timeout_s:.0f} s: with workers=SharedPool(...) all ranks must iterate as often, and none "
                    "may keep the others waiting for so long"
                )
            left_s -= waited_s(self._channel.sleep, LIVENESS_S)

    def _heard(self, kind: str) -> tuple[Any, ...] | None:
        """Return a message of a kind that has arrived; None if there is none."""
        while True:
            while (message := self._first()) is not None:
                self._channel.received.popleft()
                if message[0] in ("broken", "refused"):
                    self._epoch = -1
                    if message[0] == "broken":
                        self._broken = message[1]
                    raise RuntimeError(message[1])
                if message[0] == kind:
                    return message
            is_left = self._epoch in (-1, self._stopped)
            if kind == "batch" and (self._arrived or self._end or is_left):
                return "batch", self._epoch
            if self._channel.over:
                self._epoch = -1
                if self._broken is None:  # else the server may have ended since, for that reason
                    fault = self._channel.fault
                    how = (
                        _ENDED if fault is None else f"{_LOADS}, cannot be heard any more: {fault}"
                    )
                    self._broken = f"local rank 0 (process {self._channel.pid}), {how}"
                raise RuntimeError(self._broken)
            if not self._channel.wait(0):
                return None

    def _first(self) -> tuple[Any, ...] | None:
        """Return the first pending answer; handle messages about memory and batches, drop those of past epochs."""
        while self._channel.received and not self._channel.fault:
            message, descriptor = self._channel.received[0]
            match message:
                case ("arena", number, nbytes):
                    self._map_arena(number, descriptor, nbytes)
                case ("given back", places):
                    for arena, slot in places:
                        if self._holds(arena, slot):
                            self._given_back.add((arena, slot))
                case BatchMessage(_, number, arena, batch, portion):
                    if not self._holds(arena, batch):
                        pass
                    elif number == self._epoch:
                        remote = self._remote_arenas[arena]
                        self._arrived.append(remote.received(batch, portion))
                    else:
                        self._dropped.append((arena, batch.slot.start))
                case ("failed", number, why) if number == self._next_epoch:
                    self._next_epoch = number + 1
                    return "refused", f"local rank 0, {_LOADS}: {why}"
                case ("end" | "failed", number, *_):
                    if number == self._epoch:
                        self._end = message
                case ("open", number):
                    if number == self._next_epoch:  # else it answers a repeated request again
                        self._epoch, self._next_epoch = number, number + 1
                        for _ in range(PREFETCH_BATCHES):
                            self._send("next", number)
                        return "open", number
                case _:
                    first: tuple[Any, ...] = message
                    return first
            self._channel.received.popleft()
        return None

    def _map_arena(self, number: int, descriptor: int | None, nbytes: int) -> None:
        self._channel.received[0] = None, None  # its descriptor is taken
        try:
            if descriptor is None:
                raise ValueError("its descriptor is missing")
            segment = Segment.received(descriptor, nbytes)
        except (OSError, ValueError) as error:
            self._channel.give_up(f"the memory that it sent cannot be mapped: {error}")
            return
        self._remote_arenas[number] = RemoteArena(segment, partial(self._returned, number))

    def _holds(self, arena: int, place: BatchDescriptor | Slot) -> bool:
        """Whether a slot or descriptor lies in a known arena; if not, give the channel up."""
        remote = self._remote_arenas.get(arena)
        if remote is not None and remote.holds(place):
            return True
        self._channel.give_up("it named memory that it has not sent")
        return False


def _wish(epoch: Epoch) -> tuple[int, Completed | None]:
    """What an epoch must have in common with that of the server."""
    part = epoch.progress.part
    return epoch.number, None if part is None else part.before


class RemoteArena:
    """The mapped memory of another process's arena.

    ``returned`` gets the start of a slot when the last tensor of its batch is gone, in any thread at any time.
    """

    def __init__(self, segment: Segment, returned: Callable[[int], None]) -> None:
        self.segment = segment
        self._store = SharedStore(segment)
        self._returned = returned
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._loans = Loans(self._leases)

    @property
    def num_leased(self) -> int:
        """Slots whose batches are in use."""
        self._loans.settle()
        return len(self._leases)

    def holds(self, place: BatchDescriptor | Slot) -> bool:
        """Whether a slot, or a descriptor's slot with all its parts, lies in the memory."""
        slot = place.slot if isinstance(place, BatchDescriptor) else place
        parts = list[tuple[int, int]]()
        if isinstance(place, BatchDescriptor):
            texts = [(at, nbytes) for _, at, nbytes in place.texts]
            parts = [(place.layout, 0), place.result, *texts, (slot.start, place.nbytes)]
        inside = (slot.start <= at and at + nbytes <= slot.end for at, nbytes in parts if at)
        return 0 <= slot.start <= slot.end <= self.segment.nbytes and all(inside)

    def received(self, descriptor: BatchDescriptor, portion: object) -> BatchHandle:
        """Return a handle of the batch. When nothing views the slot any more, it is returned."""
        self._loans.settle()
        start, end = descriptor.slot
        lease = self.segment.array[start:end]
        self._leases[start] = weakref.ref(lease, partial(self._end, start))
        return BatchHandle.of(LeasedBatch(descriptor, lease, portion), self.segment, self._store)

    def _end(self, start: int, reference: weakref.ref[object]) -> None:
        self._leases.pop(start, None)
        self._returned(start)
