"""How ranks divide the order of an epoch, and what is left of it when their number changes.

A *stage* is the part of an epoch that one number of ranks loaded. The next one deals what is left again, in its order.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from minato._support.objects import attribute
from minato._support.values import plain

SAMPLES, BLOCKS, BATCHES = "samples", "blocks", "batches"
"""What ranks get in turn: one sample each, as many as a batch has, or whole batches of any size."""

Batches: TypeAlias = "list[list[Any]]"  # the indices of several batches
PlainState: TypeAlias = "dict[str, Any]"  # the state of a loader, or a part of it, as plain data
Places = npt.NDArray[np.int64]  # places of samples in an order
_DECIDES = (
    *("seed", "shuffle", "drop_last", "replacement"),
    *("max_cost", "max_size", "padded", "pool"),  # of a CostBatchSampler
)
"""Attributes of samplers on which the order of an epoch may depend."""


class Part(NamedTuple):
    """What some ranks completed in a stage: ranges ``[first, end)`` of ordinals in the order of these ranks.

    Attributes:
        together: Number of ranks from ``first`` on: several if they share a pool, in which their batches come in turn.
    """

    first: int
    together: int
    ranges: tuple[tuple[int, int], ...]

    def ordinals(self, most: int) -> Places:
        """All of them; IndexError: one is ``most`` or more."""
        if self.ranges and self.ranges[-1][1] > most:
            raise IndexError(f"the ordinals of these ranks end at {most}")
        ranges = [np.arange(first, end) for first, end in self.ranges]
        return np.concatenate([np.arange(0), *ranges])


class Stage(NamedTuple):
    """The part of an epoch that one number of ranks completed."""

    ranks: int
    batch_size: int  # samples of a full batch of one rank
    parts: tuple[Part, ...]  # what each of them, or each pool, completed
    # Number of these indices, and the sum of their hashes.
    delivered: tuple[int, int]
    skipped: tuple[int, int]
    known: int | None = None  # the only rank whose part these count; None: they count all

    @classmethod
    def of(cls, plain: PlainState) -> Stage:
        """Return the stage that ``to_plain`` gave."""
        parts = tuple(
            Part(part["first"], part["together"], tuple(map(tuple, part["ranges"])))
            for part in plain["parts"]
        )
        tallies = tuple(plain["delivered"]), tuple(plain["skipped"])
        return cls(plain["ranks"], plain["batch_size"], parts, *tallies, plain["known"])

    def to_plain(self) -> PlainState:
        """Return the stage as plain data."""
        parts = [
            {"first": first, "together": together, "ranges": [*map(list, ranges)]}
            for first, together, ranges in self.parts
        ]
        tallies = {"delivered": list(self.delivered), "skipped": list(self.skipped)}
        sizes = {"ranks": self.ranks, "batch_size": self.batch_size}
        return {**sizes, "parts": parts, **tallies, "known": self.known}

    def counted_parts(self) -> Stage:
        """Return the stage with the parts that its tallies count."""
        return self if self.known is None else self._replace(parts=(self.parts[self.known],))

    def places(self, length: int, deals: str, drops: bool) -> Places:
        """Return the places of the completed samples in the order that the stage divided, before it was filled up.

        Args:
            length: Of that order; IndexError: it is too short for them.
            deals: What the ranks get in turn.
            drops: Whether a rest that does not divide was dropped; otherwise the order was filled up from its start.
        """
        found = [np.arange(0)]
        each = length // self.ranks if drops else -(-length // self.ranks)
        for part in self.parts:
            rank, number = self._dealt(part, each)
            if deals == SAMPLES:
                found.append(number * self.ranks + rank)
            else:
                block, at = np.divmod(number, self.batch_size)
                found.append((block * self.ranks + rank) * self.batch_size + at)
        return np.concatenate(found) % max(length, 1)

    def _dealt(self, part: Part, each: int) -> tuple[Places, Places]:
        """Return the rank of each sample of a part, and its number in the order of that rank alone."""
        size = self.batch_size
        ordinals = part.ordinals((each + size) * part.together)
        if part.together == 1:
            return np.full_like(ordinals, part.first), ordinals
        # The batches of ranks that share a pool come in turn, and the last one of each may be smaller.
        whole = each // size * size * part.together
        step, rest = np.divmod(ordinals, size * part.together)
        turn, at = np.divmod(rest, size)
        short = max(each % size, 1)
        last_turn, last_at = np.divmod(ordinals - whole, short)
        is_last = ordinals >= whole
        number = np.where(is_last, whole // part.together + last_at, step * size + at)
        return part.first + np.where(is_last, last_turn, turn), number


def left_places(
    length: int, stages: Iterable[Stage], deals: str, drops: bool
) -> tuple[Places, list[Places]]:
    """Return the places in an order that are left after some stages, and those that each stage completed.

    A place that fills up the order of a stage counts as its original.
    """
    left, taken = np.arange(length), []
    for stage in stages:
        places = stage.places(len(left), deals, drops) if len(left) else left
        counted = stage.counted_parts()
        taken.append(left[counted.places(len(left), deals, drops)] if len(left) else left)
        left = np.delete(left, places)
    return left, taken


def left_batches(
    batches: Batches, stages: Sequence[Stage], fill: Callable[[Batches, int], None]
) -> tuple[Batches, Batches]:
    """Return the batches that are left after some stages, and the indices that each stage completed.

    ``batches`` are those of the first stage: the first of each rank, then the second of each, and so on. ``fill`` makes
    their number divisible by a number of ranks.
    """
    taken = []
    for number, stage in enumerate(stages):
        if number:
            fill(batches, stage.ranks)
        is_done = [np.zeros(len(batch), bool) for batch in batches]
        for part in stage.parts:
            ranks = range(part.first, part.first + part.together)
            of_part = [at for at in range(len(batches)) if at % stage.ranks in ranks]
            ends = np.cumsum([len(batches[at]) for at in of_part])
            flags = np.zeros(ends[-1] if of_part else 0, bool)
            flags[part.ordinals(len(flags))] = True
            for at, one in zip(of_part, np.split(flags, ends[:-1]), strict=False):
                is_done[at] = one
        marked = list(zip(batches, is_done, strict=True))
        taken.append([index for one in marked for index in itertools.compress(*one)])
        left = (list(itertools.compress(batch, ~done)) for batch, done in marked)
        batches = [batch for batch in left if batch]
    return batches, taken


def check_same_step(state: PlainState, *, batches: bool) -> None:
    """Raise ValueError if the state of one rank does not say what the others had, each as many batches.

    ``batches``: whether the ranks' batches may be of different sizes, if the sampler says which.
    """
    dealing, done = state["loader"]["dealing"], state["done"]
    rank, ranks = dealing["rank"], dealing["count"]
    is_prefix = [first for first, _ in done["ranges"]] in ([], [0]) and dealing["together"] == 1
    is_strict = state["loader"]["order"] == "strict" and is_prefix
    is_even = not state["loader"].get("by_cost") and (batches or dealing["deals"] != BATCHES)
    if not (is_strict and is_even):
        raise ValueError(
            f"the state is that of rank {rank} of {ranks}, and does not say what the others had: only in strict order "
            "without workers=SharedPool(...), and with batches of one size, it would, so save and load the "
            "state of each rank"
        )
    check_owned(state)


def check_owned(state: PlainState) -> None:
    """Raise ValueError if the state of one rank holds what no other can go on with."""
    draw, kept = state["draw"], state["dataset_states"]
    if kept is not None or draw.get("samplers") or draw.get("iterator") is not None:
        keeper = "dataset" if kept is not None else "sampler"
        raise ValueError(
            f"the {keeper} has a state_dict() of its own, which belongs to one rank and cannot be divided among "
            "others: go on with as many ranks, each with its own state, or leave state_dict() out of it"
        )


def of_all_ranks(state: PlainState) -> PlainState:
    """Return the state of one rank as that of all, which had as many batches; ValueError: it does not say what."""
    check_same_step(state, batches=False)
    merged, done, dealing = without_rank(state), state["done"], state["loader"]["dealing"]
    ranges = tuple(map(tuple, done["ranges"]))
    parts = tuple(Part(rank, 1, ranges) for rank in range(dealing["count"]))
    tallies = done["delivered"], done["skipped"], dealing["rank"]
    stage = Stage(dealing["count"], dealing["batch_size"], parts, *tallies)
    merged["earlier"] += [stage.to_plain()] * bool(ranges)
    return merged


def without_rank(state: PlainState) -> PlainState:
    """Return a copy of the state of a rank that is no rank's, without what is done of its last stage."""
    merged = copy.deepcopy(state)
    merged["loader"] |= {"place": None, "sampler_length": None}
    merged["loader"]["dealing"] |= {"rank": None, "count": None}
    merged["done"] = {"ranges": [], "batches": 0, "delivered": [0, 0], "skipped": [0, 0]}
    return merged


class Dealing(NamedTuple):
    """How the sampler of a loader divides an epoch among ranks."""

    deals: str  # what ranks get in turn
    divides: Any  # the sampler whose order is divided, or that divides it
    rank: int
    ranks: int
    batch_size: int  # samples of a full batch of one rank

    def facts(self) -> PlainState:
        """What decides the order that is divided, as plain data."""
        return order_facts(self.divides)


def order_facts(sampler: object) -> PlainState:
    """What decides the order of a sampler, as far as its attributes say, as plain data."""
    known = ((name, plain(attribute(sampler, name))) for name in _DECIDES)
    return {name: value for name, value in known if isinstance(value, (bool, int, float))}
