"""Samplers whose order follows from (seed, epoch); ranks and epochs of others; the batches that any of them yields."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato._compat import EndlessSampler
from minato._core import Occurrences, mix_seed, now_ns, sum_of_hashes
from minato._support.hashes import index_hash
from minato._support.objects import attribute, is_exactly, length_of
from minato._support.values import integer_of, message_of, plain
from minato.checks import refuse_single
from minato.sampling.cost_batches import CostBatchSampler, fill_steps
from minato.sampling.dealing import (
    BATCHES,
    BLOCKS,
    SAMPLES,
    Batches,
    Dealing,
    Stage,
    left_batches,
    left_places,
)
from minato.sampling.replay import RecordedOrder

OTHER_INDICES = (
    "the sampler yields other indices than when the state was taken, or other batches of them, so the remaining ones "
    "are unknown: use seed= and the same batch size, call set_epoch if the sampler has one, give it a generator, or "
    "state_dict() and load_state_dict()"
)
_MOST_RESERVED = 1 << 20
"""Samples of a batch for which memory is reserved in advance, where their number is unknown."""
_MOST_COUNTED = 1 << 28  # largest number of a dataset's indices that an array counts
_MOST_AHEAD, _INDICES_AHEAD = 32, 1024
"""Batches that are drawn together, and their indices, which costs less than one by one."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(frozen=True, eq=False)
class SamplingSpec:
    """Decides which indices a loader asks for, in which order.

    It holds no loader: an epoch outlives the iterator that the loader may keep, and a cycle would keep the workers
    until the garbage collector runs.
    """

    dataset: Any
    streams: bool
    index_sampler: Any  # yields lists of indices, or single indices where the loader does not batch
    batched: bool
    batch_size: int | None
    drop_last: bool
    generator: torch.Generator | None  # the loader's, None for torch's default generator
    order: str  # ``strict``, ``batch``, ``arrival`` or ``fast_first``
    mixes_batches: bool  # samples may take places in other batches than their own
    seed: int | None  # of shuffling and samples; None: torch's generator draws it
    has_workers: bool  # samples are loaded outside the main process or in other threads
    # The next epoch may be prefetched if its indices are known: the workers stay, and the randomness of a sample does
    # not depend on earlier samples.
    predictable: bool
    record_order: str | None
    replay: RecordedOrder | None
    rank: str | None
    pooled: range | None = None
    readers: int = 0  # number of readers of an iterable dataset, of all ranks; 0: it is map-style
    dealt: tuple[int, int] = (0, 1)  # rank and number of ranks among which they are dealt
    persists_datasets: bool = False
    # A resumed epoch is read from its beginning, whatever state the dataset has.
    rereads: bool = False
    by_cost: bool = False  # the costs of samples decide how many of them make a batch

    @property
    def own_readers(self) -> range:
        """The numbers of the readers of this rank."""
        rank, ranks = self.dealt
        return range(rank, self.readers, ranks)

    @property
    def divides_batches(self) -> str | None:
        """Why single indices are all that is kept of a batch; None: what the sampler yields is kept."""
        if self.mixes_batches:
            return (
                "this order puts samples of several batches together: use order='strict' or 'batch'"
            )
        if self.record_order is not None:
            return "recording=Record(...) writes indices only: leave it out"
        return None

    def size(self) -> int | None:
        """Number of samples in an epoch; None if another class than torch's BatchSampler makes the batches."""
        sampler = self.index_sampler
        if self.batched:
            if type(sampler) is not BatchSampler:
                return None
            sampler = sampler.sampler
        return length_of(sampler)

    def batches_left(self, done: int) -> int | None:
        """Number of batches of an epoch after the first ``done``; None if it is unknown."""
        counted, size = self.index_sampler, 1
        if self.streams:
            counted, size = self.dataset, self.batch_size or 1
        count = None if self.by_cost else length_of(counted)
        if count is None:
            return None
        return max((count if self.drop_last else count + size - 1) // size - done, 0)


class SeededSampler(RandomSampler):
    """Shuffles by (seed, epoch) alone: the order of any epoch is known in advance.

    It is a ``RandomSampler``, as trainers look for that class to see whether a loader shuffles.

    Args:
        data_source: Anything with a length.
        seed: Any integer.

    Attributes:
        epoch: The epoch whose permutation ``iter()`` yields; set it with ``set_epoch``.
    """

    def __init__(self, data_source: Sized, seed: int) -> None:
        super().__init__(data_source)
        self.seed = operator.index(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation that the next ``iter()`` yields."""
        self.epoch = operator.index(epoch)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(mix_seed(self.seed, self.epoch, 0) >> 1)
        yield from torch.randperm(len(self.data_source), generator=generator, device="cpu").tolist()


# ---- epochs and ranks of samplers ------------------------------------------------------------------

_DEEPEST = 8  # most nested samplers; an object with more returns something for every attribute


def nested(sampler: object) -> list[Any]:
    """Return a sampler, the one it draws from, and so on, by the attributes ``sampler`` and ``batch_sampler``."""
    found: list[object] = []
    while sampler is not None and len(found) < _DEEPEST:
        found.append(sampler)
        kind = type(sampler)
        if kind is BatchSampler:  # torch's own, of which each epoch asks
            batches: Any = sampler
            sampler = batches.sampler
        elif kind is SequentialSampler or kind is RandomSampler or kind is EndlessSampler:
            break
        else:
            inner = attribute(sampler, "sampler")
            sampler = attribute(sampler, "batch_sampler") if inner is None else inner
    return found


def epoch_of(samplers: Iterable[object]) -> int | None:
    """Return the ``epoch`` of the first of some nested samplers that has one; None without."""
    for one in samplers:
        try:  # no call of ``attribute``: each epoch asks five times
            epoch = getattr(one, "epoch", None)
        except Exception:
            continue
        if epoch is not None and isinstance(epoch := plain(epoch), int):
            return epoch
    return None


def set_sampler_epoch(samplers: Iterable[object], epoch: int) -> None:
    """Call ``set_epoch`` of all of some nested samplers that have it, as trainers do."""
    for one in samplers:
        set_epoch = attribute(one, "set_epoch")
        if callable(set_epoch):
            set_epoch(epoch)


@contextmanager
def at_epoch(sampler: object, epoch: int | None) -> Iterator[None]:
    """Give samplers that have an epoch another one for the length of a ``with`` block; None: they keep their own."""
    own = [
        (one, one.epoch)
        for one in nested(sampler)
        if isinstance(getattr(one, "epoch", None), int)
        and callable(getattr(one, "set_epoch", None))
    ]
    if epoch is None or all(before == epoch for _, before in own):
        own = []
    try:
        for one, _ in own:
            one.set_epoch(epoch)
        yield
    finally:
        for one, before in own:
            one.set_epoch(before)


class RankSampler(DistributedSampler[int]):
    """torch's sampler for ranks. The loader sets its epoch, so that epochs differ without ``set_epoch``.

    Args:
        shuffle: Whether (seed, epoch) permutes the indices.
        drop_last: Whether indices that do not divide by the ranks are dropped; otherwise some are repeated.
    """

    def __init__(
        self, data_source: Sized, count: int, rank: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        # torch adds the epoch to the seed, and its generator takes 64 bits.
        seed %= 1 << 62
        super().__init__(cast(Any, data_source), count, rank, shuffle, seed, drop_last)


def ranked(sampler: object) -> Any | None:
    """Return the first of the nested samplers with ``rank`` and ``num_replicas``; None if there is none."""
    return next(filter(_has_rank, nested(sampler)), None)


def _has_rank(sampler: object) -> bool:
    names = ("rank", "num_replicas")
    return all(attribute(sampler, name) is not None for name in names)


def sampler_at_rank(sampler: Any, rank: int) -> Any:
    """Return a copy of a sampler, as another rank has it, with generators of its own in the same state."""
    changes = _own_generators(sampler, {})
    if _has_rank(sampler):
        return _changed(sampler, **{**changes, "rank": rank})
    name = "batch_sampler" if attribute(sampler, "sampler") is None else "sampler"
    return _changed(sampler, **{**changes, name: sampler_at_rank(getattr(sampler, name), rank)})


def _own_generators(sampler: object, copies: dict[int, object]) -> dict[str, object]:
    found = dict[str, object]()
    for name, value in getattr(sampler, "__dict__", {}).items():
        if type(value) in _GENERATORS:
            found[name] = copy.deepcopy(value, copies)  # two attributes may hold one
        elif isinstance(value, Sampler):
            if id(value) not in copies:
                copies[id(value)] = other = copy.copy(value)
                vars(other).update(_own_generators(value, copies))
            found[name] = copies[id(value)]
    return found


Keep: TypeAlias = "Callable[[], Callable[[], object]]"
"""Returns a function that gives default generators the states that they have now."""


def _kept_states() -> Callable[[], None]:
    of_torch, of_numpy = torch.default_generator.get_state(), np.random.get_state(legacy=False)
    of_python = random.getstate()

    def restore() -> None:
        torch.default_generator.set_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    return restore


def drawn_apart(
    start: Callable[[], Iterator[object]],
    begin: Callable[[], object],
    once: bool,
    keep: Keep = _kept_states,
) -> Iterator[Any]:
    """Yield from an iterator that has states of the default generators of its own.

    Args:
        start: Returns the iterator.
        begin: Gives the generators the states from which it draws its order.
        once: It draws for its first item only.
        keep: Keeps the states of these generators; by default of all.
    """
    draw: Iterator[object] | None = None
    ended = object()
    while True:
        outside = keep()
        try:
            try:
                begin()
                draw = start() if draw is None else draw
                item = next(draw, ended)
            finally:
                begin = keep()
                outside()
        except BaseException:  # of a signal's handler, which may have come in the midst of that
            outside()
            raise
        if item is ended:
            return
        yield item
        if once:
            yield from draw
            return


class InterleavedRanks:
    """The batches of several ranks: the first batch of each, then the second of each, and so on."""

    def __init__(self, sampler: Any, ranks: range) -> None:
        self.sampler = sampler
        self.ranks = ranks
        self.batch_size: Any = attribute(sampler, "batch_size")

    def __len__(self) -> int:
        return len(self.sampler) * len(self.ranks)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. Raises ValueError if one rank has fewer batches than another."""
        ended = object()
        own = attribute(ranked(self.sampler), "rank")
        # Its own is none of the copies: what it keeps from one epoch to the next, such as a number, stays.
        samplers = {
            rank: self.sampler if rank == own else sampler_at_rank(self.sampler, rank)
            for rank in self.ranks
        }
        # Where nothing is drawn, another thread may use the default generators meanwhile.
        kinds = [*nested(self.sampler)]
        draws_nothing = all(is_exactly(each, DRAWS_NOTHING) for each in kinds)
        once = all(is_exactly(each, (*DRAWS_NOTHING, *DRAWS_AT_FIRST)) for each in kinds)
        begin: Callable[[], object] = int if draws_nothing else _kept_states()
        starts = {rank: functools.partial(iter, sampler) for rank, sampler in samplers.items()}
        draws = [
            start() if draws_nothing or rank == own else drawn_apart(start, begin, once)
            for rank, start in starts.items()
        ]
        texts = list[set[str]]()
        for number in itertools.count():
            step = [next(draw, ended) for draw in draws]
            over = [batch is ended for batch in step]
            if all(over):
                return
            if any(over):
                raise ValueError(
                    f"rank {self.ranks[over.index(True)]} has fewer batches than rank {self.ranks[over.index(False)]} "
                    f"by {type(self.sampler).__name__}: with workers=SharedPool(...) all ranks must have as many"
                )
            if number < 2:  # a single batch may be repeated for ranks that have none
                texts.append(set(map(str, step)))
            if number == 1 and len(step) > 1 and texts[0] != texts[1] and max(map(len, texts)) == 1:
                raise ValueError(
                    f"{type(self.sampler).__name__} gives all ranks the same batches: with workers=SharedPool(...) "
                    "local rank 0 draws for all by copies with another rank, so that __iter__ must go by self.rank"
                )
            yield from step


# ---- what is left of an epoch, for other ranks -----------------------------------------------------


def dealing_of(index_sampler: Any, batched: bool) -> Dealing | None:
    """Return how a loader's sampler divides an epoch among ranks, one rank included; None if that is unknown."""
    size = integer_of(attribute(index_sampler, "batch_size")) if batched else 1
    numbers = [attribute(index_sampler, name) for name in ("process_index", "num_processes")]
    if None not in numbers and (inner := attribute(index_sampler, "batch_sampler")) is not None:
        # Accelerate's, which divides the batches of another one, or each of them
        rank, count = map(integer_of, numbers)
        if not (rank is not None and count and _is_plain(inner)):
            return None
        is_split = bool(attribute(index_sampler, "split_batches"))
        size = inner.batch_size // count if is_split else inner.batch_size
        return Dealing(BLOCKS, inner.sampler, rank, count, size)
    known = ranked(index_sampler)
    if known is None:
        if not (batched and _is_plain(index_sampler)):
            return None
        return Dealing(BLOCKS, index_sampler.sampler, 0, 1, index_sampler.batch_size)
    rank, count = integer_of(known.rank), integer_of(known.num_replicas)
    if rank is None or not count:
        return None
    if known is index_sampler and batched:
        return Dealing(BATCHES, known, rank, count, 1)
    if batched and not (_is_plain(index_sampler) and index_sampler.sampler is known):
        return None
    return Dealing(SAMPLES, known, rank, count, size or 1)


def _is_plain(sampler: object) -> bool:
    """Whether a sampler makes batches of consecutive indices of another one, as torch's does."""
    return getattr(type(sampler), "__iter__", None) is BatchSampler.__iter__


def redealt(index_sampler: Any, stages: Sequence[Stage], length: int | None, batched: bool) -> Any:
    """Return a copy of a loader's sampler, or of those of several ranks, that divides what some stages have left."""
    if type(index_sampler) is InterleavedRanks:
        own = redealt(index_sampler.sampler, stages, length, batched)
        return InterleavedRanks(own, index_sampler.ranks)
    dealing = dealing_of(index_sampler, batched)
    assert dealing is not None, "the state was opened for another sampler"
    left = Remaining(dealing, stages, length)
    if index_sampler is dealing.divides:
        return left
    if (inner := index_sampler.sampler if _is_plain(index_sampler) else None) is dealing.divides:
        return _changed(index_sampler, sampler=left)
    inner = index_sampler.batch_sampler
    return _changed(index_sampler, batch_sampler=_changed(inner, sampler=left))


class Remaining:
    """What some stages have left of an epoch, in the place of the sampler that divides the epoch or is divided.

    Each rank gets as many samples or batches as any other: the rest that does not divide is dropped, or filled up from
    the start of what is left, as the sampler does.
    """

    def __init__(self, dealing: Dealing, stages: Sequence[Stage], length: int | None) -> None:
        self.sampler = dealing.divides
        self._deals, self._stages = dealing.deals, stages
        self._drops = dealing.deals == SAMPLES and bool(attribute(self.sampler, "drop_last"))
        self._length: Any = length
        if dealing.deals != BLOCKS:
            self.rank, self.num_replicas = dealing.rank, dealing.ranks
        if dealing.deals == SAMPLES:
            own = length_of(attribute(self.sampler, "dataset"))
            self._length = length if own is None else own
        elif dealing.deals == BLOCKS:
            self._length = length_of(self.sampler)
        self._batches: tuple[int | None, Batches] | None = None

    def __len__(self) -> int:
        if self._deals == BATCHES:
            return len(self._all_batches()) // self.num_replicas
        left = len(self._places()[0])
        return left if self._deals == BLOCKS else len(self._own(range(left)))

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices, or the batches, of this rank; ValueError: the sampler yields others than before."""
        if self._deals == BATCHES:
            return map(list, self._all_batches()[self.rank :: self.num_replicas])
        order = list(self._undivided())
        left, taken = self._places()
        if len(order) != self._length:
            raise ValueError(OTHER_INDICES)
        self._check([[order[place] for place in places] for places in taken])
        rest = [order[place] for place in left]
        return iter(rest if self._deals == BLOCKS else self._own(rest))

    def _own(self, left: Sequence[object]) -> Sequence[object]:
        count = self.num_replicas
        end = len(left) // count * count if self._drops else -(-len(left) // count) * count
        return [left[place % len(left)] for place in range(self.rank, end, count)]

    def _places(self) -> Any:
        try:
            return left_places(self._length, self._stages, self._deals, self._drops)
        except IndexError:
            raise ValueError(OTHER_INDICES) from None

    def _undivided(self) -> Iterator[object]:
        if self._deals == BLOCKS:
            yield from self.sampler
            return
        alone = {"rank": 0, "num_replicas": 1}
        for name in ("num_samples", "total_size"):
            if attribute(self.sampler, name) is not None:
                alone[name] = self._length
        other = _changed(self.sampler, **alone)
        yield from other
        if (epoch := epoch_of([other])) != epoch_of([self.sampler]):  # it counts by itself
            self.sampler.epoch = epoch

    def _all_batches(self) -> Batches:
        """Return the batches of all ranks: the first of each, then the second of each, and so on."""
        epoch = epoch_of(nested(self.sampler))
        if self._batches is None or self._batches[0] != epoch:
            before = _changed(self.sampler, num_replicas=self._stages[0].ranks)
            length_of(before)  # a CostBatchSampler makes the batches once for all ranks
            batches = [
                list(batch) for batch in InterleavedRanks(before, range(before.num_replicas))
            ]
            try:
                left, taken = left_batches(batches, self._stages, fill_steps)
            except IndexError:
                raise ValueError(OTHER_INDICES) from None
            self._check(taken)
            fill_steps(left, self.num_replicas)
            self._batches = epoch, left
        return self._batches[1]

    def _check(self, taken: Batches) -> None:
        for stage, indices in zip(self._stages, taken, strict=True):
            expected = [sum(pair) for pair in zip(stage.delivered, stage.skipped, strict=True)]
            found = len(indices), sum_of_hashes(indices, index_hash)
            if found != (expected[0], expected[1] % (1 << 64)):
                raise ValueError(OTHER_INDICES)


# ---- what is known of a sampler by its class ------------------------------------------------------

SEEDED = (SeededSampler, CostBatchSampler, RankSampler)
"""Samplers whose epoch the loader sets at the beginning of each epoch."""
DRAWS_NOTHING = (
    *(BatchSampler, DistributedSampler, SequentialSampler, EndlessSampler),
    *(InterleavedRanks, Remaining),
    *SEEDED,
)
"""Samplers without a generator that outlives an epoch."""
DRAWS_AT_FIRST = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that use torch's default generator before their first index, and not afterwards."""
LISTS = (list, tuple, range, np.ndarray, torch.Tensor)
"""Containers of indices that mean no more than their elements; a dataset gets any other one whole or not at all."""
_RAISES_NOTHING = (
    *(BatchSampler, DistributedSampler, SequentialSampler, SeededSampler, RankSampler),
    *DRAWS_AT_FIRST,
)


def errors_of(samplers: Iterable[object]) -> tuple[type[Exception], ...]:
    """Return what nested samplers may raise themselves; none, where any exception is that of a signal's handler."""
    return () if all(is_exactly(one, _RAISES_NOTHING) for one in samplers) else (Exception,)


def _may_repeat(sampler: Any) -> bool:
    if is_exactly(sampler, (BatchSampler, InterleavedRanks, Remaining)):
        return _may_repeat(sampler.sampler)
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples > len(sampler.data_source)
    return not is_exactly(sampler, (SequentialSampler, DistributedSampler, *SEEDED))


def drawn_ahead(index_sampler: object, batched: bool) -> int:
    """Return how many batches may be drawn together, because nobody can tell when; 1: one by one.

    These samplers know all indices of an epoch when the first is drawn, and use no generator of the program's then.
    """
    size, sampler = 1, index_sampler
    if batched:
        if type(index_sampler) is not BatchSampler:
            return 1
        size, sampler = index_sampler.batch_size, index_sampler.sampler
    if type(sampler) is RandomSampler:
        known = sampler.generator is None and not sampler.replacement
        known = known and sampler.num_samples == length_of(sampler.data_source)
    else:
        known = is_exactly(sampler, (SequentialSampler, SeededSampler))
    return most_ahead(size) if known else 1


def most_ahead(size: int) -> int:
    """Return how many batches of a size are drawn together at most."""
    return max(min(_MOST_AHEAD, _INDICES_AHEAD // size), 1)


def largest_batch(index_sampler: object, batched: bool) -> int:
    """Return the largest number of samples in a batch, if ``batch_size`` or a list of batches shows it; else 1.

    A ``batch_size`` beyond the number of samples ("all in one batch") counts as that number.
    """
    if not batched:
        return 1
    if type(index_sampler) is InterleavedRanks:
        index_sampler = index_sampler.sampler
    size = attribute(index_sampler, "batch_size")
    if issubclass(type(index_sampler), (list, tuple)):
        size = max(filter(None, map(length_of, cast("list[Any]", index_sampler))), default=1)
    size = integer_of(size)
    if size is None:
        return 1
    samples = length_of(attribute(index_sampler, "sampler"))
    return max(min(size, _MOST_RESERVED if samples is None else samples), 1)


# ---- copies of samplers ---------------------------------------------------------------------------


def independent(sampler: object, dataset: object) -> Any:
    """Return a copy of a sampler and its generators: its epochs leave them as they are; ValueError: there is none."""
    if issubclass(type(sampler), (list, tuple, range)):
        return sampler
    if not is_exactly(sampler, (*DRAWS_NOTHING, *DRAWS_AT_FIRST)):
        try:
            return copy.deepcopy(sampler, {id(dataset): dataset})
        except Exception as error:
            raise ValueError(
                f"an epoch of its own needs a copy of the sampler, and a {type(sampler).__name__} cannot be copied "
                f"({type(error).__name__}: {message_of(error)}): give the class a __deepcopy__"
            ) from error
    other = {}
    for name, value in vars(sampler).items():
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            other[name] = copy.deepcopy(value)
        elif name in ("sampler", "batch_sampler"):
            other[name] = independent(value, dataset)
    return _changed(sampler, **other)


def with_own_epochs(*samplers: object) -> list[Any]:
    """Return samplers; those whose epoch the loader sets are copies, also in a plain ``BatchSampler``."""
    copies: dict[int, object] = {}

    def copied(sampler: object) -> object:
        if type(sampler) is BatchSampler:
            inner = copied(sampler.sampler)
            return sampler if inner is sampler.sampler else _changed(sampler, sampler=inner)
        if not issubclass(type(sampler), SEEDED):
            return sampler
        return copies.setdefault(id(sampler), copy.copy(sampler))

    return list(map(copied, samplers))


def _changed(sampler: object, /, **values: object) -> Any:
    other = copy.copy(sampler)
    for name, value in values.items():
        setattr(other, name, value)
    return other


def in_epoch(index_sampler: object, epoch: int) -> Any:
    """Return a copy of a seeded sampler, alone or in a plain ``BatchSampler``, in an epoch; others as they are.

    A ``BatchSampler`` asks its sampler when its first batch is drawn: the loader may have begun another epoch by then.
    """
    inner = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    if type(inner) is not SeededSampler:
        return index_sampler
    then = _changed(inner, epoch=epoch)
    return then if inner is index_sampler else _changed(index_sampler, sampler=then)


def next_sampler(index_sampler: Any) -> Any | None:
    """Return the index sampler of the next epoch; None if it cannot be predicted.

    Predictable are ``SequentialSampler``, ``SeededSampler``, ``CostBatchSampler`` and ``DistributedSampler`` (with the
    next epoch's number), alone or in a plain ``BatchSampler``, and several ranks of these.
    """
    if is_exactly(index_sampler, (InterleavedRanks, BatchSampler)):
        inner = next_sampler(index_sampler.sampler)
        return None if inner is None else _changed(index_sampler, sampler=inner)
    if type(index_sampler) is Remaining:
        return next_sampler(index_sampler.sampler)
    if type(index_sampler) is SequentialSampler:
        return index_sampler
    if is_exactly(index_sampler, (*SEEDED, DistributedSampler)):
        return _changed(index_sampler, epoch=index_sampler.epoch + 1)
    return None


# ---- the indices of a batch -----------------------------------------------------------------------


class Alone(list[Any]):
    """A batch for which the sampler yields one object without a length, such as a slice."""


def as_given(batch: object) -> Any:
    """The object that the sampler yields for a batch that is made for ``__getitems__``, which may change it.

    The batch itself stays as it is: the call may run again, or single calls in its place.
    """
    return copied_index(batch[0] if type(batch) is Alone else batch)


def batch_maker(
    batched: bool, *, whole: bool = False, divided: str | None = None, copies: bool = False
) -> Callable[..., Any]:
    """Return a function that makes the indices of a batch, in a list, of what a sampler yields, and of its number.

    Args:
        whole: The dataset gets all indices of a batch in one call (``__getitems__``). Then their container matters, and
            reaches it as it is, with the attributes of a class of the program's own.
        divided: Why single indices are all that is kept of a batch; None: its container is kept.
        copies: Indices are used after the next ones are drawn: those that a sampler may change are copied.
    """

    def make(given: Any, number: int = 0) -> Any:  # the number is for what marks the batch
        kind = type(given)
        if batched and whole and kind is not list and not hasattr(kind, "__next__"):
            if divided is not None and kind not in LISTS:
                raise ValueError(
                    f"the batch sampler yields a {kind.__qualname__}, which the dataset's __getitems__ must get as it "
                    f"is, and {divided}"
                )
            given = copied_index(given) if copies else given
            try:
                len(given)
            except TypeError:
                return Alone([given])
            return given
        batch = list(given) if batched else [given]
        if copies and batch and type(batch[0]) not in (int, str):
            return list(map(copied_index, batch))
        return batch

    return make


def copied_index(index: Any) -> Any:
    """Return a copy of an index of a type that can be changed."""
    if type(index) is torch.Tensor:
        return index.clone()
    return index.copy() if type(index) in (np.ndarray, list, dict, set) else index


# ---- indices that come more than once in an epoch -------------------------------------------------


@final
class Recurring:
    """A batch some of whose indices came before in its epoch."""

    __slots__ = ("indices", "occurrences")

    def __init__(self, indices: Sequence[object], occurrences: list[int]) -> None:
        self.indices: Any = indices
        self.occurrences = occurrences

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def of(cls, indices: Sequence[object], occurrences: list[int]) -> Batch:
        """Return a batch: the indices alone if none came before."""
        return cls(indices, occurrences) if any(occurrences) else indices


Batch: TypeAlias = "Sequence[object] | Recurring"
"""The indices of a batch, in the container that the sampler gave."""


def unmarked(batch: object) -> tuple[Any, list[int] | None]:
    """Return the indices of a batch, and how often each came before; None: none did."""
    if type(batch) is Recurring:
        return batch.indices, batch.occurrences
    return batch, None


def occurrence_counter(
    index_sampler: object, length: int | None
) -> Callable[[Any, int], Any] | None:
    """Return a function that marks each index of an epoch's batches that came before; None: none comes again.

    It is called with each batch and its number; again, if that was interrupted.
    """
    if not _may_repeat(index_sampler):
        return None
    # Each rank counts its own indices, as without a shared pool.
    ranks = len(index_sampler.ranks) if type(index_sampler) is InterleavedRanks else 1
    size = min(length or 0, _MOST_COUNTED)
    counts = [Occurrences(size, index_hash) for _ in range(ranks)]

    def mark(indices: Sequence[object], number: int) -> Any:
        found = counts[number % ranks].count(indices, number)
        return indices if found is None else Recurring(indices, found)

    return mark


# ---- the batches of an epoch, drawn as they are needed --------------------------------------------


class Source(NamedTuple):
    """Where batches come from."""

    # What the sampler yields for each batch. An interruption loses none of it, unless it ends the items.
    items: Iterator[Any]
    # Makes a batch of it and of the batch's number; None: it is one. An interrupted call is made again.
    make: Callable[[Any, int], Any] | None = None
    may_die: bool = True  # whether an interruption ends the items, as it ends a generator
    ahead: int = 1  # how many may be drawn together


class Drawn(list[Any]):
    """A batch that was drawn: what the sampler yielded, its number, and its indices if these were made of it."""

    @property
    def number(self) -> int:
        """Its number."""
        return int(self[1])

    @property
    def indices(self) -> Any:
        """Its indices."""
        return self[2] if len(self) > 2 else self[0]


class IndexBatches:
    """Draws the batches of an epoch; an interruption loses none of them.

    A batch that was drawn stays here until its user has dropped it. A generator that is interrupted has ended: then all
    batches are drawn again, up to that point.

    Args:
        again: Returns the batches from one on, given the number of those before it; None: an interruption ends them.
        note: Called with the indices of some batches, the number of the first, and the ns of drawing since the last
            call. It may be called again, without effect.
        errors: The exceptions that are the sampler's own, after which it has ended, as with torch; others interrupt.

    Attributes:
        goes_on: Whether the last error was that of one batch, which has no indices; the next call is for the next one.
    """

    def __init__(
        self,
        begin: Callable[[], Source],
        again: Callable[[int], Source] | None = None,
        note: Callable[[Sequence[Batch], int, int], object] = lambda batches, first, took_ns: None,
        errors: tuple[type[Exception], ...] = (Exception,),
    ) -> None:
        self._begin = begin
        self._again = again
        self._note = note
        self._errors = errors
        self._source: Source | None = None
        self._numbers = itertools.count()
        self._ahead: deque[Drawn] = deque()
        self._num_dropped = self._num_noted = self._took_ns = 0
        self._was_interrupted = False
        self._raised_at = -1  # the number of batches that had been dropped
        self.goes_on = False

    @classmethod
    def of(cls, batches: Iterable[object]) -> IndexBatches:
        """Return batches of indices that nobody draws again."""
        return cls(lambda: Source(iter(batches)))

    def ahead(self, count: int) -> list[Drawn]:
        """Return the next ``count`` batches, fewer at the end.

        RuntimeError: The sampler was interrupted, and does not repeat what it has yielded.
        """
        self._complete()
        while len(self._ahead) < count and self._draw():
            self._complete()
        return list(itertools.islice(self._ahead, count))

    def first(self) -> Drawn | None:
        """Return the next batch, drawn with others where nobody can tell; None at the end. Raises as ``ahead``."""
        ahead = self._ahead
        if not ahead and not self._draw(together=True):
            return None
        if ahead[0][1] >= self._num_noted:
            self._complete()
        return ahead[0]

    def drop(self, drawn: Drawn) -> None:
        """Drop the next batch, as ``ahead`` returned it, unless that is done."""
        if self._ahead and self._ahead[0] is drawn:
            self._num_dropped = drawn[1] + 1
            self._ahead.popleft()

    def _complete(self) -> None:
        """Make the indices of all batches that were drawn, and note them, unless that is done."""
        self.goes_on = False
        new = [drawn for drawn in self._ahead if drawn[1] >= self._num_noted]
        if not new:
            return
        if self._source is not None and (make := self._source.make) is not None:
            for drawn in new:
                if len(drawn) == 2:
                    try:
                        drawn.append(make(*drawn))
                    except self._errors as error:
                        # No such indices: as with torch, the next batch follows.
                        self.goes_on = True
                        self._num_dropped = drawn.number + 1
                        self._ahead.remove(drawn)
                        refuse_single(drawn[0], error)
                        raise
        indices = [drawn[-1] if len(drawn) > 2 else drawn[0] for drawn in new]
        took_ns, self._took_ns = self._took_ns, 0
        self._note(indices, new[0][1], took_ns)
        self._num_noted = new[-1][1] + 1

    def _draw(self, together: bool = False) -> bool:
        """Draw one batch, or as many as may be drawn together; False at the end."""
        known, most, began_ns = len(self._ahead), 1, now_ns()
        try:
            if self._source is None:
                self._source = self._drawn_again() if self._was_interrupted else self._begin()
            most = self._source.ahead if together else 1
            self._take(most)
            if len(self._ahead) == known and self._was_interrupted and self._source.may_die:
                self._source = self._drawn_again()
                self._take()
            self._was_interrupted = False
        except self._errors:
            self.goes_on = False
            raise
        except BaseException as error:
            has_none = len(self._ahead) == known
            if isinstance(error, Exception) and has_none and self._raised_at == self._num_dropped:
                # Again, and no batch came in between: no signal's, but of the dataset's length. As with torch, it ends.
                self._source = Source(iter(()))
                self._was_interrupted = False
            else:
                self._was_interrupted = has_none or most > 1
                self._raised_at = self._num_dropped
            raise
        self._took_ns += now_ns() - began_ns
        return len(self._ahead) > known

    def _take(self, most: int = 1) -> None:
        """Take items of the source, in one step: a signal is handled before it or after it."""
        assert self._source is not None
        items = itertools.islice(self._source.items, most)
        self._ahead.extend(map(Drawn, zip(items, self._numbers, strict=False)))

    def _drawn_again(self) -> Source:
        number = self._ahead[-1].number + 1 if self._ahead else self._num_dropped
        if self._again is None:
            raise RuntimeError(
                f"the sampler was interrupted where it yields batch {number}: call iter(loader) to begin another epoch"
            )
        return self._again(number)
