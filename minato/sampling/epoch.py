"""One epoch of a loader: its batches of indices, its seeds, and its progress."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, NamedTuple

import torch

from minato._compat import fetcher_is_replaced
from minato._core.epochs import seed_of_epoch
from minato._support.objects import takes_lists
from minato.observe.stats.size import length_of
from minato.sampling.coverage import Progress, remaining_batches
from minato.sampling.dataset_state import DatasetStates
from minato.sampling.distributed import InterleavedRanks, epoch_of
from minato.sampling.index_batches import IndexBatches, Source
from minato.sampling.replay import OrderRecord, Origin
from minato.sampling.rng_state import IsolatedIterator, SamplerState
from minato.sampling.samplers import (
    counted,
    drawn_ahead,
    endless_size,
    in_epoch,
    index_batches,
    next_sampler,
    sizes_of,
)
from minato.sampling.spec import SamplingSpec
from minato.sampling.state import completed_from_plain

__all__ = ["Epoch", "NextEpoch"]


_ITERATORS = (GeneratorType, type(iter(range(0))))
"""Of samplers that yield what they know in advance."""


class NextEpoch(NamedTuple):
    """The epoch after the present one, as it is predicted.

    Attributes:
        batches: The indices of each batch.
        number: Of the epoch.
        seed: From which the randomness of its samples starts.
    """

    batches: Iterator[list[Any]]
    number: int
    seed: int


class Epoch:
    """One epoch of a loader over its sampler; its iterator may be gone before it ends.

    Args:
        spec: Which indices the loader asks for.
        number: Of the epoch.
        drawn_epoch: The epoch of the seed that torch draws: that of the sampler or of ``set_epoch``. By default it is
            counted from the creation of the iterator, so that ``torch.manual_seed`` repeats an epoch.
        state: The state to resume, a result of ``Position.state``; None: the epoch starts at its beginning.
        restored: A loaded state has set its samplers.
        prefetches_next: Whether batches of the next epoch may be opened during this one.

    Attributes:
        number: The same.
        drawn_epoch: The same.
        prefetches_next: The same; False once the indices of an epoch were predicted wrongly.
        progress: Records its samples.
        draw: The states of generators and samplers that decide its order.
        base_seed: torch's draw for the workers.
        seed: From which the randomness of its samples starts.
        dataset_states: The states of the workers' datasets; None if they have none.
        has_started: Whether its iterator has begun it; until then, an interrupted ``iter()`` begins it once more.
        replaces: The epoch in whose place it begins, because ``set_epoch`` came after ``iter()``; None: in no other's.
        is_resumed: Whether it began with a state.
        sampler_epoch: The epoch that the sampler had when the first batches had been drawn.
    """

    def __init__(
        self,
        spec: SamplingSpec,
        number: int,
        *,
        drawn_epoch: int = 0,
        state: dict[str, Any] | None = None,
        restored: bool = False,
        prefetches_next: bool = True,
    ) -> None:
        self.number = number
        self.drawn_epoch = drawn_epoch
        self.prefetches_next = prefetches_next
        self.base_seed = self.seed = 0
        self.dataset_states: DatasetStates | None = None
        self.has_started = False
        self.replaces: Epoch | None = None
        self.is_resumed = state is not None
        self.sampler_epoch: int | None = None
        self._spec = spec
        self._state = state
        self._restored = restored
        self._default = None if state is None else torch.default_generator.get_state()
        done = None if state is None else completed_from_plain(state["done"])
        self.progress = Progress(number, done)
        self.progress.length = functools.partial(
            _batches_left, weakref.ref(spec), 0 if done is None else done.batches
        )
        self.draw = SamplerState(spec.generator, spec.index_sampler)
        self.draw.before_iter()

    def before_iter(self) -> None:
        """Save the states of the generators again, for another call of ``iter(sampler)``; the last one counts."""
        self.draw.before_iter()

    def has_begun(self) -> None:
        """Note that its iterator has begun it, and the epoch that the sampler has now.

        Some samplers count on when they are exhausted, which may be already.
        """
        self.sampler_epoch = epoch_of(self._spec.index_sampler)
        self.has_started, self.replaces = True, None

    def set_base_seed(self, drawn: int) -> int:
        """Set torch's draw for the workers; returns the one that is used, which a resumed epoch already has."""
        self.base_seed = drawn if self._state is None else self._state["base_seed"]
        replay = self._spec.replay
        if replay is None:
            self.seed = self.seed_in(self.number)
        else:
            replay.check(self.number, self._origin())
            self.seed = replay.seed(self.number)
        return self.base_seed

    def _origin(self) -> Origin:
        """What a record of this epoch belongs to."""
        return Origin(self._spec.batched, length_of(self._spec.dataset))

    def drawn_seed_in(self, epoch: int) -> int:
        """The seed of another epoch of the same iterator, by torch's draw."""
        return seed_of_epoch(self.base_seed, self.drawn_epoch + epoch - self.number, epoch)

    def seed_in(self, epoch: int) -> int:
        """The seed of another epoch of the same iterator, by the loader's ``seed`` if it has one."""
        return self.drawn_seed_in(epoch) if self._spec.seed is None else self._spec.seed

    def batches(self, indices: Any) -> IndexBatches:
        """The indices of each remaining batch, from ``iter(sampler)``.

        Raises:
            ValueError: The sampler does not repeat the indices that it yielded before the state was taken.
        """
        spec, state = self._spec, self._state
        begin = functools.partial(self._from_start, indices)
        try:
            if spec.streams or spec.replay is not None or state is not None:
                source = self._source(state, indices)
                begin = functools.partial(_same, source)
        finally:
            if self._default is not None:
                torch.default_generator.set_state(self._default)
        path = spec.record_order
        if path is not None:
            first = self.progress.done().batches
            self.progress.record = OrderRecord(path, self.number, self.seed, first, self._origin())
        again = functools.partial(self._again, state)
        batches = IndexBatches(begin, again, self.progress.requested)
        self._state = self._default = None
        return batches

    def _source(self, state: dict[str, Any] | None, indices: Any = None) -> Source:
        """The remaining batches, of the epoch or of the one in which a state was taken.

        Args:
            indices: A new ``iter(sampler)``; None: the sampler is asked for one.
        """
        spec = self._spec
        if spec.streams:
            if (size := endless_size(spec.index_sampler, spec.batched)) is not None:
                return Source(itertools.repeat([size]), is_plain=True, is_generator=False)
            return Source(
                sizes_of(iter(spec.index_sampler) if indices is None else indices, spec.batched)
            )
        if spec.replay is not None:
            recorded = spec.replay.batches(self.number)
            return Source(recorded if state is None else self._without_done(recorded, state))
        if state is not None:
            return Source(self._resumed(state))
        return self._plain(self.draw.redraw(self.draw.to_plain()))

    def _again(self, state: dict[str, Any] | None, count: int) -> Source:
        """The batches after the first ``count`` remaining ones, drawn again."""
        source = self._source(state)
        before = list(itertools.islice(source.items, count))
        if source.indices is not None:
            before = list(map(source.indices, before))
        if not self.progress.has_drawn(before):
            raise RuntimeError(
                "the sampler was interrupted, and yields other indices when it is asked again, so the remaining ones "
                "are unknown: call iter(loader) to begin another epoch; with seed=, or a generator, it goes on"
            )
        return source

    def _without_done(self, batches: Iterator[Any], state: dict[str, Any]) -> Iterator[Any]:
        done = completed_from_plain(state["done"])
        return remaining_batches(batches, done, self._spec.mixes_batches, self._spec.drop_last)

    def _resumed(self, state: dict[str, Any]) -> Iterator[Any]:
        """The remaining batches of the epoch in which a state was taken.

        The state of a sampler may hold the position of its last iterator, that of an earlier epoch. The next iterator
        continues from there, with other indices or none, and the one after starts at the beginning.
        """

        def redrawn(samplers: bool) -> Iterator[Any]:
            indices = self.draw.redraw(state["draw"], samplers)
            return self._without_done(self._indices(indices), state)

        _, stateful = self.draw.sources
        if not stateful:
            return redrawn(samplers=True)
        try:
            batches = redrawn(samplers=True)
        except ValueError:
            return redrawn(samplers=False)
        if state["done"]["batches"]:
            return batches
        for first in batches:
            return itertools.chain([first], batches)
        return redrawn(samplers=False)

    def _from_start(self, indices: Any) -> Source:
        """All batches."""
        sampler = self._spec.index_sampler
        if type(sampler) is InterleavedRanks:  # torch iterates over this rank's own sampler
            indices = iter(sampler)
        elif (seeded := in_epoch(sampler, self.number)) is not sampler:
            indices = iter(seeded)
        self.draw.before_first(indices)
        if self._restored:
            for first in indices:
                return self._plain(itertools.chain([first], indices))
            # The state says that the sampler's last iterator had ended: only the next one starts at the beginning.
            indices = iter(sampler)
        return self._plain(indices)

    def _plain(self, indices: Any) -> Source:
        """All batches, from ``iter(sampler)``."""
        spec = self._spec
        ahead = 0 if spec.has_workers else drawn_ahead(spec.index_sampler, spec.batched)
        if ahead and type(indices) in _ITERATORS:
            return Source(indices, None if spec.batched else _alone, is_plain=True, ahead=ahead)
        fed: deque[Any] = deque()
        batches = self._indices(itertools.starmap(fed.popleft, itertools.repeat(())))

        def convert(yielded: Any) -> Any:
            fed.clear()
            fed.append(yielded)
            return next(batches)

        # The chain asks ``indices`` for its iterator once: some samplers begin again when they are asked.
        is_plain = not isinstance(indices, IsolatedIterator)
        is_generator = not is_plain or isinstance(indices, GeneratorType)
        return Source(itertools.chain(indices), convert, is_plain, is_generator)

    def _indices(self, indices: object) -> Iterator[Any]:
        spec = self._spec
        batches = index_batches(
            indices,
            spec.batched,
            whole=takes_lists(spec.dataset) or fetcher_is_replaced(),
            divided=spec.divides_batches,
            copies=spec.has_workers,
        )
        return counted(batches, spec.index_sampler, length_of(spec.dataset))

    def predict_next(self) -> NextEpoch | None:
        """The next epoch; None if its indices are unknown, or it must not be prefetched."""
        spec = self._spec
        if not (spec.predictable and self.prefetches_next):
            return None
        later = next_sampler(spec.index_sampler)
        if later is None:
            return None
        # Persistent workers keep their base seed, as with torch, so the next epoch has the same.
        number = self.number + 1
        return NextEpoch(index_batches(later, spec.batched), number, self.seed_in(number))

    def size(self) -> int | None:
        """Number of samples, None if it is unknown."""
        return self._spec.size()


def _batches_left(reference: weakref.ref[SamplingSpec], done: int) -> int | None:
    """Number of batches after the first ``done``. A log keeps this function, which must keep no dataset."""
    spec = reference()
    return None if spec is None else spec.batches_left(done)


def _alone(index: Any) -> list[Any]:
    return [index]


def _same(source: Source) -> Source:
    return source
