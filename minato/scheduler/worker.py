"""What a worker does: claim samples, run them, put the results in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from minato._core.clock import now_ns
from minato._core.histogram import Histogram
from minato._core.ledger import Ledger
from minato._core.wait import Gate
from minato.chain.chain import Chain
from minato.chain.rng import SampleRandomness

__all__ = ["Fetcher", "Sink", "Worker"]

_RUN_NS = 1_000_000
"""A worker claims about so much work at a time: dispatch then costs a per cent, and nobody hoards."""
_COLLATED_RUN_NS = 4_000_000
"""The same where batches are collated by a function: samples of one worker need no transport."""
_PATIENCE_S = 1.0
"""How long a worker sleeps at most before it looks whether its parent lives."""
_RISE, _FALL = 0.2, 0.7
"""Smoothing of a worker's mean cost per sample."""


class Sink(Protocol):
    """Where a worker's samples go (the assembler's writer)."""

    collates: bool

    def write(self, batch: int, k: int, place: int, sample: Any) -> None:
        """Put a sample at a place, which is number k of the batch."""

    def write_error(self, batch: int, place: int, error: BaseException, key: Any) -> None:
        """The same for a sample that raised."""

    def write_collated(self, batch: int, samples: list[Any]) -> None:
        """Collate all samples of a batch."""

    def finished(self, batch: int, outcome: int) -> None:
        """Act on what the ledger said when a place was filled."""

    def collate(self, batch: int) -> None:
        """Collate a full batch that a dead worker left."""


class Fetcher:
    """Gets samples from a map-style dataset and runs the chain over them.

    Args:
        dataset: Indexed by the sampler's keys; its ``__getitems__`` is used where it has one and batches are collated
            from lists of keys.
        batched: Whether keys come in lists, as with ``batch_size`` or a ``batch_sampler``.
    """

    def __init__(self, dataset: Any, chain: Chain, batched: bool) -> None:
        self._dataset = dataset
        self._run = chain.run if chain.steps else None
        self.takes_lists = batched and bool(getattr(dataset, "__getitems__", None))

    def one(self, key: Any) -> Any:
        """Sample ``key`` after the chain."""
        sample = self._dataset[key]
        return sample if self._run is None else self._run(sample)

    def many(self, keys: list[Any]) -> list[Any]:
        """All samples of a list of keys, fetched by one call of the dataset."""
        samples = self._dataset.__getitems__(keys)
        return list(samples) if self._run is None else [self._run(sample) for sample in samples]


