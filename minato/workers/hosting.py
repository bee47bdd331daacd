"""A worker that hosts readers: it has them give items, runs the transforms, and offers items to idle workers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from minato._core import BatchRecord, Claim, WorkerLedger, now_ns
from minato._core.codes import READING
from minato.batching.serialization import Store
from minato.errors import SKIP
from minato.workers.reading import Host, Taken
from minato.workers.runner import Ran
from minato.workers.worker import ALL_SAMPLES, RUN_NS, Worker, WorkerParts

_ENTRY = np.dtype([("offset", "u8"), ("nbytes", "u8")])
_ALIGNMENT = 64
_WORTH = 8
"""Items are offered if their transforms take this many times as long as storing one for another worker."""
_LEAST_MEASURED = 8
"""The fastest of at least this number of offers counts: a worker may lose its processor during one."""
_MOST_OFFERED, _MOST_OFFERED_BYTES = 1024, 64 << 20
"""Items that a host has read ahead of the workers, and their bytes."""
_CHUNK = 16
_LONG_MEAN = 256  # samples over which the mean cost of the transforms is taken
_NEEDED_NS = 2_000_000_000  # how long items are offered after another worker had nothing to do
_MISSING = object()
_LOOK_S = 0.002
"""How long a thread that only reads sleeps while enough is offered: nothing wakes it when items are claimed."""
Keys = list[Any]


class OfferedItems:
    """Items that hosts have read for any worker, in a slot of the arena that each batch has beside that of its fields.

    The slot begins with a table: where the item of each sample lies, and its size in bytes; 0: it is not there.
    """

    def __init__(self, ledger: WorkerLedger, store: Store) -> None:
        self._ledger, self._store = ledger, store
        self._cursors: dict[int, tuple[int, int]] = {}

    def _table(self, record: BatchRecord) -> Any:
        memory = self._store.segment.array[record.indices_offset :]
        return np.frombuffer(memory, _ENTRY, record.count)

    def put(self, batch: int, record: BatchRecord, k: int, item: object) -> int:
        """Store the item of sample ``k`` of a batch; returns its size in bytes. MemoryError: the slot is full."""
        table = self._table(record)

        def allocate(nbytes: int) -> int:
            generation, cursor = self._cursors.get(batch, (-1, 0))
            if generation != record.generation:
                ends = table["offset"] + table["nbytes"]
                cursor = max(record.indices_offset + table.nbytes, int(ends.max()))
            cursor = -(-cursor // _ALIGNMENT) * _ALIGNMENT
            if cursor + nbytes > record.indices_offset + record.indices_nbytes:
                raise MemoryError
            self._cursors[batch] = record.generation, cursor + nbytes
            return cursor

        offset, nbytes = self._store.put(allocate, item)
        table["nbytes"][k] = nbytes
        table["offset"][k] = offset
        return nbytes

    def take(self, record: BatchRecord, k: int, count: int) -> list[Any]:
        """The items of claimed samples, ``_MISSING`` for one that is not there; none at all if none was offered."""
        table = self._table(record)[k : k + count]
        if not table["offset"].any():
            return []
        items = []
        for offset, nbytes in table.tolist():
            items.append(self._store.get(offset, nbytes) if offset else _MISSING)
            # In shared memory it stays, for the worker that replaces this one if it dies.
            self._store.drop(offset)
        return items


class _Unread(NamedTuple):
    """A claimed sample whose item its reader has not given."""

    batch: int
    record: BatchRecord
    k: int
    key: int

    @property
    def position(self) -> int:
        return self.record.first + self.k


class HostWorker(Worker):
    """Has its readers, which may be none, give items, and runs their transforms.

    Where transforms take long, it reads ahead and offers items, in ``store``, to any worker, as long as others need it:
    without it they idle while a worker is slow, has a larger share, or while there are fewer readers than workers.
    """

    def __init__(self, host: Host, store: Store, parts: WorkerParts) -> None:
        super().__init__(parts)
        plan, runner = parts.plan, parts.runner
        self._host = host
        self._items: Any = parts.fetcher.dataset
        self._runs_items = len(plan.pipeline.transforms) > 0
        if not self._runs_items:
            runner.cost_estimate.draws = False  # nothing runs that could
        retry = parts.sample_retry
        self._tries_again = retry is not None and retry.policy.retries > 0
        self._drops_short = plan.pipeline.drop_last and plan.pipeline.batched
        self._offers = self._lays_aside = plan.offers_items
        self._times_items = plan.times_items
        self.whole_batches = plan.order.keeps_places
        self._offered = OfferedItems(parts.ledger, store)
        self._stock: deque[tuple[int, int]] = deque()  # positions and sizes of offered items
        self._stock_nbytes = 0
        self._unread: deque[_Unread] = deque()
        self._num_run, self._num_hosts = 0, plan.readers.hosts if plan.readers else 0
        self._offer_ns = self._mean_ns = self._longest_ns = 0.0
        self._batch_size = self._needed_until_ns = self._num_measured = 0

    def step(self) -> bool:
        if self._is_offering and self._lacks_stock() and self._read_ahead():
            return True
        return super().step() or (bool(self._unread) and self._read_ahead())

    @property
    def idle(self) -> bool:
        return not self._unread

    def resume_all(self) -> None:
        while self._unread:
            self._read_ahead()
        super().resume_all()

    def longest_run(self) -> int:
        if not self._is_offering:
            return super().longest_run()
        return max(min(int(RUN_NS / max(self._mean_ns, 1.0)), self.fair_share()), 1)

    def run_claimed(self, lease: Claim, record: BatchRecord) -> None:
        self._batch_size = record.count
        keys = list(self.read_indices(lease.batch, lease.k, lease.count))
        items = self._offered.take(record, lease.k, lease.count) if self._lays_aside else []
        # Those that were claimed before are read before.
        if not (items or self._unread or self._is_offering):
            self._run_items(lease, record, keys)
            return
        items = items or [_MISSING] * len(keys)
        for k, (key, item) in enumerate(zip(keys, items, strict=True), lease.k):
            each = _Unread(lease.batch, record, k, key)
            if item is _MISSING:
                self._unread.append(each)
            else:
                self._run_item(each, item)

    # ---- items that any worker runs

    @property
    def _is_offering(self) -> bool:
        # It pays if the transforms take long, or nobody knows.
        is_unknown = not self._mean_ns or self._num_measured < _LEAST_MEASURED
        pays = is_unknown or self._mean_ns > _WORTH * self._offer_ns
        return self._offers and pays and self._is_needed

    @property
    def _is_needed(self) -> bool:
        """Whether others had nothing to do recently, or would have while this worker runs its longest sample."""
        if not self.whole_batches or self._num_hosts < self.num_workers:
            return True
        # Each worker has about a batch of its own readers to do.
        if self._longest_ns > self._batch_size * self._mean_ns:
            return True
        now = now_ns()
        if self.events.sleepers:
            self._needed_until_ns = now + _NEEDED_NS
        return now < self._needed_until_ns

    def _lacks_stock(self) -> bool:
        """Whether so few items are offered that workers would idle while this one runs a slow one."""
        stock, ledger = self._stock, self.ledger
        while stock and not ledger.is_offered(stock[0][0]):
            self._stock_nbytes -= stock.popleft()[1]
        others = self.num_workers - 1
        wanted = others * max(self._longest_ns / self._mean_ns, 1.0) if self._mean_ns else others
        if self._num_hosts < self.num_workers:
            wanted = _MOST_OFFERED  # the others have nothing else to do
        return len(stock) < min(wanted, _MOST_OFFERED) and self._stock_nbytes < _MOST_OFFERED_BYTES

    def _read_ahead(self) -> bool:
        """Have a reader give some items, and offer them; False if there is nothing to read."""
        if not self._unread and not self._claim_unread():
            return False
        started = now_ns()
        batch, record, k, _ = self._unread[0]
        run: list[_Unread] = []
        for each in itertools.islice(self._unread, _CHUNK):
            if (each.batch, each.record.first, each.k) != (batch, record.first, k + len(run)):
                break
            run.append(each)
        self.runner.enter(record.seed)
        items, error = self._read(record, self._unread[0].position, [each.key for each in run])
        for each, item in zip(run, items, strict=False):
            self._unread.popleft()
            self._offer(each, item)
        self._host.release()
        missing = run[len(items) :]
        if error is not None:
            failed = self._unread.popleft()
            made, error = self._given_up(record.epoch, failed.key, error)
            self._deliver(failed, made, error)
        else:
            for each in missing:
                self._unread.popleft()
                self._deliver(each, [SKIP])
        self.end_lease(0, started)
        return True

    def _claim_unread(self) -> bool:
        """Claim samples whose items no worker has read; False if there are none."""
        lease = self.ledger.claim(ALL_SAMPLES, True)
        if lease is None:
            return False
        if lease.count == 0:
            self.writer.collate_and_publish(lease.batch)
            return self._claim_unread()
        record = self.ledger.describe(lease.batch)
        self.enter_epoch(record)
        keys = self.read_indices(lease.batch, lease.k, lease.count)
        entries = (_Unread(lease.batch, record, k, key) for k, key in enumerate(keys, lease.k))
        self._unread.extend(entries)
        return True

    def _offer(self, each: _Unread, item: object) -> None:
        if self._is_offering:
            begun_ns = now_ns()
            try:
                nbytes = self._offered.put(each.batch, each.record, each.k, item)
            except MemoryError:
                pass
            except Exception:  # it cannot be pickled, and need not be where its reader is
                self._offers = False
            else:
                self.ledger.offer(each.position)
                self._stock.append((each.position, nbytes))
                self._stock_nbytes += nbytes
                cost_ns = now_ns() - begun_ns
                self._offer_ns = min(self._offer_ns or cost_ns, cost_ns)
                self._num_measured += 1
                return
        self._run_item(each, item)

    def _hold(self, keys: Keys, items: list[object]) -> None:
        self._items.hold(keys, items, self._tries_again or self.runner.is_looking)

    def _run_item(self, each: _Unread, item: object) -> None:
        epoch, keys = each.record.epoch, Keys([each.key])
        self._hold(keys, [item])
        if each.record.bound:
            samples, error = self.run_retrying(each.position, epoch, keys)
            self._deliver(each, samples, error)
        else:
            self.run_free(each.position, epoch, keys)
        self._note_costs(1)

    def _note_costs(self, count: int) -> None:
        costs_ns = self.runner.durations[:count]
        self._num_run += count
        weight = count / min(self._num_run, _LONG_MEAN)  # slow ones are rare: they count for long
        self._mean_ns += (sum(costs_ns) / count - self._mean_ns) * min(weight, 1.0)
        self._longest_ns = max(*costs_ns, self._longest_ns * 0.999**count)

    def _deliver(
        self, each: _Unread, samples: list[object], error: BaseException | None = None
    ) -> None:
        if each.record.bound:
            self.writer.deliver(each.batch, each.k, [each.key], samples, error)
        else:
            self.writer.deliver_free(each.position, [each.key], samples, error)

    def _given_up(self, epoch: int, key: int, error: BaseException) -> Ran:
        """The outcome of an item that its reader has not given."""
        retry = self.sample_retry
        return ([], error) if retry is None else retry.give_up(epoch, key, error)

    # ---- items that this worker runs itself

    def _run_items(self, lease: Claim, record: BatchRecord, keys: Keys) -> None:
        host, position, count = self._host, record.first + lease.k, lease.count
        slot, epoch = record.epoch_slot, record.epoch
        if not record.bound:
            self._run_free_items(record, position, keys)
            return
        with nullcontext() if host.binds else host.turn(keys[0], slot, epoch):
            samples, error = self._samples(record, position, keys)
            found, writer = len(samples), self.writer
            whole = count == record.count
            if error is None and whole and (not found or (self._drops_short and found < count)):
                writer.deliver_end(lease.batch)
            elif error is None and whole and found < count and self.sample_retry is None:
                writer.deliver_list(lease.batch, keys, samples)
            else:
                if error is None:
                    samples += [SKIP] * (count - found)
                writer.deliver(lease.batch, lease.k, keys, samples, error, whole=whole)
        host.release()

    def _samples(self, record: BatchRecord, position: int, keys: Keys) -> Ran:
        """The samples of items, until one raises for good; fewer if the reader ends."""
        samples: list[Any] = []
        while len(samples) < len(keys):
            done = len(samples)
            items, error = self._read(record, position + done, keys[done:])
            if items and self._runs_items:
                self._hold(keys[done:], items)
                end = done + len(items)
                items, failure = self.run_retrying(position + done, record.epoch, keys[done:end])
                self._note_costs(end - done)
                if failure is not None:
                    return samples + items, failure
            samples += items
            if error is None:
                break
            failed = len(samples)
            made, error = self._given_up(record.epoch, keys[failed], error)
            samples += made
            if error is not None:
                return samples, error
        return samples, None

    def _read(self, record: BatchRecord, position: int, keys: Keys) -> Ran:
        """The items that a reader gives for some keys, and what the next one raised."""
        host, slot, epoch, lease = self._host, record.epoch_slot, record.epoch, self.ledger.lease

        def begin(i: int) -> None:
            lease.begin(position + i, now_ns(), READING)

        def take(keys: Keys) -> Taken:
            lease.step = READING
            try:
                return host.take(keys, slot, epoch, begin if self._times_items else None)
            finally:
                lease.step = -1

        with host.turn(keys[0], slot, epoch):
            return self.runner.read(position, epoch, keys, take)

    def _run_free_items(self, record: BatchRecord, position: int, keys: Keys) -> None:
        """Have a reader give items for any places; those that do not exist leave theirs to others."""
        while keys:
            items, error = self._read(record, position, keys)
            count = len(items)
            if count and self._runs_items:
                self._hold(keys, items)
                self.run_free(position, record.epoch, keys[:count])
                self._note_costs(count)
            elif count:
                costs_ns = [self.runner.durations[0] // count] * count
                self.deliver_free(position, keys, items, costs_ns)
            self._host.release()
            position, keys = position + count, keys[count:]
            if error is None:
                if keys:
                    self.writer.deliver_free(position, keys, [SKIP] * len(keys))
                return
            made, error = self._given_up(record.epoch, keys[0], error)
            self.writer.deliver_free(position, keys[:1], made, error)
            position, keys = position + 1, keys[1:]


class ReadingWorker(HostWorker):
    """A thread beside the workers: it has its readers give items, and offers all of them."""

    def step(self) -> bool:
        return self._lacks_stock() and self._read_ahead()

    @property
    def _is_offering(self) -> bool:
        return self._offers

    def takes_part(self) -> bool:
        return True

    @property
    def num_workers(self) -> int:
        return super().num_workers + 1

    def sleeper(self) -> Callable[[int, float], bool]:
        sleep = super().sleeper()
        if not self._stock:
            return sleep
        return lambda seen, timeout_s: sleep(seen, min(timeout_s, _LOOK_S))
