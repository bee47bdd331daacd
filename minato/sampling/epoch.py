"""The epochs of a loader: which one comes next, its batches of indices, its seeds, and the state that it resumes."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import GeneratorType
from typing import Any, NamedTuple, cast

import torch

from minato._compat import fetcher_is_replaced, state_is_inexact
from minato._core import spread_seed
from minato._support.objects import attribute, length_of, takes_lists
from minato._support.values import plain as plain_value
from minato.errors import Postponed, log
from minato.sampling.progress import (
    Completed,
    Coverage,
    Progress,
    Tally,
    remaining_batches,
    total,
)
from minato.sampling.readers import EpochReaders
from minato.sampling.replay import OrderRecord, Origin
from minato.sampling.resume import (
    DatasetStates,
    LoaderState,
    SamplerState,
    is_stateful,
    signature,
    until_end,
)
from minato.sampling.samplers import (
    OTHER_INDICES,
    SEEDED,
    Batch,
    IndexBatches,
    InterleavedRanks,
    Recurring,
    SamplingSpec,
    Source,
    batch_maker,
    drawn_ahead,
    epoch_of,
    errors_of,
    in_epoch,
    nested,
    next_sampler,
    occurrence_counter,
    redealt,
    set_sampler_epoch,
)

_PLAIN_ITERATORS = (GeneratorType, type(iter(range(0))))
"""Of samplers that yield what they know in advance."""


class Seeds(NamedTuple):
    """From which the randomness of samples is drawn, in each epoch of an iterator.

    Attributes:
        seed: The loader's, or torch's draw for the workers.
        offset: The number by which the randomness of an epoch is drawn, less its number for the user: each iterator
            counts again from torch's draw, so that ``torch.manual_seed`` repeats an epoch.
    """

    seed: int
    offset: int = 0

    def of(self, epoch: int) -> int:
        """Return the seed of an epoch: with the epoch's own number, the keys of its samples follow from it."""
        return spread_seed(self.seed) ^ (epoch + self.offset) ^ epoch


class NextEpoch(NamedTuple):
    """The epoch after the present one, as it is predicted: the indices of its batches, its number, and its seed."""

    batches: Iterator[list[Any]]
    number: int
    seed: int


