"""The states of all ranks of a job as one, which any number of ranks can load."""

from __future__ import annotations

import copy
import itertools
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from minato._support.values import type_name
from minato.sampling.dealing import Part, PlainState, Stage, check_owned, of_all_ranks, without_rank
from minato.sampling.progress import Completed, merged_ranks, total
from minato.sampling.resume import DIVIDING, check_family, check_parts

_ALL = (1 << 40) - 1  # the end of a reader whose rank has ended the epoch: above all ordinals
_OWN_FACTS = ("ranks", "saved_in", "place", "sampler_length", "sampler_epoch", "dealing")
"""Facts about a loader that may differ between ranks."""
_SAME_STEP = "give states that all ranks of one run saved at the same step"


def merge_states(states: Iterable[PlainState], *, same_step: bool = False) -> PlainState:
    """The states of all ranks as one. Each rank of another job, with any number of ranks, loads it.

    Each then gets its share of what is left: of a map-style dataset, every index of the epoch once; of an iterable one,
    its readers, if they are dealt among ranks (``Readers(ranks=...)``).

    Args:
        states: The ``state_dict()`` of the loader in every rank, in any sequence, all of one epoch. They stay as they
            are.
        same_step: One state is enough, of any rank: each rank had as many batches. That holds where all ranks step
            together, and the checkpoint of a trainer has the state of one. It needs strict order.

    Raises:
        ValueError: One is missing or twice, they are not of one run, or nobody knows how the sampler divides the epoch;
            the message names the rank and the reason.
        TypeError: One is no dictionary.
    """
    by_rank = _by_rank(list(states), same_step)
    first = next(iter(by_rank.values()))
    _check_alike(by_rank, _shared_facts)
    if _streams(first):
        return _merged_streams(by_rank)
    if len(by_rank) == _rank_of(first)[1]:
        return _merged_indices(by_rank)
    _check_alike(by_rank, lambda state: {"the number of its batches": state["done"]["batches"]})
    return of_all_ranks(first)


def _streams(state: PlainState) -> bool:
    """Whether it is the state of an iterable dataset."""
    return bool(state["loader"].get("readers"))


def _by_rank(states: list[PlainState], same_step: bool) -> dict[int, PlainState]:
    """The states by rank, ascending; ValueError: they are not of all ranks."""
    found: dict[int, PlainState] = {}
    total = 0
    for state in states:
        if not isinstance(state, dict):
            raise TypeError(f"a loader's state is a dictionary, not a {type_name(state)}")
        check_family(state)
        rank, ranks = _rank_of(state)
        if _streams(state) and ranks == 1 and len(states) > 1:
            raise ValueError(
                "a state is of a loader that does not deal its readers among ranks (readers=Readers(n, ranks='auto')), "
                "or merged already: give the states that ranks with dealt readers saved"
            )
        if total not in (0, ranks):
            raise ValueError(f"one state is of {total} ranks and another of {ranks}: {_SAME_STEP}")
        if rank in found:
            raise ValueError(f"two states are of rank {rank} of {ranks}: give one of each rank")
        found[rank], total = state, ranks
    missing = [rank for rank in range(total) if rank not in found]
    if same_step and not any(map(_streams, states)):
        missing = []
    if missing or not total:
        name = f"rank {missing[0]} of {total}" if missing else "every rank"
        raise ValueError(f"the state of {name} is missing: give the states of all ranks")
    return dict(sorted(found.items()))


def _rank_of(state: PlainState) -> tuple[int, int]:
    """The rank whose state it is, and their number."""
    facts = state["loader"]
    if _streams(state):
        rank, ranks = facts["ranks"]
        return rank, ranks
    dealing = facts.get("dealing")
    if not isinstance(dealing, dict):
        raise ValueError(
            f"states cannot be merged where nobody knows how {facts.get('sampler')} divides an epoch among ranks: "
            f"{DIVIDING}"
        )
    if dealing["rank"] is None:
        raise ValueError("one state is merged already: load it in every rank as it is")
    return dealing["rank"], dealing["count"]


