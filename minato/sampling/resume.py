"""The state of a loader: what it holds of generators, samplers and datasets, and how it is made, checked and opened."""

from __future__ import annotations

import base64
import copy
import functools
import inspect
import itertools
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from types import GeneratorType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.utils.data import DistributedSampler

from minato._compat import ACCELERATE_SEEDABLE_SAMPLER, ExceptionWrapper
from minato._support.objects import attribute, facts_of, is_exactly, length_of
from minato._system import rank_and_ranks
from minato.errors import warn
from minato.sampling.dealing import PlainState, Stage, check_same_step
from minato.sampling.progress import NOTHING, Completed, Tally, total
from minato.sampling.readers import ReaderState
from minato.sampling.samplers import (
    DRAWS_AT_FIRST,
    DRAWS_NOTHING,
    SEEDED,
    RankSampler,
    SamplingSpec,
    at_epoch,
    dealing_of,
    drawn_apart,
    epoch_of,
    nested,
)

_VERSION = 5
_INT64 = 1 << 63
_MOST_RANKS, _MOST_SAMPLES = 1 << 20, 1 << 40
_FAMILY = "minato.DataLoader"
_WORDS = {
    "place": "its place among ranks that share a pool",
    "dataset_length": "len(dataset)",
    "sampler": "the sampler's type",
    "batched": "whether batches are made",
    "readers": "the number of readers of the dataset",
    "sampler_length": "the number of batches",
    "generators": "the number of generators given to the loader and its samplers",
    "stateful_samplers": "the number of samplers with state_dict()",
}


DIVIDING = (
    "use torch.utils.data.DistributedSampler, minato.CostBatchSampler, or a sampler that divides it alike, with their "
    "attributes rank and num_replicas"
)
"""Which samplers' states can be merged."""
_REMEDIES = {
    "readers": "; give readers={}, which stays the same while num_workers may change",
}


def is_stateful(thing: object) -> bool:
    """Whether an object has ``state_dict()``, which takes no arguments, and ``load_state_dict``.

    The weights of a module are not the state of its data, and a class has no state.
    """
    state_dict = attribute(thing, "state_dict")
    if state_dict is None or issubclass(type(thing), (type, torch.nn.Module)):
        return False
    if not callable(state_dict) or not callable(attribute(thing, "load_state_dict")):
        return False
    try:
        inspect.signature(state_dict).bind()
    except ValueError:  # a compiled function does not say what it takes
        return True
    except Exception:
        return False
    return True


# ---- generators and samplers ----------------------------------------------------------------------


