"""The client of a shared pool: a rank that receives batches from local rank 0."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.scheduling.waiting import waited_s
from minato.shared_pool.channel import Channel, connected
from minato.shared_pool.descriptors import BatchDescriptor, BatchHandle, RemoteArena
from minato.shared_pool.messages import Hello, RankCompleted, from_host
from minato.shared_pool.rank_slot import PREFETCH_BATCHES
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.server import RANK_TIMEOUT_S

__all__ = ["PoolClient"]

_LIVENESS_S = 1.0
_LOADS = "which loads for all ranks of this node"
_ENDED = f"{_LOADS}, has ended or dropped this loader"
_CONNECTED: set[PoolClient] = set()
"""All connected clients: a batch needs its client, even after the loader is gone."""


class PoolClient:
    """A rank's connection to the server of its node.

    Args:
        rendezvous: Where the server listens.
        me: Rank and settings of this process.
        timeout_s: Time limit for the server to listen, and to begin an epoch.

    Raises:
        RuntimeError: The server does not listen in time, has another loader under this number, or has ended.
        PermissionError: The listening process belongs to another user, or does not know the key.
    """

    def __init__(
        self, rendezvous: Rendezvous, me: Hello, timeout_s: float = RANK_TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._dropped: deque[tuple[int, int]] = deque()
        self._outbox: deque[tuple[str, int, Any]] = deque()
        self._sending = False
        self._remote_arenas: dict[int, RemoteArena] = {}
        self._given_back: set[tuple[int, Slot]] = set()
        self._next_epoch = 0
        self._epoch = -1  # no epoch
        self._closed = False
        self._broken: str | None = None  # why the pool cannot continue, as the server has reported
        try:
            self._channel: Channel = connected(rendezvous, timeout_s, from_host)
        except TimeoutError as error:
            raise RuntimeError(str(error)) from None
        except ConnectionError:
            raise RuntimeError(f"local rank 0, {_ENDED}, or refuses this process") from None
        _CONNECTED.add(self)
        self._send("hello", 0, me)
        try:
            late = "has not given this rank its place in the pool of this loader"
            _, self._next_epoch = self._receive("welcome", late=late)
        except BaseException:
            self.close()
            raise

    def enter(self, epoch: int, before: RankCompleted | None = None) -> int:
        """Begin the next epoch as soon as the server does, and return its number.

        Args:
            before: The part of a resumed epoch that this rank has done; None: the epoch is not resumed.

        Raises:
            RuntimeError: The server or another rank has ended, or the server does not begin the epoch, or begins
                another one. The next call is for the same epoch.
        """
        with self._lock:
            self.leave(self._epoch)
            number = self._next_epoch
            self._send("enter", number, (epoch, before))
            self._receive("open", late="has not begun the next epoch of this loader")
            self._epoch, self._next_epoch = number, number + 1
            for _ in range(PREFETCH_BATCHES):
                self._send("next", number)
            return number

    def next(self, number: int) -> BatchHandle:
        """Return the next batch, which views the server's memory.

        Raises:
            StopIteration: The epoch is over.
            RuntimeError: The server or another rank has ended, or the server's engine cannot continue.
        """
        with self._lock:
            if number != self._epoch:
                raise StopIteration
            match self._receive("batch", "end", "failed"):
                case ("batch", _, arena, batch_descriptor, portion):
                    self._send("next", number)
                    return self._remote_arenas[arena].received(batch_descriptor, portion)
                case ("failed", _, why):
                    self._epoch = -1
                    raise RuntimeError(f"local rank 0, {_LOADS}: {why}")
            self._epoch = -1
            raise StopIteration

    def has_next(self, number: int) -> bool:
        """Whether a batch is available."""
        with self._lock:
            self._channel.wait(0)
            first = self._first()
            return number == self._epoch and first is not None and first[0] == "batch"

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Return slots whose pages the server has returned to the system since the last call."""
        slots, self._given_back = self._given_back, set()
        return [(self._remote_arenas[arena].segment, slot) for arena, slot in slots]

    def leave(self, number: int) -> None:
        """Leave an epoch."""
        if number >= 0 and number == self._epoch:
            self._epoch = -1
            self._send("leave", number)

    def close(self) -> None:
        """Deregister; the connection ends when no batch views the server's memory any more."""
        if os.getpid() != self._owner or self._closed:
            return
        self.leave(self._epoch)
        if not hasattr(
            sys, "last_value"
        ):  # an exception ends the process: the other ranks must notice
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
        self._outbox.append((kind, number, more))
        if self._sending or self._channel.over:
            return  # the call that is sending a message sends this one next
        self._sending = True
        try:
            while self._outbox:
                kind, number, more = self._outbox.popleft()
                dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self._channel.send((kind, number, dropped, more))
        except OSError:
            self._channel.hang_up()  # the receiving call reports the reason
        finally:
            self._sending = False

    def _receive(self, *kinds: str, late: str | None = None) -> tuple[Any, ...]:
        """Return the next message of these kinds.

        Args:
            late: The overdue action of the server, for the error after a timeout; None: no time limit.
        """
        left_s = self._timeout_s
        while True:
            while (message := self._first()) is not None:
                self._channel.received.popleft()
                if message[0] in ("broken", "refused"):
                    self._epoch = -1
                    if message[0] == "broken":
                        self._broken = message[1]
                    raise RuntimeError(message[1])
                if message[0] in kinds:
                    return message
            if self._channel.over:
                self._epoch = -1
                if self._broken is not None:  # the server may have ended since, for the same reason
                    raise RuntimeError(self._broken)
                fault = self._channel.fault
                how = _ENDED if fault is None else f"{_LOADS}, cannot be heard any more: {fault}"
                raise RuntimeError(f"local rank 0 (process {self._channel.pid}), {how}")
            if late is not None and left_s <= 0:
                raise RuntimeError(
                    f"local rank 0 (process {self._channel.pid}) {late}, for which this rank has waited "
                    f"{self._timeout_s:.0f} s: with shared_pool=True all ranks must iterate as often, and none may "
                    "keep the others waiting for so long"
                )
            left_s -= waited_s(self._channel.wait, _LIVENESS_S)

    def _first(self) -> tuple[Any, ...] | None:
        """Return the first pending message; handle those about memory, and drop those of past epochs."""
        while self._channel.received and not self._channel.fault:
            message, descriptor = self._channel.received[0]
            match message:
                case ("arena", number, nbytes):
                    self._map_arena(number, descriptor, nbytes)
                case ("given back", places):
                    for arena, slot in places:
                        if self._holds(arena, slot):
                            self._given_back.add((arena, slot))
                case ("batch", _, arena, BatchDescriptor() as batch_descriptor, _) if (
                    not self._holds(arena, batch_descriptor)
                ):
                    pass
                case ("batch", number, arena, BatchDescriptor(slot=slot), _) if (
                    number != self._epoch
                ):
                    self._dropped.append((arena, slot.start))
                case ("end" | "failed", number, *_) if number != self._epoch:
                    pass
                case ("open", number) if number != self._next_epoch:
                    pass  # the second answer to a repeated request
                case _:
                    first: tuple[Any, ...] = message
                    return first
            self._channel.received.popleft()
        return None

    def _map_arena(self, number: int, descriptor: int | None, nbytes: int) -> None:
        """Map an arena that the server has sent."""
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