def _check_alike(
    by_rank: dict[int, PlainState], facts_of: Callable[[PlainState], PlainState]
) -> None:
    """Raise ValueError if the state of a rank is not of the same run and step as that of the first."""
    first = next(iter(by_rank))
    expected = facts_of(by_rank[first])
    for rank, state in by_rank.items():
        for name, value in facts_of(state).items():
            if expected.get(name) != value:
                was, now = reprlib.repr(expected.get(name)), reprlib.repr(value)
                raise ValueError(
                    f"{name} is {was} in the state of rank {first} and {now} in that of rank {rank}: {_SAME_STEP}"
                )


def _shared_facts(state: PlainState) -> PlainState:
    """What the states of all ranks have in common; ValueError: a part of the state is missing or damaged."""
    check_parts(state)
    facts, dealing = state["loader"], state["loader"].get("dealing")
    shared = {name: value for name, value in facts.items() if name not in _OWN_FACTS}
    shared["epoch"] = state["epoch"]
    if _streams(state):
        return shared
    shared |= {f"the sampler's {name}": value for name, value in dealing["order"].items()}
    shared["that epoch"] = "ended" if state["finished"] else "in flight"
    shared["the epoch of the sampler"] = state["draw"].get("epoch")
    shared["the batch size of a rank"] = dealing["batch_size"]
    shared["what other numbers of ranks did before"] = state["earlier"]
    return shared


def _merged_streams(by_rank: dict[int, PlainState]) -> PlainState:
    """The states of ranks that each have some readers of an iterable dataset."""
    running = [state for state in by_rank.values() if not state["finished"]]
    merged = copy.deepcopy((running or list(by_rank.values()))[0])
    merged["loader"]["ranks"] = [0, 1]
    count, each = merged["loader"]["readers"], list[Any]()
    for reader in range(count):
        state = by_rank[reader % len(by_rank)]
        known = None if state["readers"] is None else state["readers"]["each"][reader]
        if running and state["finished"]:
            # Of a dataset that stays for the next epoch.
            kept = None if known is None else known["state"]
            ended = {"end": _ALL, "jumped": False, "read": None}
            known = {"done": [[0, _ALL]], "state": kept, **ended}
        elif known is None and state["readers"] is not None:
            raise ValueError(f"the state is damaged: it does not hold reader {reader}")
        each.append(copy.deepcopy(known))
    if merged["readers"] is not None:
        merged["readers"]["each"] = each
    if running:
        done = [state["done"] for state in running]
        for name in ("delivered", "skipped"):
            merged["done"][name] = list(total(part[name] for part in done))
        merged["done"]["batches"] = sum(part["batches"] for part in done)
    return merged


def _merged_indices(by_rank: dict[int, PlainState]) -> PlainState:
    """The states of ranks that each have a part of the indices of a map-style dataset."""
    for state in by_rank.values():
        check_owned(state)
    merged, stage = without_rank(by_rank[0]), _stage(by_rank)
    if any(part.ranges for part in stage.parts):
        merged["earlier"].append(stage.to_plain())
    return merged


def _stage(by_rank: dict[int, PlainState]) -> Stage:
    parts, done = [], [state["done"] for state in by_rank.values()]
    for first, ranks in itertools.groupby(
        by_rank, lambda rank: by_rank[rank]["loader"]["dealing"]["first"]
    ):
        together = [by_rank[rank] for rank in ranks]
        whole = merged_ranks(
            Completed(tuple(map(tuple, each["done"]["ranges"]))) for each in together
        )
        count = together[0]["loader"]["dealing"]["together"]
        parts.append(Part(first, count, whole.ranges))
    size = by_rank[0]["loader"]["dealing"]["batch_size"]
    delivered, skipped = (total(each[name] for each in done) for name in ("delivered", "skipped"))
    return Stage(len(by_rank), size, tuple(parts), delivered, skipped)