class SamplerState:
    """States of generators and samplers before the first index of an epoch was drawn, to draw its indices again.

    They are taken twice, as some samplers draw in ``iter(sampler)``, and others in the first ``next()`` of its result.
    If ``iter()`` cannot have drawn, the first states are dropped.

    Args:
        before: That of another epoch, most likely of the same samplers.

    Attributes:
        samplers: The sampler, the one it draws from, and so on.
    """

    def __init__(self, spec: SamplingSpec, before: SamplerState | None = None) -> None:
        self._sampler = spec.index_sampler
        samplers = self.samplers = nested(self._sampler)
        self._given = given = _generators_of(samplers, spec.generator)
        if before is None or not (_same(samplers, before.samplers) and _same(given, before._given)):
            distinct = {id(one): one for one in given if isinstance(one, torch.Generator)}
            distinct.pop(id(torch.default_generator), None)
            self._generators = [torch.default_generator, *distinct.values()]
            self._needs_default = not all(is_exactly(each, DRAWS_NOTHING) for each in samplers)
            self._stateful = [sampler for sampler in samplers if is_stateful(sampler)]
        else:
            self._generators, self._stateful = before._generators, before._stateful
            self._needs_default = before._needs_default
        self.num_generators, self.num_stateful = len(self._generators) - 1, len(self._stateful)
        names = ("epoch", "before_iter", "before_first", "iterator")
        self._state: dict[str, Any] = dict.fromkeys(names)
        self._error: ExceptionWrapper | None = None

    def before_iter(self) -> None:
        """Take the states before ``iter(sampler)``; if it is called several times, the last one counts."""
        self._state["epoch"] = epoch_of(self.samplers)
        # The body of a generator, as torch's samplers are, runs from the first next() on.
        code = getattr(getattr(type(self._sampler), "__iter__", None), "__code__", None)
        is_late = code is not None and code.co_flags & inspect.CO_GENERATOR
        self._state["before_iter"] = None if is_late else self._generator_states()
        self._error, self._state["samplers"] = None, []
        if self._stateful:
            with self._keeping_errors():
                self._state["samplers"] = self._sampler_states()

    def before_first(self, iterator: Any) -> None:
        """Take the states before the first ``next()`` of the result of ``iter(sampler)``."""
        if isinstance(iterator, GeneratorType):  # whose body runs from the first next() on
            self._state["before_iter"] = None
        self._state["before_first"] = self._generator_states()
        if not isinstance(iterator, GeneratorType) and is_stateful(iterator):
            with self._keeping_errors():
                self._state["iterator"] = copy.deepcopy(iterator.state_dict())

    def redraw(self, state: dict[str, object], samplers: bool = True) -> Iterator[Any]:
        """Return ``iter(sampler)`` with all states of :meth:`taken`; its next index is the first of the epoch.

        torch's default generator has its earlier state for the draws of the sampler, and its present one otherwise.
        ``samplers``: whether stateful samplers get their states.
        """
        self._state = state
        outside = torch.default_generator.get_state()
        try:
            if samplers:
                self._load_samplers()
            self._load_generators("before_iter")
            iterator: Any = iter(self._sampler)
            if (saved := self._state.get("iterator")) is not None:
                if not is_stateful(iterator):
                    raise _damaged("iterator", saved)
                iterator.load_state_dict(copy.deepcopy(saved))
            self._load_generators("before_first")
            if not self._needs_default:
                return iterator  # type: ignore[no-any-return]
            known = (*DRAWS_NOTHING, *DRAWS_AT_FIRST)
            once = all(is_exactly(sampler, known) for sampler in self.samplers)
            once &= not any(given is torch.default_generator for given in self._given)
            return drawn_apart(lambda: iterator, _kept_torch(), once, _kept_torch)
        finally:
            torch.default_generator.set_state(outside)

    def opened(self, plain: PlainState) -> PlainState:
        """Return the states that were written as plain data; ValueError: they do not fit, and which part."""
        state = copy.deepcopy(plain)
        epoch, samplers = plain.get("epoch"), plain.get("samplers")
        if not (epoch is None or isinstance(epoch, int)):
            raise _damaged("epoch", epoch)
        if not isinstance(samplers, list) or len(samplers) != len(self._stateful):
            raise _damaged("samplers", samplers)
        for name in ("before_iter", "before_first"):
            states = plain.get(name)
            if states is None:
                continue
            if not isinstance(states, list) or len(states) != len(self._generators):
                raise _damaged(name, states)
            for number, (generator, text) in enumerate(zip(self._generators, states, strict=True)):
                try:
                    if text is not None:
                        found = bytearray(base64.b64decode(text))
                        state[name][number] = torch.frombuffer(found, dtype=torch.uint8)
                        torch.Generator(generator.device).set_state(state[name][number])
                except (ValueError, TypeError, RuntimeError):
                    raise _damaged(name, text) from None
        return state

    def load(self, state: dict[str, object]) -> None:
        """Load a state of :meth:`idle_state` into generators and samplers."""
        self._state = state
        self._load_samplers()
        self._load_generators("before_iter")

    def idle_state(self) -> dict[str, Any]:
        """Return the present states. Between epochs, they decide the order of the next one."""
        # torch's default generator belongs to the program.
        own = [None, *self._generator_states()[1:]]
        return {
            **self._state,
            "epoch": epoch_of(self.samplers),
            "before_iter": own,
            "samplers": self._sampler_states(),
        }

    def taken(self) -> dict[str, Any]:
        """Return the states that were taken, or raise what ``state_dict()`` of a sampler or its iterator raised."""
        if self._error is not None:
            self._error.reraise()
        state = dict(self._state)
        if state.get("before_first") is None:
            state["before_first"] = self._generator_states()
        return state

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Keep an exception of ``state_dict()`` until a program asks for the loader's state."""
        try:
            yield
        except Exception:
            self._error = ExceptionWrapper(sys.exc_info(), "in state_dict() before the first key")

    def _generator_states(self) -> list[torch.Tensor | None]:
        default, *own = self._generators
        states = [default.get_state() if self._needs_default else None]
        if own:
            states += [generator.get_state() for generator in own]
        return states

    def _sampler_states(self) -> list[Any]:
        return [copy.deepcopy(sampler.state_dict()) for sampler in self._stateful]

    def _load_generators(self, when: str) -> None:
        for generator, state in zip(self._generators, self._state.get(when) or (), strict=False):
            if state is not None:
                generator.set_state(state)

    def _load_samplers(self) -> None:
        for sampler, state in zip(self._stateful, self._state["samplers"], strict=True):
            sampler.load_state_dict(copy.deepcopy(state))


