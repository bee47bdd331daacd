"""The consumer's side of the schedule: which batches are open, and which one comes next."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from minato._core.codes import ENDED, KIND_MASK, NUM_EPOCH_SLOTS, READY, SKIP_BLOB, SKIPPED
from minato._core.ledger import Ledger
from minato._core.wait import EventCount
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.sampling.occurrences import unmarked
from minato.scheduling.assignment import Assignment
from minato.scheduling.batches import BatchStorage, OpenBatch, RetiringBatches, fitting
from minato.scheduling.cost_model import EarlyStart
from minato.scheduling.orders import Order
from minato.scheduling.prefetch_window import PrefetchWindow
from minato.scheduling.protocols import Pool, Progress
from minato.scheduling.wait_stats import ConsumerWait

__all__ = ["Dispatcher", "DispatcherSettings", "Schedule"]

_LIVENESS_S = 1.0
"""How long the consumer sleeps at most; whatever it waits for wakes it at once."""
_STOPPED_S = 1.0
"""A sleep that took so much longer than it should was one of the whole process, by SIGSTOP or Ctrl-Z."""
_SETTLING_S = 0.01
"""How often it looks whether abandoned samples have ended, of which nobody tells."""
_EVERYBODY = (1 << 31) - 1


@dataclass(frozen=True)
class Schedule:
    """How many batches are open, which comes next, and which worker runs it.

    Attributes:
        assignment: Chooses the worker of a batch.
        early_start: Starts slow samples before those that precede them.
    """

    window: PrefetchWindow
    order: Order
    assignment: Assignment
    early_start: EarlyStart | None = None


@dataclass(frozen=True)
class DispatcherSettings:
    """What a dispatcher takes from the options of a loader.

    Attributes:
        timeout_s: torch's ``timeout``; 0: none.
        one_epoch: Whether the workers may leave when nothing is left to do in the first epoch.
        skips: Whether samples may be left out.
        drop_short: Whether a batch is dropped where too few samples are left to fill it.
        trace_wait_as: Name that a trace gives to the waiting of the training loop.
    """

    timeout_s: float = 0.0
    one_epoch: bool = False
    skips: bool = False
    drop_short: bool = False
    trace_wait_as: str = "wait"


DEFAULTS = DispatcherSettings()


class Dispatcher:
    """Opens batches for the workers, in the sampler's order, and hands finished ones to the consumer.

    Args:
        gate: Counts the events that end the wait of the training loop.
        storage: Where open batches lie.
        schedule: How many batches are open, which comes next, and which worker runs it.
        wait_stats: Measures how long the training loop waits.
        tracer: Records batches, and inside ``next()`` the waiting and reading of the training loop.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        gate: EventCount,
        pool: Pool,
        storage: BatchStorage,
        schedule: Schedule,
        settings: DispatcherSettings = DEFAULTS,
        wait_stats: ConsumerWait | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        order = schedule.order
        self._ledger = ledger
        self._early_start = schedule.early_start
        self._gate = gate
        self._pool = pool
        self._slots = storage.slots
        self._keys = storage.keys
        self._window = schedule.window
        self._order = order
        self._assignment = schedule.assignment
        skips = settings.skips
        self._retiring = RetiringBatches(ledger, storage, order.keeps_places, skips)
        self._timeout_s = settings.timeout_s
        # Workers must stay until it is known which places stay empty.
        self._one_epoch = settings.one_epoch and (order.keeps_places or not skips)
        self._fills_up = skips and not order.keeps_places
        self._filled_up = False
        self._drops_short = settings.drop_short and not order.keeps_places
        self._flow = wait_stats or ConsumerWait()
        self._tracer, self._waiting = tracer, settings.trace_wait_as
        self._open: deque[OpenBatch] = deque()
        self._ahead: deque[OpenBatch] = deque()  # of the pass that is expected next
        self._recent: deque[OpenBatch] = deque()  # the last max_lag + 1 opened of this pass
        self._batches: Iterator[list[Any]] = iter(())
        self._drawn: deque[list[Any]] = deque()  # keys of batches that are not open yet
        self._owner: int | None = None  # of the next of them, once it is chosen
        self._expected: Callable[[], tuple[Iterable[list[Any]], int, int] | None] = lambda: None
        self._progress: Progress | None = None  # of a pass that was not abandoned
        # Of the present pass: index, epoch, seed, and the position of its first sample once that is known.
        self._pass: tuple[int, int, int, int | None] = (0, 0, 0, None)
        self._exhausted = True  # the present pass has no more batches to open
        self._foretold = False  # what is drawn belongs to the next pass
        self._dry = True  # nothing is left to open, in this pass and in what is known of the next

    @property
    def num_open(self) -> int:
        """Batches in flight of the present pass and the next."""
        return len(self._open) + len(self._ahead)

    @property
    def num_ready(self) -> int:
        """Batches of the present pass that are complete."""
        return sum(map(self._is_ready, self._open))

    @property
    def over(self) -> bool:
        """Whether the present pass has no more batches."""
        return self._exhausted and not self._open

    # ---- passes -----------------------------------------------------------------------------

    def begin(
        self,
        batches: Iterable[list[Any]],
        epoch: int,
        seed: int,
        expected: Callable[[], tuple[Iterable[list[Any]], int, int] | None],
        progress: Progress,
    ) -> bool:
        """Start a pass over the sampler's batches, each a list of keys.

        Args:
            expected: Foretells ``(batches, epoch, seed)`` of the pass after this one, or None if they are not known.
            progress: Told what becomes of the pass.

        Returns:
            False if batches had been opened ahead for this pass and were not the right ones; they are dropped.
        """
        self.cancel(self._open)
        ahead, self._ahead = self._ahead, deque()
        self._batches = iter(batches)
        self._drawn = deque()
        self._expected = expected
        self._progress = progress
        self._exhausted = self._foretold = self._dry = False
        right = all((item.epoch, item.seed) == (epoch, seed) for item in ahead)
        if right:
            self._drawn.extend(itertools.islice(self._batches, len(ahead)))
            right = [item.keys for item in ahead] == list(self._drawn)
        if ahead and right:
            self._pass = ahead[0].epoch_slot, epoch, seed, ahead[0].pass_start
            for item in ahead:
                item.progress = progress
            self._open = ahead
            self._drawn.clear()
        else:
            self.cancel(ahead)
            self._recent.clear()
            self._assignment.reset()
            self._owner = None
            self._open_pass(epoch, seed)
        return right

    def cancel(self, batches: deque[OpenBatch]) -> None:
        """Abandon batches: what has not begun never will, what runs ends unseen."""
        if not self._assignment.exact:
            for item in batches:
                self._ledger.cancel(item.record)
        self._retiring.cancel(batches)
        batches.clear()

    def cancel_all(self) -> None:
        """Abandon everything in flight."""
        self.cancel(self._open)
        self.cancel(self._ahead)

    def abandon(self) -> None:
        """End the present pass here."""
        self.cancel_all()
        self._progress = None
        self._batches, self._expected = iter(()), lambda: None
        self._drawn.clear()
        self._exhausted = True

    def _open_pass(self, epoch: int, seed: int) -> None:
        leavings = self._retiring
        while True:
            used = {
                item.epoch_slot
                for batches in (self._open, self._ahead, leavings.delivered, leavings.cancelled)
                for item in batches
            }
            # Never the number of the last pass: it also tells a worker that a new one has begun.
            later = (self._pass[0] + 1 + i for i in range(NUM_EPOCH_SLOTS - 1))
            free = next(
                (index % NUM_EPOCH_SLOTS for index in later if index % NUM_EPOCH_SLOTS not in used),
                None,
            )
            if free is not None:
                break
            # So many abandoned passes still run that the ledger cannot tell another one from them.
            self._sleep(time.monotonic() + _SETTLING_S)
        self._ledger.open_epoch(free)
        self._pass = free, epoch, seed, None

    # ---- batches ----------------------------------------------------------------------------

    def next(self) -> OpenBatch:
        """Wait for the next batch in this order; ``done`` and then ``deliver`` must be called when it has been read.

        Raises:
            StopIteration: The pass is over.
            RuntimeError: A worker died, or torch's ``timeout`` is over.
        """
        deadline = time.monotonic() + self._timeout_s if self._timeout_s else None
        while True:
            seen = self._gate.events
            found = self._ready()
            if found is None:
                self.refill()
            if self._flow.watched:
                self._flow.ending, self._flow.ready = self._dry, self.num_ready
            if found is not None:
                self._open.remove(found)
                flags, _, result, *_ = self._ledger.contents(found.record)
                if flags & ENDED:
                    self._assignment.ended(found.owner, found.record)
                    self._retiring.drop_empty(found)
                    continue
                self._assignment.delivered(found.owner)
                if not flags & SKIPPED or not self._is_empty(found, result):
                    self._flow.delivered += 1
                    found.found_ns = self._tracer.now()
                    return found
                self._retiring.drop(found)
                continue
            if self._fills_up and self._settled() and self._mend():
                continue
            if self.over:
                if self._progress is not None:
                    self._progress.finish(self._assignment.over)
                raise StopIteration
            self._ledger.waiting = True
            try:
                if self._dry or self._ledger.unclaimed() or not self._window.grow():
                    self._flow.begin_wait()
                    stopped_s = self._sleep(deadline, seen)
                    if deadline is not None:
                        deadline += stopped_s
            finally:
                self._ledger.waiting = False
                self._flow.end_wait()
            if deadline is not None and time.monotonic() > deadline and self._ready() is None:
                raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")

    def _is_empty(self, item: OpenBatch, result: int) -> bool:
        """Whether all samples of a batch are skipped, or so many that it is dropped."""
        if result & KIND_MASK == SKIP_BLOB and not result & ~KIND_MASK:
            return True
        return self._drops_short and -1 in self._ledger.occupants(item.record)

    def _settled(self) -> bool:
        """Whether all samples of the pass that are in flight have been run."""
        in_flight = *self._open, *self._retiring.delivered
        return bool(self._open) and all(self._ledger.settled(item.record) for item in in_flight)

    def _mend(self) -> bool:
        """Help open batches that lack samples which were skipped: by later samples, or else by doing without."""
        if not self._exhausted:
            before = self.num_open
            self.refill(most=1)
            if self.num_open > before:
                return True
        if self._filled_up:
            return False
        self._filled_up = True
        self._ledger.fill_skipped(self._open[0].epoch_slot)
        return True

    def done(self, item: OpenBatch, batch_bytes: int) -> None:
        """Say that a batch has been read and its slot leased or released."""
        if self._tracer.enabled:
            now = self._tracer.now()
            self._tracer.slice("read", item.found_ns, now)
            args = {"epoch": item.epoch, "samples": len(item.keys)}
            self._tracer.span("batch", item.opened_ns, now, args)
        self._window.observe(batch_bytes)

    def deliver(self, item: OpenBatch) -> None:
        """Say that the program gets it, or its error, now."""
        self._retiring.deliver(item)

    def _sleep(self, deadline: float | None, seen: int | None = None) -> float:
        """Wait for workers; returns how long this process was stopped meanwhile, in seconds."""
        # Without an open batch, room is waited for, which abandoned samples take up.
        limit = _LIVENESS_S if self._open else _SETTLING_S
        if deadline is not None:
            limit = min(limit, max(deadline - time.monotonic(), 0.0))
        began = time.monotonic()
        begun_ns = self._tracer.now()
        try:
            self._pool.wait(self._gate.events if seen is None else seen, limit)
        finally:
            self._tracer.slice(self._waiting, begun_ns)
        late_s = time.monotonic() - began - limit
        self._pool.check()
        self._retiring.sweep()
        return late_s if late_s > _STOPPED_S else 0.0

    def _is_ready(self, item: OpenBatch) -> bool:
        return bool(self._ledger.state(item.record) == READY)

    def _ready(self) -> OpenBatch | None:
        return self._order.next_ready(self._open, self._is_ready)

    def upcoming(self, limit: int) -> list[OpenBatch]:
        """Return at most ``limit`` complete batches of those that come next; no other comes before them."""
        return self._order.upcoming(self._open, self._is_ready, limit)

    def refill(self, most: int | None = None) -> None:
        """Open as many batches as the window allows, or so many whatever it says."""
        start = 0 if most is None else self.num_open
        while (
            self._window.has_room(self.num_open) if most is None else self.num_open < start + most
        ):
            keys = self._draw()
            if keys is None:
                self._run_dry()
                return
            self._drawn.appendleft(keys)  # and there they are again if what follows raises
            if not self._ledger.has_room(len(keys) or 1):
                self._check_capacity(len(keys))
                return
            if self._owner is None:
                self._owner = self._assignment.choose()
            if self._owner is None:
                if self._assignment.over:
                    self._exhausted = True
                    self._run_dry()
                return
            item = self._publish(keys, self._owner)
            (self._ahead if self._foretold else self._open).append(item)
            self._drawn.popleft()
            self._owner = None
            if self._early_start is not None:
                self._early_start.hint(item.record, keys)

    def top_up(self) -> None:
        """Refill, but not for each single batch where the window leaves the choice."""
        if self._window.is_low(self.num_open):
            self.refill()

    def _run_dry(self) -> None:
        if not self._dry:
            self._dry = True
            if self._one_epoch:
                self._ledger.shut_down(drain=True)

    def _draw(self) -> list[Any] | None:
        """Keys of the next batch: of this pass, then of the one after it where that is known."""
        if self._drawn:
            return self._drawn.popleft()
        keys = next(self._batches, None)
        if keys is not None or self._exhausted:
            return keys
        self._exhausted = True
        foretold = self._expected()
        if foretold is None:
            return None
        batches, epoch, seed = foretold
        self._batches = iter(batches)
        self._foretold = True
        self._recent.clear()
        self._open_pass(epoch, seed)
        return next(self._batches, None)

    def _publish(self, keys: Any, owner: int) -> OpenBatch:
        opened_ns = self._tracer.now()
        self._filled_up = False
        count = len(keys) or 1  # an empty batch has a place too: for what is collated of nothing
        plain, occurrences = self._ledger.can_hold(keys), None
        if not plain:
            keys, occurrences = unmarked(keys)
            plain = occurrences is not None and self._ledger.can_hold(keys)
        keys_slot, offset, nbytes = None, 0, 0
        if not plain:
            keys_slot = self._slots.acquire()
            try:
                offset, nbytes = self._keys.put(lambda size: fitting(keys_slot, size), keys)
            except BaseException:
                self._slots.release(keys_slot)
                raise
        slot = self._slots.acquire()
        index, epoch, seed, start = self._pass
        record = self._ledger.publish(
            keys if plain else None,
            count,
            (slot.start, slot.start, slot.end),
            index,
            epoch,
            seed,
            self._order.keeps_places,
            offset,
            nbytes,
            _EVERYBODY if owner else count,  # a batch with an owner must wake that very worker
            owner,
            occurrences,
        )
        if start is None:
            start = self._ledger.describe(record)[1]
            self._pass = index, epoch, seed, start
        progress = None if self._foretold else self._progress
        item = OpenBatch(
            record,
            keys,
            slot,
            keys_slot,
            offset,
            index,
            epoch,
            seed,
            owner,
            start,
            progress,
            opened_ns,
        )
        if not self._order.keeps_places:
            self._recent.append(item)
            if len(self._recent) > self._order.max_lag:
                overdue = self._recent.popleft()
                if not overdue.retired:
                    self._ledger.bind_late(overdue.record, record)
        return item

    def _check_capacity(self, count: int) -> None:
        _, positions = self._ledger.capacity
        if count > positions:
            raise ValueError(
                f"a batch of {count} samples is more than the {positions} that can be in flight: give the "
                "batch_sampler an attribute batch_size, the size of its largest batch, or split it"
            )