class Worker:
    """Runs samples until the ledger says stop.

    Args:
        number: Its number, from 0.
        read_keys: ``(batch, k, count) -> keys`` of samples k … k+count-1.
        make_randomness: ``seed -> SampleRandomness`` that binds the generators to each sample; None leaves them alone.
        times: Receives the service time of each sample.
        failure: What ``worker_init_fn`` raised; then every sample raises it.
        catches: What a sample may raise without ending the worker.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        gate: Gate,
        fetcher: Fetcher,
        sink: Sink,
        read_keys: Callable[[int, int, int], Sequence[Any]],
        make_randomness: Callable[[int], SampleRandomness] | None,
        times: Histogram,
        failure: BaseException | None = None,
        catches: type[BaseException] = Exception,
    ) -> None:
        self._number = number
        self._ledger = ledger
        self._gate = gate
        self._fetcher = fetcher
        self._sink = sink
        self._read_keys = read_keys
        self._make_randomness = make_randomness
        self._randomness: SampleRandomness | None = None
        self._times = times
        self._failure = failure
        self._catches = catches
        self._run_ns = _COLLATED_RUN_NS if sink.collates else _RUN_NS
        self._mean_ns = float(_COLLATED_RUN_NS)
        self._idle_since = now_ns()

    def loop(self, parent_lives: Callable[[], bool]) -> None:
        """Work until the loader shuts down or its process is gone."""
        ledger, gate = self._ledger, self._gate
        while not ledger.stopping:
            seen = gate.events
            if self.step():
                continue
            if ledger.draining:
                return
            ledger.hungry()
            if not gate.wait(seen, _PATIENCE_S) and not parent_lives():
                return

    def step(self) -> bool:
        """Do one lease; False if there is nothing to do."""
        longest = 1 << 31 if self._fetcher.takes_lists else int(self._run_ns / self._mean_ns) or 1
        lease = self._ledger.claim(self._number, longest)
        if lease is None:
            return False
        batch, k, count = lease
        if count == 0:
            self._sink.collate(batch)
            return True
        started = now_ns()
        _, first, size, bound, epoch, seed, _, _ = self._ledger.describe(batch)
        keys = self._read_keys(batch, k, count)
        if self._make_randomness is not None and (
            self._randomness is None or self._randomness.base_seed != seed
        ):
            self._randomness = self._make_randomness(seed)
        if bound:
            self._run_bound(batch, first, k, epoch, keys, whole=count == size)
        else:
            self._run_unbound(first + k, epoch, keys)
        now = now_ns()
        self._ledger.end(self._number, count, now - started, started - self._idle_since)
        self._idle_since = now
        cost_ns = (now - started) / count
        # Down at once, up slowly: the first samples of a run are often the dearest, and a straggler is no trend.
        self._mean_ns += (_RISE if cost_ns > self._mean_ns else _FALL) * (cost_ns - self._mean_ns)
        return True

    def _run_bound(
        self, batch: int, first: int, k: int, epoch: int, keys: Sequence[Any], whole: bool
    ) -> None:
        """Run samples whose places are their own; all are filled at once at the end."""
        ledger, sink = self._ledger, self._sink
        together: list[Any] | None = [] if whole and sink.collates else None
        position = first + k
        for key, sample, error, _ in self._results(position, epoch, keys):
            if error is not None:
                # The batch is lost, as with torch, which does not run the samples after a bad one either.
                sink.write_error(batch, position, error, key)
                together = None
                break
            if together is None:
                sink.write(batch, position - first, position, sample)
            else:
                together.append(sample)
            position += 1
        if together is not None:
            sink.write_collated(batch, together)
        sink.finished(batch, ledger.fill_run(self._number, batch, k, len(keys)))

    def _run_unbound(self, position: int, epoch: int, keys: Sequence[Any]) -> None:
        """Run samples that take a place when they are finished."""
        ledger, sink = self._ledger, self._sink
        for key, sample, error, cost_ns in self._results(position, epoch, keys):
            late = cost_ns > ledger.slow_ns > 0
            place, batch, k = ledger.reserve(self._number, position, late)
            if error is not None:
                sink.write_error(batch, place, error, key)
            else:
                sink.write(batch, k, place, sample)
            sink.finished(batch, ledger.fill(self._number, position, place, cost_ns))
            position += 1

    def _results(
        self, position: int, epoch: int, keys: Sequence[Any]
    ) -> Iterator[tuple[Any, Any, BaseException | None, int]]:
        """Run samples one after the other; yields ``(key, sample, error, cost_ns)`` of each."""
        ledger, randomness, fetch = self._ledger, self._randomness, self._fetcher.one
        if self._fetcher.takes_lists:
            fetch = self._listed(list(keys))
        for key in keys:
            started = now_ns()
            ledger.begin(self._number, position, started)
            if randomness is not None:
                randomness.bind(epoch, key)
            sample, error = None, None
            try:
                if self._failure is not None:
                    raise self._failure
                sample = fetch(key)
            except self._catches as caught:
                error = caught
            cost_ns = now_ns() - started
            self._times.record(cost_ns)
            yield key, sample, error, cost_ns
            position += 1

    def _listed(self, keys: list[Any]) -> Callable[[Any], Any]:
        """A fetch that calls ``__getitems__`` once, for the first key, and then deals out its samples."""
        samples: list[Any] = []

        def deal(key: Any) -> Any:
            if not samples:
                samples.extend(reversed(self._fetcher.many(keys)))
            return samples.pop()

        return deal