def _generators_of(samplers: Iterable[object], given: object) -> list[Any]:
    """The generator that a loader was given, and what its samplers have in its place."""
    found = [] if given is None else [given]
    for sampler in samplers:
        # Accelerate gives one to a sampler of ours, which does not use it, where there are several processes. Its own
        # sampler makes one at the first epoch and seeds it for each, so that its state decides nothing.
        is_seeded = is_exactly(sampler, SEEDED)
        if not is_seeded and type(sampler).__name__ != ACCELERATE_SEEDABLE_SAMPLER:
            generator = attribute(sampler, "generator")
            if generator is not None:
                found.append(generator)
    return found


def _same(these: Sequence[object], others: Sequence[object]) -> bool:
    return len(these) == len(others) and all(map(is_, these, others))


def until_end(iterator: Iterator[Any]) -> Iterator[Any]:
    """What an iterator yields until its end, after which it is not asked again.

    Nor is it asked for its iterator: some samplers are their own, begin again then, and draw.
    """
    return itertools.chain(map(next, itertools.repeat(iterator)))


def _kept_torch() -> Callable[[], object]:
    return functools.partial(torch.default_generator.set_state, torch.default_generator.get_state())


def _encoded(state: torch.Tensor | None) -> str | None:
    return None if state is None else base64.b64encode(state.numpy().tobytes()).decode()


def _damaged(name: str, value: object) -> ValueError:
    return ValueError(f"the state is damaged: {name!r} of its 'draw' is {reprlib.repr(value)}")


# ---- the workers' copies of the dataset -----------------------------------------------------------


@dataclass
class DatasetState:
    """The state of one worker's copy of the dataset after a returned batch."""

    dataset: Any = None  # result of the dataset's ``state_dict()``, None if it has none


Reported: TypeAlias = DatasetState | ExceptionWrapper
"""The state of a copy, or the error of its ``state_dict()``."""


