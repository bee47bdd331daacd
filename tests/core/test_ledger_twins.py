"""Both ledgers are driven through the same random operations: same answers, same bytes, nothing lost or repeated."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from minato._core import codes
from tests.core.ledger_tools import LAYOUT, SLOT, Desk, values
from tests.selection import mostly_slow

TWIN = "ledger"

WORKERS, PASSES = 3, 2
Arguments = Callable[[random.Random], tuple[Any, ...]]
STEPS: dict[str, tuple[float, Arguments]] = {}
"""How often each step of a walk comes, and its arguments."""


def step(weight: float, arguments: Arguments) -> Callable[[Any], Any]:
    """A step of a walk, by which its method is known."""

    def named(method: Any) -> Any:
        STEPS[method.__name__] = weight, arguments
        return method

    return named


def worker_of(draw: random.Random) -> int:
    return draw.randrange(WORKERS)


def reservation(draw: random.Random) -> tuple[Any, ...]:
    return worker_of(draw), draw.randrange(99), draw.randint(1, 4), draw.random() < 0.5


@dataclass
class Open:
    """A batch that was opened and not yet retired."""

    record: int
    first: int
    count: int
    bound: bool
    epoch_slot: int
    owner: int
    delivered: bool = False
    cancelled: bool = False


@dataclass
class Hand:
    """What a worker has in hand."""

    positions: list[int] = field(default_factory=list)
    collating: list[int] = field(default_factory=list)


class Twins:
    """The consumer and the workers of two loaders, one with each ledger."""

    def __init__(self, halves: tuple[ModuleType, ModuleType], batches: int, positions: int) -> None:
        self.desks = [Desk(half, WORKERS, batches, positions) for half in halves]
        self.open: list[Open] = []
        self.hands = [Hand() for _ in range(WORKERS)]
        self.wanted: set[int] = set()
        self.offered: set[int] = set()  # what somebody may run who does not own it
        self.delivered: list[int] = []
        self.occupant: dict[int, int] = {}  # the sample at each place
        self.next_key = 0
        for index in range(PASSES):
            self.both("open_epoch", index)

    def both(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the consumer's end of both ledgers; their common answer."""
        return self.common([desk.ledger for desk in self.desks], method, *arguments, **named)

    def each(self, worker: int, method: str, *arguments: Any) -> Any:
        """Call a method of a worker's end of both ledgers; their common answer."""
        return self.common([desk.workers[worker] for desk in self.desks], method, *arguments)

    def common(self, ends: list[Any], method: str, *arguments: Any, **named: Any) -> Any:
        pure, compiled = (values(getattr(end, method)(*arguments, **named)) for end in ends)
        assert pure == compiled, (method, arguments, named)
        return pure

    def batch_of(self, position: int) -> Open:
        return next(b for b in self.open if b.first <= position < b.first + b.count)

    def bytes_are_the_same(self) -> None:
        pure, compiled = (desk.image() for desk in self.desks)
        assert pure == compiled

    # ---- the consumer

    @step(
        8,
        lambda d: (
            d.randint(1, 5),
            d.random() < 0.4,
            d.randrange(PASSES),
            d.choice((0, 0, 1, 2, 3)),
        ),
    )
    def open_batch(self, count: int, bound: bool, index: int, owner: int) -> None:
        swept = not any(b.cancelled and b.epoch_slot == index for b in self.open)
        if not swept or not self.both("has_room", count):
            return
        keys = list(range(self.next_key, self.next_key + count))
        owner = owner if bound else 0
        fields = (keys, count, SLOT, index, 1, 2, bound)
        record = self.both("open", *fields, wake=99, owner=owner)
        first = self.both("describe", record)[1]
        assert first == self.next_key
        self.next_key += count
        self.wanted.update(keys)
        self.open.append(Open(record, first, count, bound, index, owner))

    @step(2, lambda d: (d.randrange(99),))
    def bind_late(self, which: int) -> None:
        free = [b for b in self.open if not b.bound and not b.cancelled]
        pairs = [
            (old.record, new.record)
            for old in free
            for new in free
            if old.first < new.first and old.epoch_slot == new.epoch_slot and not new.delivered
        ]
        if pairs:
            self.both("bind_late", *pairs[which % len(pairs)])

    @step(4, lambda d: ())
    def deliver(self) -> None:
        for batch in self.open:
            ready = self.both("state", batch.record) == codes.READY
            if ready and not batch.delivered and not batch.cancelled:
                self.delivered += self.both("occupants", batch.record)
                for looked_at in ("describe", "costs", "blobs"):
                    self.both(looked_at, batch.record)
                batch.delivered = True
        for batch in self.open[:]:
            if batch.delivered and not batch.cancelled and self.both("settled", batch.record):
                self.retire(batch)

    def retire(self, batch: Open) -> None:
        self.both("retire", batch.record)
        self.open.remove(batch)

    @step(0.15, lambda d: (d.randrange(PASSES),))
    def cancel(self, index: int) -> None:
        """Abandon a pass; its samples that were not delivered are not wanted any more."""
        for batch in self.open:
            if batch.epoch_slot == index:
                self.both("cancel", batch.record)
                batch.cancelled = True
                numbers = range(batch.first, batch.first + batch.count)
                self.wanted.difference_update(numbers, map(self.occupant.get, numbers))
        self.wanted |= set(self.delivered)

    @step(2, lambda d: (d.randrange(PASSES),))
    def sweep(self, index: int) -> None:
        gone = [batch for batch in self.open if batch.cancelled and batch.epoch_slot == index]
        if not gone or not all(self.both("settled", batch.record) for batch in gone):
            return
        if all([self.both("close", batch.record) for batch in gone]):
            for batch in gone:
                self.retire(batch)
            self.both("open_epoch", index)

    @step(1, lambda d: (d.random() < 0.5,))
    def wait(self, value: bool) -> None:
        for desk in self.desks:
            desk.ledger.waiting = value

    @step(0.7, lambda d: (worker_of(d),))
    def kill(self, worker: int) -> None:
        assert self.both("owns", worker) >= bool(self.hands[worker].positions)
        for position in self.hands[worker].positions:
            assert self.both("is_unfinished", worker, position)
        self.both("release", worker)
        assert not self.both("owns", worker)
        self.hands[worker] = Hand()

    # ---- workers

    @step(10, lambda d: (worker_of(d), d.randint(1, 4), d.random() < 0.2))
    def claim(self, worker: int, max_run: int, fresh: bool = False) -> None:
        waiting = {p for p in self.offered if self.each(worker, "is_offered", p)}
        lease = self.each(worker, "claim", max_run, fresh)
        self.both("unclaimed")
        if lease is None:
            return
        record, k, count = lease
        if count == 0:
            self.hands[worker].collating.append(record)
            return
        _, first, *_ = self.both("describe", record)
        assert self.both("indices", record, k, count) == list(range(first + k, first + k + count))
        held = {position for hand in self.hands for position in hand.positions}
        run = range(first + k, first + k + count)
        assert not held.intersection(run)
        assert self.batch_of(run[0]).owner in (0, worker + 1) or waiting.issuperset(run)
        assert not (fresh and waiting.intersection(run))
        self.hands[worker].positions += run

    @step(4, lambda d: (worker_of(d), d.randrange(99)))
    def offer(self, worker: int, which: int) -> None:
        """Only the owner of a batch reads its items."""
        mine = self.hands[worker].positions
        own = [p for p in mine if self.batch_of(p).owner == worker + 1]
        if own:
            position = own[which % len(own)]
            assert not self.each(worker, "is_offered", position)
            self.each(worker, "offer", position)
            assert self.each(worker, "is_offered", position)
            self.hands[worker].positions.remove(position)
            self.offered.add(position)

    @step(3, reservation)
    def reserve(self, worker: int, which: int, run: int, late: bool) -> None:
        self.reserved(worker, which, run, late)

    def reserved(self, worker: int, which: int, run: int, late: bool) -> tuple[range, int] | None:
        """Reserve places for at most ``run`` samples in a row; the samples, and the first place."""
        positions = self.hands[worker].positions
        if not positions:
            return None
        position = positions[which % len(positions)]
        run = next(n for n in range(run, 0, -1) if {*range(position, position + n)} <= {*positions})
        place, record, taken = self.each(worker, "reserve", position, run, late)
        assert 1 <= taken <= run
        for i in range(taken):
            there, own = self.batch_of(place + i), self.batch_of(position + i)
            assert (there.record, there.epoch_slot) == (record, own.epoch_slot)
            assert place == position or not own.bound
        return range(position, position + taken), place

    @step(20, lambda d: (*reservation(d), d.choice((0, 0, 0, 1, 2, 3, 4))))
    def fill(self, worker: int, which: int, run: int, late: bool, kind: int) -> None:
        reserved = self.reserved(worker, which, run, late)
        if reserved is None:
            return
        samples, place = reserved
        record = self.batch_of(place).record
        if kind:
            self.each(worker, "attach", place, 8192 | kind, samples[0])
        else:
            if late:
                self.each(worker, "reserve_fields", record, 64 * run)
            self.each(worker, "publish_layout", record, LAYOUT + 64 * worker)
        for i, position in enumerate(samples):
            self.hands[worker].positions.remove(position)
            self.occupant[place + i] = position
        outcome = self.each(worker, "fill", samples[0], place, len(samples))
        self.settle(worker, record, outcome)

    @step(0.3, lambda d: (worker_of(d), d.randint(1, 5), d.randrange(6)))
    def die_with_a_result(self, worker: int, max_run: int, filled: int) -> None:
        """Killed when it has filled so many places of a batch whose result is there."""
        batch, first, count = self.claimed_bound(worker, max_run)
        k = first - batch.first if batch else 0
        if batch is None or not self.each(worker, "lacks_only", batch.record, k, count):
            self.hands[worker].positions += range(first, first + count)
            return
        self.each(worker, "set_result", batch.record, 4096 | codes.SAMPLE_BLOB, 99)
        if filled := min(filled, count - 1):
            self.each(worker, "fill_run", batch.record, k, filled)
        self.kill(worker)

    def claimed_bound(self, worker: int, max_run: int) -> tuple[Open | None, int, int]:
        """A run of a bound batch that a worker has claimed for this: the batch, the first position, how many."""
        hand = self.hands[worker]
        before = len(hand.positions)
        self.claim(worker, max_run)
        run = hand.positions[before:]
        if not run or not self.batch_of(run[0]).bound:
            return None, 0, 0
        del hand.positions[before:]
        return self.batch_of(run[0]), run[0], len(run)

    @step(4, lambda d: (worker_of(d), d.randint(1, 5), d.random() < 0.5))
    def fill_run(self, worker: int, max_run: int, together: bool) -> None:
        batch, first, count = self.claimed_bound(worker, max_run)
        if batch is None:
            return
        k = first - batch.first
        if self.each(worker, "lacks_only", batch.record, k, count) and together:
            self.each(worker, "set_result", batch.record, 4096 | codes.SAMPLE_BLOB, 99)
        outcome = self.each(worker, "fill_run", batch.record, k, count)
        self.settle(worker, batch.record, outcome)

    def settle(self, worker: int, record: int, outcome: int) -> None:
        if outcome == codes.MUST_COLLATE:
            self.hands[worker].collating.append(record)

    @step(3, lambda d: (d.randrange(99), d.randrange(12)))
    def start_early(self, which: int, ahead: int) -> None:
        batches = [batch for batch in self.open if not batch.owner]
        if batches:
            batch = batches[which % len(batches)]
            self.both("start_early", batch.first + which % batch.count, ahead)

    @step(2, lambda d: (worker_of(d), d.randrange(99)))
    def note_costs(self, worker: int, cost_ns: int) -> None:
        for position in self.hands[worker].positions[:1]:
            self.each(worker, "note_costs", position, array("q", [cost_ns]), 1)
            self.both("is_placed", position)

    @step(5, lambda d: (worker_of(d),))
    def collate(self, worker: int) -> None:
        collating = self.hands[worker].collating
        if collating:
            self.each(worker, "set_ready", collating.pop(), 4096 | codes.SAMPLE_BLOB, 11)

    @step(1, lambda d: (d.randrange(99), d.randrange(300)))
    def allocate(self, which: int, nbytes: int) -> None:
        batches = [batch for batch in self.open if not batch.delivered]
        if batches:
            self.each(0, "allocate", batches[which % len(batches)].record, nbytes)

    # ---- the end

    def end(self) -> None:
        for worker in range(1, WORKERS):
            self.kill(worker)
        idle = 0
        while idle < WORKERS:
            for worker, hand in enumerate(self.hands):
                self.claim(worker, 3)
                idle = 0 if hand.positions or hand.collating else idle + 1
                while hand.positions:
                    self.fill(worker, 0, 3, False, 0)
                while hand.collating:
                    self.collate(worker)
        self.deliver()
        for index in range(PASSES):
            self.sweep(index)
        assert self.open == []
        assert sorted(self.delivered) == sorted(self.wanted)
        self.bytes_are_the_same()


@mostly_slow("seed", range(6), quick=2)
def test_a_long_random_walk(twins: tuple[ModuleType, ModuleType], seed: int) -> None:
    """As many operations as a loader performs: thousands, with few kills and cancels between."""
    draw = random.Random(seed)
    walk = Twins(twins, 3 + seed % 3, (8, 16, 4)[seed % 3])
    weights = [weight for weight, _ in STEPS.values()]
    for name in draw.choices([*STEPS], weights, k=15_000):
        getattr(walk, name)(*STEPS[name][1](draw))
        walk.bytes_are_the_same()
    walk.end()
    assert len(walk.delivered) > 300
