"""A ledger with everything around it that the scheduler needs, all of it in this thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from torch.utils.data import default_collate

from minato._core import READY_EVENTS_OFFSET, WORK_EVENTS_OFFSET, ConsumerLedger, EventCount
from minato._core.codes import ERROR_BLOB, MUST_COLLATE, SAMPLE_BLOB
from minato._core.segment import Segment
from minato.batching.arena import Arena
from minato.batching.serialization import LocalStore, StoredIndices
from minato.observe.meters import Meters
from minato.options import FetchOptions
from minato.sampling.samplers import IndexBatches
from minato.scheduling.batches import BatchStorage, OpenBatch
from minato.scheduling.dispatcher import Dispatcher, Schedule
from minato.scheduling.orders import Assignment, make_order
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.transforms.compose import Transforms
from minato.transforms.rng import SampleRandomness
from minato.workers.fetch import Fetcher
from minato.workers.plan import Pipeline, WorkerPlan
from minato.workers.runner import Deferral, Runner, StageRunner
from minato.workers.shared_state import ActiveWorkers
from minato.workers.worker import Worker, WorkerParts
from tests.protocol import deliver, delivery

SLOT_BYTES = 1 << 16


class Range(NamedTuple):
    """A slot."""

    start: int
    end: int


class Slots:
    """Hands out ranges, and knows which are taken."""

    def __init__(self) -> None:
        self.taken: set[Range] = set()
        self._made = 0

    def acquire(self) -> Range:
        self._made += 1
        slot = Range(self._made * SLOT_BYTES, (self._made + 1) * SLOT_BYTES)
        self.taken.add(slot)
        return slot

    def release(self, slot: Range, used_bytes: int = 0) -> None:
        self.taken.remove(slot)


class Pool:
    """Workers that do what a test tells them whenever the consumer waits."""

    def __init__(self) -> None:
        self.script: list[Callable[[], Any]] = []
        self.waits = 0
        self.dead: Exception | None = None

    def wait(self, seen: int, timeout_s: float) -> None:
        self.waits += 1
        assert self.script, "the consumer waits, and nobody works"
        self.script.pop(0)()

    def check(self) -> None:
        if self.dead is not None:
            raise self.dead


class Account:
    """Records the samples of an epoch; from the index ``end`` on, they do not exist."""

    readers = None

    def __init__(self, end: int | None = None) -> None:
        self.end = end
        self.delivered_numbers: list[list[int]] = []
        self.skipped_numbers: list[int] = []
        self.dropped_numbers: list[int] = []
        self.finished = 0

    def returns(
        self, positions: list[int], start: int, num_slow: int = 0, ahead: int = 0
    ) -> Callable[[], None]:
        numbers = [position - start for position in positions]
        return lambda: self.delivered_numbers.append(numbers)

    def skipped(self, positions: list[int], start: int) -> None:
        self.skipped_numbers += [position - start for position in positions]

    def missing(self, indices: Sequence[Any]) -> int:
        return 0 if self.end is None else sum(index >= self.end for index in indices)

    def drop(self, positions: Sequence[int], start: int) -> None:
        self.dropped_numbers += [position - start for position in positions]

    def tell(self) -> None:
        pass

    def finish(self) -> None:
        self.finished += 1


class Lease(NamedTuple):
    """A claimed run of samples."""

    worker: int
    batch: int
    k: int
    count: int


class Bench:
    """A dispatcher with ``fixed`` batches in flight, and workers that are steps of the test."""

    def __init__(
        self,
        order: str = "strict",
        max_lag: int = 0,
        fixed: int | None = 4,
        *,
        workers: int = 3,
        batches: int = 32,
        positions: int = 256,
        timeout_s: float = 0.0,
        one_epoch: bool = False,
        assignment: Assignment | None = None,
    ) -> None:
        sizes = (workers, batches, positions)
        self.segment = Segment(ConsumerLedger.nbytes(*sizes))
        self.ledger = ConsumerLedger(self.segment.array, sizes, self.segment.descriptor)
        self.workers = [self.ledger.worker(number) for number in range(workers)]
        self.slots = Slots()
        self.indices = LocalStore(self.segment)
        self.pool = Pool()
        how, limits = make_order(order, max_lag), {"fixed": fixed, "budget_bytes": 10**9}
        most = None if how.keeps_places else max_lag
        self.window = PrefetchWindow(workers, max_batches=most, **limits)
        self.discarded: list[int] = []
        ends = {"timeout_s": timeout_s, "one_epoch": one_epoch}
        self.dispatcher = Dispatcher(
            self.ledger,
            ready_events=EventCount(self.segment.array, READY_EVENTS_OFFSET),
            pool=self.pool,
            storage=BatchStorage(cast(Arena, self.slots), self.indices, self._discard),
            schedule=Schedule(self.window, how, assignment or Assignment(), **ends),
        )

    def _discard(self, record: int, slot: Range) -> None:
        self.discarded.append(record)
        self.slots.release(slot)

    # ---- the consumer

    def begin(
        self, batches: Any, epoch: int = 0, seed: int = 0, following: Any = None, end: Any = None
    ) -> bool:
        self.account = Account(end)
        options: Any = {"predict_next": lambda: following, "progress": self.account}
        was_right = self.dispatcher.begin(
            IndexBatches.of(batches), epoch=epoch, seed=seed, **options
        )
        self.dispatcher.refill()
        return was_right

    def begun(self, *arguments: Any, **options: Any) -> Bench:
        self.begin(*arguments, **options)
        return self

    def next(self) -> list[Any]:
        """Indices of the next batch, as they were when it was opened."""
        return self.take().indices

    def take(self) -> OpenBatch:
        item = self.dispatcher.next()
        self.dispatcher.read(item)
        self.window.expect(100)  # bytes, which these workers do not write
        self.discarded.remove(item.record)  # of those that were read, tests know
        for record in self.dispatcher.records(item):
            record()
        self.dispatcher.returned(item)
        return item

    def rest(self) -> list[list[Any]]:
        """Indices of all further batches."""
        found = []
        with suppress(StopIteration):
            while True:
                found.append(self.next())
        return found

    # ---- the workers

    def claim(self, worker: int = 0, count: int = 1) -> Lease:
        claim = self.workers[worker].claim(count)
        assert claim is not None, "nothing to claim"
        return Lease(worker, claim.batch, claim.k, claim.count)

    def finish(self, lease: Lease, late: bool = False) -> list[int]:
        """Put results in their places, as a worker with a ``collate_fn``; returns in which batch each is."""
        record, worker = self.ledger.describe(lease.batch), self.workers[lease.worker]
        first = record.first + lease.k
        if record.bound:
            self._deliver(lease, first, "whole" if lease.count == record.count else "samples")
            return [lease.batch] * lease.count
        batches = []
        for position in range(first, first + lease.count):
            place, batch, _ = worker.reserve(position, 1, late)
            worker.attach(place, 64 | SAMPLE_BLOB, 0)
            self._finished(batch, worker.fill(position, place))
            batches.append(batch)
        return batches

    def _deliver(self, lease: Lease, start: int, path: str) -> None:
        worker, batch = self.workers[lease.worker], lease.batch

        def write(first: int, count: int) -> None:
            for place in range(start + first, start + first + count):
                worker.attach(place, 64 | SAMPLE_BLOB, 0)

        def fill(first: int, count: int) -> None:
            self._finished(batch, worker.fill_run(batch, lease.k + first, count))

        def result(*_: int) -> None:
            worker.set_result(batch, 64 | SAMPLE_BLOB, 0)

        deliver(delivery(path, lease.count), {"write": write, "fill": fill, "result": result})

    def _finished(self, batch: int, outcome: int) -> None:
        if outcome == MUST_COLLATE:
            self.workers[0].set_ready(batch, 64 | SAMPLE_BLOB, 0)

    def work(self, samples: int, worker: int = 0) -> None:
        """Claim and finish so many samples, one by one."""
        for _ in range(samples):
            self.finish(self.claim(worker))

    def work_all(self) -> None:
        """Claim and finish all there is."""
        while (claim := self.workers[0].claim(1)) is not None:
            if claim.count:
                self.finish(Lease(0, claim.batch, claim.k, claim.count))
            else:
                self.workers[0].set_ready(claim.batch, 64 | SAMPLE_BLOB, 0)

    def always_work(self, times: int = 1000) -> None:
        """Let the workers do everything whenever the consumer waits."""
        self.pool.script = [self.work_all] * times


def worker_plan(order: str = "strict", max_lag: int = 0, most_workers: int = 1) -> WorkerPlan:
    """The plan of workers that read from a dataset of their own; the loader's defaults."""
    return WorkerPlan(
        pipeline=Pipeline(None, None, Transforms(), default_collate, True, False, False),
        method="process",
        in_main_process=False,
        most_workers=most_workers,
        init_fn=None,
        base_seed=0,
        seeds_samples=False,
        order=make_order(order, max_lag),
        round_robin=False,
        dataset_states=None,
        readers=None,
        fetching=FetchOptions(1),
        stats=True,
        tracks=None,
    )