class DatasetStates:
    """The states of all copies, as the training process knows them, and the worker whose batch comes next.

    Args:
        persist: Whether the states at the end of an epoch are those at the start of the next: the workers stay.
        resumed: Result of ``to_plain``; the first epoch resumes it.

    Attributes:
        next_worker: Number of the worker whose batch comes next in round-robin order.
        present: Without workers: returns the state of the only copy now, None before it has resumed.
    """

    def __init__(self, count: int, persist: bool, resumed: PlainState | None = None) -> None:
        self._persist = persist
        self._resumes = resumed is not None
        resumed = resumed or {"turn": 0, "each": [{}] * count}
        self.each = [DatasetState(**copy.deepcopy(state)) for state in resumed["each"]]
        self.next_worker: int = resumed["turn"]
        self.present: Callable[[], DatasetState | None] | None = None
        self._errors: dict[int, ExceptionWrapper] = {}

    @staticmethod
    def alone(dataset: object) -> dict[str, Any]:
        """The states that the next epoch starts with, as plain data, given that of the only copy of a dataset."""
        return {"turn": 0, "each": [vars(DatasetState(dataset))]}

    def begin(self) -> None:
        """Begin an epoch."""
        if not self._resumes:
            self.next_worker = 0
            kept = [state.dataset if self._persist else None for state in self.each]
            self.each = [DatasetState(dataset=dataset) for dataset in kept]
            self._errors.clear()
        self._resumes = False

    def returned(self, number: int) -> None:
        """Note that a batch of worker ``number`` was returned."""
        self.next_worker = (number + 1) % len(self.each)

    def update(self, number: int, state: Reported) -> None:
        """Store the state that came with a batch of worker ``number``, or the error of its ``state_dict()``."""
        if isinstance(state, ExceptionWrapper):
            self._errors[number] = state
        else:
            self._errors.pop(number, None)
            self.each[number] = state

    def between_epochs(self) -> dict[str, Any] | None:
        """The states that the next epoch starts with, as ``to_plain``; None if it starts with fresh copies."""
        if not self._persist:
            return None
        return self._plain(0, [DatasetState(dataset=state.dataset) for state in self.each])

    def to_plain(self) -> dict[str, Any]:
        """All states as plain data, apart from the results of ``state_dict()``.

        Raises:
            Exception: Raised by the ``state_dict()`` of a dataset or its iterator.
        """
        present = None if self.present is None else self.present()
        if present is not None:
            self.update(0, present)
        return self._plain(self.next_worker, self.each)

    def _plain(self, next_worker: int, states: list[DatasetState]) -> dict[str, Any]:
        for error in self._errors.values():
            error.reraise()
        return copy.deepcopy({"turn": next_worker, "each": [vars(state) for state in states]})


# ---- the state of a loader ------------------------------------------------------------------------


_NOTHING_DONE = Completed()


