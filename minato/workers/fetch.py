"""Loading samples from the user's dataset, by index or by lists of indices."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType, MethodDescriptorType
from typing import Any

from minato._compat import make_fetcher
from minato._support.objects import takes_lists
from minato._support.values import gives_keys, type_name
from minato.batching.layout import Rows, has_rows, rows_of
from minato.sampling.resume import DatasetState
from minato.sampling.samplers import as_given
from minato.transforms.compose import Transforms
from minato.workers.plan import WorkerPlan

_Load = Callable[[Any], Any]
_METHODS = FunctionType, MethodDescriptorType
"""Types of ``__getitem__`` that are called sooner than an index is taken."""
LEAST_BOUND = 16  # samples for which it pays to look up the dataset's method
LEAST_ROWS = 8  # fewer samples that are rows are copied sooner one by one


class Fetcher:
    """Loads samples from a map-style dataset and runs the transforms on them.

    The dataset's ``__getitems__`` is used where indices come in lists: if they are ``batched``, as with ``batch_size``
    or a ``batch_sampler``. ``keeps_state``: its state goes with each batch.
    """

    def __init__(
        self, dataset: Any, transforms: Transforms, batched: bool, keeps_state: bool = False
    ) -> None:
        self.dataset = dataset
        self._run = transforms.run if transforms.steps else None
        self.transform = transforms.run
        get = functools.partial(operator.getitem, dataset)  # dataset[index] without a frame
        # Not a method, which would refer to this object, and keep it and the dataset until a collection.
        self.one: _Load = get
        if transforms.steps:
            self.one = functools.partial(_transformed, get, transforms.run)
        self.takes_lists = batched and takes_lists(dataset)
        self.has_rows = batched and self._run is None and has_rows(dataset)
        """Whether samples are rows of tensors or arrays, which are copied together."""
        self.keeps_state = keeps_state

    def state(self) -> DatasetState:
        """The dataset's state."""
        return DatasetState(dataset=self.dataset.state_dict())

    def now(self, count: int) -> _Load:
        """As ``one``, for some samples now: the method itself takes less time than an index, but to look it up."""
        if count < LEAST_BOUND:
            return self.one
        method = getattr(type(self.dataset), "__getitem__", None)
        if self._run is None and type(method) in _METHODS:
            return method.__get__(self.dataset)  # type: ignore[no-any-return, union-attr]
        return self.one

    def rows(self, indices: list[object]) -> Rows | None:
        """The rows that are these samples, where ``has_rows``; None if they are to be loaded one by one."""
        return rows_of(self.dataset, indices) if len(indices) >= LEAST_ROWS else None

    def single(self, index: object) -> Any:
        """The sample of one index, by a call of its own."""
        return one_each(self.many([index]), 1)[0] if self.takes_lists else self.one(index)

    def many(self, indices: object) -> Any:
        """What the dataset returns for the indices of a batch, normally the list of samples, transformed."""
        return self.transformed(self.dataset.__getitems__(as_given(indices)))

    def transformed(self, samples: Any) -> Any:
        """What the dataset returned for the indices of a batch, transformed."""
        return samples if self._run is None else list(map(self._run, _separate(samples)))


def _separate(samples: Any) -> Any:
    """The samples that ``__getitems__`` has returned; TypeError: it is one object for all of them."""
    if samples is None or gives_keys(samples):
        raise TypeError(
            f"__getitems__ returned a {type_name(samples)}, and transforms= and orders that mix batches take single "
            "samples: return a list of these; or transform in __getitems__, with order='strict' or 'batch'"
        )
    return samples


def one_each(samples: Any, count: int) -> list[Any]:
    """What a call for ``count`` samples has returned, as a list; ValueError: it is not one sample for each."""
    separate = [*_separate(samples)]
    if len(separate) != count:
        raise ValueError(
            f"__getitems__ returned {len(separate)} samples for {count} keys: with order='arrival' and 'fast_first' "
            "it must return one for each (use order='batch')"
        )
    return separate


def _transformed(get: _Load, run: _Load, index: object) -> Any:
    return run(get(index))


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
        return list(map(self._run, _separate(self._dataset.__getitems__(indices))))


class ReplacedFetcher(Fetcher):
    """Has the fetcher that a program has put in the place of torch's make whole batches, collated."""

    def __init__(self, plan: WorkerPlan, dataset: object, transforms: Transforms) -> None:
        pipeline = plan.pipeline
        batched = pipeline.batched
        super().__init__(dataset, transforms, batched, plan.sends_states)
        self.takes_lists, self.has_rows = batched, False
        samples = _Transformed(dataset, transforms) if transforms.steps else dataset
        # In the worker, as torch makes it: a worker that is not forked may have torch's own class.
        made = make_fetcher(samples, batched, pipeline.collate_fn, pipeline.drop_last)
        self.one = self._fetch = made.fetch

    def now(self, count: int) -> Callable[[Any], Any]:
        return self.one

    def many(self, indices: object) -> Any:
        return self._fetch(as_given(indices))


class Items:
    """Items that a reader has given, by their keys: the dataset of the transforms of an iterable one."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._may_repeat = False

    def hold(self, keys: Sequence[int], items: list[object], may_repeat: bool) -> None:
        """Have these items, and no others.

        Where they ``may_repeat``, each is given as a copy: transforms may change it in place before they run again.
        """
        self._held = dict(zip(keys, items, strict=False))
        self._may_repeat = may_repeat

    def __getitem__(self, key: int) -> Any:
        item = self._held[key]
        if self._may_repeat:
            with suppress(Exception):  # it cannot be copied
                return copy.deepcopy(item)
        return item


def fetcher_of(plan: WorkerPlan, reads: object = None) -> Fetcher:
    """The fetcher of a worker; ``reads`` take the place of dataset and transforms, which another machine has."""
    pipeline = plan.pipeline
    dataset, transforms = pipeline.dataset, pipeline.transforms
    if reads is not None:
        dataset, transforms = reads, Transforms()
    if pipeline.streams:
        return Fetcher(Items(), transforms, batched=False)
    if pipeline.refetches:
        return ReplacedFetcher(plan, dataset, transforms)
    return Fetcher(dataset, transforms, pipeline.batched, plan.sends_states)