class Epoch:
    """One epoch of a loader over its sampler; its iterator may be gone before it ends.

    Args:
        state: The state to resume; None: the epoch starts at its beginning.
        restored: A loaded state has set its samplers.
        before: The draw of the epoch before it, if that is known.

    Attributes:
        drawn_epoch: The epoch of the seed that torch draws: that of the sampler or of ``set_epoch``. By default it is
            counted from the creation of the iterator.
        prefetches_next: Whether batches of the next epoch may be opened during this one; False once its indices were
            predicted wrongly.
        seeds: From which the randomness of samples is drawn, in this epoch and others of the same iterator.
        seed: From which the randomness of its samples starts.
        dataset_states: The states of the workers' copies of a map-style dataset; None if they have none.
        iterator: The iterator that has begun it; None: no other takes its place.
        has_started: Whether its iterator has begun it; until then, an interrupted ``iter()`` begins it once more.
        replaces: The epoch in whose place it begins, because ``set_epoch`` came after ``iter()``; None: in no other's.
        may_be_replaced: Whether ``set_epoch`` still chooses an epoch in its place: no batch was asked for.
        sampler_epoch: The epoch that the sampler had when the first batches had been drawn.
    """

    def __init__(
        self,
        spec: SamplingSpec,
        number: int,
        *,
        drawn_epoch: int = 0,
        state: LoaderState | None = None,
        restored: bool = False,
        prefetches_next: bool = True,
        before: SamplerState | None = None,
    ) -> None:
        self.number = number
        self.drawn_epoch = drawn_epoch
        self.prefetches_next = prefetches_next
        self.base_seed = self.seed = 0
        self.seeds = Seeds(0)
        self.dataset_states: DatasetStates | None = None
        self.readers: EpochReaders | None = None
        self.has_started = False
        self.iterator: weakref.ref[object] | None = None
        self.replaces: Epoch | None = None
        self.may_be_replaced = False
        self.is_resumed = state is not None
        self.sampler_epoch: int | None = None
        self.earlier = () if state is None else state.earlier
        if self.earlier:
            length = length_of(spec.dataset)
            left = redealt(spec.index_sampler, self.earlier, length, spec.batched)
            spec = replace(spec, index_sampler=left)
        self._spec = spec
        self._state = state
        self._restored = restored
        is_programs = spec.streams and spec.persists_datasets and not spec.has_workers
        self._default: torch.Tensor | None = None
        if state is not None and not is_programs:  # whose iterator draws again from where it began
            self._default = torch.default_generator.get_state()
        self.draw = SamplerState(spec, before)
        if state is not None and state.stands_for_all:
            state = self._state = replace(state, done=self._first_batches(state))
        done = None if state is None else state.done
        self.progress = Progress(number, done)
        num_done = 0 if done is None else done.batches
        self.progress.length = functools.partial(_batches_left, weakref.ref(spec), num_done)
        if state is not None:
            self.progress.earlier = state.counted
        if state is None or spec.streams or spec.replay is not None:  # nothing is drawn again
            self.draw.before_iter()
        self._restores = (True, False) if self.draw.num_stateful else (True,)
        """Whether samplers get their states again to repeat an epoch: one that has the position of its last iterator
        repeats it in the iterator after the one that goes on from there. Two values: not yet known."""

    def _first_batches(self, state: LoaderState) -> Completed:
        """What this rank had when another one, which steps with it, had as many batches."""
        batches = _made_of(until_end(self.draw.redraw(state.draw)), self._maker())
        first = list(itertools.islice(filter(_is_made, batches), state.done.batches))
        end = sum(len(batch) or 1 for batch in first)
        tally = total(map(Tally.of, first))
        ranges = ((0, end),) if end else ()
        return Completed(ranges, len(first), tally, earlier=state.done.earlier)

    def has_begun(self, iterator: weakref.ref[object] | None = None) -> None:
        """Note that its iterator has begun it, and the epoch that the sampler has now.

        Some samplers count on when they are exhausted, which may be already.
        """
        self.iterator = iterator
        self.sampler_epoch = epoch_of(self.draw.samplers)
        self.has_started, self.replaces = True, None

    def set_base_seed(self, drawn: int) -> int:
        """Set torch's draw for the workers; returns the one that is used, which a resumed epoch already has."""
        spec = self._spec
        self.base_seed = drawn if self._state is None else self._state.base_seed
        drawn_seeds = Seeds(self.base_seed, self.drawn_epoch - self.number)
        self.seeds = drawn_seeds if spec.seed is None else Seeds(spec.seed)
        self.seed = self.seeds.of(self.number)
        if spec.replay is not None:
            spec.replay.check(self.number, self._origin())
            self.seed = spec.replay.seed(self.number)
        return self.base_seed

    def _origin(self) -> Origin:
        return Origin(self._spec.batched, length_of(self._spec.dataset))

    def size(self) -> int | None:
        """Number of samples, None if it is unknown."""
        return self._spec.size()

    def batches_of_rank(self) -> int:
        """Number of batches of each rank, if several share the epoch."""
        sampler = self._spec.index_sampler
        return len(sampler.sampler if type(sampler) is InterleavedRanks else sampler)

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
        return NextEpoch(map(batch_maker(spec.batched), later), number, self.seeds.of(number))

    def batches(self, indices: Iterator[Any]) -> IndexBatches:
        """The indices of each remaining batch, from ``iter(sampler)``.

        Raises:
            ValueError: The sampler does not repeat the indices that it yielded before the state was taken.
        """
        spec, state = self._spec, self._state
        begin: Callable[[], Source] = functools.partial(self._from_start, indices)
        readers = self.readers
        try:
            if readers is not None:  # they draw nothing from these generators, but later epochs do
                if state is None:
                    self.draw.before_first(indices)
                else:
                    self.draw.redraw(state.draw)
            elif spec.replay is not None or state is not None:
                source = self._source(state)
                begin = lambda: source  # noqa: E731
        finally:
            if self._default is not None:
                torch.default_generator.set_state(self._default)
        if readers is not None:
            self.progress.readers = readers
            readers.prefix, readers.beyond = self.progress.prefix, self.progress.beyond
            self._state = self._default = None
            return IndexBatches(readers.source, readers.again, self.progress.requested, ())
        path = spec.record_order
        if path is not None:
            first = self.progress.done().batches
            self.progress.record = OrderRecord(path, self.number, self.seed, first, self._origin())
        again = functools.partial(self._again, state)
        self._state = self._default = None
        errors = errors_of(self.draw.samplers)
        return IndexBatches(begin, again, self.progress.requested, errors)

    def _source(self, state: LoaderState | None) -> Source:
        """The remaining batches, of the epoch or of the one in which a state was taken."""
        spec = self._spec
        if spec.replay is not None:
            recorded = (Recurring.of(*pair) for pair in spec.replay.batches(self.number))
            return Source(recorded) if state is None else self._after(state, lambda _: recorded)
        if state is not None:
            return self._after(
                state,
                lambda restores: _made_of(
                    until_end(self.draw.redraw(state.draw, restores)), self._maker()
                ),
            )
        return self._drawn(self.draw.redraw(self.draw.taken()))

    def _after(self, state: LoaderState, drawn: Callable[[bool], Iterator[Batch]]) -> Source:
        """The same; ``drawn`` returns all batches, given whether samplers get their states again."""
        spec, done = self._spec, state.done
        for restores in self._restores:
            left = remaining_batches(drawn(restores), done, spec.mixes_batches, spec.drop_last)
            is_unsure = len(self._restores) > 1 and restores
            if left is not None and (is_unsure or self.earlier) and not done.batches:
                first = [*itertools.islice(left, 1)]
                left = itertools.chain(first, left) if first or self.earlier else None
            if left is not None:
                self._restores = (restores,)
                # An interruption ends a generator: then no batch is missing unnoticed.
                return Source((batch for batch in left), _made)
        raise ValueError(OTHER_INDICES)

    def _again(self, state: LoaderState | None, count: int) -> Source:
        """The batches after the first ``count`` remaining ones, drawn again."""
        source = self._source(state)
        before = itertools.islice(source.items, count)
        made = before if source.make is None else _made_of(before, source.make)
        if total(map(Tally.of, filter(_is_made, made))) != self.progress.drawn():
            raise RuntimeError(
                "the sampler was interrupted, and yields other indices when it is asked again, so the remaining ones "
                "are unknown: call iter(loader) to begin another epoch; with seed=, or a generator, it goes on"
            )
        return source

    def _from_start(self, indices: Iterator[Any]) -> Source:
        sampler = self._spec.index_sampler
        if type(sampler) is InterleavedRanks:  # torch iterates over this rank's own sampler
            indices = iter(sampler)
        elif (seeded := in_epoch(sampler, self.number)) is not sampler:
            indices = iter(seeded)
        self.draw.before_first(indices)
        if self._restored:
            for first in itertools.islice(until_end(indices), 1):
                return self._drawn(itertools.chain([first], until_end(indices)))
            # The state says that the sampler's last iterator had ended: only the next one starts at the beginning.
            indices = iter(sampler)
        return self._drawn(indices)

    def _drawn(self, indices: Iterator[Any]) -> Source:
        spec, may_die = self._spec, isinstance(indices, GeneratorType)
        ahead = drawn_ahead(spec.index_sampler, spec.batched)
        if ahead > 1 and type(indices) in _PLAIN_ITERATORS:
            return Source(indices, None if spec.batched else batch_maker(False), may_die, ahead)
        return Source(until_end(indices), self._maker(), may_die)

    def _maker(self) -> Callable[[Any, int], Any]:
        """A function that makes the indices of a batch of what the sampler yields, and of the batch's number."""
        spec = self._spec
        make = batch_maker(
            spec.batched,
            whole=takes_lists(spec.dataset) or fetcher_is_replaced(),
            divided=spec.divides_batches,
            copies=spec.has_workers,
        )
        mark = occurrence_counter(spec.index_sampler, length_of(spec.dataset))
        return make if mark is None else lambda given, number: mark(make(given), number)