@dataclass(frozen=True)
class LoaderState:
    """The state of a loader.

    Attributes:
        loader: The ``signature`` of the loader that saves it.
        epoch: Number of the epoch: the present one, or the last.
        finished: No epoch has begun, or the last one has ended.
        dataset_states: Result of ``DatasetStates``; None: a map-style dataset has none, or starts afresh.
        drawn_epoch: Number of the epoch in which the random numbers of samples are drawn from ``base_seed``; if it is
            finished, that of the next one.
        readers: Result of ``EpochReaders.to_plain`` or ``between_epochs``; None: there are none, or they start afresh.
            Those of other ranks are there after they were loaded.
        earlier: What other numbers of ranks completed of the epoch before.
        stands_for_all: It is the state of another rank, and this one had as many batches.
    """

    loader: dict[str, Any]
    epoch: int
    finished: bool
    draw: dict[str, Any]
    dataset_states: dict[str, Any] | None = None
    base_seed: int = 0
    drawn_epoch: int = 0
    done: Completed = _NOTHING_DONE
    readers: dict[str, Any] | None = None
    earlier: tuple[Stage, ...] = ()
    stands_for_all: bool = False

    @property
    def counted(self) -> tuple[Tally, Tally]:
        """Tallies of what other ranks delivered and skipped before; only rank 0 counts it."""
        dealing = self.loader.get("dealing")
        if not self.earlier or not dealing or dealing["rank"] != 0:
            return NOTHING, NOTHING
        stages = self.earlier
        return total(each.delivered for each in stages), total(each.skipped for each in stages)

    def to_plain(self) -> dict[str, Any]:
        """Return a copy as plain data, apart from the ``state_dict()`` of samplers and datasets."""
        plain = copy.deepcopy(vars(self))
        draw, done = plain["draw"], plain.pop("done")
        del plain["stands_for_all"]
        plain["earlier"] = [stage.to_plain() for stage in self.earlier]
        for name in {"before_iter", "before_first"} & draw.keys():
            draw[name] = draw[name] and list(map(_encoded, draw[name]))
        if (readers := plain["readers"]) is not None:
            rank, ranks = plain["loader"]["ranks"]
            own = range(rank, len(readers["each"]), ranks)
            readers["each"] = [one if i in own else None for i, one in enumerate(readers["each"])]
        # At any moment with the same names: torch.distributed.checkpoint loads what it finds in a new loader's state.
        tallies = {"delivered": list(done.delivered), "skipped": list(done.skipped)}
        ranges = [list(pair) for pair in done.ranges]
        return {**plain, "done": {"ranges": ranges, "batches": done.batches, **tallies}}

    @classmethod
    def opened(
        cls, plain: object, spec: SamplingSpec, draw: SamplerState, copies: int
    ) -> LoaderState:
        """Return a copy of plain data, if it is a state and belongs to a loader.

        Args:
            copies: Number of copies of the dataset that its workers have.

        Raises:
            TypeError: It is no dictionary.
            ValueError: It belongs to another loader, or is damaged; the message names what differs or is wrong.
        """
        if not isinstance(plain, dict):
            raise TypeError(f"a loader's state is a dictionary, not a {type(plain).__name__}")
        check_family(plain)
        epoch = plain["loader"].get("sampler_epoch")
        with at_epoch(spec.index_sampler, epoch if _is_int64(epoch) else None):
            mine = signature(spec, draw)
        _check_signature(plain["loader"], mine)
        check_parts(plain)
        if spec.streams:
            _check_stream(plain, mine["stream"], spec.rereads)
        stands_for_all = not plain["finished"] and _is_of_another_rank(plain["loader"], mine)
        if stands_for_all:
            check_same_step(plain, batches=True)
        if not plain["finished"]:
            theirs = plain["loader"].get("saved_in")
            _warn_of_another_rank(theirs if _are_ranks(theirs) else None, mine["saved_in"])
        drawn = draw.opened(plain["draw"])
        known = plain["dataset_states"]
        if known is not None and len(known["each"]) != copies:
            raise ValueError(
                f"the state holds those of the dataset in {len(known['each'])} workers, and this loader has {copies}: "
                "which worker gives which samples of such a dataset depends on their number, so use the same"
            )
        found = copy.deepcopy({name: plain[name] for name in ("loader", *_PARTS)})
        if spec.streams:
            _keep_share(found, spec)
        found["earlier"] = stages = tuple(map(Stage.of, found["earlier"]))
        if (done := found.get("done")) is not None:
            ranges = tuple((first, end) for first, end in done["ranges"])
            tallies = Tally(*done["delivered"]), Tally(*done["skipped"])
            earlier = total(pair for stage in stages for pair in (stage.delivered, stage.skipped))
            found["done"] = Completed(ranges, done["batches"], *tallies, earlier)
            if stages and not (spec.replay is None and spec.record_order is None):
                raise ValueError(
                    "the state is that of all ranks in the middle of an epoch, and recording= is about the batches of "
                    "one rank: leave it out"
                )
        if (plain["loader"].get("dealing") or {}).get("rank", 0) is None:  # it is merged
            found["loader"] = {**mine, "sampler_epoch": epoch}
        return cls(**{**found, "draw": drawn, "stands_for_all": stands_for_all})


