"""The ranks of a node, as the server knows them: their processes, requests, batches and leases."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minato._core import EVENT_COUNT_NBYTES, EventCount
from minato.batching.arena import Arena, Slot
from minato.engine.engine import Engine
from minato.sampling.progress import Completed
from minato.shared_pool.channel import (
    BatchMessage,
    Channel,
    Hello,
    RankMessage,
    has_ended,
    meet,
)
from minato.shared_pool.source import LeasedBatch

PREFETCH_BATCHES = 2  # batches that each rank requests ahead of use
_DRAIN_BATCHES = 64
"""Batches sent without a request when the server exits, as far as the socket's buffer takes them."""


@dataclass(eq=False)
class PoolEpoch:
    """One epoch of all ranks, whose batches an engine yields."""

    engine: Engine
    number: int  # in this pool, from 0
    epoch: int  # the server's, from set_epoch()
    quota: int  # batches of each rank, with those before a resume
    total: int  # batches that the engine yields
    arena: int  # number of the engine's
    latest: Callable[[], Any]  # the part of the epoch that the engine's last batch covers
    resumed: bool = False
    fetched: int = 0  # batches that the engine has yielded
    exhausted: bool = False  # the engine has ended the epoch
    error: Exception | None = None  # why it cannot go on


@dataclass(eq=False)
class RankSlot:
    """A rank in the current epoch."""

    rank: int
    channel: Channel | None = None  # None: the server itself, or a rank that is not connected
    # "away": it has not begun the epoch; "in": it takes part; "out": it has left.
    state: str = "out"
    inbox: deque[LeasedBatch] = field(default_factory=deque)
    wants: int = 0  # requested batches that it has not received
    dealt: int = 0  # batches of the epoch for it, with the inbox and those before a resume
    asked_at: int = 0  # sequence number of its last request
    leases: dict[tuple[int, int], Any] = field(default_factory=dict)  # by arena and start of a slot
    arenas: set[int] = field(default_factory=set)  # numbers of those that it has mapped
    # Slots whose pages were returned to the system, which it has not heard of yet.
    given_back: set[tuple[int, Slot]] = field(default_factory=set)
    # Number and epoch that it waits for, and the part done before a resume.
    entering: tuple[int, int, Completed | None] | None = None
    gone: str | None = None  # why it has ended

    @property
    def name(self) -> str:
        """Its name in messages."""
        process = "" if self.channel is None else f" (process {self.channel.pid})"
        return f"local rank {self.rank}{process}"

    def leave(self) -> None:
        """Leave the epoch."""
        self.state = "out"
        self.inbox.clear()

    def end(self, why: str, waits: bool) -> None:
        """Release all that the rank's process had, which is gone.

        If ``waits``, another process begins in its place the epoch that it has not begun.
        """
        if not waits or self.state == "in":
            self.leave()
        self.gone = self.gone or why
        self.channel = self.entering = None
        for held in (self.arenas, self.given_back, self.leases):
            held.clear()

    def mismatch(self, epoch: int, resumed: bool) -> str | None:
        """Why it cannot enter the server's epoch, which either may resume from a loaded state; None if it can."""
        assert self.entering is not None
        _, own, before = self.entering
        if (own, before is not None) == (epoch, resumed):
            return None
        if before is None and not resumed:
            return (
                f"this is epoch {own} here and {epoch} for local rank 0: with workers=SharedPool(...) call set_epoch() "
                "alike in all ranks"
            )
        where = {True: "in the middle, by the state that it has loaded", False: "at the beginning"}
        return (
            f"{self.name} begins epoch {own} {where[before is not None]}, and local rank 0 begins epoch {epoch} "
            f"{where[resumed]}: with workers=SharedPool(...) load in each rank the state that it saved at the same step"
        )

    def needs_batch(self, quota: int) -> bool:
        """Whether it has requested a batch that must be fetched."""
        return self.state == "in" and self.wants > 0 and self.dealt < quota

    def can_be_sent(self, quota: int) -> bool:
        """Whether a client has an available message, and its socket has space for it."""
        if self.state != "in" or not self.wants or self.channel is None:
            return False
        return (bool(self.inbox) or self.dealt == quota) and self.channel.has_room


