"""What a worker does: claim samples, run them, put the results in their places."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from minato._core.clock import now_ns
from minato._core.histogram import Histogram
from minato._core.ledger import Ledger
from minato._core.run import run_samples
from minato._core.wait import Gate
from minato.chain.rng import SampleRandomness
from minato.scheduler.fetch import Fetcher, StreamEnd, StreamFetcher

__all__ = ["Sink", "Worker"]

_RUN_NS = 1_000_000
"""A worker claims about so much work at a time: dispatch then costs a per cent, and nobody hoards."""
_COLLATED_RUN_NS = 4_000_000
"""The same where batches are collated by a function: samples of one worker need no transport."""
_PATIENCE_S = 1.0
"""How long a worker sleeps at most before it looks whether its parent lives."""
_WHOLE_BATCH = 1 << 31
_PROBES = 16
"""Samples that are watched for draws at first."""
_WORTH_BINDING_NS = 50_000
"""Samples that cost more are always bound: it takes about a microsecond."""
_RISE, _FALL = 0.2, 0.7
"""Smoothing of a worker's mean cost per sample."""


class Sink(Protocol):
    """Where a worker's samples go (the assembler's writer)."""

    collates: bool
    holds: bool
    run_again: Callable[[int], list[Any]] | None

    def write_run(self, batch: int, k: int, place: int, samples: list[Any]) -> None:
        """Put samples at consecutive places, the first of which is number k of the batch."""

    def write_batch(self, batch: int, samples: list[Any]) -> None:
        """Build a whole batch, of however many samples, that has one place."""

    def write_error(self, batch: int, place: int, error: BaseException, key: Any) -> None:
        """The same for a sample that raised."""

    def write_end(self, place: int) -> None:
        """Say that there is nothing more to come."""

    def write_collated(self, batch: int, samples: list[Any]) -> None:
        """Collate all samples of a batch."""

    def finished(self, batch: int, outcome: int) -> None:
        """Act on what the ledger said when a place was filled."""

    def collate(self, batch: int) -> None:
        """Collate a full batch that a dead worker left."""