def _keep_share(found: PlainState, spec: SamplingSpec) -> None:
    """Make a state that of this rank, whatever readers it holds; the others are for their ranks to save.

    ValueError: It does not hold all of this rank.
    """
    facts, readers = found["loader"], found["readers"]
    is_about = found["finished"] if readers is None else len(readers["each"]) == spec.readers
    if not is_about:
        raise ValueError(f"the state is damaged: it is not about {spec.readers} readers")
    theirs = facts.get("ranks")
    facts["ranks"] = list(spec.dealt)
    if "done" in found and theirs != facts["ranks"]:
        del found["done"]  # of other readers
    if readers is None:
        return
    missing = [i for i in spec.own_readers if readers["each"][i] is None]
    if missing:
        rank, ranks = spec.dealt
        saved, count = theirs if _are_ranks(theirs) else (0, 1)
        raise ValueError(
            f"the state is that of rank {saved} of {count} and holds its readers alone, and rank {rank} of {ranks} "
            f"has reader {missing[0]}: merge the states of all ranks with minato.merge_states(...), and load the result"
        )


def _check_signature(theirs: PlainState, mine: PlainState) -> None:
    """Raise ValueError if a state does not belong to a loader, by their signatures; a merged state names no rank."""
    here, found = mine["dealing"] or {}, theirs.get("dealing") or {}
    is_merged = bool(found) and found.get("rank") is None
    if is_merged and not here:
        raise ValueError(
            f"the state is merged from those of several ranks, and nobody knows how {mine['sampler']} divides an epoch "
            f"among ranks: {DIVIDING}"
        )
    is_alike = bool(here) and not is_merged and found.get("deals") == here["deals"]
    if is_alike and found.get("count") != here["count"]:
        raise ValueError(
            f"the state is that of rank {found.get('rank')} of {found.get('count')}, and here are {here['count']}: "
            "merge the states of all ranks by minato.merge_states(), and load the result in each rank"
        )
    differs = {name: (theirs.get(name), value) for name, value in mine.items()}
    for name in ("sampler_epoch", "dealing", "ranks", "saved_in", "by_cost", "stream"):
        del differs[name]
    if is_merged:
        for name in ("place", "sampler", "sampler_length", "batch_size"):
            del differs[name]
        differs["what ranks get in turn"] = found.get("deals"), here["deals"]
    order, expected = found.get("order", {}), here.get("order", {})
    for name in {**order, **expected}:
        differs[f"the sampler's {name}"] = order.get(name), expected.get(name)
    for name, (was, now) in differs.items():
        if was != now:
            remedy = _REMEDIES.get(name, "").format(was)
            raise ValueError(
                f"the state belongs to another loader: {_WORDS.get(name, name)} was {was!r} when it was taken "
                f"and is {now!r} here{remedy}"
            )


def _check_stream(plain: PlainState, here: dict[str, str], rereads: bool) -> None:
    """Raise ValueError if readers without a state are read again from a stream that gives other items."""
    found, readers = plain["loader"].get("stream"), plain["readers"]
    if found == here or readers is None:
        return
    known = [one for one in readers["each"] if one is not None and one["done"]]
    if not rereads and all(one["state"] and one["state"]["iterator"] for one in known):
        return  # they compare what they need
    found = found if isinstance(found, dict) else {}
    for name in {**found, **here} if known else ():
        if found.get(name) != here.get(name):
            raise ValueError(
                f"the {name} was {found.get(name)} when the state was taken and is {here.get(name)} here, and what was "
                "delivered is read again to find where to go on: resume with the same"
            )


def _is_of_another_rank(theirs: PlainState, mine: PlainState) -> bool:
    """Whether a state is that of another rank of as many: trainers save that of one rank only."""
    found, here = theirs.get("dealing") or {}, mine["dealing"] or {}
    return found.get("rank") is not None and found["rank"] != here.get("rank")


def _warn_of_another_rank(theirs: list[int] | None, mine: list[int] | None) -> None:
    """Say that the state is that of another rank, where each may read its own part of a stream."""
    if mine is None or theirs is None or theirs == mine or theirs[1] < 2:
        return
    warn(
        f"the state is that of rank {theirs[0]} of {theirs[1]}, and this is rank {mine[0]} of {mine[1]}: if the "
        "dataset divides itself by rank, items are lost and repeated. Load in each rank the state that it saved, or "
        "have the loader deal its readers among ranks (readers=Readers(n, ranks='auto')), whose states can be merged"
    )