class Ranks:
    """The ranks of a node: lets their processes in, hears their requests, and sends their batches.

    The threads of the channels call ``hear`` and ``forget``, with which clients come and go. All other methods need
    ``lock`` to be held.

    Args:
        me: Rank and settings of the server's own process, local rank 0; the clients' settings must be equal.
        on_rank_death: See :class:`minato.SharedPool`.
    """

    def __init__(self, me: Hello, count: int, on_rank_death: str) -> None:
        self._me = me
        self._raises = on_rank_death == "raise"
        self._waits = on_rank_death == "wait"
        self._turns = itertools.count()
        # Re-entrant: the garbage collector may drop a source in the middle of anything.
        self.lock = threading.RLock()
        # No Condition: its own code may keep a lock where the handler of a signal raises.
        self.changed = EventCount(np.zeros(EVENT_COUNT_NBYTES, np.uint8), 0)
        self.slots = [RankSlot(rank) for rank in range(count)]
        self.own = self.slots[0]  # the server's
        self.epoch: PoolEpoch | None = None  # that is open
        self.num_epochs = 0
        self.arenas: list[Arena] = []  # messages name them by their position
        self.done_before = [0] * count  # batches of each rank before a resume
        self.broken: str | None = None  # why no rank can go on
        self.closing = False  # the server ends with this epoch
        self.draining = False  # clients get more than they request, so that the server can end

    def missing(self) -> list[str]:
        """The names of ranks that have ended and wait for a replacement."""
        return [slot.name for slot in self.slots if slot.gone is not None and self._waits]

    def check_alive(self) -> None:
        """Raise RuntimeError if the ranks cannot continue, as one has ended."""
        gone = [slot.gone for slot in self.slots if slot.gone is not None]
        if self.broken is not None or (gone and self._raises):
            raise RuntimeError(self.broken or gone[0])

    def arena_number(self, arena: Arena) -> int:
        """Return the number of an arena, which is new or known."""
        if arena not in self.arenas:
            self.own.arenas.add(len(self.arenas))
            self.arenas.append(arena)
            arena.given_back = []
        return self.arenas.index(arena)

    def begin(self, epoch: PoolEpoch) -> None:
        """Open an epoch for all ranks, and let those in that wait for it."""
        self.epoch = epoch
        self.num_epochs += 1
        for slot, done in zip(self.slots, self.done_before, strict=True):
            slot.state = "away" if slot.gone is None or self._waits else "out"
            slot.wants, slot.dealt = 0, done if epoch.resumed else 0
        self.own.state, self.own.wants = "in", PREFETCH_BATCHES
        for slot in self.slots[1:]:
            self._let_in(slot)
        self.changed.notify()

    def request(self, slot: RankSlot) -> None:
        """Record that a rank asks for one more batch."""
        slot.wants += 1
        slot.asked_at = next(self._turns)
        self.changed.notify()

    def leave(self, number: int) -> None:
        """Have the server's own rank leave an epoch; the other ranks continue."""
        if self.epoch is not None and self.epoch.number == number:
            self.own.leave()
            self.changed.notify()

    def close(self) -> None:
        """End with this epoch; if the server's rank has had its part, send the others theirs ahead of use."""
        self.closing = True
        self.own.leave()
        self.draining = self.epoch is not None and self.own.dealt == self.epoch.quota
        for slot in self.slots[1:]:
            if self.draining and slot.state == "in":
                slot.wants += _DRAIN_BATCHES
        self.changed.notify()

    def break_off(self, why: str) -> None:
        """End the epoch in all ranks with an error."""
        self.broken = why
        for slot in self.slots:
            _send(slot.channel, ("broken", why))
            slot.leave()
        self.changed.notify()

    def serve(self, slot: RankSlot) -> None:
        """Send a client its requested batches, as far as they are available."""
        this = self.epoch
        if this is None or slot.channel is None or slot.state != "in":
            return
        while slot.wants and slot.inbox and slot.channel.has_room:  # sending never waits
            if this.arena not in slot.arenas:
                slot.arenas.add(this.arena)
                segment = self.arenas[this.arena].segment
                _send(slot.channel, ("arena", this.arena, segment.nbytes), segment.descriptor)
            if slot.given_back:  # before the slot can hold a new batch
                _send(slot.channel, ("given back", tuple(slot.given_back)))
                slot.given_back.clear()
            descriptor, lease, portion = slot.inbox.popleft()
            slot.wants -= 1
            slot.leases[this.arena, descriptor.slot.start] = lease
            message = BatchMessage("batch", this.number, this.arena, descriptor, portion)
            _send(slot.channel, message)
        if slot.inbox or not slot.wants:
            return
        if slot.dealt == this.quota:
            _send(slot.channel, ("end", this.number))
            slot.leave()
        elif this.error is not None:
            _fail(slot, this)

    def hear(self, channel: Channel, message: RankMessage) -> None:
        """Act on a message of a client; ValueError: a rank says hello twice."""
        with self.lock:
            slot = self._slot_of(channel)
            if message.kind == "hello":
                if slot is not None:
                    raise ValueError("a rank that is connected asks for another rank slot")
                self._welcome(channel, message.more)
            if slot is None:
                return
            for place in message.dropped:
                slot.leases.pop(place, None)
            here = self.epoch is not None and self.epoch.number == message.number
            if message.kind == "enter":
                slot.entering = message.number, *message.more
                self._let_in(slot)
            elif message.kind == "next" and here and slot.state == "in":
                self.request(slot)
                self.serve(slot)
            elif message.kind == "leave" and here:
                slot.leave()
            elif message.kind == "bye":
                slot.gone = f"{slot.name} has ended its use of this loader"
                slot.leave()
            self.changed.notify()

    def forget(self, channel: Channel) -> None:
        """Act on the end of a client."""
        with self.lock:
            slot = self._slot_of(channel)
            if slot is None:
                return
            how = "has ended" if channel.fault is None else f"was given up ({channel.fault})"
            self._lose(slot, f"{slot.name} {how}")

    def miss(self) -> None:
        """Act on the end of processes that other loaders have met, and this one has not."""
        for slot in self.slots[1:]:
            if slot.channel is None and slot.gone is None and has_ended(slot.rank):
                self._lose(slot, f"{slot.name} has ended")

    def _lose(self, slot: RankSlot, why: str) -> None:
        unexpected = slot.gone is None
        slot.end(why, self._waits)
        if unexpected and self._raises and not self.closing:
            self.break_off(
                f"{slot.gone}, which shares the workers of this loader: the others cannot go on "
                "(SharedPool('continue') lets them)"
            )
        self.changed.notify()

    def _slot_of(self, channel: Channel) -> RankSlot | None:
        return next((slot for slot in self.slots if slot.channel is channel), None)

    def _welcome(self, channel: Channel, who: Hello) -> None:
        why = rejection_reason(self.slots, self._me, who, self._waits)
        if why is not None:
            _send(channel, ("refused", why))
            return
        slot = self.slots[who.local_rank]
        slot.channel, slot.gone = channel, None
        meet(slot.rank, channel.pid)
        is_awaited = self.epoch is not None and slot.state == "away"
        _send(channel, ("welcome", self.num_epochs - is_awaited))

    def _let_in(self, slot: RankSlot) -> None:
        """Let a client join the epoch that it waits for, if that is open."""
        if slot.entering is None:
            return
        number, this = slot.entering[0], self.epoch
        if self.broken is not None:
            _send(slot.channel, ("broken", self.broken))
        elif this is not None and this.number == number:
            why, slot.entering = slot.mismatch(this.epoch, this.resumed), None
            if this.error is not None and this.exhausted:  # it cannot begin
                _fail(slot, this)
            elif why is None:
                slot.state = "in"
                slot.wants = _DRAIN_BATCHES if self.draining else 0
                _send(slot.channel, ("open", number))
            else:
                _send(slot.channel, ("refused", why))