class Shared:
    """What a worker asks of the memory that it shares: where it sleeps, and whether it is active."""

    def __init__(self, bench: Bench, active: int) -> None:
        self.work = EventCount(bench.segment.array, WORK_EVENTS_OFFSET)
        self.active = ActiveWorkers(bytearray(ActiveWorkers.NBYTES), 0, self.work)
        self.active.set_count(active)


def worker_of(
    bench: Bench,
    number: int,
    dataset: Any,
    chain: Transforms,
    writer: Journal,
    *,
    active: int = 1,
    most_workers: int = 1,
    deferral: Deferral | None = None,
    make_randomness: Callable[[int], SampleRandomness] | None = None,
    meters: Meters | None = None,
) -> Worker:
    """A worker of a bench, with a real runner."""
    ledger, plan = bench.workers[number], worker_plan(most_workers=most_workers)
    shared: Any = {"lease": ledger.lease, "meters": meters or Meters(len(chain))}
    stages = StageRunner(dataset, chain, deferral=deferral, **shared)
    runner = Runner(plan, stage_runner=stages, make_randomness=make_randomness, **shared)
    state, fetcher = Shared(bench, active), Fetcher(dataset, chain, batched=True)
    return Worker(WorkerParts(plan, ledger, cast(Any, state), fetcher, runner, cast(Any, writer)))


