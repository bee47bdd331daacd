"""The runs of a loader over its sampler, one after the other, and the state from which one can go on."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler

from minato._compat import index_sampler, is_batched, is_iterable
from minato._core.epochs import seed_of_epoch
from minato.observe.stats.lateness import Lateness
from minato.observe.stats.size import length_of
from minato.sampling.completed import Completed
from minato.sampling.coverage import Coverage, Progress, index_hash, remaining_batches
from minato.sampling.distributed import InterleavedRanks
from minato.sampling.replay import OrderRecord, RecordedOrder
from minato.sampling.rng_state import SamplerState
from minato.sampling.sampler_epoch import epoch_of, nested, set_sampler_epoch
from minato.sampling.samplers import SEEDED, counted, index_batches, next_sampler, sizes_of
from minato.sampling.state import (
    checked,
    completed_from_plain,
    completed_to_plain,
    is_stateful,
    signature,
)

__all__ = ["Course", "Run", "Standing", "is_stream"]

_MIXING = ("arrival", "fast_first")
"""Orders in which samples take places in other batches than their own."""


def is_stream(loader: Any) -> bool:
    """Whether the loader's dataset is iterable, so that its workers decide what comes."""
    return is_iterable(loader)


@dataclass
class Standing:
    """What a loader remembers of its last run, whose iterator may be gone.

    Attributes:
        epoch: Its number.
        progress: What has become of its keys.
        draw: What decided their order.
        base_seed: What torch drew for the workers.
        drawn_epoch: The epoch that a seed which torch drew is in: told by the sampler or by ``set_epoch``, or else
            counted from the creation of the iterator, so that ``torch.manual_seed`` repeats an epoch.
        seed: What the randomness of its samples starts from.
        replicas: Knows the states of the workers' datasets; None if they have none.
    """

    epoch: int
    progress: Progress
    draw: SamplerState
    base_seed: int = 0
    drawn_epoch: int = 0
    seed: int = 0
    replicas: Any = None

    def seed_in(self, epoch: int) -> int:
        """What the randomness of samples starts from in another epoch of the same iterator."""
        return seed_of_epoch(self.base_seed, self.drawn_epoch + epoch - self.epoch, epoch)


@dataclass(frozen=True)
class _Given:
    """What a run needs of its loader, by value.

    A loader that keeps its iterator would else be part of a cycle, and its workers would stay after ``del loader``
    until the garbage collector comes by.
    """

    dataset: Any
    streams: bool
    batched: bool
    sampler: Any
    index_sampler: Any
    drop_last: bool
    persistent: bool
    options: Any
    course: Course

    @classmethod
    def of(cls, loader: Any) -> _Given:
        return cls(
            dataset=loader.dataset,
            streams=is_stream(loader),
            batched=is_batched(loader),
            sampler=loader.sampler,
            index_sampler=index_sampler(loader),
            drop_last=loader.drop_last,
            persistent=loader.persistent_workers,
            options=loader._options,
            course=loader._position,
        )