def _send(
    channel: Channel | None, message: tuple[object, ...], descriptor: int | None = None
) -> None:
    if channel is not None:
        try:
            channel.send(message, descriptor)
        except OSError:
            channel.hang_up()  # its thread finds that it is over


def _fail(slot: RankSlot, this: PoolEpoch) -> None:
    why = f"{type(this.error).__name__}: {this.error}"
    _send(slot.channel, ("failed", this.number, why))
    slot.leave()


def next_rank(rank_slots: list[RankSlot], this: PoolEpoch, in_turn: bool) -> RankSlot:
    """Return the rank that gets the next batch: with ``in_turn``, batch k of the epoch is for rank k mod n.

    Otherwise it is for the rank that has waited longest and has not had its quota; if no rank waits, for any below it.
    """
    if in_turn:
        return min(rank_slots, key=lambda slot: (slot.dealt, slot.rank))

    def place(slot: RankSlot) -> tuple[object, ...]:
        state = ("in", "away", "out").index(slot.state)
        return state, len(slot.inbox), not slot.wants, slot.asked_at

    return min((slot for slot in rank_slots if slot.dealt < this.quota), key=place)


def rejection_reason(
    rank_slots: list[RankSlot], server: Hello, client: Hello, waits: bool
) -> str | None:
    """Return why a connecting rank is rejected, or None; if ``waits``, it may replace one that has ended."""
    theirs, ours, number = client.loader, server.loader, client.local_rank
    if theirs != ours:
        differ = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        here = ", ".join(f"{name}={theirs.get(name, 'unknown')}" for name in differ)
        there = ", ".join(f"{name}={ours.get(name, 'unknown')}" for name in differ)
        return (
            f"this loader is not the one that local rank 0 has in its place: here it has {here}, and there {there}. "
            "Make all loaders with workers=SharedPool(...) in the same sequence, and alike, in all ranks"
        )
    slot = rank_slots[number] if 0 < number < len(rank_slots) else None
    if slot is None or slot.channel is not None or client.rank != server.rank + number:
        return (
            f"LOCAL_RANK={client.local_rank} with RANK={client.rank} is taken, or not possible where local rank 0 has "
            f"RANK={server.rank} and there are {len(rank_slots)} ranks: start the ranks of a node by torchrun"
        )
    if slot.gone is not None and not waits:
        return (
            f"{slot.gone}, and the other ranks continue without it: SharedPool('wait') lets "
            "another process take its place"
        )
    return None
