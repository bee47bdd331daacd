"""The ranks of a node at the host of their pool: what each has coming to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from minato.batching.arena import Arena, Slot
from minato.shared_pool.channel import Channel
from minato.shared_pool.descriptors import Packed
from minato.shared_pool.messages import Greeting, Had

__all__ = [
    "AHEAD",
    "FAREWELL",
    "Round",
    "Seat",
    "Source",
    "misfit",
    "next_seat",
    "refusal",
]


AHEAD = 2
"""Batches that each rank has asked for before it needs them, so that they are there when it does."""
FAREWELL = 64
"""So many more are sent unasked when the host takes leave, as far as the socket has room for them."""


class Source(Protocol):
    """What the host's engine is asked for."""

    arena: Arena

    def next(self) -> Any:
        """The next batch, packed."""

    def cancel(self) -> None:
        """Abandon what is in flight."""


class Round:
    """One pass of all ranks.

    Args:
        number: Of the pass, from 0.
        epoch: As the host numbers it.
        quota: Batches that each rank gets, in earlier runs and this one.
        seats: Number of ranks.
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
        seats: int,
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
        self.total = quota * seats - (done or 0)
        self.arena = arena
        self.fetched = 0
        self.exhausted = False
        self.error: Exception | None = None


class Seat:
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
        self.inbox: deque[Packed] = deque()
        self.wants = 0
        self.dealt = 0
        self.turn = 0
        self.leases: dict[tuple[int, int], Any] = {}
        self.arenas: set[int] = set()
        self.given_back: set[tuple[int, Slot]] = set()
        self.entering: tuple[int, int, Had | None] | None = None
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

    def hungry(self, quota: int) -> bool:
        """Whether it waits for a batch to be fetched."""
        return self.state == "in" and self.wants > 0 and self.dealt < quota

    def unserved(self, quota: int) -> bool:
        """Whether another rank than the host is to be sent what is there already, and its socket has room."""
        if self.state != "in" or not self.wants or self.channel is None:
            return False
        return (bool(self.inbox) or self.dealt == quota) and self.channel.has_room


def next_seat(seats: list[Seat], this: Round, in_turn: bool) -> Seat:
    """Whom the next batch of a pass is for.

    Args:
        in_turn: Batch k of the whole pass is rank k mod n's. Otherwise it is for whoever has waited longest, as long as
            each gets as many in the end; if nobody waits, for any that is due one.
    """
    if in_turn:
        return min(seats, key=lambda seat: (seat.dealt, seat.rank))
    due = [seat for seat in seats if seat.dealt < this.quota]
    places = {"in": 0, "away": 1, "out": 2}
    return min(
        due, key=lambda seat: (places[seat.state], len(seat.inbox), not seat.wants, seat.turn)
    )


def misfit(name: str, epoch: int, resumed: bool, host_epoch: int, host_resumed: bool) -> str | None:
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


def refusal(seats: list[Seat], host: Greeting, who: Greeting, waits: bool) -> str | None:
    """Why a rank that has come gets no seat; None if it does.

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
    free = 0 < who.local_rank < len(seats) and seats[who.local_rank].channel is None
    if not free or who.rank != host.rank + who.local_rank:
        return (
            f"LOCAL_RANK={who.local_rank} with RANK={who.rank} is taken, or not possible where local rank 0 has "
            f"RANK={host.rank} and there are {len(seats)} ranks: start the ranks of a node by torchrun"
        )
    if seats[who.local_rank].gone is not None and not waits:
        return (
            f"{seats[who.local_rank].gone}, and the others do without it: SharedPool('wait') lets another process "
            "take its place"
        )
    return None