def check_parts(plain: PlainState) -> None:
    """Raise ValueError if a part of a state is missing or damaged; it says which."""
    for name, fits in _PARTS.items():
        if name not in plain:
            raise ValueError(f"the state is damaged: it has no {name!r}")
        if not fits(plain[name]):
            raise ValueError(f"the state is damaged: {name!r} is {reprlib.repr(plain[name])}")


def check_family(plain: dict[str, object]) -> None:
    """Raise ValueError if a dictionary is no state that this version reads."""
    loader = plain.get("loader")
    if not isinstance(loader, dict) or loader.get("kind") != _FAMILY:
        raise ValueError(
            f"this is no state of a {_FAMILY}: it has the keys {sorted(map(str, plain))}. A state of torchdata's "
            "StatefulDataLoader cannot be resumed here"
        )
    if loader.get("version") != _VERSION:
        raise ValueError(
            f"the state has version {loader.get('version')!r}, and this minato reads {_VERSION}: resume it with the "
            "minato that wrote it, to the end of the epoch"
        )
    dealing = loader.get("dealing")
    if dealing is not None and not _is_dealing(dealing):
        raise ValueError(
            f"the state is damaged: 'dealing' of its 'loader' is {reprlib.repr(dealing)}"
        )


def signature(spec: SamplingSpec, draw: SamplerState) -> dict[str, Any]:
    """Return the facts by which a state belongs to a loader; those about epoch, rank and cost may differ."""
    sampler = spec.index_sampler
    epoch = epoch_of(draw.samplers)
    sets_epoch = any(callable(getattr(one, "set_epoch", None)) for one in draw.samplers)
    # It may depend on the epoch, and the sampler does not say which one it has.
    length = None if sets_epoch and epoch is None else length_of(sampler)
    return {
        "kind": _FAMILY,
        "version": _VERSION,
        "place": spec.rank,
        "dataset_length": None if spec.streams else length_of(spec.dataset),
        "sampler": " of ".join(type(one).__qualname__ for one in draw.samplers),
        "batched": spec.batched,
        "batch_size": spec.batch_size,
        "by_cost": spec.by_cost,
        "drop_last": spec.drop_last,
        "sampler_length": length,  # after what decides it: the error names the first difference
        "order": spec.order,
        "seed": spec.seed,
        "readers": spec.readers,
        "ranks": list(spec.dealt),
        "stream": facts_of(spec.dataset) if spec.streams else None,
        "saved_in": list(rank_and_ranks()) if spec.streams and spec.dealt[1] == 1 else None,
        "generators": draw.num_generators,
        "stateful_samplers": draw.num_stateful,
        "sampler_epoch": epoch,
        "dealing": _dealing(spec),
    }


def _dealing(spec: SamplingSpec) -> dict[str, Any] | None:
    """Return how the sampler divides the epoch among ranks, which one this is, and which ones share its batches."""
    dealing = None if spec.streams else dealing_of(spec.index_sampler, spec.batched)
    if dealing is None:
        return None
    kinds = map(type, nested(dealing.divides))
    # Its order is that of torch's sampler, which the program may give where there is one rank.
    names = [(DistributedSampler if k is RankSampler else k).__qualname__ for k in kinds]
    pooled = range(dealing.rank, dealing.rank + 1) if spec.pooled is None else spec.pooled
    return {
        "rank": dealing.rank,
        "count": dealing.ranks,
        "first": pooled.start,
        "together": len(pooled),
        "deals": dealing.deals,
        "batch_size": dealing.batch_size,
        "order": {"type": " of ".join(names), **dealing.facts()},
    }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < _INT64


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64 <= value < _INT64