class Worker:
    """Runs samples until the ledger says stop.

    Args:
        number: Its number, from 0.
        fetcher: Gets samples by key, or batches from a stream.
        read_keys: ``(batch, k, count) -> keys`` of samples k … k+count-1.
        make_randomness: ``seed -> SampleRandomness`` that binds the generators to each sample; None leaves them alone.
        times: Receives the service time of each sample.
        whole_batches: Claim batches as a whole, whatever their samples cost.
        failure: What ``worker_init_fn`` raised; then every sample raises it.
        in_line: The worker runs in the consumer's thread, which must find its generators as it left them.
        catches: What a sample may raise without ending the worker.
    """

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        gate: Gate,
        fetcher: Fetcher | StreamFetcher,
        sink: Sink,
        read_keys: Callable[[int, int, int], Sequence[Any]],
        make_randomness: Callable[[int], SampleRandomness] | None,
        times: Histogram,
        whole_batches: bool = False,
        failure: BaseException | None = None,
        in_line: bool = False,
        catches: type[BaseException] = Exception,
    ) -> None:
        self._number = number
        self._ledger = ledger
        self._gate = gate
        self._fetcher = fetcher
        self._sink = sink
        sink.run_again = self._run_again
        self._read_keys = read_keys
        self._make_randomness = make_randomness
        self._randomness: SampleRandomness | None = None
        self._times = times
        self._whole_batches = whole_batches or fetcher.takes_lists
        self._failure = failure
        self._in_line = in_line
        self._catches = catches
        self._run_ns = _COLLATED_RUN_NS if sink.collates else _RUN_NS
        self._mean_ns = float(_COLLATED_RUN_NS)
        self._idle_since = now_ns()
        self._lease = ledger.lease_words(number)
        self._durations = array("q")
        self._draws: bool | None = None  # not yet known
        self._probes = 0

    def loop(self, parent_lives: Callable[[], bool]) -> None:
        """Work until the loader shuts down or its process is gone."""
        ledger, gate = self._ledger, self._gate
        while not ledger.stopping:
            seen = gate.events
            # Asked before the look: what was published last would otherwise be left to nobody.
            draining = ledger.draining
            if self.step():
                continue
            if draining and self.idle:
                return
            ledger.hungry()
            if not self.rest(seen, _PATIENCE_S) and not parent_lives():
                return

    @property
    def idle(self) -> bool:
        """Whether nothing that the worker has claimed is still to be done, when ``step`` has nothing to do."""
        return True

    def rest(self, seen: int, timeout_s: float) -> bool:
        """Sleep until the work gate has had an event since ``seen``; whether it had one."""
        return self._gate.wait(seen, timeout_s)

    def turn(self, timeout_s: float) -> None:
        """Do one lease, or sleep until there is one."""
        seen = self._gate.events
        if not self.step():
            self.rest(seen, timeout_s)

    def close(self) -> None:
        """End what the worker has begun in other threads."""

    def step(self) -> bool:
        """Do one lease; False if there is nothing to do."""
        lease = self._ledger.claim(self._number, self._longest_run())
        if lease is None:
            return False
        batch, k, count = lease
        if count == 0:
            self._sink.collate(batch)
            return True
        started = now_ns()
        _, first, size, bound, epoch, seed, _, _, pass_index = self._ledger.describe(batch)
        given = self._read_keys(batch, k, count)
        keys = list(given)
        self._enter(seed)
        whole = bound and count == size
        fetcher = self._fetcher
        if isinstance(fetcher, StreamFetcher):
            self._run_stream(fetcher, batch, first, (epoch, pass_index), keys[0])
        elif whole and (fetcher.takes_lists or not keys):
            fetch = fetcher.many if fetcher.takes_lists else list
            self._run_list(fetch, batch, first, count, epoch, given)
        elif bound:
            samples, error = self._run(first + k, epoch, keys, fetcher.each(keys))
            self._deliver_bound(batch, first + k, k, keys, samples, error, whole)
        else:
            self._run_unbound(fetcher, first + k, epoch, keys)
        now = now_ns()
        self._ledger.end(self._number, count, now - started, started - self._idle_since)
        self._idle_since = now
        cost_ns = (now - started) / count
        # Down at once, up slowly: the first samples of a run are often the dearest, and a straggler is no trend.
        self._mean_ns += (_RISE if cost_ns > self._mean_ns else _FALL) * (cost_ns - self._mean_ns)
        return True

    def _enter(self, seed: int) -> None:
        """Bind randomness to this seed."""
        if self._make_randomness is not None and (
            self._randomness is None or self._randomness.base_seed != seed
        ):
            self._randomness = self._make_randomness(seed)

    def _run_again(self, batch: int) -> list[Any]:
        """Run all samples of a batch in this worker, because some cannot be sent here by those that ran them."""
        _, first, size, _, epoch, seed, *_ = self._ledger.describe(batch)
        assert isinstance(self._fetcher, Fetcher)
        keys = list(self._read_keys(batch, 0, size))
        self._enter(seed)
        samples, error = self._run(first, epoch, keys, self._fetcher.each(keys))
        if error is not None:
            raise error
        return samples

    def _longest_run(self) -> int:
        if self._whole_batches or self._sink.holds:
            return _WHOLE_BATCH
        return 1 if self._draws is None else int(self._run_ns / self._mean_ns) or 1

    def _run(
        self, position: int, epoch: int, keys: list[Any], fetch: Callable[[Any], Any]
    ) -> tuple[list[Any], BaseException | None]:
        """Run samples until one raises; returns them and what it raised."""
        if len(keys) > len(self._durations):
            self._durations = array("q", bytes(8 * len(keys)))
        if self._failure is not None:
            return [], self._failure

        def run(bind: Callable[[int, Any], None] | None) -> tuple[list[Any], BaseException | None]:
            return run_samples(
                fetch, keys, position, self._lease, self._durations, bind, epoch, self._catches
            )

        randomness = self._randomness
        if randomness is None:
            samples, error = run(None)
        elif self._draws is False and self._mean_ns < _WORTH_BINDING_NS:
            # Binding would cost as much as these samples do, and they do not seem to draw. Should one draw after all,
            # these few are run again, bound, and so are all later ones.
            randomness.mark()
            samples, error = run(None)
            if randomness.drawn():
                self._draws = True
                randomness.rewind()
                with self._guard(randomness):
                    samples, error = run(randomness.bind)
        elif self._draws is None and len(keys) == 1:
            with self._guard(randomness):
                randomness.bind(epoch, keys[0])
                randomness.mark(unbind=False)
                samples, error = run(None)
                self._probes += 1
                if randomness.drawn():
                    self._draws = True
                elif self._probes == _PROBES:
                    self._draws = not randomness.watches
        else:
            with self._guard(randomness):
                samples, error = run(randomness.bind)
        self._record(len(samples))
        return samples, error

    def _record(self, count: int) -> None:
        """Note what the samples that were just run have cost."""
        self._times.record_all(self._durations, count)

    def _guard(self, randomness: SampleRandomness) -> AbstractContextManager[None]:
        return randomness.saved() if self._in_line else nullcontext()

    def _deliver_bound(
        self,
        batch: int,
        position: int,
        k: int,
        keys: list[Any],
        samples: list[Any],
        error: BaseException | None,
        whole: bool,
    ) -> None:
        """Put samples in their own places and fill all of them at once."""
        sink = self._sink
        if error is not None:
            # The batch is lost, as with torch, which does not run the samples after a bad one either.
            failed = len(samples)
            sink.write_error(batch, position + failed, error, keys[failed])
        elif whole and (sink.collates or sink.holds):
            sink.write_collated(batch, samples)
        else:
            sink.write_run(batch, k, position, samples)
        sink.finished(batch, self._ledger.fill_run(self._number, batch, k, len(keys)))

    def _run_list(
        self,
        fetch: Callable[[Any], Any],
        batch: int,
        first: int,
        count: int,
        epoch: int,
        keys: Sequence[Any],
    ) -> None:
        """Run a whole batch by one call of the dataset, or an empty one; the dataset may return what it likes."""
        results, error = self._run(first, epoch, [keys], fetch)
        if error is not None:
            self._sink.write_error(batch, first, error, keys)
        elif self._sink.collates or type(results[0]) is not list or len(results[0]) != count:
            self._sink.write_collated(batch, results[0])
        else:
            self._sink.write_run(batch, 0, first, results[0])
        self._sink.finished(batch, self._ledger.fill_run(self._number, batch, 0, count))

    def _run_stream(
        self, stream: StreamFetcher, batch: int, first: int, this_pass: object, wanted: int
    ) -> None:
        """Take a batch from the worker's own iterator over an iterable dataset."""

        def fetch(count: int) -> list[Any]:
            stream.enter(this_pass)
            return stream.take(count)

        batches, error = self._run(first, 0, [wanted], fetch)
        if error is None:
            self._sink.write_batch(batch, batches[0])
        elif isinstance(error, StreamEnd):
            self._sink.write_end(first)
        else:
            self._sink.write_error(batch, first, error, None)
        self._sink.finished(batch, self._ledger.fill_run(self._number, batch, 0, 1))

    def _run_unbound(self, fetcher: Fetcher, position: int, epoch: int, keys: list[Any]) -> None:
        """Run samples that may go to any batch; so those after one that raised are run all the same."""
        while keys:
            samples, error = self._run(position, epoch, keys, fetcher.each(keys))
            done = len(samples) + 1 if error and not fetcher.takes_lists else len(keys)
            self._deliver(position, keys[:done], samples, error)
            keys, position = keys[done:], position + done

    def _deliver(
        self, position: int, keys: list[Any], samples: list[Any], error: BaseException | None
    ) -> None:
        """Find a place for each sample, and for each that an error was raised for."""
        ledger, sink = self._ledger, self._sink
        for i, key in enumerate(keys):
            cost_ns = self._durations[i]
            place, batch, k = ledger.reserve(
                self._number, position + i, cost_ns > ledger.slow_ns > 0
            )
            if i < len(samples):
                sink.write_run(batch, k, place, samples[i : i + 1])
            else:
                assert error is not None
                sink.write_error(batch, place, error, key)
            sink.finished(batch, ledger.fill(self._number, position + i, place, cost_ns))
