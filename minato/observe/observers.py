"""What an engine tells its observers. One that raises is switched off: what is measured never stops what is loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add, itemgetter, sub
from typing import NamedTuple, Protocol

from minato._core import Calls, Histogram, now_ns
from minato._support.values import message_of, type_name
from minato.errors import warn
from minato.observe.lateness import Lateness, ThresholdDecision
from minato.observe.meters import EMPTY, SlowSample, merged


class Counts(dict[str, int]):
    """Numbers by name; one that is missing is 0. Six to nine times as fast as a ``Counter``."""

    def __missing__(self, name: str) -> int:
        return 0

    def add(self, other: Mapping[str, int]) -> None:
        """Add the numbers of others."""
        known = self if [*self] == [*other] else Counts({name: self[name] for name in other})
        self.update(zip(other, map(add, known.values(), other.values()), strict=True))

    @classmethod
    def total(cls, many: Sequence[Counts]) -> Counts:
        """The sums of numbers with the same name."""
        names = dict.fromkeys(chain.from_iterable(many))
        return cls({name: sum(map(itemgetter(name), many)) for name in names})

    def minus(self, other: Counts) -> Counts:
        """These numbers without others."""
        known = other if [*self] == [*other] else Counts({name: other[name] for name in self})
        return Counts(zip(self, map(sub, self.values(), known.values()), strict=True))


@dataclass
class Metrics:
    """Counters and histograms, which only grow; those of several runs can be added.

    Attributes:
        counts: By name, with the unit in the name.
        histograms: By name; read-only, so that several metrics may share one.
    """

    counts: Counts = field(default_factory=Counts)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @classmethod
    def total(cls, many: Sequence[Metrics]) -> Metrics:
        """The sum of metrics."""
        parts: dict[str, list[Histogram]] = {}
        for each in many:
            for name, values in each.histograms.items():
                known = parts.setdefault(name, [])
                if values is not EMPTY:
                    known.append(values)
        histograms = {
            name: known[0] if len(known) == 1 else merged(known) if known else EMPTY
            for name, known in parts.items()
        }
        return cls(Counts.total([each.counts for each in many]), histograms)

    def grown_since(self, older: Metrics) -> dict[str, Histogram]:
        """The increase of the histograms since an older snapshot of the same metrics."""
        known, grown = older.histograms, dict.fromkeys(self.histograms, EMPTY)
        for name, values in self.histograms.items():
            before = known.get(name, EMPTY)
            if before is not values:
                grown[name] = values.subtract(before) if before.count else values
        return grown


class LoaderSnapshot(NamedTuple):
    """Workers and batches of a loader.

    Attributes:
        memory_bytes: Approximate memory of the batches in flight.
    """

    workers: int
    in_flight: int
    ready: int
    limit: int
    memory_bytes: int
    budget_bytes: int


class EpochState(Protocol):
    """The progress of an epoch, from the sampler's side.

    Attributes:
        began_ns: When ``iter()`` began.
        sampling_ns: Time in the sampler.
    """

    began_ns: int
    sampling_ns: int

    @property
    def lateness(self) -> Lateness:
        """The lags of its samples."""

    def num_samples(self) -> tuple[int, int, int]:
        """The numbers of requested, returned and outstanding samples."""

    def length(self) -> int | None:
        """The number of batches; None if unknown."""


class MetricsSource(Protocol):
    """The metrics of an engine; readable after its end."""

    @property
    def stands_still(self) -> bool:
        """Whether nothing changes between two epochs: there are no workers."""

    def metrics(self) -> Metrics:
        """All counters and histograms now."""

    def quick_counts(self) -> Mapping[str, int]:
        """The counts that cost little to read: a subset of those of ``metrics()``; callable in any thread."""

    def stages(self) -> tuple[tuple[int, int], ...]:
        """``(samples, ns)`` of each stage, for the samples that were timed, since the workers started.

        The dataset comes first, then the transforms; callable in any thread.
        """

    def slowest(self) -> list[SlowSample]:
        """The slowest samples of each worker."""

    def decision(self) -> ThresholdDecision:
        """The present threshold of slow samples."""

    @property
    def held_by_budget(self) -> bool:
        """Whether the memory budget keeps more batches from being opened."""


class Observer:
    """Follows the calls of a loader's engines. Each method does nothing, and is there to be overridden.

    Iterators of one loader may run at a time, each with an engine: what ``begin`` returns follows the calls of this one
    from ``started`` to ``finish``.

    Attributes:
        calls: What notes the calls of ``next()``. Where it does, ``enter`` and ``leave`` need not be called.
    """

    calls: Calls | None = None

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> Observer:
        """An epoch begins; an unfinished one of the same source is abandoned."""
        return self

    def started(self) -> None:
        """The workers of the epoch have started."""

    def enter(self) -> None:
        """``next()`` is called."""

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        """``next()`` returns a batch; ``loader`` returns the state of the loader, and is to be called rarely."""

    def fail(self) -> None:
        """``next()`` raises; not the error of a batch, which it returns, nor the end of the epoch."""

    def pinned(self, duration_ns: int) -> None:
        """A batch was copied to pinned memory, after ``next()`` of the engine."""

    def waited_for_ranks(self, duration_ns: int) -> None:
        """The training loop has waited for other ranks, after ``next()`` of the engine."""

    def own_rank_waited(self, duration_ns: int) -> None:
        """The engine loads ahead for several ranks, and that of this process has waited; 0: there are several."""

    def finish(self) -> None:
        """The epoch ends, in a call of ``next()``."""

    def workers_ended(self, duration_ns: int) -> None:
        """The epoch is over, and the training loop has waited for the end of its workers."""

    def end(self, source: MetricsSource) -> None:
        """The engine ends that has this source, and with it its epoch."""

    def switched_off(self) -> None:
        """A method raised, and none is called any more."""


class Observers(Observer):
    """Calls all observers. One that raises is switched off, with a warning; the training loop gets its batch.

    Where warnings are errors, the next call of ``next()`` raises the warning, before it takes a batch.

    Args:
        of_loader: Observers of all engines of a loader; the list may change between two epochs.
    """

    def __init__(self, of_loader: list[Observer], own: Iterable[Observer] = ()) -> None:
        self._of_loader, self._own = of_loader, list(own)
        self._all: tuple[
            tuple[Observer, Observer], ...
        ] = ()  # what follows the calls, and for whom
        self._calls: Calls | None = None  # of the only one
        self._references: list[weakref.ref[Observer]] = []
        self._late: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    def begin(self, epoch: int, progress: EpochState, source: MetricsSource) -> Observer:
        self._references[:] = map(weakref.ref, self._of_loader)
        self._all, self._calls = (), None
        for observer in (*self._of_loader, *self._own):
            try:
                self._all += ((observer.begin(epoch, progress, source), observer),)
            except Exception as error:
                self._failed(observer, error)
        if len(self._all) == 1:
            self._calls = self._all[0][0].calls
        return self

    def started(self) -> None:
        self._call("started")

    def enter(self) -> None:
        """``next()`` is called.

        Raises:
            Warning: Warnings are errors, and an observer warned since the last call.
        """
        if self._late is not None:
            self._raise_late()
        if self._calls is not None:
            self._calls.enter(now_ns())
            return
        for follower, observer in self._all:
            try:
                follower.enter()
            except Exception as error:
                self._failed(observer, error)

    def leave(self, samples: int, nbytes: int, loader: Callable[[], LoaderSnapshot]) -> None:
        if self._calls is not None and self._calls.leave(now_ns(), samples, nbytes):
            return
        for follower, observer in self._all:
            try:
                follower.leave(samples, nbytes, loader)
            except Exception as error:
                self._failed(observer, error)

    def fail(self) -> None:
        self._call("fail")

    def pinned(self, duration_ns: int) -> None:
        self._call("pinned", duration_ns)

    def waited_for_ranks(self, duration_ns: int) -> None:
        self._call("waited_for_ranks", duration_ns)

    def workers_ended(self, duration_ns: int) -> None:
        self._call("workers_ended", duration_ns)

    def own_rank_waited(self, duration_ns: int) -> None:
        self._call("own_rank_waited", duration_ns)

    def finish(self) -> None:
        """The epoch ends, in a call of ``next()``; raises as ``enter`` does."""
        self._call("finish")
        self._raise_late()

    def ending(self, source: MetricsSource) -> Callable[[], None]:
        """A function for the end of the engine: it calls those of the loader's observers that live, and keeps none."""
        references = self._references

        def end() -> None:
            alive = Observers([each for one in references if (each := one()) is not None])
            alive.end(source)
            alive._raise_late()

        return end

    def end(self, source: MetricsSource) -> None:
        for observer in list(self._of_loader):
            try:
                observer.end(source)
            except Exception as error:
                self._failed(observer, error)

    def _call(self, name: str, *arguments: object) -> None:
        for follower, observer in self._all:
            try:
                getattr(follower, name)(*arguments)
            except Exception as error:
                self._failed(observer, error)

    def _raise_late(self) -> None:
        if self._late is not None:
            error, self._late = self._late, None
            raise BaseException.with_traceback(error, None)

    def _failed(self, observer: Observer, error: Exception) -> None:
        if isinstance(error, Warning):  # it warned, and goes on
            self._late = error
            return
        if isinstance(error, RecursionError):
            return  # a collection within the program's recursion ends an iterator
        self._all = tuple(each for each in self._all if each[1] is not observer)
        self._calls = None
        observer.switched_off()
        for listed in (self._of_loader, self._own):
            if observer in listed:
                listed.remove(observer)
        try:
            warn(
                f"{type_name(observer)} of this loader is switched off, because it raised {type_name(error)}: "
                f"{message_of(error)}. Batches come as before, and what it shows ends here"
            )
        except Exception as raised:
            self._late = raised
