"""Random kills: whatever happens to the workers, each sample is delivered once.

    python -m tests.stress.ledger_stress --seconds 60 --twin c

One consumer opens batches of numbered samples, in passes of every order. Workers write each number to its place, so
that a sample that is lost, repeated, misplaced or overwritten shows. Every few milliseconds a worker is killed; its
samples are released only a while later, when its places may have been delivered and used again. Others are stopped
for a while, which is how a worker looks that the system does not run for some milliseconds. Some passes are abandoned.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from minato._core import codes
from tests.protocol import PATHS, deliver, delivery
from tests.stress.bare import core, fork

PATIENCE_S = 30.0
"""Without any progress for so long, something is lost."""
VALUES_AT = 1 << 16
WHOLE = 128
"""Where the result of a whole batch lies."""
POISON = -1
SLOT = (4096, 4160, 1 << 30)
PASSES = 8
MAX_LAG = 2


@dataclass(frozen=True)
class Plan:
    """What is run. Sizes are small, so that records come round the ring all the time."""

    twin: str
    seconds: float
    seed: int
    workers: int = 4
    batches: int = 6
    positions: int = 32
    largest: int = 8
    kill_every_s: float = 0.004
    stop_every_s: float = 0.02


def is_ragged(key: int) -> bool:
    """Whether a sample is kept as an object, so that its batch must be collated."""
    return key % 7 == 0


# ------------------------------------------------------------------------------------------- a worker


class Worker:
    """Claims samples and writes their keys to their places, as fast as it can."""

    def __init__(self, plan: Plan, segment: Any, number: int) -> None:
        self.module = core(f"_ledger_{plan.twin}")
        self.ledger = self.module.Ledger(segment.array, None, segment.descriptor)
        self.gate = core(f"_wait_{plan.twin}").EventCount(
            segment.array, self.ledger.work_events_offset
        )
        self.values = values_in(segment, plan)
        self.mask = plan.positions - 1
        self.number = number
        self.parent = os.getppid()
        self.draw = random.Random(os.getpid())

    def run(self) -> None:
        while True:
            seen = self.gate.events
            if self.ledger.stopping:
                return
            lease = self.ledger.claim(self.number, self.draw.choice([1, 1, 2, 8]))
            if lease is not None:
                self.work(*lease)
                continue
            self.ledger.notify_idle()
            if not self.gate.wait(seen, 1.0) and os.getppid() != self.parent:
                return

    def work(self, batch: int, k: int, count: int) -> None:
        if count == 0:
            self.collate(batch)
            return
        _, first, size, bound, *_ = self.ledger.describe(batch)
        keys = self.ledger.indices(batch, k, count)
        if bound and self.draw.random() < 0.7:
            self.deliver(batch, first, k, keys, whole=count == size)
            return
        for position, key in enumerate(keys, first + k):
            place, there, _ = self.ledger.reserve(self.number, position, key % 3 == 0)
            self.write(there, place, key)
            self.finished(there, self.ledger.fill(self.number, position, place))

    def deliver(self, batch: int, first: int, k: int, keys: list[int], whole: bool) -> None:
        """Deliver samples that were run together, on a random path; what one raises may not be raised again."""
        paths = PATHS if whole else [path for path in PATHS if not path.startswith("whole")]
        path, bad = self.draw.choice([*paths, "samples"]), self.draw.randrange(len(keys))
        ledger, start = self.ledger, first + k
        kept = sum(keys) - (keys[bad] if "skip" in path else 0)

        def write(first: int, count: int) -> None:
            for i in range(first, first + count):
                self.write(batch, start + i, keys[i])

        deliver(
            delivery(path, len(keys), bad),
            {
                "write": write,
                "error": lambda i, _: ledger.attach(start + i, 64 | codes.ERROR_BLOB, keys[i]),
                "mark": lambda i, _: ledger.attach(start + i, codes.SKIP_BLOB, 0),
                "result": lambda *_: ledger.set_result(batch, WHOLE | codes.SAMPLE_BLOB, kept),
                "fill": lambda i, count: self.finished(
                    batch, ledger.fill_run(self.number, batch, k + i, count)
                ),
                "skip": lambda i, _: self.finished(*ledger.skip(self.number, start + i)),
            },
        )

    def write(self, batch: int, place: int, key: int) -> None:
        if self.draw.random() < 0.1:  # some samples take longer
            end = time.monotonic() + self.draw.random() * 5e-4
            while time.monotonic() < end:
                pass
        self.values[place & self.mask] = key
        if is_ragged(key):
            self.ledger.attach(place, 64 | codes.SAMPLE_BLOB, key)
        else:
            self.ledger.publish_layout(batch, 64)

    def finished(self, batch: int, outcome: int) -> None:
        if outcome == codes.MUST_COLLATE:
            self.collate(batch)

    def collate(self, batch: int) -> None:
        _, first, size, *_ = self.ledger.describe(batch)
        kinds = [kind for kind, _, _ in self.ledger.blobs(batch)]
        places = [first + i for i in range(size) if kinds[i] != codes.SKIP_BLOB]
        total = sum(int(self.values[place & self.mask]) for place in places)
        self.ledger.set_ready(batch, 64 | codes.SAMPLE_BLOB, total)


def values_in(segment: Any, plan: Plan) -> np.ndarray[Any, np.dtype[np.int64]]:
    return segment.array[VALUES_AT : VALUES_AT + 8 * plan.positions].view(np.int64)


# ----------------------------------------------------------------------------------------- the killer


class Crew:
    """The worker processes, killed, stopped and replaced at random."""

    def __init__(self, plan: Plan, segment: Any, ledger: Any) -> None:
        self.plan = plan
        self.segment = segment
        self.ledger = ledger
        self.draw = random.Random(plan.seed)
        self.pids = [self.start(number) for number in range(plan.workers)]
        self.dead: list[tuple[float, int]] = []  # (when to find it out, number)
        self.stopped: list[tuple[float, int]] = []
        self.next_kill = time.monotonic()
        self.next_stop = self.next_kill + plan.stop_every_s
        self.kills = self.stops = self.released = 0

    def start(self, number: int) -> int:
        return fork(Worker(self.plan, self.segment, number).run)

    def act(self, opened: bool) -> float:
        """Do what is due; returns when the next thing is."""
        now = time.monotonic()
        busy = {number for _, number in self.dead + self.stopped}
        idle = [number for number in range(self.plan.workers) if number not in busy]
        if now >= self.next_kill and idle:
            # Workers are at work just after batches were opened: hit them there.
            while opened and time.monotonic() < now + self.draw.random() * 3e-4:
                pass
            number = idle.pop(self.draw.randrange(len(idle)))
            os.kill(self.pids[number], signal.SIGKILL)
            self.kills += 1
            self.dead.append((now + self.draw.choice([0, 0, 0.002, 0.01]), number))
            self.next_kill = now + self.draw.expovariate(1 / self.plan.kill_every_s)
        if now >= self.next_stop and idle:
            number = self.draw.choice(idle)
            os.kill(self.pids[number], signal.SIGSTOP)
            self.stops += 1
            self.stopped.append((now + self.draw.choice([0.001, 0.01, 0.05]), number))
            self.next_stop = now + self.draw.expovariate(1 / self.plan.stop_every_s)
        for due, number in self.stopped[:]:
            if now >= due:
                os.kill(self.pids[number], signal.SIGCONT)
                self.stopped.remove((due, number))
        for due, number in self.dead[:]:
            if now >= due:
                self.replace(number)
                self.dead.remove((due, number))
        return min([self.next_kill, self.next_stop, *(due for due, _ in self.dead + self.stopped)])

    def replace(self, number: int) -> None:
        _, status = os.waitpid(self.pids[number], 0)
        assert os.WIFSIGNALED(status), f"worker {number} ended by itself: {status:#x}"
        self.released += self.ledger.release(number)
        self.pids[number] = self.start(number)

    def end(self) -> None:
        self.ledger.shut_down()
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# --------------------------------------------------------------------------------------- the consumer


@dataclass(eq=False)
class Batch:
    record: int
    first: int
    keys: list[int]
    number: int  # within its pass
    delivered: bool = False


@dataclass(eq=False)
class Pass:
    """One run over some samples."""

    index: int
    bound: bool
    length: int
    opened: list[Batch] = field(default_factory=list)
    live: deque[Batch] = field(default_factory=deque)
    keys: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    abandoned: bool = False


class Consumer:
    """Publishes passes of batches and checks what comes back."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draw = random.Random(plan.seed + 1)
        self.module: ModuleType = core(f"_ledger_{plan.twin}")
        self.segment = core("segment").Segment(1 << 20)
        sizes = plan.workers, plan.batches, plan.positions
        self.ledger = self.module.Ledger(self.segment.array, sizes, self.segment.descriptor)
        offset = self.ledger.ready_events_offset
        self.gate = core(f"_wait_{plan.twin}").EventCount(self.segment.array, offset)
        self.values = values_in(self.segment, plan)
        self.mask = plan.positions - 1
        self.passes: list[Pass] = []
        self.next_key = 1
        self.home: dict[int, tuple[int, int]] = {}  # position: its key, number of its batch
        self.batches = self.samples = self.finished = self.abandoned = 0
        self.errors = self.wholes = 0

    def run(self) -> dict[str, int]:
        crew = Crew(self.plan, self.segment, self.ledger)
        try:
            begun = progress = time.monotonic()
            end = begun + self.plan.seconds
            while self.passes or time.monotonic() < end:
                opened = self.open(may_begin=time.monotonic() < end)
                pause = crew.act(opened) - time.monotonic()
                seen = self.gate.events
                before = self.batches
                self.deliver()
                self.sweep()
                now = time.monotonic()
                progress = now if self.batches > before else progress
                assert now - progress < PATIENCE_S, f"no progress\n{self.report()}"
                if self.batches == before and pause > 0:
                    self.ledger.waiting = self.draw.random() < 0.5
                    self.gate.wait(seen, min(pause, 0.1))
                    self.ledger.waiting = False
        finally:
            crew.end()
        return {
            "batches": self.batches,
            "samples": self.samples,
            "passes": self.finished,
            "abandoned": self.abandoned,
            "errors": self.errors,
            "wholes": self.wholes,
            "kills": crew.kills,
            "stops": crew.stops,
            "released": crew.released,
        }

    def open(self, may_begin: bool) -> bool:
        """Open as many batches as there is room for; whether there was any."""
        opened = False
        while True:
            count = self.draw.randint(1, self.plan.largest)
            current = self.passes[-1] if self.passes else None
            if current is None or current.abandoned or len(current.opened) == current.length:
                if not may_begin or len(self.passes) == PASSES:
                    return opened
                used = {one.index for one in self.passes}
                index = next(index for index in range(PASSES) if index not in used)
                self.ledger.open_epoch(index)
                bound = self.draw.random() < 0.4
                current = Pass(index, bound, self.draw.choice([1, 3, 40]))
                self.passes.append(current)
            if not self.ledger.has_room(count):
                return opened
            opened = True
            keys = list(range(self.next_key, self.next_key + count))
            self.next_key += count
            number = len(current.opened)
            arguments = (current.index, 0, 0, current.bound)
            record = self.ledger.open(
                keys, count, SLOT, *arguments, wake=self.draw.choice([count, 1])
            )
            batch = Batch(record, self.ledger.describe(record)[1], keys, number)
            for position, key in enumerate(keys, batch.first):
                self.home[position] = key, number
                if self.draw.random() < 0.2:
                    self.ledger.start_early(position, self.draw.randrange(40))
            current.opened.append(batch)
            current.live.append(batch)
            current.keys += keys
            if not current.bound and number >= MAX_LAG:
                overdue = current.opened[number - MAX_LAG]
                if overdue in current.live:
                    self.ledger.bind_late(overdue.record, record)

    def deliver(self) -> None:
        for one in self.passes:
            for batch in one.live:
                if (
                    not batch.delivered
                    and not one.abandoned
                    and self.ledger.state(batch.record) == codes.READY
                ):
                    self.check(one, batch)
            if len(one.opened) > 3 and not one.abandoned:
                self.maybe_abandon(one)

    def check(self, one: Pass, batch: Batch) -> None:
        occupants = self.ledger.occupants(batch.record)
        places = [(batch.first + k) & self.mask for k in range(len(occupants))]
        keys = [self.home[position][0] for position in occupants]
        self.check_content(batch, places, keys)
        if one.bound:
            assert keys == batch.keys, (batch, keys)
        for position in occupants:
            lag = batch.number - self.home[position][1]
            assert lag <= MAX_LAG, f"{position} is {lag} batches late"
        self.values[places] = POISON
        one.delivered += keys
        batch.delivered = True
        self.batches += 1
        self.samples += len(keys)

    def check_content(self, batch: Batch, places: list[int], keys: list[int]) -> None:
        """Compare what lies in a batch with the keys of its samples, as far as anything does."""
        flags, _, result, nbytes, count, _ = self.ledger.contents(batch.record)
        assert count == len(batch.keys)
        blobs = self.ledger.blobs(batch.record)
        if flags & codes.FAILED:
            errors = [i for i, blob in enumerate(blobs) if blob[0] == codes.ERROR_BLOB]
            assert errors
            assert all(blobs[i] == (codes.ERROR_BLOB, 64, keys[i]) for i in errors), (blobs, keys)
            self.errors += 1
            return
        kept = [i for i, blob in enumerate(blobs) if blob[0] != codes.SKIP_BLOB]
        assert bool(flags & codes.SKIPPED) == (len(kept) < count)
        assert not result or nbytes == sum(keys[i] for i in kept), (batch, result, nbytes)
        if result == WHOLE | codes.SAMPLE_BLOB:  # nothing else was written
            self.wholes += 1
            return
        found = [int(self.values[places[i]]) for i in kept]
        assert found == [keys[i] for i in kept], (batch, keys, found)
        assert bool(flags & codes.RAGGED) == any(is_ragged(keys[i]) for i in kept), (flags, keys)
        assert result == 64 | codes.SAMPLE_BLOB or not flags & (codes.RAGGED | codes.SKIPPED)

    def maybe_abandon(self, one: Pass) -> None:
        if self.draw.random() < 0.003:
            one.abandoned = True
            self.abandoned += 1
            for batch in one.live:
                self.ledger.cancel(batch.record)

    def sweep(self) -> None:
        for one in self.passes[:]:
            if one.abandoned:
                if all(self.ledger.settled(batch.record) for batch in one.live) and all(
                    [self.ledger.close(batch.record) for batch in one.live]
                ):
                    while one.live:
                        self.retire(one.live.popleft(), poisoned=False)
            else:
                for batch in list(one.live):
                    # Bound batches are retired at once, as loaders do; a worker may not have said yet that it is done.
                    if batch.delivered and (one.bound or self.ledger.settled(batch.record)):
                        self.retire(batch, poisoned=True)
                        one.live.remove(batch)
            if not one.live and (one.abandoned or len(one.opened) == one.length):
                self.passes.remove(one)
                self.finished += 1
                lost = set() if one.abandoned else set(one.keys) - set(one.delivered)
                assert not lost, f"lost: {lost}"
                assert len(set(one.delivered)) == len(one.delivered), "repeated"

    def retire(self, batch: Batch, poisoned: bool) -> None:
        places = [(batch.first + k) & self.mask for k in range(len(batch.keys))]
        assert not poisoned or (self.values[places] == POISON).all(), (
            f"written after delivery: {batch}"
        )
        self.ledger.retire(batch.record)

    def report(self) -> str:
        lines = [f"unclaimed {self.ledger.unclaimed()}"]
        for one in self.passes:
            for batch in one.live:
                state, settled = self.ledger.state(batch.record), self.ledger.settled(batch.record)
                lines.append(f"pass {one.index} bound {one.bound} {batch} state {state} {settled=}")
        return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.ledger_stress")
    parser.add_argument("--twin", choices=["c", "py"], default="c")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill-ms", type=float, default=4.0, help="mean time between kills")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    # A worker that is stopped holds the pure twin's lock; the consumer, who is to let it go on, would wait for it.
    stop_every_s = Plan.stop_every_s if options.twin == "c" else float("inf")
    rates = options.kill_ms / 1000, stop_every_s
    plan = Plan(options.twin, options.seconds, seed, options.workers, 6, 32, 8, *rates)
    for name, count in Consumer(plan).run().items():
        print(f"{name} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
