"""The server's view of the ranks of a node: their batches, requests and leases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from minato.batching.arena import Arena, Slot
from minato.sampling.outgoing import Outgoing
from minato.shared_pool.channel import Channel
from minato.shared_pool.descriptors import LeasedBatch
from minato.shared_pool.messages import Hello, RankCompleted

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
"""Batches that each rank requests ahead of use."""
DRAIN_BATCHES = 64
"""Batches sent without a request when the server exits, as far as the socket's buffer takes them."""


class Source(Protocol):
    """The part of an engine that the server uses."""

    arena: Arena

    def next(self) -> Outgoing:
        """Return the next batch, as a leased descriptor."""

    def cancel(self) -> None:
        """Cancel the batches in flight."""


class PoolEpoch:
    """One epoch of all ranks.

    Args:
        number: Number of the epoch in this pool, from 0.
        epoch: The server's epoch number, from ``set_epoch``.
        quota: Batches that each rank gets, including those before a resume.
        rank_slots: Number of ranks.
        arena: Number of the engine's arena.
        latest: Returns the part of the epoch that the engine's last batch covers.
        done: Batches of all ranks before the resume; None: the epoch is not resumed.

    Attributes:
        fetched: Batches that the engine has yielded.
        exhausted: Whether the engine has ended the epoch.
        error: Why it cannot continue.
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
    """A rank in the current epoch.

    Attributes:
        rank: Its local rank.
        channel: Channel to its process; None for the server itself, and for a rank that is not connected.
        state: ``away``: it has not begun the epoch; ``in``: it takes part; ``out``: it has left.
        inbox: Batches that wait for it.
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
        self.entering: tuple[int, int, RankCompleted | None] | None = None
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


def next_rank(rank_slots: list[RankSlot], this: PoolEpoch, in_turn: bool) -> RankSlot:
    """Return the rank that gets the next batch.

    Args:
        in_turn: Batch k of the epoch is for rank k mod n. Otherwise it is for the rank that has waited longest and has
            not had its quota; if no rank waits, for any below its quota.
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
    name: str, epoch: int, resumed: bool, server_epoch: int, server_resumed: bool
) -> str | None:
    """Return why a rank cannot join the server's epoch; None if it can.

    Args:
        resumed, server_resumed: Whether the client and the server resume the epoch from a loaded state.
    """
    if (epoch, resumed) == (server_epoch, server_resumed):
        return None
    if not (resumed or server_resumed):
        return (
            f"this is epoch {epoch} here and {server_epoch} for local rank 0: with shared_pool=True call set_epoch() "
            "alike in all ranks"
        )
    where = {True: "in the middle, by the state that it has loaded", False: "at the beginning"}
    return (
        f"{name} begins epoch {epoch} {where[resumed]}, and local rank 0 begins epoch {server_epoch} "
        f"{where[server_resumed]}: with shared_pool=True load in each rank the state that it saved "
        "at the same step"
    )


def rejection_reason(
    rank_slots: list[RankSlot], server: Hello, client: Hello, waits: bool
) -> str | None:
    """Return why a connecting rank is rejected; None if it is accepted.

    Args:
        waits: Whether a new process may replace a rank that has ended.
    """
    if client.loader != server.loader:
        names = dict.fromkeys([*server.loader, *client.loader])
        differ = [name for name in names if client.loader.get(name) != server.loader.get(name)]
        here = ", ".join(f"{name}={client.loader.get(name, 'unknown')}" for name in differ)
        there = ", ".join(f"{name}={server.loader.get(name, 'unknown')}" for name in differ)
        return (
            f"this loader is not the one that local rank 0 has in its place: here it has {here}, and there {there}. "
            "Make all loaders with shared_pool=True in the same sequence, and alike, in all ranks"
        )
    free = 0 < client.local_rank < len(rank_slots) and rank_slots[client.local_rank].channel is None
    if not free or client.rank != server.rank + client.local_rank:
        return (
            f"LOCAL_RANK={client.local_rank} with RANK={client.rank} is taken, or not possible where local rank 0 has "
            f"RANK={server.rank} and there are {len(rank_slots)} ranks: start the ranks of a node by torchrun"
        )
    if rank_slots[client.local_rank].gone is not None and not waits:
        return (
            f"{rank_slots[client.local_rank].gone}, and the other ranks continue without it: SharedPool('wait') lets "
            "another process take its place"
        )
    return None
