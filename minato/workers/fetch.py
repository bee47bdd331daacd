"""Loading samples from the user's dataset: by index, by lists of indices, or from a stream."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, MethodDescriptorType
from typing import Any, Literal, cast

from minato._compat import make_fetcher
from minato._core import now_ns
from minato._support.objects import takes_lists
from minato.batching.rows import Rows, has_rows, rows_of
from minato.sampling.resume import DatasetState, is_stateful
from minato.transforms.compose import CollateFn, Transforms
from minato.workers.plan import WorkerPlan

__all__ = ["Fetcher", "StreamEnd", "StreamFetcher", "fetcher_of", "one_each"]

_METHODS = FunctionType, MethodDescriptorType
"""Types of ``__getitem__`` that are called sooner than an index is taken."""
_STATE_SHARE = 50
"""States that are sent unasked take at most this part of a worker's time."""


class Fetcher:
    """Loads samples from a map-style dataset and runs the transforms on them.

    Args:
        dataset: Has the samples; its ``__getitems__`` is used where it has one and batches are collated from lists of
            indices.
        batched: Whether indices come in lists, as with ``batch_size`` or a ``batch_sampler``.
        keeps_state: Whether the dataset's state goes with each batch.
    """

    def __init__(
        self, dataset: Any, transforms: Transforms, batched: bool, keeps_state: bool = False
    ) -> None:
        self._dataset = dataset
        self._run = transforms.run if transforms.steps else None
        self.transform = transforms.run
        """Runs the transforms on what the dataset has returned for an index."""
        get = functools.partial(operator.getitem, dataset)  # dataset[index] without a frame
        self.one: Callable[[Any], Any] = self._transformed if transforms.steps else get
        """Loads the sample of an index and runs the transforms."""
        self.takes_lists = batched and takes_lists(dataset)
        self.has_rows = batched and self._run is None and has_rows(dataset)
        """Whether samples are rows of tensors or arrays, which are copied together."""
        self.keeps_state = self.sends_state = keeps_state

    def state(self) -> DatasetState:
        """The dataset's state."""
        return DatasetState(dataset=self._dataset.state_dict())

    present = state

    def now(self) -> Callable[[Any], Any]:
        """As ``one``, for a few samples now: the method itself takes less time than an index."""
        method = getattr(type(self._dataset), "__getitem__", None)
        if self._run is None and type(method) in _METHODS:
            return method.__get__(self._dataset)  # type: ignore[no-any-return, union-attr]
        return self.one

    def _transformed(self, index: object) -> Any:
        assert self._run is not None
        return self._run(self._dataset[index])

    def each(self, indices: list[object]) -> Callable[[Any], Any]:
        """A function that returns these samples one by one; with ``__getitems__`` its first call loads all."""
        if not self.takes_lists:
            return self.one
        samples: Iterator[Any] | None = None

        def deal(_: object) -> Any:
            nonlocal samples
            if samples is None:
                samples = iter(one_each(self.many(indices), len(indices)))
            return next(samples)

        return deal

    def rows(self, indices: list[object]) -> Rows | None:
        """The rows that are these samples, where ``has_rows``; None if they must be loaded one by one."""
        return rows_of(self._dataset, indices)

    def single(self, index: object) -> Any:
        """The sample of one index, by a call of its own."""
        return self.each([index])(index)

    def many(self, indices: object) -> Any:
        """What the dataset returns for the indices of a batch, normally the list of samples, transformed."""
        return self.transformed(self._dataset.__getitems__(indices))

    def transformed(self, samples: Any) -> Any:
        """What the dataset returned for the indices of a batch, transformed."""
        return samples if self._run is None else [self._run(sample) for sample in samples]


def one_each(samples: Any, count: int) -> list[Any]:
    """What a call for ``count`` samples has returned, as a list of these.

    Raises:
        ValueError: It is not one sample for each.
    """
    if len(samples) != count:
        raise ValueError(
            f"__getitems__ returned {len(samples)} samples for {count} keys: with order='arrival' and 'fast_first' "
            "it must return one for each (use order='batch')"
        )
    return list(samples)


class _Transformed:
    """A dataset after the loader's transforms, for a fetcher that knows of none."""

    def __init__(self, dataset: Any, transforms: Transforms) -> None:
        self._dataset = dataset
        self._run = transforms.run
        if getattr(dataset, "__getitems__", None):
            self.__getitems__ = self._many

    def __getitem__(self, index: object) -> Any:
        return self._run(self._dataset[index])

    def _many(self, indices: object) -> Any:
        return list(map(self._run, self._dataset.__getitems__(indices)))


