"""The ranks of a node, as the server knows them: their processes, requests, batches and leases."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minato._core import EVENT_COUNT_NBYTES, EventCount
from minato.batching.arena import Arena, Slot
from minato.engine.engine import Engine
from minato.sampling.progress import Completed
from minato.shared_pool.channel import BatchMessage, Channel, Hello, RankMessage
from minato.shared_pool.source import LeasedBatch

__all__ = [
    "DRAIN_BATCHES",
    "PREFETCH_BATCHES",
    "PoolEpoch",
    "RankSlot",
    "Ranks",
    "epoch_mismatch",
    "next_rank",
    "rejection_reason",
]


PREFETCH_BATCHES = 2
"""Batches that each rank requests ahead of use."""
DRAIN_BATCHES = 64
"""Batches sent without a request when the server exits, as far as the socket's buffer takes them."""


@dataclass(eq=False)
class PoolEpoch:
    """One epoch of all ranks.

    Attributes:
        engine: Yields the batches of all ranks.
        number: Number of the epoch in this pool, from 0.
        epoch: The server's epoch number, from ``set_epoch``.
        quota: Batches that each rank gets, including those before a resume.
        total: Batches that the engine yields.
        arena: Number of the engine's arena.
        latest: Returns the part of the epoch that the engine's last batch covers.
        resumed: Whether the epoch continues from a loaded state.
        fetched: Batches that the engine has yielded.
        exhausted: Whether the engine has ended the epoch.
        error: Why it cannot continue.
    """

    engine: Engine
    number: int
    epoch: int
    quota: int
    total: int
    arena: int
    latest: Callable[[], Any]
    resumed: bool = False
    fetched: int = 0
    exhausted: bool = False
    error: Exception | None = None


