"""Getting samples from the user's dataset: by key, by lists of keys, or from a stream."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

from minato.sampling.dataset_state import DatasetState
from minato.sampling.state import is_stateful
from minato.transforms.compose import Transforms

__all__ = ["Fetcher", "StreamEnd", "StreamFetcher"]


class Fetcher:
    """Gets samples from a map-style dataset and runs the transforms over them.

    Args:
        dataset: Indexed by the sampler's keys; its ``__getitems__`` is used where it has one and batches are collated
            from lists of keys.
        batched: Whether keys come in lists, as with ``batch_size`` or a ``batch_sampler``.
        keeps_state: Whether the dataset's state goes with each batch.
    """

    def __init__(
        self, dataset: Any, transforms: Transforms, batched: bool, keeps_state: bool = False
    ) -> None:
        self._dataset = dataset
        self._run = transforms.run if transforms.steps else None
        get = functools.partial(operator.getitem, dataset)  # dataset[key] without a frame
        self.one: Callable[[Any], Any] = self._transformed if transforms.steps else get
        """Gets the sample of a key, after the transforms."""
        self.takes_lists = batched and bool(getattr(dataset, "__getitems__", None))
        self.keeps_state = keeps_state

    @property
    def sends_state(self) -> bool:
        """Whether the state goes with the batch at hand."""
        return self.keeps_state

    def state(self) -> DatasetState:
        """The dataset's state."""
        return DatasetState(dataset=self._dataset.state_dict())

    def _transformed(self, key: Any) -> Any:
        assert self._run is not None
        return self._run(self._dataset[key])

    def each(self, keys: list[Any]) -> Callable[[Any], Any]:
        """How to get these samples one by one; where one call fetches all, they are dealt out afterwards."""
        if not self.takes_lists:
            return self.one
        samples: Iterator[Any] | None = None

        def deal(_: Any) -> Any:
            nonlocal samples
            if samples is None:
                fetched = self.many(keys)
                if len(fetched) != len(keys):
                    raise ValueError(
                        f"__getitems__ returned {len(fetched)} samples for {len(keys)} keys: with order='arrival' "
                        "and 'fast_first' it must return one for each (use order='batch')"
                    )
                samples = iter(fetched)
            return next(samples)

        return deal

    def single(self, key: Any) -> Any:
        """The sample of one key, by a call of its own."""
        return self.each([key])(key)

    def many(self, keys: Any) -> Any:
        """What the dataset returns for the keys of a batch, normally the list of samples, transformed."""
        samples = self._dataset.__getitems__(keys)
        return samples if self._run is None else [self._run(sample) for sample in samples]


class StreamEnd(Exception):
    """An iterable dataset has no further batch for this pass."""


class StreamFetcher:
    """Takes batches from an iterable-style dataset, as torch's fetcher does.

    Args:
        batched: Whether samples are collated in lists; otherwise each is a batch.
        drop_last: Whether an incomplete list is dropped.
        at_once: Whether the first pass is begun now, where the caller gets the errors of the dataset's ``__iter__``;
            otherwise each is begun with its first batch.
            Then the caller also asks for the state, which is not sent.
        initial: The state in which the first epoch starts; None: the dataset's own.
        state_every: Of how many batches one comes with the state; None: none does.
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
        state_every: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._run = transforms.run if transforms.steps else None
        self.takes_lists = False
        self._batched = batched
        self._drop_last = drop_last
        self._begun = at_once
        self._samples: Iterator[Any] | None = iter(dataset) if at_once else None
        self._pass: object = None
        # The stream of one that has ended begins anew in the next pass.
        self._initial = DatasetState() if initial is None or initial.ended else initial
        self._sends = not at_once
        self._state_every = state_every
        self._num_taken = 0
        self._dataset_keeps = is_stateful(dataset)
        self._iterator_keeps = is_stateful(self._samples)

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset or its iterator has a state."""
        return self._dataset_keeps or self._iterator_keeps

    @property
    def sends_state(self) -> bool:
        """Whether the state goes with the batch at hand."""
        if not (self._sends and self.keeps_state and self._state_every):
            return False
        return self._num_taken % self._state_every == 0

    @property
    def sends_last_state(self) -> bool:
        """Whether the dataset's state goes with the end of the stream."""
        return self._sends and self._dataset_keeps

    def state(self) -> DatasetState:
        """States of the dataset and of its iterator, and whether that has ended."""
        dataset, iterator = self._dataset, cast(Any, self._samples)
        return DatasetState(
            dataset.state_dict() if self._dataset_keeps and iterator is not dataset else None,
            iterator.state_dict() if self._iterator_keeps and iterator is not None else None,
            0,
            iterator is None,
        )

    def present(self) -> DatasetState | None:
        """The same at any time; None if there is no state, or it is still to be restored."""
        restored = self._pass is not None or self._initial == DatasetState()
        return self.state() if restored and self.keeps_state else None

    def enter(self, this_pass: object, count: int) -> None:
        """Make a new iterator if a new pass has begun.

        Args:
            count: Samples in a batch.
        """
        if this_pass != self._pass:
            self._pass = this_pass
            if not self._begun:
                self._samples = None
                self._samples = iter(self._dataset)
            self._begun = False
            samples = cast(Any, self._samples)
            self._iterator_keeps = is_stateful(samples)
            self._num_taken = 0
            initial, self._initial = self._initial, DatasetState()
            if initial.iterator is not None:
                samples.load_state_dict(initial.iterator)
            for _ in range(initial.batches):
                # With the transforms, whose draws belong to the same generators; what raised, raised then.
                with suppress(Exception):
                    self.take(count)

    def take(self, count: int) -> list[Any]:
        """The next ``count`` samples, or what is left of them.

        Raises:
            StreamEnd: Nothing is left, or less than ``drop_last`` asks for.
        """
        self._num_taken += 1
        samples: list[Any] = []
        while self._samples is not None and len(samples) < count:
            try:
                # By next() alone: islice asks for the iterator again, and a dataset that is its own would begin anew.
                samples.append(next(self._samples))
            except StopIteration:
                self._samples = None
        if len(samples) < count and (not samples or (self._batched and self._drop_last)):
            raise StreamEnd
        return samples if self._run is None else [self._run(sample) for sample in samples]