def _made_of(items: Iterator[object], make: Callable[[object, int], object]) -> Iterator[Any]:
    """All batches; in place of one that has no indices, which must not end the iterator, its error."""

    def attempt(given: object, number: int) -> object:
        try:
            return make(given, number)
        except Exception as error:
            return Postponed(error)

    return map(attempt, items, itertools.count())


def _is_made(batch: object) -> bool:
    return not isinstance(batch, Postponed)


def _made(batch: object, number: int) -> object:
    if isinstance(batch, Postponed):
        batch.reraise()
    return batch


def _batches_left(reference: weakref.ref[SamplingSpec], done: int) -> int | None:
    """Number of batches after the first ``done``. A log keeps this function, which must keep no dataset."""
    spec = reference()
    return None if spec is None else spec.batches_left(done)


class EpochPosition:
    """The epoch of a loader, and the state that its next iterator resumes.

    Attributes:
        last: The last epoch; None before the first, and after ``load``.
    """

    def __init__(self) -> None:
        self.last: Epoch | None = None
        self._number = -1  # of the last epoch
        self._chosen: int | None = None  # number of the next epoch, if set_epoch was called
        self._predicts = True
        self._sampler_epoch: int | None = 0  # what it was when the last epoch began
        self._dataset_epoch: int | None = None
        self._seeds: Seeds | None = None  # of the last epoch, in a copy
        self._loaded: LoaderState | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The last epoch belongs to its iterator, which no copy shares.
        last = self.last
        kept = {**self.__dict__, "_predicts": self._may_predict(), "_loaded": self._pending()}
        if last is not None:
            kept["_seeds"] = last.seeds
            kept["_number"] = last.number if last.has_started else last.number - 1
        return {**kept, "last": None}

    def set_epoch(self, epoch: int) -> None:
        """Choose the number of the next epoch."""
        self._chosen = epoch

    @property
    def epoch(self) -> int:
        """Number of the present or last epoch, that of a loaded state if there is one; -1 before the first."""
        loaded = self._waiting()
        return self._number if loaded is None else loaded.epoch

    def seed_of(self, epoch: int) -> int | None:
        """The seed of another epoch of the last epoch's iterator, where torch drew it; None if it is unknown."""
        seeds, loaded = self._seeds if self.last is None else self.last.seeds, self._waiting()
        if loaded is not None:
            seeds = Seeds(loaded.base_seed, loaded.drawn_epoch - loaded.epoch)
            seeds = None if loaded.finished else seeds
        return None if seeds is None else seeds.of(epoch)

    def without_state(self) -> EpochPosition:
        """A copy at the same epoch, without a state to resume."""
        other = copy.copy(self)
        other._loaded = None
        return other

    def _pending(self) -> LoaderState | None:
        """The loaded state, until an iterator has returned a batch after it, or has begun with none left to return."""
        last = self.last
        if self._loaded is not None and last is not None and last.has_started:
            progress = last.progress.part or last.progress
            if progress.has_advanced():
                self._loaded = None
            elif last.iterator is not None and last.iterator() is not None:
                return None  # the rest is that iterator's, as long as it is there
        return self._loaded

    def _waiting(self) -> LoaderState | None:
        """The loaded state, unless an iterator has begun with it; one that persists is there without a reference."""
        last = self.last
        is_begun = last is not None and last.has_started and last.iterator is None
        return None if is_begun else self._pending()

    def _may_predict(self) -> bool:
        if self.last is not None and not self.last.prefetches_next:
            self._predicts = False
        return self._predicts

    @property
    def has_state(self) -> bool:
        """Whether a state was loaded, and the next iterator begins with it."""
        return self._pending() is not None

    @property
    def resumes(self) -> tuple[int, Completed] | None:
        """The epoch that the next iterator resumes, and its complete part; None: it starts at the beginning."""
        loaded = self._pending()
        return None if loaded is None or loaded.finished else (loaded.epoch, loaded.done)

    def open(
        self, spec: SamplingSpec, *, done: Completed | None = None, persists: bool = False
    ) -> tuple[Epoch, dict[str, Any] | None]:
        """Begin the next epoch; returns it, and the states that the datasets of new workers start with, or None.

        Args:
            done: The complete part of the resumed epoch, if the loaded state does not know it.
            persists: The iterator of the last epoch continues.
        """
        loaded = None if self._loaded is None else self._pending()
        last, samplers = self.last, nested(spec.index_sampler)
        predicts, draw = self._may_predict(), None if last is None else last.draw
        begin = functools.partial(Epoch, spec, prefetches_next=predicts, before=draw)
        if loaded is not None and not loaded.finished:
            state = loaded if done is None else replace(loaded, done=done)
            _restore_sampler_epoch(samplers, state)
            epoch = begin(state.epoch, drawn_epoch=state.drawn_epoch, state=state)
        else:
            number, drawn_epoch = self._next(samplers, persists)
            restored = False
            if loaded is not None:
                if self._choice(samplers) is None:
                    _restore_sampler_epoch(samplers, loaded)
                    self._sampler_epoch = epoch_of(samplers)
                self._loaded = replace(loaded, epoch=number - 1, drawn_epoch=drawn_epoch)
                draw = SamplerState(spec)
                draw.load(loaded.draw)
                restored = draw.num_stateful > 0
            _set_seeded(samplers, number)
            epoch = begin(number, drawn_epoch=drawn_epoch, restored=restored)
        if persists and last is not None:
            epoch.dataset_states = last.dataset_states  # its workers keep theirs
        if spec.streams:
            epoch.readers = self._readers(spec, loaded, last if persists else None)
            if loaded is not None and loaded.finished and self._loaded is not None:
                self._loaded = replace(self._loaded, readers=epoch.readers.at_start())
        self._begin(epoch)
        return epoch, None if loaded is None else loaded.dataset_states

    def _readers(
        self, spec: SamplingSpec, loaded: LoaderState | None, last: Epoch | None
    ) -> EpochReaders:
        """The readers in the epoch that begins, after ``last`` if the copies of the dataset stay."""
        resumed = None if loaded is None else loaded.readers
        goes_on = loaded is not None and not loaded.finished
        if resumed is not None and loaded is not None and goes_on:
            kept = sum(resumed["each"][i]["state"] is not None for i in spec.own_readers)
            has_states = kept and not spec.rereads
            way = f"go on from {kept} states of the dataset" if has_states else "read it again"
            log(f"epoch {loaded.epoch} is resumed: {len(spec.own_readers)} readers {way}")
        if loaded is None and last is not None and last.readers is not None:
            resumed = last.readers.between_epochs()
        readers = _made_readers(spec, resumed, goes_on)
        of_dataset, sets_epoch = _dataset_epoch(spec.dataset), _sets_epoch(spec.dataset)
        if sets_epoch and not goes_on and self._chosen is not None:
            readers.set_epoch = self._chosen
        elif sets_epoch and readers.set_epoch is None:
            if loaded is not None and goes_on:
                readers.set_epoch = loaded.epoch
            elif (loaded or last) is not None and of_dataset != self._dataset_epoch:
                readers.set_epoch = of_dataset
            elif loaded is not None:
                readers.set_epoch = loaded.drawn_epoch or None  # chosen before the state was taken
            elif last is not None and last.readers is not None:
                readers.set_epoch, readers.is_told = last.readers.set_epoch, True
        self._dataset_epoch = of_dataset
        return readers

    def _next(self, samplers: Sequence[object], persists: bool) -> tuple[int, int]:
        """Number and ``drawn_epoch`` of the next epoch, which starts at its beginning."""
        chosen, last = self._choice(samplers), self.last
        if chosen is not None:
            return chosen, chosen
        if last is not None and not last.has_started:  # its iter() was interrupted, or failed
            return last.number, last.drawn_epoch
        if (loaded := self._pending()) is not None:
            return loaded.epoch + 1, loaded.drawn_epoch
        return self._number + 1, last.drawn_epoch + 1 if persists and last is not None else 0

    def _choice(self, samplers: Sequence[object]) -> int | None:
        """The epoch that ``set_epoch`` of sampler or loader has chosen since the last one began; None if none has."""
        of_sampler = epoch_of(samplers)
        return self._chosen if of_sampler in (None, self._sampler_epoch) else of_sampler

    def _begin(self, epoch: Epoch) -> None:
        """Go on to an epoch: all at once, as the handler of a signal may raise at any line."""
        of_sampler = epoch_of(epoch.draw.samplers)
        vars(self).update(last=epoch, _number=epoch.number, _sampler_epoch=of_sampler, _chosen=None)

    def begin_again(self, spec: SamplingSpec, epoch: Epoch) -> Epoch | None:
        """Begin an iterator's epoch again, if ``set_epoch`` has chosen another one since; None if it has not.

        A resumed epoch stays what the state says. The order is drawn again as it was the first time.
        """
        again = self.last
        last = again and (again.replaces or again)
        if again is None or last is None or last.is_resumed or epoch not in (last, again):
            return None
        chosen, samplers = self._instead(spec, last), last.draw.samplers
        if chosen is None and again is last:
            self._chosen, last.may_be_replaced = None, False
            return None
        chosen = again.number if chosen is None else chosen  # that one was interrupted
        _set_seeded(samplers, chosen)
        drawn = {**last.draw.taken(), "epoch": epoch_of(samplers)}
        state = LoaderState({}, chosen, False, drawn, None, last.base_seed, chosen)
        other = Epoch(
            spec, chosen, drawn_epoch=chosen, state=state, prefetches_next=last.prefetches_next
        )
        other.dataset_states, other.replaces = last.dataset_states, last
        other.may_be_replaced = True
        if last.readers is not None:
            plain = _readers_instead(spec, last.readers, chosen)
            other.readers = _made_readers(spec, plain)
            self._dataset_epoch = _dataset_epoch(spec.dataset)
        self._begin(other)
        return other

    def _instead(self, spec: SamplingSpec, last: Epoch) -> int | None:
        """The epoch that ``set_epoch`` has chosen in place of one; None: it has not, or the epoch is the same."""
        of_sampler, readers = epoch_of(last.draw.samplers), last.readers
        is_moved = of_sampler != last.sampler_epoch
        chosen = of_sampler if is_moved and of_sampler is not None else self._chosen
        # The copies of a stream also get the number that would have come by itself.
        has_it = readers is None or readers.set_epoch == chosen or not _sets_epoch(spec.dataset)
        return None if chosen == self._number and has_it and not is_moved else chosen

    def _state_instead(self, spec: SamplingSpec) -> LoaderState | None:
        """The state of the epoch that the next batch begins in place of the last one; None if it does not."""
        last = self.last
        if last is None or not (last.may_be_replaced and last.has_started) or last.is_resumed:
            return None
        chosen = self._instead(spec, last)
        if chosen is None:
            return None
        drawn = {**last.draw.taken(), "epoch": epoch_of(last.draw.samplers)}
        states, readers = last.dataset_states, last.readers
        return LoaderState(
            signature(spec, SamplerState(spec)),
            *(chosen, False, drawn, None if states is None else states.to_plain()),
            *(last.base_seed, chosen),
            readers=None if readers is None else _readers_instead(spec, readers, chosen),
        )

    def state(self, spec: SamplingSpec) -> dict[str, Any]:
        """The present state as plain data, apart from the ``state_dict()`` of samplers and datasets."""
        if (instead := self._state_instead(spec)) is not None:
            return instead.to_plain()
        loaded, chosen = self._waiting(), self._choice(nested(spec.index_sampler))
        if loaded is not None:
            if chosen is not None and loaded.finished:
                drawn = {**loaded.draw, "epoch": epoch_of(nested(spec.index_sampler))}
                loaded = replace(loaded, epoch=chosen - 1, drawn_epoch=chosen, draw=drawn)
            return loaded.to_plain()
        last, draw = self.last, SamplerState(spec)
        facts = signature(spec, draw)
        progress = None if last is None else last.progress.part or last.progress
        states = None if last is None else last.dataset_states
        # An iter() that was interrupted, or failed, has begun none: the next one does.
        waits = last is not None and not last.has_started and last.replaces is None
        if last is None or progress is None or progress.finished or waits:
            epoch = self._number - waits if chosen is None else chosen - 1
            plain = None if states is None else states.between_epochs()
            between = (
                None if last is None or last.readers is None else last.readers.between_epochs()
            )
            if not spec.has_workers and is_stateful(spec.dataset):
                if spec.streams:
                    own = spec.persists_datasets and not state_is_inexact(spec.dataset)
                    between = EpochReaders.alone(spec.dataset.state_dict()) if own else None
                else:
                    plain = DatasetStates.alone(spec.dataset.state_dict())
            return LoaderState(
                *(facts, epoch, True, draw.idle_state(), plain),
                drawn_epoch=chosen or 0,
                readers=between,
            ).to_plain()
        done, before = progress.done(), None  # first: it records the last batch
        while done != before:  # another thread may go on with the loop in between
            plain = None if states is None else states.to_plain()
            readers = None if last.readers is None else last.readers.to_plain()
            before, done = done, progress.done()
        drawn, seeds = last.draw.taken(), (last.base_seed, last.drawn_epoch)
        if readers is not None and readers["set_epoch"] is None:
            readers["set_epoch"] = self._dataset_epoch  # its own may be another by now
        return LoaderState(
            facts, last.number, False, drawn, plain, *seeds, done, readers, last.earlier
        ).to_plain()

    def load(self, spec: SamplingSpec, state: object, copies: int) -> None:
        """Set the state that the next iterator resumes; TypeError, ValueError: it is none, or another loader's.

        Args:
            copies: Number of copies of the dataset that the loader's workers have.
        """
        loaded = LoaderState.opened(state, spec, SamplerState(spec), copies)
        if loaded.stands_for_all:
            log(
                f"the state is that of rank {loaded.loader['dealing']['rank']}, and stands for this rank: each had "
                f"{loaded.done.batches} batches of epoch {loaded.epoch}"
            )
        self._may_predict()
        self._loaded = loaded
        self._chosen = self.last = self._seeds = None
        self._dataset_epoch = _dataset_epoch(spec.dataset)
        # So that a later set_epoch() of the sampler is noticed whatever its number.
        samplers = nested(spec.index_sampler)
        if _set_seeded(samplers, loaded.epoch):
            self._sampler_epoch = epoch_of(samplers)

    def coverage(self) -> Coverage:
        """The coverage of the last epoch's indices."""
        if self.last is not None:
            return self.last.progress.coverage()
        progress = Progress(*(self.resumes or (self.epoch,)))
        if (loaded := self._pending()) is not None:
            progress.earlier = loaded.counted
        return progress.coverage()


