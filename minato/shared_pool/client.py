"""One pool of workers for all ranks of a node: the ranks that do not host it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from functools import partial
from typing import Any

from minato._core.segment import Segment
from minato.batching.arena import Slot
from minato.shared_pool.channel import Channel, connected
from minato.shared_pool.descriptors import BatchDescriptor, BatchHandle, RemoteArena
from minato.shared_pool.messages import Hello, RankProgress, from_host
from minato.shared_pool.rank_slot import PREFETCH_BATCHES
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.server import RANK_TIMEOUT_S

__all__ = ["PoolClient"]

_LIVENESS_S = 1.0
_LOADS = "which loads for all ranks of this node"
_ENDED = f"{_LOADS}, has ended or dropped this loader"
_CONNECTED: set[PoolClient] = set()
"""All that are connected: whoever holds a batch needs the connection, though the loader be gone."""


class PoolClient:
    """A rank's connection to the host of its node.

    Args:
        rendezvous: Where the host is found.
        me: Who this is.
        timeout_s: How long to wait until it is there, and until it begins a pass.

    Raises:
        RuntimeError: It is not there in time, has another loader in this place, or has ended.
        PermissionError: Another user has its place, or somebody who does not know its key.
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
        self._epoch = -1  # no pass
        self._closed = False
        self._broken: str | None = None  # why the pool cannot go on, if the host has said so
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

    def enter(self, epoch: int, before: RankProgress | None = None) -> int:
        """Begin the next pass, as soon as the host does; returns its number.

        Args:
            before: What this rank has had of the pass that is resumed; None: it begins at the beginning.

        Raises:
            RuntimeError: The host, or another rank, has ended, or the host does not come, or is in another epoch. The
                next call is for the same pass.
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
        """The next batch, which views the host's memory.

        Raises:
            StopIteration: The pass is over.
            RuntimeError: The host, or another rank, has ended, or the host's engine cannot go on.
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
        """Whether a batch is there."""
        with self._lock:
            self._channel.wait(0)
            first = self._first()
            return number == self._epoch and first is not None and first[0] == "batch"

    def given_back(self) -> list[tuple[Segment, Slot]]:
        """Slots whose pages the host has given back since this was last asked."""
        slots, self._given_back = self._given_back, set()
        return [(self._remote_arenas[arena].segment, slot) for arena, slot in slots]

    def leave(self, number: int) -> None:
        """Be through with a pass."""
        if number >= 0 and number == self._epoch:
            self._epoch = -1
            self._send("leave", number)

    def close(self) -> None:
        """Take leave for ever; the connection ends when no batch is left that views the host's memory."""
        if os.getpid() != self._owner or self._closed:
            return
        self.leave(self._epoch)
        if not hasattr(sys, "last_value"):  # an exception ends the process: the others shall know
            self._send("bye", 0)
        self._closed = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and not any(remote.num_leased for remote in self._remote_arenas.values()):
            self._channel.close()
            _CONNECTED.discard(self)

    def _returned(self, arena: int, start: int) -> None:
        # By the garbage collector, which may come by in the middle of anything here.
        self._dropped.append((arena, start))
        if os.getpid() == self._owner:
            self._close_if_unused()

    def _send(self, kind: str, number: int, more: Any = None) -> None:
        if os.getpid() != self._owner:
            return
        self._outbox.append((kind, number, more))
        if self._sending or self._channel.over:
            return  # in the middle of a message, which sends this one next
        self._sending = True
        try:
            while self._outbox:
                kind, number, more = self._outbox.popleft()
                dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self._channel.send((kind, number, dropped, more))
        except OSError:
            self._channel.hang_up()  # whoever receives finds why
        finally:
            self._sending = False

    def _receive(self, *kinds: str, late: str | None = None) -> tuple[Any, ...]:
        """The next message of these kinds.

        Args:
            late: What the host has not done, if it lives and they do not come in time; None: they may take any time.
        """
        deadline = time.monotonic() + self._timeout_s
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
                if self._broken is not None:  # the host may since have ended, for the same reason
                    raise RuntimeError(self._broken)
                fault = self._channel.fault
                how = _ENDED if fault is None else f"{_LOADS}, cannot be heard any more: {fault}"
                raise RuntimeError(f"local rank 0 (process {self._channel.pid}), {how}")
            if late is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    f"local rank 0 (process {self._channel.pid}) {late}, for which this rank has waited "
                    f"{self._timeout_s:.0f} s: with shared_pool=True all ranks must iterate as often, and none may "
                    "keep the others waiting for so long"
                )
            self._channel.wait(_LIVENESS_S)

    def _first(self) -> tuple[Any, ...] | None:
        """The first message for whoever asks; what is about memory is seen to, what belongs to past passes let go."""
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
                    pass  # the second answer to whoever asked twice
                case _:
                    first: tuple[Any, ...] = message
                    return first
            self._channel.received.popleft()
        return None

    def _map_arena(self, number: int, descriptor: int | None, nbytes: int) -> None:
        """Map an arena that the host has sent."""
        self._channel.received[0] = None, None  # its descriptor is taken
        try:
            if descriptor is None:
                raise ValueError("its descriptor is missing")
            segment = Segment.received(descriptor, nbytes)
        except (OSError, ValueError) as error:
            self._channel.give_up(f"the memory that it sent cannot be mapped: {error}")
            return
        self._remote_arenas[number] = RemoteArena(segment, partial(self._returned, number))

    def _holds(self, arena: int, what: BatchDescriptor | Slot) -> bool:
        """Whether something lies in an arena that is known; if not, the host is not listened to any more."""
        remote = self._remote_arenas.get(arena)
        if remote is not None and remote.holds(what):
            return True
        self._channel.give_up("it named memory that it has not sent")
        return False