class Journal:
    """In the place of a worker's writer: writes down what it is given, and fills the places."""

    def __init__(self, bench: Bench, collates: bool = False) -> None:
        self.collates, self.has_texts = collates, False
        self.handover_ns = 0.0
        self.keeps_batches = False
        self.journal: list[Any] = []
        self.indices = StoredIndices(bench.ledger, bench.indices)
        self._ledger = bench.workers[0]

    def deliver(
        self,
        batch: int,
        k: int,
        indices: Sequence[Any],
        samples: list[Any],
        error: BaseException | None = None,
        *,
        whole: bool = False,
    ) -> None:
        record = self._ledger.describe(batch)
        if error is not None:
            self._error(record.first + k + len(samples), indices[len(samples)], error)
        elif whole and self.collates:
            self._collated(batch, samples)
        else:
            self._samples(record.first + k, k, samples)
        self._collate_if_left(batch, self._ledger.fill_run(batch, k, len(indices)))

    def deliver_free(
        self,
        position: int,
        indices: Sequence[Any],
        samples: list[Any],
        error: BaseException | None = None,
        *,
        to_newest: bool = False,
    ) -> None:
        done = 0
        while done < len(samples):
            here = position + done
            place, batch, taken = self._ledger.reserve(here, len(samples) - done, to_newest)
            k = place - self._ledger.describe(batch).first
            self._samples(place, k, samples[done : done + taken])
            self._collate_if_left(batch, self._ledger.fill(here, place, taken))
            done += taken
        if error is not None:
            place, batch, _ = self._ledger.reserve(position + done, 1, to_newest)
            self._error(place, indices[done], error)
            self._collate_if_left(batch, self._ledger.fill(position + done, place))

    def collate_and_publish(self, batch: int) -> None:
        self.journal.append("collate")
        self._ledger.set_ready(batch, 64 | SAMPLE_BLOB, 0)

    def _collate_if_left(self, batch: int, outcome: int) -> None:
        if outcome == MUST_COLLATE:
            self.collate_and_publish(batch)

    def _samples(self, place: int, k: int, samples: list[Any]) -> None:
        self.journal.append(("samples", k, samples))
        for i in range(len(samples)):
            self._ledger.attach(place + i, 64 | SAMPLE_BLOB, 0)

    def _error(self, place: int, index: Any, error: BaseException) -> None:
        self.journal.append(("error", index, str(error)))
        self._ledger.attach(place, 64 | ERROR_BLOB, 0)

    def _collated(self, batch: int, samples: Any) -> None:
        self.journal.append(("collated", samples))
        self._ledger.set_result(batch, 64 | SAMPLE_BLOB, 0)
