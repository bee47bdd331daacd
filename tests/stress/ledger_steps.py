"""Every instant: kill a worker after each change of memory, stop it at each instruction.

    python -m tests.stress.ledger_steps --twin c --seconds 60 --all

A worker's effect on the others is what it writes to shared memory. So its work is run once, step by step, and memory is
kept after each change: these are all the states in which a kill can leave the ledger. From each of them the others must
finish, with every sample delivered once.

Then a worker, or the consumer, is stopped at an instruction in the middle of an operation, the others go on as far as
they can, up to several rounds of the ring, and it continues with what it had read. (Only for the compiled twin: the
pure one holds a lock, and nobody else is in the middle of anything.)
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from minato._core import codes
from tests.protocol import deliver, delivery
from tests.stress.bare import core, fork
from tests.stress.tracee import POSSIBLE, Tracee

WHOLE = 32768
"""Where the result of a whole batch lies."""
UNTRACEABLE = 77
"""Exit status where processes cannot be traced."""
HANG_S = 20
SLOT = (4096, 4160, 1 << 20)
EVERYTHING = 10**9
PARTS = ("_ledger_c", "_claims_c", "_records_c")
"""The modules whose instructions are counted."""
OPERATIONS, INSTRUCTIONS, ADOPTION = 12, 400, 150
"""Where a worker may be stopped; few operations are longer, and what is not there is simply not stopped at."""


@dataclass(frozen=True)
class Scene:
    """How batches are opened and worked on."""

    name: str
    bound: bool = False
    late: bool = False
    ragged: bool = False
    max_run: int = 1
    path: str = "samples"
    bad: int = 0


SCENES = (
    Scene("bound", bound=True, max_run=2),
    Scene("bound one by one", bound=True),
    Scene("bound, collated", bound=True, ragged=True, max_run=2),
    Scene("bound, whole", bound=True, max_run=2, path="whole"),
    Scene("bound, the first raises", bound=True, max_run=2, path="error"),
    Scene("bound, the second raises", bound=True, max_run=2, path="error", bad=1),
    Scene("bound, one skipped", bound=True, max_run=2, path="skip"),
    Scene("bound, whole, one skipped", bound=True, max_run=2, path="whole, skip", bad=1),
    Scene("arrival"),
    Scene("arrival, collated", ragged=True),
    Scene("late", late=True, max_run=2),
)


class World:
    """A small ledger with its consumer and all its workers in one process; one of them can live in another.

    Two batches of two samples fill the ring, so that everything new uses old records.
    """

    WORKERS, BATCHES, SIZE = 3, 3, 2

    def __init__(self, twin: str, scene: Scene) -> None:
        self.module = core(f"_ledger_{twin}")
        self.scene = scene
        sizes = self.WORKERS, self.BATCHES, 2 * self.SIZE
        self.nbytes = self.module.Ledger.nbytes(*sizes) + 8 * 2 * self.SIZE
        self.memory = mmap.mmap(-1, 1 << 14)
        self.ledger = self.module.Ledger(self.memory, sizes)
        start = self.module.Ledger.nbytes(*sizes)
        self.values = memoryview(self.memory)[start : self.nbytes].cast("q")
        self.epoch_slot = self.next_position = 0
        self.open: list[int] = []
        self.is_abandoned = False
        self.wanted: set[int] = set()
        self.delivered: list[int] = []
        self.ledger.open_epoch(0)
        for _ in range(2):
            self.open_batch()

    # ---- the consumer

    def open_batch(self) -> None:
        """Open a batch; keys are positions + 1000."""
        start = self.next_position
        keys = [1000 + start + k for k in range(self.SIZE)]
        arguments = (SLOT, self.epoch_slot, 0, 0, self.scene.bound)
        self.open.append(self.ledger.open(keys, self.SIZE, *arguments))
        self.ledger.start_early(start + self.SIZE - 1, self.SIZE)
        self.wanted.update(keys)
        self.next_position = start + self.SIZE

    def deliver(self) -> None:
        """Take what is ready and check it; retire what is settled."""
        if self.is_abandoned:
            return
        for batch in self.open[:]:
            if self.ledger.state(batch) != codes.READY:
                continue
            _, first, count, *_ = self.ledger.describe(batch)
            keys = [1000 + position for position in self.ledger.occupants(batch)]
            self.check(
                batch, [place % len(self.values) for place in range(first, first + count)], keys
            )
            if not set(keys) <= set(self.delivered):
                assert not set(keys) & set(self.delivered), f"repeated: {keys}"
                self.delivered += keys
            if self.scene.bound or self.ledger.settled(batch):
                self.ledger.retire(batch)
                self.open.remove(batch)

    def check(self, batch: int, places: list[int], keys: list[int]) -> None:
        """Compare what lies in a batch with the keys of its samples, as far as anything does."""
        flags, _, result, nbytes, *_ = self.ledger.contents(batch)
        blobs = self.ledger.blobs(batch)
        if flags & codes.FAILED:
            errors = [i for i, blob in enumerate(blobs) if blob[0] == codes.ERROR_BLOB]
            assert [blobs[i][2] for i in errors] == [keys[i] for i in errors], (batch, blobs)
            return
        kept = [i for i, blob in enumerate(blobs) if blob[0] != codes.SKIP_BLOB]
        if result:
            assert nbytes == sum(keys[i] for i in kept), (batch, result, nbytes)
        if result != WHOLE | codes.SAMPLE_BLOB:
            assert [self.values[places[i]] for i in kept] == [keys[i] for i in kept], (batch, keys)

    def open_more(self, batches: int) -> None:
        """Go round the ring, as far as there is room."""
        for _ in range(batches):
            if not self.ledger.has_room(self.SIZE):
                return
            self.open_batch()
            self.work(2)
            self.deliver()

    def bind_late(self) -> None:
        if not self.scene.bound and len(self.open) > 1:
            self.ledger.bind_late(self.open[0], self.open[-1])

    def cancel(self) -> bool:
        """Abandon the pass and begin another; False while somebody works for it: ask again."""
        self.is_abandoned = True
        for batch in self.open:
            self.ledger.cancel(batch)
        if not all(self.ledger.settled(b) and self.ledger.close(b) for b in self.open):
            return False
        for batch in self.open:
            self.ledger.retire(batch)
        self.open.clear()
        self.wanted = set(self.delivered)
        self.epoch_slot += 1
        self.ledger.open_epoch(self.epoch_slot)
        self.is_abandoned = False
        return True

    # ---- workers

    def work(self, worker: int, samples: int = EVERYTHING, pause: Callable[[], None] = int) -> None:
        """Do up to so many leases of a worker; ``pause`` is called between operations."""
        for _ in range(samples):
            pause()
            lease = self.ledger.claim(worker, self.scene.max_run)
            if lease is None:
                return
            batch, k, count = lease
            if count == 0:
                self.collate(batch)
                continue
            first = self.ledger.describe(batch)[1]
            keys = self.ledger.indices(batch, k, count)
            if self.scene.bound and self.scene.max_run > 1:
                self.together(worker, batch, first, k, keys, pause)
                continue
            for position, key in enumerate(keys, first + k):
                self.sample(worker, position, key, pause)

    def together(
        self,
        worker: int,
        batch: int,
        first: int,
        k: int,
        keys: list[int],
        pause: Callable[[], None],
    ) -> None:
        """Deliver samples that were run together; what one raises in worker 0, it does not raise in the others."""
        ledger, path, bad, start = self.ledger, self.scene.path, self.scene.bad, first + k
        if len(keys) < self.SIZE or (path == "error" and worker != 0):
            path = "samples"
        kept = sum(keys) - (keys[bad] if "skip" in path else 0)

        def write(first: int, count: int) -> None:
            for i in range(first, first + count):
                self.write(batch, start + i, keys[i])

        def fill(first: int, count: int) -> None:
            pause()
            self.finished(batch, ledger.fill_run(worker, batch, k + first, count), pause)

        def skip(i: int, _: int) -> None:
            pause()
            self.finished(*ledger.skip(worker, start + i), pause)

        deliver(
            delivery(path, len(keys), bad),
            {
                "write": write,
                "error": lambda i, _: ledger.attach(start + i, 64 | codes.ERROR_BLOB, keys[i]),
                "mark": lambda i, _: ledger.attach(start + i, codes.SKIP_BLOB, 0),
                "result": lambda *_: ledger.set_result(batch, WHOLE | codes.SAMPLE_BLOB, kept),
                "fill": fill,
                "skip": skip,
            },
        )

    def claim_for(self, worker: int) -> int:
        """Give a worker a sample to work on; returns its position."""
        batch, k, _ = self.ledger.claim(worker, 1)
        return int(self.ledger.describe(batch)[1]) + k

    def sample(self, worker: int, position: int, key: int, pause: Callable[[], None] = int) -> None:
        pause()
        self.finish(worker, position, key, pause)

    def finish(self, worker: int, position: int, key: int, pause: Callable[[], None]) -> None:
        pause()
        place, there, _ = self.ledger.reserve(worker, position, self.scene.late)
        self.write(there, place, key)
        pause()
        self.finished(there, self.ledger.fill(worker, position, place), pause)

    def write(self, batch: int, place: int, key: int) -> None:
        self.values[place % len(self.values)] = key
        if self.scene.ragged:
            self.ledger.attach(place, 8192 | codes.SAMPLE_BLOB, key)
        else:
            self.ledger.publish_layout(batch, 4096)

    def finished(self, batch: int, outcome: int, pause: Callable[[], None] = int) -> None:
        if outcome == codes.MUST_COLLATE:
            pause()
            self.collate(batch)

    def collate(self, batch: int) -> None:
        _, first, count, *_ = self.ledger.describe(batch)
        kinds = [kind for kind, _, _ in self.ledger.blobs(batch)]
        kept = [first + i for i in range(count) if kinds[i] != codes.SKIP_BLOB]
        total = sum(self.values[place % len(self.values)] for place in kept)
        self.ledger.set_ready(batch, 16384 | codes.SAMPLE_BLOB, total)

    # ---- the end

    def end(self) -> None:
        """Everything that is wanted has been delivered once."""
        self.work(2)
        assert not self.is_abandoned or self.cancel()
        self.deliver()
        assert sorted(self.delivered) == sorted(self.wanted), (self.delivered, self.wanted)
        assert self.open == []


# ---------------------------------------------------------------------------------------------- kills


def images(world: World, twin: str, run: Callable[[], None]) -> list[bytes]:
    """Memory after each change that ``run`` makes to it."""
    found = [world.memory[: world.nbytes]]

    def look() -> None:
        image = world.memory[: world.nbytes]
        if image != found[-1]:
            found.append(image)

    if twin == "c":
        tracee = Tracee(lambda pause: (pause(), run(), pause()))
        while tracee.step():
            look()
        tracee.finish()
        return found

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        look()
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    look()
    return found


def in_a_copy(run: Callable[[], None]) -> int:
    """Status of a forked process that runs this; one that hangs is killed."""
    pid = fork(lambda: (signal.alarm(HANG_S), run()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def after_kill(world: World, other: int | None) -> dict[str, Callable[[], None]]:
    """What the others may do when worker 0 is killed, while worker 1 has a sample in hand."""

    def worker_1() -> None:
        if other is not None:
            world.sample(1, other, 1000 + other)

    def found_at_once() -> None:
        world.ledger.release(0)
        worker_1()

    def found_late() -> None:
        world.bind_late()
        worker_1()
        world.work(2)
        world.deliver()
        world.ledger.release(0)

    def found_rounds_later() -> None:
        worker_1()
        world.work(2)
        world.deliver()
        world.open_more(5)
        world.ledger.release(0)
        world.work(2)
        world.deliver()
        world.open_more(5)

    def abandoned() -> None:
        world.cancel()
        worker_1()
        world.ledger.release(0)
        world.deliver()
        assert world.cancel()
        world.open_more(3)

    return {
        "found at once": found_at_once,
        "found late": found_late,
        "found rounds later": found_rounds_later,
        "abandoned": abandoned,
    }


def kill_everywhere(twin: str, thorough: bool) -> int:
    """Kill worker 0 in every state; returns how many there were.

    Args:
        thorough: Let the others do everything they can after each kill, rather than one thing in turn, and see what
            happens where worker 1 has nothing in hand.
    """
    count = 0
    for scene in SCENES:
        for worker_1_is_busy in (True, False) if thorough else (True,):
            world = World(twin, scene)
            other = world.claim_for(1) if worker_1_is_busy else None
            states = images(world, twin, lambda world=world: world.work(0))
            for number, image in enumerate(states):
                ways = list(after_kill(world, other).items())
                for name, others in ways if thorough else [ways[number % len(ways)]]:
                    world.memory[: world.nbytes] = image
                    status = in_a_copy(lambda others=others, world=world: (others(), world.end()))
                    where = f"{scene.name}, killed in state {number} of {len(states)}, {name}"
                    assert status == 0, f"{where}: status {status}"
            count += len(states)
    return count


# ---------------------------------------------------------------------------------------------- stops


def finish(world: World) -> None:
    world.work(2)
    world.deliver()


def finish_and_open(world: World) -> None:
    finish(world)
    while world.ledger.has_room(world.SIZE):
        world.open_batch()


def go_round(world: World) -> None:
    finish(world)
    world.open_more(7)


def bind_late(world: World) -> None:
    world.bind_late()
    finish(world)


def abandon(world: World) -> None:
    if world.cancel():
        world.open_batch()
        world.open_batch()


def abandon_and_go_round(world: World) -> None:
    if world.cancel():
        world.open_more(5)


def lose_another(world: World) -> None:
    world.ledger.claim(1, 1)
    world.ledger.release(1)
    finish(world)


def lose_a_full_batch(world: World) -> None:
    while (lease := world.ledger.claim(1, world.scene.max_run)) is not None:
        batch, k, count = lease
        if count == 0:
            break
        first = world.ledger.describe(batch)[1] + k
        outcomes = []
        for position in range(first, first + count):
            place, there, _ = world.ledger.reserve(1, position)
            world.write(there, place, 1000 + position)
            outcomes.append(world.ledger.fill(1, position, place))
        if codes.MUST_COLLATE in outcomes:
            break
    world.ledger.release(1)


MEANWHILE = (
    finish,
    finish_and_open,
    go_round,
    bind_late,
    abandon,
    abandon_and_go_round,
    lose_another,
    lose_a_full_batch,
)
"""What the others may do while a worker stands still."""


@dataclass(frozen=True)
class Stop:
    """Worker 0 stops at an instruction of its n-th operation, and meanwhile the others do something."""

    scene: Scene
    worker_1_is_busy: bool
    operation: int
    instruction: int
    others: Callable[[World], None]
    after_a_death: bool = False

    def __str__(self) -> str:
        busy = ", worker 1 busy" if self.worker_1_is_busy else ""
        busy += ", after a death" if self.after_a_death else ""
        where = f"instruction {self.instruction} of operation {self.operation}"
        return f"{self.scene.name}{busy}, {where}, {self.others.__name__}"

    def play(self) -> None:
        world = World("c", self.scene)
        other = world.claim_for(1) if self.worker_1_is_busy else None
        if self.after_a_death:
            world.ledger.release(2)
        tracee = Tracee(lambda pause: world.work(0, EVERYTHING, pause), *PARTS)
        try:
            for _ in range(self.operation):
                if not tracee.resume():
                    return  # there are not so many
            for _ in range(self.instruction):
                if not tracee.step_inside():
                    break
            if other is not None:
                world.sample(1, other, 1000 + other)
            self.others(world)
            tracee.finish()
            world.end()
        finally:
            tracee.kill()


@dataclass(frozen=True)
class ConsumerStop:
    """The consumer stops at an instruction of its n-th operation, and meanwhile the workers do everything they can.

    Worker 0 has a sample in hand and finishes it then; worker 1 had one and is dead.
    """

    scene: Scene
    operation: int
    instruction: int

    def __str__(self) -> str:
        where = f"instruction {self.instruction} of operation {self.operation}"
        return f"{self.scene.name}, consumer at {where}"

    def play(self) -> None:
        world = World("c", self.scene)
        worker_0 = world.claim_for(0)
        world.claim_for(1)

        def consume(pause: Callable[[], None]) -> None:
            operations: tuple[Callable[[], Any], ...] = (
                lambda: world.ledger.release(1),
                world.bind_late,
                world.deliver,
                lambda: world.ledger.has_room(world.SIZE) and world.open_batch(),
            )
            for number in range(OPERATIONS):
                pause()
                operations[number % len(operations)]()
            pause()
            world.end()

        tracee = Tracee(consume, *PARTS)
        try:
            for _ in range(self.operation):
                assert tracee.resume()
            for _ in range(self.instruction):
                if not tracee.step_inside():
                    break
            world.sample(0, worker_0, 1000 + worker_0)
            world.work(2)
            tracee.finish()
        finally:
            tracee.kill()


def stop_anywhere(seconds: float, seed: int) -> int:
    """Try random stops for a while; returns how many."""
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        scene, instruction = draw.choice(SCENES), draw.randint(1, INSTRUCTIONS)
        stop: Stop | ConsumerStop = Stop(
            scene,
            worker_1_is_busy=draw.random() < 0.5,
            operation=draw.randrange(OPERATIONS),
            instruction=instruction,
            others=draw.choice(MEANWHILE),
            after_a_death=draw.random() < 0.3,
        )
        if draw.random() < 0.3:
            stop = ConsumerStop(scene, draw.randrange(OPERATIONS), instruction)
        status = in_a_copy(stop.play)
        assert status == 0, f"{stop}: status {status}"
        count += 1
    return count


def stop_in_the_first_look(thorough: bool) -> int:
    """Worker 0 looks for what a dead worker left, and another one dies meanwhile; returns at how many instructions."""
    instructions = range(1, ADOPTION, 1 if thorough else 8)
    for instruction in instructions:
        stop = Stop(SCENES[2], False, 0, instruction, lose_a_full_batch, after_a_death=True)
        status = in_a_copy(stop.play)
        assert status == 0, f"{stop}: status {status}"
    return len(instructions)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.ledger_steps")
    parser.add_argument("--twin", choices=["c", "py"], default="c")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long to try random stops")
    parser.add_argument("--all", action="store_true", help="everything that may follow a kill")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    if hasattr(os, "sched_setaffinity"):
        # One process runs at a time, and takes turns with its tracer: three times as fast on one core as on two.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if options.twin == "c" and not POSSIBLE:
        print("processes can be stepped on x86-64 Linux only")
        return UNTRACEABLE
    try:
        print(f"kills {kill_everywhere(options.twin, options.all)}", flush=True)
        if options.twin == "c":
            print(f"looks {stop_in_the_first_look(options.all)}", flush=True)
            print(f"stops {stop_anywhere(options.seconds, seed)}")
    except PermissionError as error:
        print(error)
        return UNTRACEABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