def _made_readers(
    spec: SamplingSpec, resumed: dict[str, object] | None, goes_on: bool = False
) -> EpochReaders:
    return EpochReaders(
        spec.readers,
        spec.own_readers,
        spec.batch_size or 1,
        in_turn=spec.order == "strict",
        persist=spec.persists_datasets,
        resumed=resumed,
        goes_on=goes_on,
    )


def _readers_instead(spec: SamplingSpec, readers: EpochReaders, chosen: int) -> dict[str, Any]:
    """The readers of the epoch that begins in place of another one, which may have read ahead, as plain data."""
    return {**readers.at_start(), "set_epoch": chosen if _sets_epoch(spec.dataset) else None}


def _sets_epoch(dataset: object) -> bool:
    return callable(attribute(dataset, "set_epoch"))


def _dataset_epoch(dataset: object) -> int | None:
    """The epoch that an iterable dataset with ``set_epoch`` has, if it shows it."""
    epoch = attribute(dataset, "epoch") if _sets_epoch(dataset) else None
    return value if epoch is not None and isinstance(value := plain_value(epoch), int) else None


def _restore_sampler_epoch(samplers: Sequence[object], state: LoaderState) -> None:
    of_sampler: Any = state.draw.get("epoch")
    if of_sampler is not None:
        set_sampler_epoch(samplers, of_sampler)


def _set_seeded(samplers: Sequence[object], epoch: int) -> bool:
    """Set the epoch of the samplers whose order is a function of it; False if there is none."""
    found = False
    for one in samplers:
        if issubclass(type(one), SEEDED):
            cast(Any, one).set_epoch(epoch)
            found = True
    return found
