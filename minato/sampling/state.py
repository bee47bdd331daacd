"""The state of a loader as plain data, and whether it fits the loader that gets it; which objects have a state."""

from __future__ import annotations

import copy
import inspect
import itertools
import reprlib
from collections.abc import Callable
from typing import Any

import torch

from minato._support.objects import attribute
from minato.observe.stats.size import length_of
from minato.sampling.completed import Completed, Tally
from minato.sampling.distributed import epoch_of, nested
from minato.sampling.spec import SamplingSpec

__all__ = [
    "checked",
    "completed_from_plain",
    "completed_to_plain",
    "is_stateful",
    "sampler_epoch_in",
    "signature",
]

_VERSION = 2
_INT64 = 1 << 63
_FAMILY = "minato.DataLoader"
_WORDS = {
    "place": "its place among ranks that share a pool",
    "dataset_length": "len(dataset)",
    "sampler": "the sampler's type",
    "batched": "whether batches are made",
    "sampler_length": "the number of batches",
    "generators": "the number of generators given to the loader and its samplers",
    "stateful_samplers": "the number of samplers with state_dict()",
}


def signature(spec: SamplingSpec, sources: tuple[int, int]) -> dict[str, Any]:
    """The facts that must be the same in the loader that saves a state and the one that loads it.

    Args:
        sources: Number of its generators, and of its samplers with ``state_dict()``.
    """
    sampler = spec.index_sampler
    generators, stateful = sources
    sets_epoch = any(callable(getattr(one, "set_epoch", None)) for one in nested(sampler))
    # It may depend on the epoch, and the sampler does not say which one it has.
    length = None if sets_epoch and epoch_of(sampler) is None else length_of(sampler)
    return {
        "kind": _FAMILY,
        "version": _VERSION,
        "place": spec.rank,
        "dataset_length": None if spec.streams else length_of(spec.dataset),
        "sampler": " of ".join(type(one).__qualname__ for one in nested(sampler)),
        "sampler_length": length,
        "batched": spec.batched,
        "batch_size": spec.batch_size,
        "drop_last": spec.drop_last,
        "order": spec.order,
        "seed": spec.seed,
        "generators": generators,
        "stateful_samplers": stateful,
    }


def sampler_epoch_in(state: object) -> int | None:
    """The epoch that the sampler had when a state was taken; None if it had none, or the state does not say so."""
    loader = state.get("loader") if isinstance(state, dict) else None
    epoch = loader.get("sampler_epoch") if isinstance(loader, dict) else None
    return epoch if _is_int64(epoch) else None


def checked(state: object, mine: dict[str, Any], copies: int) -> dict[str, Any]:
    """A copy of a state, if it is one and belongs to a loader with this signature.

    Args:
        copies: Number of copies of the dataset that the loader's workers have.

    Raises:
        TypeError: It is no dictionary.
        ValueError: It belongs to another loader, or is damaged; the message names what differs or is wrong.
    """
    if not isinstance(state, dict):
        raise TypeError(f"a loader's state is a dictionary, not a {type(state).__name__}")
    theirs = state.get("loader")
    if not isinstance(theirs, dict) or theirs.get("kind") != _FAMILY:
        raise ValueError(
            f"this is no state of a {_FAMILY}: it has the keys {sorted(map(str, state))}. A state of torchdata's "
            "StatefulDataLoader cannot be resumed here"
        )
    if theirs.get("version") != _VERSION:
        raise ValueError(
            f"the state has version {theirs.get('version')!r}, and this minato reads {_VERSION}: resume it with the "
            "minato that wrote it, to the end of the epoch"
        )
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ValueError(
                f"the state belongs to another loader: {_WORDS.get(name, name)} was {theirs.get(name)!r} when it "
                f"was taken and is {value!r} here"
            )
    _check_parts(state)
    known = state["dataset_states"]
    if known is not None and len(known["each"]) != copies:
        raise ValueError(
            f"the state holds those of the dataset in {len(known['each'])} workers, and this loader has {copies}: "
            "which worker gives which samples of such a dataset depends on their number, so use the same"
        )
    return copy.deepcopy(state)


def _check_parts(state: dict[str, Any]) -> None:
    """Check all that is this package's own; states of samplers and datasets are theirs."""
    _check("epoch", state, _is_int64)
    _check("finished", state, lambda value: isinstance(value, bool))
    _check("draw", state, lambda value: isinstance(value, dict))
    _check("dataset_states", state, _are_dataset_states)
    if not state["finished"]:
        _check("base_seed", state, _is_int64)
        _check("drawn_epoch", {"drawn_epoch": 0, **state}, _is_int64)
        _check("done", state, _is_done)


def _check(name: str, state: dict[str, Any], fits: Callable[[Any], bool]) -> None:
    if name not in state:
        raise ValueError(f"the state is damaged: it has no {name!r}")
    if not fits(state[name]):
        raise ValueError(f"the state is damaged: {name!r} is {reprlib.repr(state[name])}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < _INT64


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _are_dataset_states(value: object) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and isinstance(value.get("each"), list)
        and _is_count(value.get("turn"))
        and value["turn"] < max(len(value["each"]), 1)
        and all(
            isinstance(each, dict)
            and each.keys() == {"dataset", "iterator", "batches", "ended"}
            and _is_count(each["batches"])
            and isinstance(each["ended"], bool)
            for each in value["each"]
        )
    )


def _is_done(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"ranges", "batches", "delivered", "skipped"}:
        return False
    tallies, ranges = (value["delivered"], value["skipped"]), value["ranges"]
    pairs = (list, tuple)
    if not isinstance(ranges, pairs) or not all(
        isinstance(pair, pairs) and len(pair) == 2 for pair in (*tallies, *ranges)
    ):
        return False
    bounds = [bound for pair in ranges for bound in pair]
    return (
        _is_count(value["batches"])
        and all(_is_count(samples) for samples, _ in tallies)
        and all(isinstance(hashed, int) and 0 <= hashed < 2 * _INT64 for _, hashed in tallies)
        and all(map(_is_count, bounds))
        and all(one < next_one for one, next_one in itertools.pairwise(bounds))
    )


def completed_to_plain(done: Completed) -> dict[str, Any]:
    """What is done of an epoch, as plain data."""
    return {
        "ranges": [list(pair) for pair in done.ranges],
        "batches": done.batches,
        "delivered": list(done.delivered),
        "skipped": list(done.skipped),
    }


def completed_from_plain(plain: dict[str, Any]) -> Completed:
    """Rebuild what ``completed_to_plain`` returned."""
    return Completed(
        tuple((first, end) for first, end in plain["ranges"]),
        plain["batches"],
        Tally(*plain["delivered"]),
        Tally(*plain["skipped"]),
    )


def is_stateful(thing: object) -> bool:
    """Whether an object has ``state_dict()``, which takes no arguments, and ``load_state_dict``.

    The weights of a module are not the state of its data, and a class has no state.
    """
    if issubclass(type(thing), (type, torch.nn.Module)):
        return False
    state_dict = attribute(thing, "state_dict")
    if not callable(state_dict) or not callable(attribute(thing, "load_state_dict")):
        return False
    try:
        inspect.signature(state_dict).bind()
    except ValueError:  # a compiled function does not say what it takes
        return True
    except Exception:
        return False
    return True
