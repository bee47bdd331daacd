"""The scheduling loop of the training process: it opens batches for the workers, waits, and returns complete ones."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from minato._core import BatchRecord, ConsumerLedger, EventCount, now_ns
from minato._core.codes import (
    ENDED,
    FAILED,
    KIND_MASK,
    NOTHING_AT_PLACES,
    NUM_EPOCH_SLOTS,
    READY,
    SKIP_BLOB,
    SKIPPED,
)
from minato.batching.arena import Slot
from minato.batching.sample_spec import Handover
from minato.errors import Postponed, add_note, warn
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.sampling.epoch import NextEpoch
from minato.sampling.progress import Progress
from minato.sampling.samplers import Drawn, IndexBatches, unmarked
from minato.scheduling.batches import (
    BatchStorage,
    OpenBatch,
    OpenEpoch,
    RetiringBatches,
    offset_in_slot,
)
from minato.scheduling.orders import Assignment, BatchOrder, Order
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.slow_samples import EarlyStart, integers_of

_LIVENESS_S = 1.0
"""Longest sleep of the training loop. Workers wake it as soon as a batch is ready; this is only for dead ones."""
_SETTLING_S = 0.01
"""Time between checks whether cancelled samples have ended, for which there is no event."""
_REFILL_NS = 300_000
"""The window grows where batches are opened more often: to open several together takes a third of the time."""
_WAKE_NS = 100_000
"""Workers are woken once for all batches that are opened within this time: to wake them takes microseconds."""
_STAYS_WHOLE = (
    "the samples hold objects of which another process would get a copy that may differ, so each batch is made by one "
    "worker, as with order='batch': use that, or let the dataset return tensors, arrays, numbers, strings, and lists, "
    "tuples and dictionaries of these (in_order=False alone means order='arrival')"
)
_ALL_WORKERS = (1 << 31) - 1
_TABLE_NBYTES = 16  # for each sample, of the table of items that workers offer to each other


STOPPED_S = 1.0
"""What comes later than this after its time shows that the whole process was stopped, by SIGSTOP or Ctrl-Z."""


def waited_s(wait: Callable[[float], object], limit_s: float) -> float:
    """Call ``wait(limit_s)``; returns how many of these seconds it waited, 0 if the process was stopped meanwhile."""
    start_s = time.monotonic()
    wait(limit_s)
    passed_s = time.monotonic() - start_s
    return 0.0 if passed_s > limit_s + STOPPED_S else min(passed_s, limit_s)


class Pool(Protocol):
    """The workers, as the dispatcher sees them."""

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep, or work, until the count of ready events exceeds ``seen`` or the time is over."""

    def check(self) -> None:
        """Raise if a worker died and is not replaced."""


@dataclass
class ConsumerWait:
    """How long the training loop waits, and how many batches are ready for it."""

    # Total time of its waits for batches, without the present one since ``waiting_since_ns``; 0: none.
    waited_ns: int = 0
    waiting_since_ns: int = 0
    delivered: int = 0
    watched: bool = False  # whether ``ready`` and ``ending`` are kept up to date
    ready: int = 0  # batches that were ready at the last call of ``next()``
    ending: bool = False  # whether nothing is left to open, so that workers soon idle

    def end_wait(self) -> None:
        """Stop the clock, and add the wait to the total."""
        self.waited_ns = self.waited_until(now_ns())
        self.waiting_since_ns = 0

    def waited_until(self, now: int) -> int:
        """Total time in ns until ``now``, the present wait included."""
        return self.waited_ns + (now - self.waiting_since_ns if self.waiting_since_ns else 0)


class Schedule(NamedTuple):
    """What a dispatcher does.

    Attributes:
        handover: Whether samples may be collated by another worker than the one that made them; None: they may.
        timeout_s: torch's ``timeout``, whose error ``explain`` has name the running samples; 0: none.
        one_epoch: Whether the workers may leave when nothing is left to do in the first epoch.
        offers_items: Whether workers offer the items of an iterable dataset to each other, in a slot of their batch.
        drop_short: Whether a batch that lacks samples is dropped if none are left to fill it.
    """

    window: PrefetchWindow
    order: Order
    assignment: Assignment
    early_start: EarlyStart | None = None
    handover: Handover | None = None
    timeout_s: float = 0.0
    explain: Callable[[], str] = str
    one_epoch: bool = False
    skips: bool = False
    offers_items: bool = False
    drop_short: bool = False


