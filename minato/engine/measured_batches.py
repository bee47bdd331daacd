"""Batches that are closed by the cost of their samples, which the loaded samples show.

The engine gives single samples, in its order. They wait here until a batch of similar ones is full, and count as
delivered with their batch: to a state that is taken meanwhile, those that wait are still to come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import floor, isfinite, log, log1p
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from minato._support.values import gives_keys, number_of, text_of, type_name
from minato.delivery.iterator import Layer
from minato.errors import add_note, not_the_end
from minato.observe.observers import EpochState, LoaderSnapshot, MetricsSource, Observers
from minato.options import CostBatches
from minato.sampling.epoch import Epoch
from minato.sampling.progress import Outgoing, Progress
from minato.sampling.samplers import IndexBatches

_HOLDER = "batches"
_ABOVE_ZERO = 1 << 40
"""Group 0 is that of samples that cost nothing, and of all samples without padding."""
Record = Callable[[], object]
Collate = Callable[[list[object]], object]


class _Waiting(NamedTuple):
    """A sample that waits for its batch, with its number in the order of arrival."""

    given: Outgoing
    sample: object
    records: Sequence[Record]
    cost: float
    group: int  # the same for samples whose lengths differ little
    number: int


class _Batch(Outgoing):
    """A batch on its way, or the error of one.

    Attributes:
        members: Its samples, which wait until the training loop has it.
        failed: What the engine gave, if that is the error of a sample, or a sample without a cost.
    """

    def __init__(self, members: Sequence[_Waiting] = (), failed: Outgoing | None = None) -> None:
        super().__init__()
        self.members, self.failed = members, failed
        self.is_observed = False


class _Joined:
    """The observers of a source, several of whose calls are one of theirs; they may not know that it has ended."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._snapshot: weakref.WeakMethod[Callable[[], LoaderSnapshot]] | None = None
        self._is_inside = self.has_ended = False
        self._nbytes = 0  # of the samples that the source has given since the last batch

    def __bool__(self) -> bool:
        return bool(self._observers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observers, name)

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> None:
        self._is_inside = self.has_ended = False
        self._observers.begin(epoch, progress, source)

    def enter(self) -> None:
        """The first call since a batch was given begins that of the next one."""
        if not self._is_inside:
            self._observers.enter()
            self._is_inside = True

    def leave(self, samples: int, nbytes: int, snapshot: Callable[[], LoaderSnapshot]) -> None:
        self._snapshot = weakref.WeakMethod(snapshot)  # of the source, which has these observers
        self._nbytes += nbytes

    def give(self, batch: _Batch) -> None:
        samples = max(len(batch.members), 1)
        if self._snapshot is not None and (snapshot := self._snapshot()) is not None:
            self._observers.leave(samples, self._nbytes, snapshot)
        # At once: until then, an interruption has the batch come again.
        batch.is_observed, self._is_inside, self._nbytes = True, False, 0

    def fail(self) -> None:
        """The call raises: the next one begins again."""
        if self._is_inside:  # also that of the source
            self._is_inside = False
            self._observers.fail()

    def finish(self) -> None:
        """The source has ended; the epoch ends with its last batch."""
        self.has_ended = True

    def end_epoch(self) -> None:
        if self.has_ended:
            self.has_ended = False
            self._observers.finish()