class RankSlot:
    """A rank in the current epoch.

    Attributes:
        channel: Channel to its process; None for the server itself, and for a rank that is not connected.
        state: ``away``: it has not begun the epoch; ``in``: it takes part; ``out``: it has left.
        wants: Number of requested batches that it has not received.
        dealt: Number of batches assigned to it in the epoch, including the inbox and those before a resume.
        asked_at: Sequence number of its last request.
        leases: Leases of the slots whose batches it holds, by arena and start.
        arenas: Numbers of the arenas that it has mapped.
        given_back: Slots whose pages were returned to the system, with their arena's number; not reported to it yet.
        entering: Number and epoch that it waits for, and the part done before a resume.
        gone: Why it has ended; None while it has not.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.channel: Channel | None = None
        self.state = "out"
        self.inbox: deque[LeasedBatch] = deque()
        self.wants = 0
        self.dealt = 0
        self.asked_at = 0
        self.leases: dict[tuple[int, int], Any] = {}
        self.arenas: set[int] = set()
        self.given_back: set[tuple[int, Slot]] = set()
        self.entering: tuple[int, int, Completed | None] | None = None
        self.gone: str | None = None

    @property
    def name(self) -> str:
        """Name for error messages."""
        process = "" if self.channel is None else f" (process {self.channel.pid})"
        return f"local rank {self.rank}{process}"

    def reset(self, dealt: int = 0) -> None:
        """Begin an epoch, of which the rank had ``dealt`` batches before a resume."""
        self.state = "away" if self.gone is None else "out"
        self.wants, self.dealt = 0, dealt

    def leave(self) -> None:
        """Leave the epoch."""
        self.state = "out"
        self.inbox.clear()

    def end(self, why: str) -> None:
        """Release all resources of the rank's process, which is gone."""
        self.leave()
        self.gone = self.gone or why
        self.channel = None
        self.arenas.clear()
        self.given_back.clear()
        self.entering = None
        self.leases.clear()

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

    Attributes:
        lock: Guards everything here.
        changed: Counts the changes.
        epoch: The epoch that is open; None between two.
        arenas: Arenas of all engines so far; messages name them by their position.
        done_before: Batches that each rank had before a resume.
        broken: Why no rank can continue; None: they can.
        closing: Whether the server ends with this epoch.
        draining: Whether clients get more than they request, so that the server can end.
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
        self.epoch: PoolEpoch | None = None
        self.num_epochs = 0
        self.arenas: list[Arena] = []
        self.done_before = [0] * count
        self.broken: str | None = None
        self.closing = False
        self.draining = False

    @property
    def own(self) -> RankSlot:
        """The server's own rank."""
        return self.slots[0]

    def missing(self) -> list[str]:
        """Return the names of ranks that have ended and wait for a replacement."""
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
            slot.reset(done if epoch.resumed else 0)
        self.own.state, self.own.wants = "in", PREFETCH_BATCHES
        for slot in self.slots[1:]:
            self._let_in(slot)
        self.changed.notify()

    def end(self) -> None:
        """Close the epoch."""
        if self.epoch is not None:
            self.epoch.error = None  # its traceback holds the epoch
        self.epoch = None
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
                slot.wants += DRAIN_BATCHES
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
            leased = slot.inbox.popleft()
            slot.wants -= 1
            descriptor = leased.descriptor
            slot.leases[this.arena, descriptor.slot.start] = leased.lease
            message = BatchMessage("batch", this.number, this.arena, descriptor, leased.portion)
            _send(slot.channel, message)
        if slot.inbox or not slot.wants:
            return
        if slot.dealt == this.quota:
            _send(slot.channel, ("end", this.number))
            slot.leave()
        elif this.error is not None:
            why = f"{type(this.error).__name__}: {this.error}"
            _send(slot.channel, ("failed", this.number, why))
            slot.leave()

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
            unexpected = slot.gone is None
            how = "has ended" if channel.fault is None else f"was given up ({channel.fault})"
            slot.end(f"{slot.name} {how}")
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
        is_awaited = self.epoch is not None and slot.state == "away"
        _send(channel, ("welcome", self.num_epochs - is_awaited))

    def _let_in(self, slot: RankSlot) -> None:
        """Let a client join the epoch that it waits for, if that is open."""
        if slot.entering is None:
            return
        number, epoch, before = slot.entering
        this = self.epoch
        if self.broken is not None:
            _send(slot.channel, ("broken", self.broken))
        elif this is not None and this.number == number:
            slot.entering = None
            why = epoch_mismatch(slot.name, epoch, before is not None, this.epoch, this.resumed)
            if this.error is not None and this.exhausted:  # it cannot begin
                slot.leave()
                text = f"{type(this.error).__name__}: {this.error}"
                _send(slot.channel, ("failed", number, text))
            elif why is None:
                slot.state = "in"
                slot.wants = DRAIN_BATCHES if self.draining else 0
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


def next_rank(rank_slots: list[RankSlot], this: PoolEpoch, in_turn: bool) -> RankSlot:
    """Return the rank that gets the next batch: with ``in_turn``, batch k of the epoch is for rank k mod n.

    Otherwise it is for the rank that has waited longest and has not had its quota; if no rank waits, for any below it.
    """
    if in_turn:
        return min(rank_slots, key=lambda slot: (slot.dealt, slot.rank))
    due = [slot for slot in rank_slots if slot.dealt < this.quota]
    places = {"in": 0, "away": 1, "out": 2}

    def rank(slot: RankSlot) -> tuple[object, ...]:
        return places[slot.state], len(slot.inbox), not slot.wants, slot.asked_at

    return min(due, key=rank)


def epoch_mismatch(
    name: str, epoch: int, resumed: bool, server_epoch: int, server_resumed: bool
) -> str | None:
    """Return why a rank cannot join the server's epoch, which either may resume from a loaded state; None if it can."""
    if (epoch, resumed) == (server_epoch, server_resumed):
        return None
    if not (resumed or server_resumed):
        return (
            f"this is epoch {epoch} here and {server_epoch} for local rank 0: with workers=SharedPool(...) call "
            "set_epoch() alike in all ranks"
        )
    where = {True: "in the middle, by the state that it has loaded", False: "at the beginning"}
    return (
        f"{name} begins epoch {epoch} {where[resumed]}, and local rank 0 begins epoch {server_epoch} "
        f"{where[server_resumed]}: with workers=SharedPool(...) load in each rank the state that it saved "
        "at the same step"
    )


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