class ReplacedFetcher(Fetcher):
    """Has the fetcher that a program has put in the place of torch's make whole batches, collated.

    Args:
        dataset, transforms, batched, keeps_state: As of :class:`Fetcher`.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Transforms,
        batched: bool,
        keeps_state: bool,
        *,
        collate_fn: CollateFn,
        drop_last: bool,
    ) -> None:
        super().__init__(dataset, transforms, batched, keeps_state)
        self.takes_lists, self.has_rows = batched, False
        samples = _Transformed(dataset, transforms) if transforms.steps else dataset
        # In the worker, as torch makes it: a worker that is not forked may have torch's own class.
        self._fetch = make_fetcher(samples, batched, collate_fn, drop_last).fetch
        self.one = self._fetch

    def now(self) -> Callable[[Any], Any]:
        return self.one

    def many(self, indices: object) -> Any:
        return self._fetch(indices)


class StreamEnd(Exception):
    """An iterable dataset has no further batch for this epoch."""


class StreamFetcher:
    """Takes batches from an iterable-style dataset, as torch's fetcher does.

    Args:
        batched: Whether samples are collated in lists; otherwise each is a batch.
        at_once: Whether the first epoch begins now, so that the caller gets the errors of the dataset's ``__iter__``;
            otherwise each epoch begins with its first batch. The caller then reads the state, which is not sent.
        initial: The state in which the first epoch starts; None: the dataset's own.
        state_every: Every such batch carries the state; None: none does. ``auto``: the first one does, and each by
            which the cost of the last state has become a small share of the time.
    """

    def __init__(
        self,
        dataset: Any,
        transforms: Transforms,
        *,
        batched: bool,
        drop_last: bool,
        at_once: bool = False,
        initial: DatasetState | None = None,
        state_every: int | Literal["auto"] | None = None,
    ) -> None:
        self._dataset = dataset
        self._run = transforms.run if transforms.steps else None
        self.takes_lists = self.has_rows = False
        self._batched = batched
        self._drop_last = drop_last
        self._begun = self._keeps = at_once
        self.taken: list[Any] = []
        """Without workers: the samples of the batch that is being made, which an interruption does not lose."""
        self._samples: Iterator[Any] | None = iter(dataset) if at_once else None
        self._epoch: object = None
        # A stream that has ended starts again in the next epoch.
        self._initial = DatasetState() if initial is None or initial.ended else initial
        self._sends = not at_once
        self._state_every = state_every
        self._num_taken = 0
        self._state_begun_ns = self._state_due_ns = 0
        self._dataset_keeps = is_stateful(dataset)
        self._iterator_keeps = is_stateful(self._samples)

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset or its iterator has a state."""
        return self._dataset_keeps or self._iterator_keeps

    @property
    def sends_state(self) -> bool:
        """Whether the state is sent with the current batch."""
        if not (self._sends and self.keeps_state and self._state_every):
            return False
        if self._state_every == "auto":
            return self._num_taken == 1 or now_ns() >= self._state_due_ns
        return self._num_taken % self._state_every == 0

    def state_sent(self) -> None:
        """Record that the result of ``state`` is written."""
        now = now_ns()
        self._state_due_ns = now + _STATE_SHARE * (now - self._state_begun_ns)

    @property
    def sends_last_state(self) -> bool:
        """Whether the dataset's state goes with the end of the stream."""
        return self._sends and self._dataset_keeps

    def state(self) -> DatasetState:
        """States of the dataset and of its iterator, and whether that has ended."""
        self._state_begun_ns = now_ns()
        dataset, iterator = self._dataset, cast(Any, self._samples)
        return DatasetState(
            dataset.state_dict() if self._dataset_keeps and iterator is not dataset else None,
            iterator.state_dict() if self._iterator_keeps and iterator is not None else None,
            0,
            iterator is None,
        )

    def present(self) -> DatasetState | None:
        """The current state; None if there is none, or it is not restored yet."""
        restored = self._epoch is not None or self._initial == DatasetState()
        return self.state() if restored and self.keeps_state else None

    def enter(self, epoch: object, count: int) -> None:
        """Make a new iterator if a new epoch has begun.

        Args:
            count: Samples in a batch.
        """
        if epoch == self._epoch:
            return
        initial = self._initial
        try:
            if not self._begun:
                self._samples = None
                self._samples = iter(self._dataset)
            self._begun = False
            samples = cast(Any, self._samples)
            self._iterator_keeps = is_stateful(samples)
            self._num_taken = 0
            if initial.iterator is not None:
                samples.load_state_dict(initial.iterator)
            for _ in range(initial.batches):
                # With the transforms, which draw from the same generators; errors were raised in the earlier run.
                with suppress(Exception):
                    self.take(count)
                self.taken.clear()
        except Exception:
            self._initial, self._epoch = DatasetState(), epoch
            raise
        self._initial, self._epoch = DatasetState(), epoch

    def batch(self, epoch: object, count: int) -> list[Any]:
        """The next ``count`` samples of an epoch, which begins with its first batch; raises as ``take``."""
        if epoch != self._epoch:
            self.enter(epoch, count)
        return self.take(count)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` samples, fewer at the end of the stream.

        Raises:
            StreamEnd: No sample is left, or ``drop_last`` drops an incomplete batch.
        """
        self._num_taken += 1
        samples: list[Any] = self.taken if self._keeps else []
        if self._samples is not None and len(samples) < count:
            # In one step: a signal is handled before it or after it. Not islice(), which calls iter() again: that
            # restarts a dataset that is its own iterator.
            samples.extend(map(next, itertools.repeat(self._samples, count - len(samples))))
            if len(samples) < count:
                self._samples = None
        if len(samples) < count and (not samples or (self._batched and self._drop_last)):
            raise StreamEnd
        if self._keeps:
            samples = samples.copy()
        return samples if self._run is None else [self._run(sample) for sample in samples]


def fetcher_of(plan: WorkerPlan, number: int, reads: object = None) -> Fetcher | StreamFetcher:
    """The fetcher of worker ``number``.

    Args:
        reads: They take the place of dataset and transforms, which another machine has.
    """
    pipeline = plan.pipeline
    dataset, transforms = pipeline.dataset, pipeline.transforms
    if reads is not None:
        dataset, transforms = reads, Transforms()
    batched, drop_last = pipeline.batched, pipeline.drop_last
    if pipeline.streams:
        return StreamFetcher(
            dataset,
            transforms,
            batched=batched,
            drop_last=drop_last,
            at_once=plan.in_main_process,
            initial=None if plan.dataset_states is None else plan.dataset_states.each[number],
            state_every=plan.state_every,
        )
    of_samples = dataset, transforms, batched, plan.sends_states
    if pipeline.refetches:
        return ReplacedFetcher(*of_samples, collate_fn=pipeline.collate_fn, drop_last=drop_last)
    return Fetcher(*of_samples)