class MeasuredBatches(Layer):
    """Makes batches of the samples of an engine by ``collate`` (see :class:`minato.CostBatches`)."""

    def __init__(self, source: Any, batches: CostBatches, collate: Collate) -> None:
        super().__init__(source)
        self._plan = batches
        self._collate = collate
        self._waiting: list[_Waiting] = []  # in the order of arrival
        self._batch: _Batch | None = None
        self._num_arrived = 0
        self._progress: Progress | None = None
        # An engine without workers may be used again.
        kept = source.observers
        self._observers: _Joined = kept if isinstance(kept, _Joined) else _Joined(kept)
        source.observers = self._observers

    def begin(self, epoch: Epoch, batches: IndexBatches) -> bool:
        self._waiting, self._batch, self._num_arrived = [], None, 0
        self._progress = epoch.progress
        epoch.progress.held_by.add(_HOLDER)
        return self.source.begin(epoch, batches)

    def next(self) -> Outgoing:
        batch, progress = self._batch, self._progress
        assert progress is not None
        if batch is not None and batch.is_given:
            progress.settle()
            if batch.failed is not None:
                batch.failed.records, batch.failed.is_given = (), True
            first = {each.number for each in batch.members}
            self._waiting = [each for each in self._waiting if each.number not in first]
            self._batch = batch = None
        self._observers.enter()
        try:
            while batch is None:
                self._batch = batch = self._closed() or self._arrived(progress)
            progress.last = batch
            if not batch.is_observed:
                self._observers.give(batch)
        except StopIteration:
            raise
        except BaseException:
            self._observers.fail()
            raise
        return batch

    def _arrived(self, progress: Progress) -> _Batch | None:
        """Have one more sample wait, or return the batch that follows from what the source gave."""
        waiting = self._waiting
        try:
            given = self.source.next()
        except StopIteration:
            if waiting:
                return self._made(self._around(waiting[0]))
            progress.held_by.discard(_HOLDER)
            progress.finish()
            self._observers.end_epoch()
            raise
        error = given.error
        # An interrupted call may have taken it.
        if not (waiting and waiting[-1].given is given):
            if error is None:
                try:
                    cost = self._cost(given.batch)
                except Exception as raised:
                    error = not_the_end("cost=", raised)
            if error is not None:
                batch = _Batch(failed=given)
                batch.error, batch.records = error, given.records
                return batch
            number, records = self._num_arrived, given.records
            waiting.append(_Waiting(given, given.batch, records, cost, self._group(cost), number))
        self._num_arrived = waiting[-1].number + 1
        given.records, given.is_given = (), True
        return None

    def _cost(self, sample: object) -> float:
        """The cost of a sample; ValueError, TypeError: it has none, or more than a batch may cost."""
        of, most = self._plan.cost, self._plan.max_cost
        held: Any = sample
        if of is None and _has_fields(held):
            raise TypeError(
                f"a sample of type {type_name(held)} has fields, whose number is no cost: give cost=, the key of the "
                "field whose length counts, or a function of the sample"
            )
        try:
            found = of(held) if callable(of) else len(held if of is None else held[of])
        except Exception as error:
            if not callable(of):
                what = "the sample" if of is None else "a field"
                add_note(
                    error,
                    f"  CostBatches(cost={text_of(of)}) takes the length of {what}, and the sample is of type "
                    f"{type_name(held)}: give the key of a field that has a length, or a function of the sample",
                )
            raise
        cost = number_of(found)
        if cost is None or not isfinite(cost) or cost < 0:
            raise ValueError(f"cost= returned {text_of(found)} for a sample: it must be 0 or more")
        if cost > most:
            raise ValueError(
                f"a sample costs {cost:g}, and a batch at most max_cost={most:g}: raise max_cost, or shorten such "
                "samples in transforms="
            )
        return cost

    def _group(self, cost: float) -> int:
        """The same for costs that are within ``max_padding`` of each other."""
        plan = self._plan
        if not plan.padded or not cost:
            return 0
        return floor(log(cost) / -log1p(-plan.max_padding)) + _ABOVE_ZERO

    def _closed(self) -> _Batch | None:
        """The batch that the last sample has closed, or the oldest sample that has waited long enough."""
        # An interruption may have come before the last one was taken.
        if not self._waiting or not self._waiting[-1].given.is_given:
            return None
        plan, oldest = self._plan, self._waiting[0]
        group = self._waiting[-1].group
        members = [each for each in self._waiting if each.group == group]
        costs = [each.cost for each in members]
        total = len(costs) * max(costs) if plan.padded else sum(costs)
        if total > plan.max_cost:
            return self._made(members[:-1])
        another = max(costs) if plan.padded else 0.0
        if len(costs) == plan.max_size or total + another > plan.max_cost:
            return self._made(members)
        if self._num_arrived - oldest.number > plan.max_wait:
            return self._made(self._around(oldest))
        return None

    def _around(self, one: _Waiting) -> list[_Waiting]:
        """The samples nearest in cost to one that can wait no longer, as many as a batch may have."""
        plan = self._plan
        ordered = sorted(self._waiting, key=lambda each: (each.cost, each.number))
        first = ordered.index(one)
        end = first + 1
        total = one.cost
        while True:
            below, above = ordered[first - 1 : first], ordered[end : end + 1]
            if below and above and above[0].cost - one.cost < one.cost - below[0].cost:
                below = []
            another = below or above
            if not another:
                break
            size = end - first + 1
            most = max(ordered[end - 1].cost, another[0].cost)
            cost = size * most if plan.padded else total + another[0].cost
            padding = cost - total - another[0].cost
            too_large = cost > plan.max_cost or size > (plan.max_size or size)
            if too_large or padding > plan.max_padding * cost:
                break
            total += another[0].cost
            first, end = (first - 1, end) if below else (first, end + 1)
        return ordered[first:end]

    def _made(self, members: list[_Waiting]) -> _Batch:
        assert self._progress is not None
        batch = _Batch(members)
        batch.records = self._progress.together([each.records for each in members])
        try:
            batch.batch = self._collate([each.sample for each in members])
        except Exception as error:
            batch.error = not_the_end("collate_fn", error)
        return batch

    def shut_down(self) -> None:
        self._waiting, self._batch = [], None
        super().shut_down()


def _has_fields(sample: object) -> bool:
    """Whether the length of a sample is the number of its fields: of a dictionary, or of a pair of array and label."""
    if issubclass(type(sample), tuple):
        arrays = (np.ndarray, torch.Tensor, list, dict)
        return any(issubclass(type(part), arrays) for part in cast(tuple[Any, ...], sample))
    return gives_keys(sample)
