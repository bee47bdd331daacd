"""One epoch of a loader: its batches of indices, its seeds, and its progress."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from minato._compat import fetcher_is_replaced
from minato._core.epochs import seed_of_epoch
from minato._support.objects import takes_lists
from minato.observe.stats.size import length_of
from minato.sampling.coverage import Progress, index_hash, remaining_batches
from minato.sampling.dataset_state import DatasetStates
from minato.sampling.distributed import InterleavedRanks, epoch_of
from minato.sampling.replay import OrderRecord, Origin
from minato.sampling.rng_state import SamplerState
from minato.sampling.samplers import counted, in_epoch, index_batches, next_sampler, sizes_of
from minato.sampling.spec import SamplingSpec
from minato.sampling.state import completed_from_plain

__all__ = ["Epoch", "NextEpoch"]


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
        has_started: Whether ``batches`` was called.
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
        """Note the epoch that the sampler has now: some count on when they are exhausted, which may be already."""
        self.sampler_epoch = epoch_of(self._spec.index_sampler)

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

    def batches(self, indices: object) -> Iterator[Any]:
        """The indices of each remaining batch, from ``iter(sampler)``.

        Raises:
            ValueError: The sampler does not repeat the indices that it yielded before the state was taken.
        """
        try:
            batches = self._remaining(indices)
        finally:
            if self._default is not None:
                torch.default_generator.set_state(self._default)
        path = self._spec.record_order
        if path is not None:
            first = self.progress.done().batches
            self.progress.record = OrderRecord(path, self.number, self.seed, first, self._origin())
        self.has_started = True
        self._state = self._default = None
        return map(self.progress.requested, batches)

    def _remaining(self, indices: object) -> Iterator[Any]:
        spec = self._spec
        if spec.streams:
            return sizes_of(indices, spec.batched)
        if spec.replay is not None:
            recorded = spec.replay.batches(self.number)
            return recorded if self._state is None else self._without_done(recorded, self._state)
        if self._state is not None:
            return self._resumed(self._state)
        return itertools.chain.from_iterable(self._from_start(indices))

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

    def _from_start(self, indices: object) -> Iterator[Iterator[Any]]:
        """All batches, in one or two parts."""
        sampler = self._spec.index_sampler
        if type(sampler) is InterleavedRanks:  # torch iterates over this rank's own sampler
            indices = iter(sampler)
        elif (seeded := in_epoch(sampler, self.number)) is not sampler:
            indices = iter(seeded)
        self.draw.before_first(indices)
        batches = self._indices(indices)
        if not self._restored:
            yield batches
            return
        first = list(itertools.islice(batches, 1))
        yield iter(first)
        # If the state says that the sampler's last iterator had ended, only the next one starts at the beginning.
        yield batches if first else self._indices(iter(sampler))

    def _indices(self, indices: object) -> Iterator[Any]:
        spec = self._spec
        batches = index_batches(
            indices,
            spec.batched,
            whole=takes_lists(spec.dataset) or fetcher_is_replaced(),
            divided=spec.divides_batches,
            copies=spec.has_workers,
        )
        return counted(batches, spec.index_sampler, length_of(spec.dataset), index_hash)

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