class Dispatcher:
    """Opens batches for the workers, in the sampler's order, and returns complete ones to the training loop.

    When all batches of an epoch are open and the indices of the next one are known, it prefetches that one: it opens
    its batches, which belong to the training loop only after ``begin``. ``ready_events`` end its waits.
    """

    def __init__(
        self,
        ledger: ConsumerLedger,
        *,
        ready_events: EventCount,
        pool: Pool,
        storage: BatchStorage,
        schedule: Schedule,
        wait_stats: ConsumerWait | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        order, skips = schedule.order, schedule.skips
        self._ledger, self._ready_events, self._pool = ledger, ready_events, pool
        self._storage = storage
        self._window = schedule.window
        self._order = order
        self._assignment = schedule.assignment
        self._early_start = schedule.early_start
        self._handover = None if order.keeps_places else schedule.handover
        self._mixed_before = self._handover is not None and not self._handover.refused
        self._wait_stats = wait_stats or ConsumerWait()
        self._tracer = tracer
        self._timeout_s, self._explain = schedule.timeout_s, schedule.explain
        # Workers must stay until it is known which places remain empty.
        self._one_epoch = schedule.one_epoch and (order.keeps_places or not skips)
        self._offers_items = schedule.offers_items
        self._fills_skipped = skips and not order.keeps_places
        self._drops_short = schedule.drop_short

        self._open: deque[OpenBatch] = deque()
        self._prefetched: deque[OpenBatch] = deque()  # batches of the next epoch
        # The last max_lag + 1 that were opened in an epoch.
        self._recent: deque[OpenBatch] = deque()
        self._retiring = RetiringBatches(
            ledger, storage, keeps_places=order.keeps_places, skips=skips
        )
        self._batches = IndexBatches.of(())  # those of an epoch that are not open yet
        self._unmade: Postponed | None = None  # the error of the next batch, which has no indices
        self._opening: OpenBatch | None = None  # until the lists below say what the ledger says
        self._to_wake = 0  # samples that were opened since workers were woken, or _ALL_WORKERS
        self._woken_ns = self._refilled_ns = 0
        self.current: OpenBatch | None = None
        """The batch that ``next`` has chosen, until it is returned."""
        self._epoch = OpenEpoch(number=0, seed=0, slot=0)  # whose batches are being opened
        self._progress: Progress | None = None  # of the present epoch, unless it was abandoned
        self._predict_next: Callable[[], NextEpoch | None] = lambda: None
        self._has_begun = False  # an epoch, wholly
        self._exhausted = True  # the present epoch has no more batches to open
        self._prefetches_next = False  # the batches being opened belong to the next epoch
        # Nothing is left to open, in this epoch and the next one if it is known.
        self._is_dry = True
        # The newest open batches stay short: no samples are left for them.
        self._lacks_samples = False

    @property
    def num_open(self) -> int:
        """Batches in flight, of the present epoch and the next."""
        return len(self._open) + len(self._prefetched)

    @property
    def num_ready(self) -> int:
        """Batches of the present epoch that are complete."""
        return sum(map(self._is_ready, self._open))

    @property
    def over(self) -> bool:
        """Whether the present epoch has no more batches."""
        return self._exhausted and not self._open and self.current is None

    # ---- epochs -----------------------------------------------------------------------------

    def begin(
        self,
        batches: IndexBatches,
        *,
        epoch: int,
        seed: int,
        predict_next: Callable[[], NextEpoch | None],
        progress: Progress,
    ) -> bool:
        """Begin an epoch; the randomness of its samples starts from ``seed``.

        ``predict_next`` returns the epoch after this one, or None if its batches are unknown. Returns False if batches
        had been prefetched for this epoch and were not its own; they are dropped.
        """
        self._complete_opening()
        self._has_begun, self._unmade = False, None
        self._cancel_present()
        prefetched = self._prefetched
        is_right = not prefetched or (self._epoch.number, self._epoch.seed) == (epoch, seed)
        if is_right:
            drawn = batches.ahead(len(prefetched))
            is_right = [item.indices for item in prefetched] == [each.indices for each in drawn]
        if prefetched and is_right:
            self._epoch.progress = progress
            self._open, self._prefetched = prefetched, deque()
            for each in drawn:
                batches.drop(each)
        else:
            self.cancel(prefetched)
            self._assignment.reset()
            self._open_epoch(epoch, seed, progress)
        if progress.readers is not None:
            progress.readers.begin(self._epoch.slot)
        self._batches, self._predict_next, self._progress = batches, predict_next, progress
        self._exhausted = self._prefetches_next = self._is_dry = False
        self._has_begun = True
        return is_right

    def _cancel_present(self) -> None:
        if self.current is not None:
            if self.current.records is None and not self.current.is_empty:
                self.cancel(deque([self.current]))
            else:
                self._retiring.add_empty(self.current)
            self.current = None
        self.cancel(self._open)

    def cancel(self, batches: deque[OpenBatch]) -> None:
        """Cancel batches: their waiting samples never start, and the results of running ones are dropped."""
        if not self._assignment.runs_cancelled:
            for item in batches:
                self._ledger.cancel(item.record)
        self._retiring.add_cancelled(batches)
        batches.clear()

    def cancel_all(self) -> None:
        """Cancel everything in flight."""
        self._complete_opening()
        self._cancel_present()
        self.cancel(self._prefetched)

    def abandon(self) -> None:
        """End the present epoch here."""
        self.cancel_all()
        self._progress = self._unmade = None
        self._batches, self._predict_next = IndexBatches.of(()), lambda: None
        self._exhausted = True

    def _open_epoch(self, number: int, seed: int, progress: Progress | None) -> None:
        """Give an epoch a slot of the ledger; waits for one while abandoned epochs use all of them."""
        self._recent.clear()
        while (slot := self._free_epoch_slot()) is None:
            self._sleep(_SETTLING_S, self._ready_events.events)
        self._ledger.open_epoch(slot)
        self._epoch = OpenEpoch(number, seed, slot, progress=progress)

    def _free_epoch_slot(self) -> int | None:
        retiring, current = self._retiring, () if self.current is None else (self.current,)
        opened = *self._open, *self._prefetched, *current
        in_use = {item.epoch.slot for item in (*opened, *retiring.returned, *retiring.cancelled)}
        # Never the slot of the last epoch: by a change of the slot, a worker also notices that a new one begins.
        others = ((self._epoch.slot + 1 + i) % NUM_EPOCH_SLOTS for i in range(NUM_EPOCH_SLOTS - 1))
        return next((slot for slot in others if slot not in in_use), None)

    # ---- returning batches ------------------------------------------------------------------

    def next(self) -> OpenBatch:
        """Wait for the batch that comes next: the same one until ``returned`` was called.

        The caller reads it and calls ``records``, ``read`` and ``returned``. StopIteration: the epoch is over.
        RuntimeError: a worker died, or torch's ``timeout`` is over.
        """
        if not self._has_begun:
            raise StopIteration  # iter() was interrupted
        if self._opening is not None:
            self._complete_opening()
        # Of torch's timeout, which limits the wait alone: neither a slow sampler nor a stop of the process uses it up.
        left_s = self._timeout_s or None
        while True:
            seen = self._ready_events.events
            found = self.current or self._order.next_ready(self._open, self._is_ready)
            if found is None:
                self._raise_unmade()
                self.refill()
            if self._wait_stats.watched:
                self._wait_stats.ending, self._wait_stats.ready = self._is_dry, self.num_ready
            if found is not None:
                if self._take(found):
                    return found
            elif self._fills_skipped and self._fill_short():
                pass
            elif self.over:
                if self._progress is not None:
                    self._progress.finish()
                raise StopIteration
            else:
                left_s = self._wait(seen, left_s)

    def take_ready(self) -> bool:
        """Take the batch that comes next, if it is complete and has samples to return, as ``next`` does."""
        if self._opening is not None:
            self._complete_opening()
        found = self._order.next_ready(self._open, self._is_ready)
        return found is not None and self._take(found)

    def _raise_unmade(self) -> None:
        """Raise the error of a batch that has no indices, once all before it are given."""
        error = self._unmade
        if error is not None and not self._open and not self._prefetches_next:
            self._unmade = None
            error.reraise()

    def _take(self, item: OpenBatch) -> bool:
        """Take a complete batch out of the open ones; False if it has no samples to return."""
        self.current = item
        if item in self._open:
            self._open.remove(item)
        if item.is_empty is None:
            record = self._ledger.describe(item.record)
            item.is_plain = record.flags == NOTHING_AT_PLACES and not record.result
            item.nbytes = _nbytes_of(record)
            is_whole = item.is_plain and not self._drops_short
            item.is_empty = not is_whole and self._is_empty(item, record)
            self._wait_stats.delivered += not item.is_empty
            if self._tracer.enabled:
                item.found_ns = self._tracer.now()
        if item.is_empty:
            self._retiring.add_empty(item)
            self.current = None
        return not item.is_empty

    def _is_empty(self, item: OpenBatch, record: BatchRecord) -> bool:
        """Whether a complete batch has no samples to return, or is dropped as a short one; records that, if so."""
        if record.flags & ENDED or (self._drops_short and self._ends_short(item, record.flags)):
            self._retiring.note_missing(item)
            return True
        if not record.flags & SKIPPED:
            return False
        is_skipped = record.result & KIND_MASK == SKIP_BLOB and not record.result & ~KIND_MASK
        is_dropped = self._drops_short and not self._order.keeps_places and not item.bound
        if not (is_skipped or (is_dropped and -1 in self._ledger.occupants(item.record))):
            return False
        if (counts := self._assignment.returns(item.owner)) is not None:
            counts()
        self._retiring.note_skipped(item)
        return True

    def _ends_short(self, item: OpenBatch, flags: int) -> bool:
        """Whether the reader of a complete batch has ended within it."""
        progress = item.epoch.progress
        if not item.bound or flags & FAILED or progress is None:
            return False
        return progress.missing(item.indices) > 0

    def _fill_short(self) -> bool:
        """Once all have run, fill the places of skipped samples with one more batch, or do without; False: neither."""
        in_flight = *self._open, *self._retiring.returned
        if not (self._open and all(self._ledger.settled(item.record) for item in in_flight)):
            return False
        if not self._exhausted and self._open_next():
            self._wake()
            return True
        if self._lacks_samples:
            return False
        self._ledger.fill_skipped(self._open[0].epoch.slot)
        self._lacks_samples = True
        return True

    def read(self, item: OpenBatch) -> None:
        """Record that a batch was read, and drop its memory apart from what its tensors view."""
        if self._tracer.enabled:
            now = self._tracer.now()
            self._tracer.slice("read", item.found_ns, now)
            args = {"epoch": item.epoch.number, "samples": len(item.indices)}
            self._tracer.span("batch", item.opened_ns, now, args)
        self._retiring.discard(item)

    def records(self, item: OpenBatch, ahead: int = 0) -> list[Callable[[], object]]:
        """Functions that record a batch, or its error, once it is given; they need no ledger, and may be repeated.

        ``ahead`` batches are given before it.
        """
        records = self._retiring.records(item, ahead)
        if item.owner and (counts := self._assignment.returns(item.owner)) is not None:
            records.append(counts)
        return records

    def returned(self, item: OpenBatch) -> None:
        """Go on to the batch that comes next; this one is kept elsewhere until it is given."""
        self._retiring.add_returned(item)
        self.current = None

    def upcoming(self, limit: int) -> list[OpenBatch]:
        """At most ``limit`` complete batches that come next; no other comes before them."""
        return self._order.upcoming(self._open, self._is_ready, limit)

    def _is_ready(self, item: OpenBatch) -> bool:
        return bool(self._ledger.state(item.record) == READY)

    # ---- waiting ----------------------------------------------------------------------------

    def _wait(self, seen: int, left_s: float | None) -> float | None:
        """Grow the window, or wait for an event after ``seen``; returns what is left of ``left_s``."""
        self._ledger.waiting = True
        try:
            if self._is_dry or self._ledger.unclaimed() or not self._grow():
                self._wait_stats.waiting_since_ns = now_ns()
                # Without an open batch, it waits for memory that cancelled samples still use.
                limit_s = _LIVENESS_S if self._open else _SETTLING_S
                slept_s = self._sleep(limit_s if left_s is None else min(limit_s, left_s), seen)
                if left_s is not None:
                    left_s -= slept_s
        finally:
            self._ledger.waiting = False
            self._wait_stats.end_wait()
        is_over = left_s is not None and left_s <= 0
        if is_over and self._order.next_ready(self._open, self._is_ready) is None:
            error = RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")
            add_note(error, self._explain())
            raise error
        return left_s

    def _grow(self) -> bool:
        """Allow more batches; False if the limit stays."""
        if not self._window.batch_bytes and self._open:
            # The first batch of an iterator may be the slow one, with complete ones behind it.
            records = (self._ledger.describe(item.record) for item in self._open)
            self._window.expect(max(map(_nbytes_of, records)))
        return self._window.grow()

    def _sleep(self, limit_s: float, seen: int) -> float:
        """Sleep until an event after ``seen``; returns for how many seconds, at most ``limit_s``."""
        start_ns = self._tracer.now()
        try:
            slept_s = waited_s(functools.partial(self._pool.wait, seen), limit_s)
        finally:
            self._tracer.slice("wait", start_ns)
        self._pool.check()
        self._retiring.sweep()
        return slept_s

    # ---- opening batches --------------------------------------------------------------------

    def refill(self, ahead: int = 0) -> None:
        """Open as many batches as the window allows, besides those that were read ``ahead`` of their time."""
        try:
            most = self._window.most - ahead
            while self.num_open < most and self._open_next():
                if now_ns() - self._woken_ns > _WAKE_NS:
                    self._wake()
        finally:
            self._wake()

    def _wake(self) -> None:
        """Wake workers for the batches that were opened."""
        if self._to_wake:
            self._woken_ns = now_ns()
            self._ledger.wake(self._to_wake)
            self._to_wake = 0

    def top_up(self, ahead: int = 0) -> bool:
        """Refill, but only when the window is low, so that several batches are opened at once; False if it is not."""
        if not self._window.is_low(self.num_open + ahead):
            return False
        now = now_ns()
        if now - self._refilled_ns < _REFILL_NS and not self._exhausted:
            self._window.widen()
        self._refilled_ns = now
        self.refill(ahead)
        return True

    def _open_next(self) -> bool:
        """Open the next batch; False if there is none, it has no indices, or no record, position or worker is free."""
        if self._opening is not None:
            self._complete_opening()
        if self._handover is not None and self._handover.refused:
            self._keep_places()
        if self._unmade is not None:
            return False
        try:
            drawn = self._draw()
        except Exception as error:
            if not self._batches.goes_on:
                raise
            self._unmade = Postponed(error)
            return False
        if drawn is None:
            if self._one_epoch and not self._is_dry:
                self._ledger.shut_down(drain=True)
            self._is_dry = True
            return False
        indices = drawn.indices
        count = len(indices)
        if not self._ledger.has_room(count or 1):
            _, positions = self._ledger.capacity
            if count > positions:
                raise ValueError(
                    f"a batch of {count} samples is more than the {positions} that can be in flight: give the "
                    "batch_sampler an attribute batch_size, the size of its largest batch, or split it"
                )
            return False
        owner = self._assignment.choose(indices, self._held)
        if owner is None:
            return False
        item = self._open_batch(drawn, owner)
        early, epoch_start = self._early_start, item.epoch.start
        if early is not None and early.threshold_ns and epoch_start is not None:
            early.hint(item.first, item.indices, epoch_start)
        return True

    def _keep_places(self) -> None:
        """Leave an order that mixes batches, once no open batch is mixed, because samples must stay in their worker."""
        if all(item.bound for batches in (self._open, self._prefetched) for item in batches):
            self._handover = None
            self._order = BatchOrder()
            if self._mixed_before:
                warn(_STAYS_WHOLE)

    def _held(self, owner: int) -> int:
        return sum(item.owner == owner for item in (*self._open, *self._prefetched))

    def _draw(self) -> Drawn | None:
        """The next batch of the sampler, of this epoch and then of the next one if that is known."""
        found = self._batches.first()
        if found is None and not self._exhausted:
            self._exhausted = True
            following = self._predict_next()
            if following is None:
                return None
            self._prefetches_next = True
            self._open_epoch(following.number, following.seed, None)
            self._batches = IndexBatches.of(following.batches)
            found = self._batches.first()
        return found

    def _open_batch(self, drawn: Drawn, owner: int) -> OpenBatch:
        """Write a batch to the ledger, where workers find it."""
        opened_ns = self._tracer.now() if self._tracer.enabled else 0
        indices = drawn.indices
        # An empty batch has a place too, for the result of collate_fn([]).
        count = len(indices) or 1
        fits_ledger, occurrences = self._ledger.can_hold(indices), None
        if not fits_ledger:
            indices, occurrences = unmarked(indices)
            fits_ledger = occurrences is not None and self._ledger.can_hold(indices)
        indices_slot: Slot | None = None
        offset = nbytes = 0
        if self._offers_items:
            indices_slot, offset, nbytes = self._empty_table(count)
        elif not fits_ledger:
            indices_slot, offset, nbytes = self._stored(indices)
        slot, epoch = self._storage.slots.acquire(), self._epoch
        bound = self._order.keeps_places
        if self._handover is not None:
            bound = self._handover.keeps_batches
        item = OpenBatch(
            record=-1,
            indices=indices,
            slot=slot,
            indices_slot=indices_slot,
            indices_offset=0 if fits_ledger else offset,
            epoch=epoch,
            owner=owner,
            bound=bound,
            opened_ns=opened_ns,
            drawn=drawn,
            first=self._ledger.tail,
        )
        self._opening = item
        # A batch with an owner must wake that very worker.
        self._to_wake = _ALL_WORKERS if owner else min(self._to_wake + count, _ALL_WORKERS)
        item.record = self._ledger.open(
            indices=indices if fits_ledger else integers_of(indices),
            count=count,
            slot=(slot.start, slot.start, slot.end),
            epoch_slot=epoch.slot,
            epoch=epoch.number,
            seed=epoch.seed,
            bound=bound,
            indices_offset=offset,
            indices_nbytes=nbytes,
            wake=0,
            owner=owner,
            occurrences=occurrences,
        )
        self._complete_opening()
        return item

    def _stored(self, indices: object) -> tuple[Slot, int, int]:
        """The slot in which indices that the ledger cannot hold are, their offset and size in bytes."""
        slot = self._storage.slots.acquire()
        try:
            put = functools.partial(offset_in_slot, slot)
            offset, nbytes = self._storage.indices.put(put, indices)
        except BaseException:
            self._storage.slots.release(slot)
            raise
        return slot, offset, nbytes

    def _empty_table(self, count: int) -> tuple[Slot, int, int]:
        """A slot for the items that workers offer to each other, its offset and size in bytes."""
        slot = self._storage.slots.acquire()
        table = slice(slot.start, slot.start + _TABLE_NBYTES * count)
        self._storage.slots.segment.array[table] = 0
        return slot, slot.start, slot.end - slot.start

    def _complete_opening(self) -> None:
        """Do what follows from the opening of a batch in the ledger; again, if an interruption came before the end."""
        item = self._opening
        if item is None:
            return
        if self._ledger.tail == item.first:  # the ledger has not opened it
            self._opening = None
            for slot in (item.slot, item.indices_slot):
                if slot is not None:
                    self._storage.slots.release(slot)
            return
        if item.record < 0:
            item.record = self._ledger.live[-1]
        if item.epoch.start is None:
            item.epoch.start = item.first
        self._lacks_samples = False
        batches = self._prefetched if self._prefetches_next else self._open
        if not (batches and batches[-1] is item):
            batches.append(item)
        if not item.bound:
            self._bind_late(item)
        if item.owner:
            self._assignment.opened(item.owner)
        self._batches.drop(item.drawn)
        self._opening = None

    def _bind_late(self, item: OpenBatch) -> None:
        """Give the samples that are late by ``max_lag`` batches a place in this batch."""
        recent = self._recent
        if not (recent and recent[-1] is item):
            recent.append(item)
        while len(recent) > self._order.max_lag:
            overdue = recent[0]
            if not overdue.retired:
                self._ledger.bind_late(overdue.record, item.record)
            recent.popleft()


def _nbytes_of(record: BatchRecord) -> int:
    """Bytes of a batch in its slot; of one that a thread hands over as an object, about those of the object."""
    return record.used_nbytes or record.result_nbytes