def _are_each(value: object, fits: Callable[[object], bool]) -> bool:
    """Whether a part of a state is about each of several that take turns."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("each"), list)
        and _is_count(value.get("turn"))
        and value["turn"] < max(len(value["each"]), 1)
        and all(map(fits, value["each"]))
    )


def _has(
    value: object, names: Iterable[str], **fits: Callable[[Any], bool]
) -> TypeGuard[PlainState]:
    """Whether a part of a state is a dictionary with these keys, some of whose values pass checks."""
    if not isinstance(value, dict) or value.keys() != {*names, *fits}:
        return False
    return all(fit(value[name]) for name, fit in fits.items())


def _are_dataset_states(value: object) -> bool:
    return value is None or _are_each(value, lambda each: _has(each, vars(DatasetState())))


def _are_readers(value: object) -> bool:
    if value is None:
        return True
    set_epoch = value.get("set_epoch") if isinstance(value, dict) else None
    return _are_each(value, _is_reader) and (set_epoch is None or _is_int64(set_epoch))


def _are_ranks(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_count, value))
        and value[0] < value[1]
    )


def _is_reader(value: object) -> bool:
    return value is None or _has(  # None: of another rank
        value,
        (),
        done=_are_ranges,
        end=lambda end: end is None or _is_count(end),
        jumped=_is_bool,
        read=lambda read: read is None or (_is_tally(read) and read[1] < 1 << 32),
        state=lambda state: state is None or _has(state, vars(ReaderState()), ordinal=_is_count),
    )


def _are_ranges(value: object) -> bool:
    pairs = (list, tuple)
    if not isinstance(value, pairs) or not all(isinstance(p, pairs) and len(p) == 2 for p in value):
        return False
    bounds = [bound for pair in value for bound in pair]
    return all(map(_is_count, bounds)) and all(a < b for a, b in itertools.pairwise(bounds))


def _is_done(value: object) -> bool:
    tallies = {"delivered": _is_tally, "skipped": _is_tally}
    return _has(value, (), ranges=_are_ranges, batches=_is_count, **tallies)


def _is_tally(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    samples, hashed = value
    return _is_count(samples) and isinstance(hashed, int) and 0 <= hashed < 2 * _INT64


def _is_dealing(value: object) -> bool:
    counts = dict.fromkeys(("first", "together", "batch_size"), _is_count)
    if not _has(value, ("rank", "count", "deals"), **counts, order=_is_dict):
        return False
    rank, count = value["rank"], value["count"]
    is_merged = rank is None and count is None
    return is_merged or (_is_count(rank) and _is_count(count) and rank < count <= _MOST_RANKS)


def _are_stages(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_stage, value))


def _is_stage(value: object) -> bool:
    fits = {
        "ranks": lambda ranks: _is_count(ranks) and 0 < ranks <= _MOST_RANKS,
        "batch_size": lambda size: _is_count(size) and 0 < size <= _MOST_SAMPLES,
        "parts": lambda parts: isinstance(parts, list),
        **dict.fromkeys(("delivered", "skipped"), _is_tally),
    }
    return (
        _has(value, Stage._fields, **fits)
        and (value["known"] is None or value["known"] in range(len(value["parts"])))
        and all(_is_part(part, value["ranks"]) for part in value["parts"])
    )


def _is_part(value: object, ranks: int) -> bool:
    fits = dict.fromkeys(("first", "together"), _is_count)
    return (
        _has(value, (), ranges=_are_ranges, **fits)
        and 0 < value["together"] <= ranks - value["first"]
    )


_PARTS: dict[str, Callable[[Any], bool]] = {
    "epoch": _is_int64,
    "finished": _is_bool,
    "draw": _is_dict,
    "dataset_states": _are_dataset_states,
    "readers": _are_readers,
    "base_seed": _is_int64,
    "drawn_epoch": _is_int64,
    "done": _is_done,
    "earlier": _are_stages,
}
"""Parts of a state, and their checks; the states of samplers and datasets are theirs."""