class Run:
    """One run of a loader over its sampler.

    Args:
        standing: Kept up to date.
        state: In the middle of which it begins; None: at the beginning.
        begun: Called when its first batches are known.
        settled: Its samplers have the state that a loaded one gave them.
    """

    def __init__(
        self,
        loader: Any,
        standing: Standing,
        replay: RecordedOrder | None,
        state: dict[str, Any] | None = None,
        begun: Callable[[], None] = lambda: None,
        settled: bool = False,
    ) -> None:
        self._given = _Given.of(loader)
        self._standing = standing
        self._draw = standing.draw
        self._replay = replay
        self._state = state
        self._begun = begun
        self._settled = settled
        self._default = None if state is None else torch.default_generator.get_state()
        self._draw.before_iter()

    @property
    def epoch(self) -> int:
        """Its number."""
        return self._standing.epoch

    @property
    def seed(self) -> int:
        """What the randomness of its samples starts from."""
        return self._standing.seed

    @property
    def progress(self) -> Progress:
        """What has become of its keys."""
        return self._standing.progress

    def entering(self) -> None:
        """Note that the sampler is about to be asked for an iterator again; the last one counts."""
        self._draw.before_iter()

    def seeded(self, base_seed: int) -> int:
        """Take torch's draw for the workers; returns the one that holds."""
        if self._state is not None:
            base_seed = self._state["base_seed"]
        self._standing.base_seed = base_seed
        if self._replay is not None:
            self._standing.seed = self._replay.seed(self.epoch)
        else:
            self._standing.seed = self._seed_in(self.epoch)
        return base_seed

    def _seed_in(self, epoch: int) -> int:
        given: int | None = self._given.options.seed
        return self._standing.seed_in(epoch) if given is None else given

    def batches(self, indices: Any) -> Iterator[Any]:
        """The keys of each batch that is left, from what ``iter(sampler)`` gave.

        Raises:
            ValueError: The sampler does not give again what it gave when the state was taken.
        """
        try:
            batches = self._left(indices)
        finally:
            if self._default is not None:
                torch.default_generator.set_state(self._default)
        path = self._given.options.record_order
        if path is not None:
            first = self.progress.done().batches
            self.progress.record = OrderRecord(path, self.epoch, self.seed, first)
        self._begun()
        return map(self.progress.requested, batches)

    def _left(self, indices: Any) -> Iterator[Any]:
        given = self._given
        if given.streams:
            return sizes_of(indices, given.batched)
        if self._replay is not None:
            recorded = self._replay.batches(self.epoch)
            return recorded if self._state is None else self._rest(recorded, self._state)
        if self._state is not None:
            return self._drawn_again(self._state)
        return itertools.chain.from_iterable(self._drawn_first(indices))

    def _rest(self, batches: Iterator[Any], state: dict[str, Any]) -> Iterator[Any]:
        mixes = self._given.options.order in _MIXING
        return remaining_batches(
            batches, completed_from_plain(state["done"]), mixes, self._given.drop_last
        )

    def _drawn_again(self, state: dict[str, Any]) -> Iterator[Any]:
        """What is left of the pass in which a state was taken.

        The state of a sampler may say how far its last iterator was, that of an earlier epoch. The next one goes on
        from there, so that its keys are others, or none, and the one after begins anew.
        """

        def rest(samplers: bool) -> Iterator[Any]:
            return self._rest(self._keys(self._draw.redraw(state["draw"], samplers)), state)

        _, stateful = self._draw.sources
        if not stateful:
            return rest(samplers=True)
        try:
            left = rest(samplers=True)
        except ValueError:
            return rest(samplers=False)
        if state["done"]["batches"]:
            return left
        for keys in left:
            return itertools.chain([keys], left)
        return rest(samplers=False)

    def _drawn_first(self, indices: Any) -> Iterator[Iterator[Any]]:
        if isinstance(
            self._given.index_sampler, InterleavedRanks
        ):  # and not what torch asked, this rank's
            indices = iter(self._given.index_sampler)
        self._draw.before_first(indices)
        keys = self._keys(indices)
        if not self._settled:
            yield keys
            return
        first = list(itertools.islice(keys, 1))
        yield iter(first)
        # Of a sampler whose state says that its last iterator had ended, only the next one begins anew.
        yield keys if first else self._keys(iter(self._given.index_sampler))

    def _keys(self, indices: Any) -> Iterator[Any]:
        given = self._given
        whole = bool(getattr(given.dataset, "__getitems__", None))
        batches = index_batches(indices, given.batched, whole)
        return counted(batches, given.index_sampler, length_of(given.dataset), index_hash)

    def expected(self) -> tuple[Iterator[list[Any]], int, int] | None:
        """``(batches, epoch, seed)`` of the pass after this one, where it is known and can be prepared."""
        given = self._given
        if not (
            given.persistent
            and given.course.foretells
            and given.options.seeds_samples
            and self._replay is None
        ):
            return None
        later = next_sampler(given.index_sampler)
        if later is None:
            return None
        # Persistent workers keep their base seed, as with torch, so it is the same in the next pass.
        epoch = self.epoch + 1
        return index_batches(later, given.batched), epoch, self._seed_in(epoch)

    def size(self) -> int | None:
        """How many samples the sampler says it has, where there is no other than torch's batch sampler above it."""
        given = self._given
        if given.batched and type(given.index_sampler) is not BatchSampler:
            return None
        try:
            return len(given.sampler)
        except TypeError:
            return None

    def prediction_failed(self) -> None:
        """Load nothing ahead for the next passes of this loader."""
        self._given.course.foretells = False


