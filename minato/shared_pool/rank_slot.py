"""The ranks of a node at the host of their pool: what each has coming to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from minato.batching.arena import Arena, Slot
from minato.shared_pool.channel import Channel
from minato.shared_pool.descriptors import LeasedBatch
from minato.shared_pool.messages import Hello, RankProgress

__all__ = [
    "DRAIN_BATCHES",
    "PREFETCH_BATCHES",
    "PoolEpoch",
    "RankSlot",
    "Source",
    "epoch_mismatch",
    "next_rank",
    "rejection_reason",
]


PREFETCH_BATCHES = 2
"""Batches that each rank has asked for before it needs them, so that they are there when it does."""
DRAIN_BATCHES = 64
"""So many more are sent unasked when the host takes leave, as far as the socket has room for them."""


class Source(Protocol):
    """What the host's engine is asked for."""

    arena: Arena

    def next(self) -> Any:
        """The next batch, packed."""

    def cancel(self) -> None:
        """Abandon what is in flight."""


class PoolEpoch:
    """One pass of all ranks.

    Args:
        number: Of the pass, from 0.
        epoch: As the host numbers it.
        quota: Batches that each rank gets, in earlier runs and this one.
        rank_slots: Number of ranks.
        arena: Number of the engine's arena.
        latest: Tells what was in the batch that the engine gave last.
        done: Batches that all ranks together had of it in earlier runs; None: it begins at the beginning.

    Attributes:
        fetched: Batches that the engine has given.
        exhausted: Whether it has ended the pass.
        error: Why it cannot go on.
    """

    def __init__(
        self,
        source: Source,
        number: int,
        epoch: int,
        quota: int,
        rank_slots: int,
        arena: int,
        latest: Callable[[], Any],
        done: int | None = None,
    ) -> None:
        self.source = source
        self.number = number
        self.epoch = epoch
        self.quota = quota
        self.latest = latest
        self.resumed = done is not None
        self.total = quota * rank_slots - (done or 0)
        self.arena = arena
        self.fetched = 0
        self.exhausted = False
        self.error: Exception | None = None


class RankSlot:
    """A rank's place in the present pass.

    Attributes:
        rank: Its local rank.
        channel: To its process; None for the host itself, and for one that is not connected.
        state: ``away``: it has not begun the pass; ``in``; or ``out``: it is through with it.
        inbox: Batches for it.
        wants: How many more it has asked for.
        dealt: How many it was given of the pass, those in the inbox and those of earlier runs included.
        turn: When it asked.
        leases: What keeps the slots of batches that it holds, by arena and start.
        arenas: Numbers of the arenas whose memory it has.
        given_back: Slots there whose pages were given back, by the number of their arena, of which it is still to be
            told.
        entering: Number and epoch of the pass that it waits for, and what it had of that in earlier runs.
        gone: Why it will not come again.
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
        self.entering: tuple[int, int, RankProgress | None] | None = None
        self.gone: str | None = None

    @property
    def name(self) -> str:
        """For messages."""
        process = "" if self.channel is None else f" (process {self.channel.pid})"
        return f"local rank {self.rank}{process}"

    def reset(self, dealt: int = 0) -> None:
        """Begin a pass, of which it had so many batches in earlier runs."""
        self.state = "away" if self.gone is None else "out"
        self.wants, self.dealt = 0, dealt

    def leave(self) -> None:
        """Be through with it."""
        self.state = "out"
        self.inbox.clear()

    def end(self, why: str) -> None:
        """Take back all that its process had: it is gone."""
        self.leave()
        self.gone = self.gone or why
        self.channel = None
        self.arenas.clear()
        self.given_back.clear()
        self.entering = None
        self.leases.clear()

    def needs_batch(self, quota: int) -> bool:
        """Whether it waits for a batch to be fetched."""
        return self.state == "in" and self.wants > 0 and self.dealt < quota

    def can_be_sent(self, quota: int) -> bool:
        """Whether another rank than the host is to be sent what is there already, and its socket has room."""
        if self.state != "in" or not self.wants or self.channel is None:
            return False
        return (bool(self.inbox) or self.dealt == quota) and self.channel.has_room


def next_rank(rank_slots: list[RankSlot], this: PoolEpoch, in_turn: bool) -> RankSlot:
    """Whom the next batch of a pass is for.

    Args:
        in_turn: Batch k of the whole pass is rank k mod n's. Otherwise it is for whoever has waited longest, as long as
            each gets as many in the end; if nobody waits, for any that is due one.
    """
    if in_turn:
        return min(rank_slots, key=lambda slot: (slot.dealt, slot.rank))
    due = [slot for slot in rank_slots if slot.dealt < this.quota]
    places = {"in": 0, "away": 1, "out": 2}
    return min(
        due,
        key=lambda slot: (
            places[slot.state],
            len(slot.inbox),
            not slot.wants,
            slot.asked_at,
        ),
    )


def epoch_mismatch(
    name: str, epoch: int, resumed: bool, host_epoch: int, host_resumed: bool
) -> str | None:
    """Why a rank cannot take part in a pass with the host; None if it can.

    Args:
        resumed, host_resumed: Whether they begin in the middle, each by the state that it has loaded.
    """
    if (epoch, resumed) == (host_epoch, host_resumed):
        return None
    if not (resumed or host_resumed):
        return (
            f"this is epoch {epoch} here and {host_epoch} for local rank 0: with shared_pool=True call set_epoch() "
            "alike in all ranks"
        )
    where = {True: "in the middle, by the state that it has loaded", False: "at the beginning"}
    return (
        f"{name} begins epoch {epoch} {where[resumed]}, and local rank 0 begins epoch {host_epoch} "
        f"{where[host_resumed]}: with shared_pool=True load in each rank the state that it saved, all at the same step"
    )


def rejection_reason(
    rank_slots: list[RankSlot], host: Hello, who: Hello, waits: bool
) -> str | None:
    """Why a rank that has come gets no rank slot; None if it does.

    Args:
        waits: Whether the place of a rank that has ended is free.
    """
    if who.loader != host.loader:
        names = dict.fromkeys([*host.loader, *who.loader])
        differ = [name for name in names if who.loader.get(name) != host.loader.get(name)]
        here = ", ".join(f"{name}={who.loader.get(name, 'unknown')}" for name in differ)
        there = ", ".join(f"{name}={host.loader.get(name, 'unknown')}" for name in differ)
        return (
            f"this loader is not the one that local rank 0 has in its place: here it has {here}, and there {there}. "
            "Make all loaders with shared_pool=True in the same sequence, and alike, in all ranks"
        )
    free = 0 < who.local_rank < len(rank_slots) and rank_slots[who.local_rank].channel is None
    if not free or who.rank != host.rank + who.local_rank:
        return (
            f"LOCAL_RANK={who.local_rank} with RANK={who.rank} is taken, or not possible where local rank 0 has "
            f"RANK={host.rank} and there are {len(rank_slots)} ranks: start the ranks of a node by torchrun"
        )
    if rank_slots[who.local_rank].gone is not None and not waits:
        return (
            f"{rank_slots[who.local_rank].gone}, and the other ranks continue without it: on_rank_death='wait' lets "
            "another process take its place"
        )
    return None