class Course:
    """Where a loader stands: its epoch, its last run, and the state that the next one begins with.

    Attributes:
        epoch: Number of the last run.
        last: What is known of that run; None before the first.
        foretells: Whether the next pass may be begun early; not once it was foretold wrongly.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.last: Standing | None = None
        self.foretells = True
        self._sampler_epoch: int | None = 0
        self._told = False
        self._last_seed: int | None = None
        self._loaded: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What the last run is, is its iterator's, which no copy shares.
        return {**self.__dict__, "last": None, "_last_seed": self.seed}

    def tell(self, epoch: int) -> None:
        """Learn which epoch the next run begins."""
        self.epoch, self._told = epoch - 1, True

    @property
    def seed(self) -> int | None:
        """What the randomness of the last run's samples started from; None before the first."""
        return self._last_seed if self.last is None else self.last.seed

    def seed_of(self, epoch: int) -> int | None:
        """The same in another epoch of the last run's iterator, where torch drew the seed."""
        last = self.last
        if last is None:
            return self._last_seed
        drawn = last.seed == last.seed_in(last.epoch)
        return last.seed_in(epoch) if drawn else last.seed

    def twin(self) -> Course:
        """Another one at the same epoch, without a state to begin with."""
        twin = copy.copy(self)
        twin._loaded = None
        return twin

    @property
    def resumes(self) -> tuple[int, Completed] | None:
        """The epoch in the middle of which the next run begins, and what is done of it; None: it begins with one."""
        if self._loaded is None or self._loaded["finished"]:
            return None
        return self._loaded["epoch"], completed_from_plain(self._loaded["done"])

    def open(
        self,
        loader: Any,
        replay: RecordedOrder | None,
        done: Completed | None = None,
        persists: bool = False,
    ) -> tuple[Run, Any]:
        """Begin the next run; returns it and the states of the workers' datasets to begin with, or None.

        Args:
            persists: It is another one of the iterator that had the last run.
            done: What is done of the pass that is resumed, if that is not what the loaded state says.
        """
        sampler, loaded = index_sampler(loader), self._loaded
        replicas = loaded and loaded["replicas"]
        if loaded is not None and not loaded["finished"]:
            if done is not None:
                loaded = {**loaded, "done": completed_to_plain(done)}
            self.epoch = loaded["epoch"]
            if loaded["draw"].get("epoch") is not None:
                set_sampler_epoch(sampler, loaded["draw"]["epoch"])
            self._sampler_epoch = epoch_of(sampler)
            self.last = _standing(loader, self.epoch, completed_from_plain(loaded["done"]))
            self.last.drawn_epoch = loaded.get("drawn_epoch", self.epoch)
            return Run(loader, self.last, replay, loaded, self._forget), replicas
        if loaded is not None:
            self.epoch = loaded["epoch"]
            SamplerState(loader.generator, sampler).load(loaded["draw"])
        said = epoch_of(sampler)
        told = self._told
        if said is None or said == self._sampler_epoch:
            self.epoch += 1
        else:
            self.epoch, told = said, True
        drawn_epoch = 0
        if told:
            drawn_epoch = self.epoch
        elif persists and self.last is not None:
            drawn_epoch = self.last.drawn_epoch + 1
        self._told = False
        for one in nested(sampler):
            if isinstance(one, SEEDED):
                one.set_epoch(self.epoch)
        self._sampler_epoch = epoch_of(sampler)
        self._loaded = None
        self.last = _standing(loader, self.epoch)
        self.last.drawn_epoch = drawn_epoch
        settled = loaded is not None and self.last.draw.sources[1] > 0
        return Run(loader, self.last, replay, settled=settled), replicas

    def _forget(self) -> None:
        self._loaded = None

    def state(self, loader: Any) -> dict[str, Any]:
        """The present state as plain data, as far as the states of samplers and datasets are."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        last, draw = self.last, SamplerState(loader.generator, index_sampler(loader))
        account = None if last is None else last.progress.part or last.progress
        state = {
            "loader": signature(loader, is_stream(loader), draw.sources),
            "epoch": self.epoch,
            "finished": account is None or account.finished,
        }
        if last is None or account is None or account.finished:
            if loader.num_workers == 0 and is_stateful(loader.dataset):
                own = copy.deepcopy(loader.dataset.state_dict())
                each = {"dataset": own, "iterator": None, "batches": 0, "ended": False}
                replicas: Any = {"turn": 0, "each": [each]}
            else:
                replicas = (
                    None if last is None or last.replicas is None else last.replicas.between()
                )
            return {**state, "draw": draw.idle_state(), "replicas": replicas}
        return {
            **state,
            "base_seed": last.base_seed,
            "drawn_epoch": last.drawn_epoch,
            "done": completed_to_plain(account.done()),
            "draw": last.draw.to_plain(),
            "replicas": None if last.replicas is None else last.replicas.plain(),
        }

    def load(self, loader: Any, state: Any, replicas: int) -> None:
        """Begin the next run with a state.

        Args:
            replicas: How many copies of the dataset the loader's workers have.

        Raises:
            TypeError, ValueError: It is none, or belongs to another loader.
        """
        draw = SamplerState(loader.generator, index_sampler(loader))
        mine = signature(loader, is_stream(loader), draw.sources)
        loaded = checked(state, mine, replicas)
        draw.check(loaded["draw"])
        self._loaded = loaded
        self._last_seed, self.last = self.seed, None

    def lateness(self) -> Lateness:
        """How far the batches of the last run are from the sampler's order."""
        return self.last.progress.lateness if self.last else Lateness()

    def coverage(self) -> Coverage:
        """What has become of the keys of the last run."""
        return (self.last.progress if self.last else Progress(self.epoch)).coverage()


def _standing(loader: Any, epoch: int, done: Completed | None = None) -> Standing:
    progress = Progress(epoch, done)
    counted = loader.dataset if is_stream(loader) else index_sampler(loader)
    parts = loader.batch_size or 1 if is_stream(loader) else 1
    batches = 0 if done is None else done.batches
    progress.length = functools.partial(_length, counted, parts, loader.drop_last, batches)
    return Standing(epoch, progress, SamplerState(loader.generator, index_sampler(loader)))


def _length(counted: Any, size: int, drop_last: bool, done: int) -> int | None:
    """How many batches of so many are left of a pass of which ``done`` are done; None if nobody says."""
    try:
        count = len(counted)
    except TypeError:
        return None
    return max((count if drop_last else count + size - 1) // size - done, 0)
