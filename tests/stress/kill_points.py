"""Every store is a kill point: a worker is killed after each one, and the epoch must be right to the last byte.

    python -m tests.stress.kill_points --all

A loader with all its real parts runs in one process. Its first worker does its part step by step, and the shared
memory is kept after each store to the ledger: these are all the states in which a kill can leave it. From each of them
a copy of the process finds the worker dead, lets the other one do the rest, and compares every batch with what it
should hold. Where workers hold state that dies with them, the epoch must end with an error instead. The pure core is
watched at each of its instructions, the compiled one by a tracer at each machine instruction of an operation. Of
workers that host readers of a stream, what they write beside the ledger is kept, too, at each line of their code.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import minato
import minato.engine.engine
from minato._core import ConsumerLedger, WorkerLedger
from minato._fork_safety import Borrower, starting_worker
from minato._system import thread_usage
from minato.batching.blobs import ErrorTransport, wrapped
from minato.sampling import readers
from minato.workers import hosting, reading
from minato.workers.hosting import HostWorker
from minato.workers.plan import ReaderPlan
from minato.workers.shared_state import SharedState
from minato.workers.worker import Worker
from minato.workers.worker_process import host_of, initialise
from tests.stress.tracee import POSSIBLE, UNTRACEABLE, Tracee
from tests.subprocesses import fork

HANG_S = 120
SIZE, BATCHES = 3, 5
LENGTH = SIZE * BATCHES
DELIVERED = 2
"""Batches that the loop has had before the worker is killed, so that the slots hold bytes of other samples."""
BAD = 7
"""The second sample of the first batch that the killed worker may run."""
IMAGE_BYTES = 1 << 14
"""How much of each slot is kept; the batches are smaller."""
POSITIONS, RECORDS = 64, 8
TABLE_BYTES = 64
"""Of the table of the items of a batch."""
STATE_BYTES = 1 << 15
"""How much of each state of a reader is kept; they are smaller."""
STALLED = 2000
LOST = "DataLoader worker exited unexpectedly"
CHANGING = {
    *("attach", "claim", "end", "fill", "fill_run", "note_costs", "allocate", "publish_layout"),
    *("offer", "reserve", "reserve_fields", "set_ready", "set_result", "skip"),
}
"""Operations of workers that change the ledger."""
HOSTING = tuple(module.__file__ for module in (hosting, reading, readers))
"""The code that writes to shared memory beside the ledger."""


class Flag:
    """Whether the worker that will be killed runs."""

    up = False


# ------------------------------------------------------------------------------------- the samples


def content(index: int) -> dict[str, Any]:
    data = torch.arange(24, dtype=torch.float64).reshape(4, 6) + 1000 * (index + 1)
    return {"index": index, "data": data}


class Samples(Dataset[Any]):
    """Samples that say their index in each of their bytes; ``"text"`` and ``"ragged"`` fit in no layout.

    ``BAD`` raises: ``"flaky"``: only in the worker that is killed; ``"bad"``: always.
    """

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if index == BAD and (self.kind == "bad" or (self.kind == "flaky" and Flag.up)):
            raise ValueError(f"sample {index} is bad")
        sample = content(index)
        if self.kind == "text":
            sample["text"] = f"sample {index}" * (1 + index % 3)
        elif self.kind == "ragged":
            sample["data"] = sample["data"] if index % 2 else sample["data"].tolist()
        return sample


class Listed(Samples):
    """The same, fetched in lists."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stateful(Samples):
    """The same, with a state that goes with each batch."""

    def state_dict(self) -> dict[str, int]:
        return {"one": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"one": 1}


class Wholes(Samples):
    """The same, fetched as collated batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices], "of one piece"


class Stream(IterableDataset[Any]):
    """The same samples, every second one from each of two readers, whose copies have a state."""

    kind = ""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        share = range(info.id, LENGTH, info.num_workers)
        while self.at < len(share):
            self.at += 1
            yield content(share[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


READ_BATCHES = [
    [[*range(LENGTH)[number::2]][first : first + SIZE] for first in range(0, LENGTH // 2 + 1, SIZE)]
    for number in (0, 1)
]
"""The batches of each reader in strict order."""


def places_of_states(plan: ReaderPlan | None) -> list[tuple[int, int, int]]:
    """Where the headers and the contents of the states of readers are: descriptor, bytes, and offset."""
    if plan is None or plan.slots is None:
        return []
    descriptor, count = plan.slots._descriptor, plan.number * (plan.slots.depth + 1)
    starts = ((i + 1) * readers._REGION for i in range(count))
    heads = descriptor, count * readers._HEADER.size, 0
    return [heads, *((descriptor, STATE_BYTES, start) for start in starts)]


class Offering(HostWorker):
    """It offers all items, however cheap."""

    @property
    def _is_offering(self) -> bool:
        return self._offers


def collate(samples: Any) -> Any:
    """A collate function of the user's."""
    if type(samples) is tuple:
        samples = samples[0]
    data = [torch.as_tensor(sample["data"], dtype=torch.float64) for sample in samples]
    return {"index": torch.tensor([s["index"] for s in samples]), "data": torch.stack(data)}


def check(batch: Any, kind: str) -> list[int]:
    """Compare every byte of a batch; returns its indices."""
    indices: list[int] = batch["index"].tolist()
    assert len(batch["data"]) == len(indices), batch
    for row, index in zip(batch["data"], indices, strict=True):
        assert torch.equal(row, content(index)["data"]), f"{index} is not what it should be: {row}"
    if kind == "text":
        assert batch["text"] == [f"sample {index}" * (1 + index % 3) for index in indices]
    return indices


# --------------------------------------------------------------------------------------- the paths


@dataclass(frozen=True)
class Scene:
    """One way from a sample to the training loop."""

    name: str
    dataset: Samples | Stream = field(default_factory=Samples)
    options: dict[str, Any] = field(default_factory=dict)
    cheap: bool = False  # samples are claimed in runs
    defers: bool = False
    slow: bool = False  # all samples count as slow
    restarts: bool = True  # another worker takes the place of the dead one

    @property
    def kind(self) -> str:
        return self.dataset.kind

    @property
    def is_stream(self) -> bool:
        return isinstance(self.dataset, Stream)


# With 1, each sample has its own place.
ARRIVAL: dict[str, Any] = {"order": minato.Arrival(2)}
COLLATE: dict[str, Any] = {"collate_fn": collate}
SKIP: dict[str, Any] = {"errors": "skip"}
DEFER: dict[str, Any] = {**ARRIVAL, "transforms": [copy.copy]}
READ: dict[str, Any] = {"readers": 2, "transforms": [copy.copy], "prefetch_factor": 2}
SCENES = (
    Scene("single"),
    Scene("run", cheap=True),
    Scene("text", Samples("text"), cheap=True),
    Scene("ragged", Samples("ragged"), COLLATE, cheap=True),
    Scene("collate_fn", options=COLLATE, cheap=True),
    Scene("collate_fn, single", options=COLLATE),
    Scene("list", Listed()),
    Scene("list, collate_fn", Listed(), COLLATE),
    Scene("list, not a list", Wholes(), COLLATE),
    Scene("error", Samples("flaky"), cheap=True),
    Scene("error, single", Samples("flaky")),
    Scene("error, collate_fn", Samples("flaky"), COLLATE, cheap=True),
    Scene("error, list", Listed("flaky")),
    Scene("skip", Samples("bad"), SKIP, cheap=True),
    Scene("skip, single", Samples("bad"), SKIP),
    Scene("skip, collate_fn", Samples("bad"), {**SKIP, **COLLATE}, cheap=True),
    Scene("skip, list", Listed("bad"), SKIP),
    Scene("arrival", options=ARRIVAL),
    Scene("arrival, run", options=ARRIVAL, cheap=True),
    Scene("arrival, text", Samples("text"), ARRIVAL, cheap=True),
    Scene("arrival, collate_fn", options={**ARRIVAL, **COLLATE}),
    Scene("arrival, error", Samples("flaky"), ARRIVAL),
    Scene("arrival, skip", Samples("bad"), {**ARRIVAL, **SKIP}),
    Scene("fast_first", options={**ARRIVAL, "order": "fast_first"}, slow=True),
    Scene("concurrent reads", options={"fetch_concurrency": 2}),
    Scene("concurrent reads, collate_fn", Samples("flaky"), {"fetch_concurrency": 2, **COLLATE}),
    Scene("dataset with a state", Stateful(), restarts=False),
    Scene("deferred", options=DEFER, defers=True),
    Scene("deferred, error", Samples("flaky"), DEFER, defers=True),
    Scene("deferred, fast_first", options={**DEFER, "order": "fast_first"}, defers=True),
    Scene("stream", Stream(), READ),
    Scene("stream, arrival", Stream(), {**READ, "order": minato.Arrival(4)}),
)


class Stage:
    """In the place of the workers' processes: two workers that are steps of this program."""

    processes = threads = ()

    def __init__(self, plan: Any, context: Any, state: Any, *others: Any) -> None:
        self.context = context
        self.ledger = state.ledger
        self.workers: list[Worker] = []
        self.stalled = 0
        self.lost = False  # whether a worker that is not replaced is dead

    def make(self, number: int, scene: Scene, wrap: Callable[[Any], Any] = lambda one: one) -> Any:
        state, context = SharedState(self.context.layout), self.context
        ledger: WorkerLedger = wrap(state.worker_ledger(number))
        told = wrapped(f"worker process {number}", in_process=True)
        if scene.is_stream:  # each process has a copy of the dataset
            pipeline = context.plan.pipeline._replace(dataset=copy.deepcopy(scene.dataset))
            context = dataclasses.replace(context, plan=context.plan._replace(pipeline=pipeline))
        host = host_of(context.plan, number, state)
        assert host is None or initialise(context.plan, number, host) is None
        errors = ErrorTransport((Exception,), told)
        worker = context.worker(ledger, state, errors, host=host, kind=Offering)
        if scene.cheap:
            worker.runner.cost_estimate.draws, worker.runner.cost_estimate.mean_ns = False, 1000.0
        return worker

    def wait(self, seen: int, timeout_s: float) -> None:
        self.stalled += 1
        assert self.stalled < STALLED, "the epoch does not go on"
        for worker in self.workers:
            work(worker, 1)

    def start(self, enough: Any = None) -> None:
        """The workers begin when the consumer waits."""

    def check(self) -> None:
        """Nobody dies but where the program says so."""
        if self.lost:
            raise RuntimeError(LOST)

    def check_early(self) -> None:
        """A loss is noticed when the consumer waits."""

    def usage(self) -> Any:
        return thread_usage([threading.get_native_id()])

    def shut_down(self) -> bool:
        return True

    end_rest = shut_down


def work(worker: Any, steps: int) -> None:
    """Do so many steps, and wait for reads under way in between."""
    for _ in range(steps):
        if worker.step():
            continue
        if worker.idle:
            return
        worker._reads.wait(0.05)


def defer(worker: Any, ledger: Any) -> None:
    """Have a worker defer a sample, run another one, resume the first, and so on."""
    ledger.slow_ns = 1
    worker.runner.cost_estimate.draws = True  # which is known after a while
    deferral = worker._deferral
    deferral.allows = lambda position: deferral._sample is None
    due = itertools.cycle((False, False, True))
    deferral.is_due = lambda: next(due)


class Image(NamedTuple):
    """Shared memory at one moment."""

    words: list[bytes]
    slots: list[bytes]  # of batches and of items
    states: list[bytes]  # headers and contents of those of readers


class World:
    """A loader of a scene in the middle of an epoch, just before its first worker begins."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        usual = {"batch_size": SIZE, "num_workers": 2, "prefetch_factor": 1}
        usual |= {"multiprocessing_context": "fork", "persistent_workers": True}
        small = {"make_pool": Stage, "_POSITIONS": POSITIONS, "_BATCH_RECORDS": RECORDS}
        with mock.patch.multiple(minato.engine.engine, **small):
            self.loader = minato.DataLoader(scene.dataset, **{**usual, **scene.options})
            self.iterator: Any = iter(self.loader)
        self.stage: Stage = self.iterator._source._pool
        self.ledger = self.stage.ledger
        self.ledger.slow_ns = int(scene.slow)
        layout = self.stage.context.layout
        shared = memoryview(layout.segment.array)
        nbytes = ConsumerLedger.nbytes(2, *self.ledger.capacity)
        self.memory = [shared[:nbytes], shared[layout.offsets[-2] : layout.offsets[-1]]]
        self.states = places_of_states(self.stage.context.plan.readers)
        numbers = (0, 1) if scene.is_stream else (1,)
        self.stage.workers = [self.stage.make(number, scene) for number in numbers]
        self.batches: list[list[int]] = []
        for _ in range(DELIVERED):
            self._take_batch()
        # A copy of this process has none of its threads, so each makes a worker anew.
        for number, worker in zip(numbers, self.stage.workers, strict=True):
            worker.close()
            self.ledger.release(number)
        taken = self.iterator._source._dispatcher._open
        items = [batch.indices_slot for batch in taken if batch.indices_slot is not None]
        arena = memoryview(self.stage.context.store.segment.array)
        self.memory += [arena[slot.start : slot.start + TABLE_BYTES] for slot in items]
        slots = [*items, *(batch.slot for batch in taken)]
        self.slots = [arena[slot.start : slot.start + IMAGE_BYTES] for slot in slots]

    def _take_batch(self) -> None:
        self.batches.append(check(next(self.iterator), self.scene.kind))
        for reader in (self.loader.state_dict()["readers"] or {}).get("each", ()):
            if (state := reader["state"]) is not None:  # it begins again at its end
                assert state["dataset"]["at"] in (state["ordinal"], 0), state["ordinal"]

    @property
    def got(self) -> Counter[int]:
        return Counter(itertools.chain.from_iterable(self.batches))

    @property
    def words(self) -> list[bytes]:
        """Ledger, board, tables of items, and headers of states: what says that the rest is there."""
        return [*map(bytes, self.memory), *(os.pread(*each) for each in self.states[:1])]

    def _go_on_to_the_error(self) -> None:
        """Compare the batches that come before it."""
        self.stage.lost = True
        delivered = sum(self.got.values()) // SIZE
        with pytest.raises(RuntimeError, match=LOST):
            for first in range(delivered * SIZE, 2 * LENGTH, SIZE):
                indices = check(next(self.iterator), self.scene.kind)
                assert indices == list(range(first, first + SIZE))

    def image(self) -> Image:
        slots = [bytes(slot) for slot in self.slots]
        return Image(self.words, slots, [os.pread(*each) for each in self.states])

    def restore(self, image: Image) -> None:
        kept = *image.slots, *image.words[: len(self.memory)]
        for part, content in zip((*self.slots, *self.memory), kept, strict=True):
            part[:] = content
        for (descriptor, nbytes, offset), state in zip(self.states, image.states, strict=True):
            os.pwrite(descriptor, state.ljust(nbytes, b"\0"), offset)

    # ---- the worker that is killed

    def images(self) -> list[Image]:
        """Memory after each store of the first worker."""
        found = [self.image()]

        def look() -> None:
            if self.words != found[-1].words:
                found.append(self.image())

        Flag.up = True
        try:
            (self._step_by_instruction if is_compiled() else self._step_by_line)(look)
        finally:
            Flag.up = False
        return found

    def _run(self, wrap: Callable[[Any], Any]) -> None:
        worker = self.stage.make(0, self.scene, wrap)
        if self.scene.defers:
            defer(worker, self.ledger)
        many = self.scene.is_stream or self.scene.options.get("fetch_concurrency")
        work(worker, 40 if many else 2 * SIZE)
        worker.close()

    def _step_by_line(self, look: Callable[[], None]) -> None:
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            file = frame.f_code.co_filename
            if "_core" in file:
                frame.f_trace_opcodes = True
            elif file not in HOSTING:
                return None
            look()
            return trace

        sys.settrace(trace)
        try:
            self._run(lambda ledger: ledger)
        finally:
            sys.settrace(None)
        look()

    def _step_by_instruction(self, look: Callable[[], None]) -> None:
        with starting_worker(Borrower()):  # it changes the memory of all
            tracee = Tracee(lambda pause: self._run(lambda ledger: Pausing(ledger, pause)))
        try:
            while tracee.pid:  # it stands before an operation
                while tracee.step():
                    look()
                tracee.resume()
                look()
        finally:
            tracee.kill()
        look()

    # ---- what becomes of the epoch

    def survive(self, image: Image, late: bool) -> None:
        """Find the first worker dead, or when the other one has done all it could, and go on to the epoch's end."""
        self.restore(image)
        self.stage.workers = [self.stage.make(1, self.scene)]
        # This copy stands for the consumer itself.
        self.iterator._owner = self.iterator._source.arena.owner = os.getpid()
        if late:
            work(self.stage.workers[0], 20)
        if not self.scene.restarts:
            self._go_on_to_the_error()
            return
        self.ledger.release(0)
        if self.scene.is_stream:
            host = self.stage.make(0, self.scene)
            host._offers = not late  # otherwise it takes what the dead one has left
            self.stage.workers.append(host)
        raised: list[str] = []
        while True:
            try:
                self._take_batch()
            except StopIteration:
                break
            except ValueError as error:
                raised.append(str(error))
        missing = set(range(LENGTH)) - set(self.got)
        assert set(self.got.values()) == {1}, f"repeated: {self.got}"
        if self.scene.is_stream and self.iterator._source.plan.worker.order.in_order:
            assert self.batches == list(itertools.chain(*zip(*READ_BATCHES, strict=True)))
        if self.scene.kind == "bad":
            assert missing == {BAD}
        else:
            assert len(raised) <= (self.scene.kind == "flaky"), raised
            assert all(f"sample {BAD} is bad" in text for text in raised), raised
            assert len(missing) == SIZE * len(raised), f"lost: {missing}"
            assert not raised or BAD in missing


class Pausing:
    """A ledger whose user stops before and after each operation that changes it."""

    def __init__(self, ledger: Any, pause: Callable[[], None]) -> None:
        self._ledger = ledger
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ledger, name)
        return partial(self._paused, value) if name in CHANGING else value

    def _paused(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        self._pause()
        try:
            return operation(*arguments)
        finally:
            self._pause()


def is_compiled() -> bool:
    return minato.implementation()[0] == "compiled"


def in_a_copy(run: Callable[[], None]) -> int:
    """Status of a forked process that runs this; one that hangs is killed."""
    pid = fork(lambda: (signal.alarm(HANG_S), run()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_everywhere(scene: Scene, every: int) -> int:
    """Kill the worker after each store, or after every so many of them; returns how often."""
    world = World(scene)
    images = world.images()
    numbers = range(0, len(images), every)
    for number in numbers:
        late = number // every % 2 == 1
        status = in_a_copy(partial(world.survive, images[number], late))
        assert status == 0, f"{scene.name}: killed in state {number} of {len(images)}, {late=}"
    world.restore(images[0])
    return len(numbers)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.kill_points")
    parser.add_argument("--all", action="store_true", help="after each store, not a few of them")
    parser.add_argument("--scene", action="append", help="only these")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if hasattr(os, "sched_setaffinity"):
        # One process runs at a time, and takes turns with its tracer.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if is_compiled() and not POSSIBLE:
        print("processes can be stepped on x86-64 Linux only")
        return UNTRACEABLE
    for scene in [each for each in SCENES if each.name in (options.scene or {each.name})]:
        begun = time.monotonic()
        try:
            kills = kill_everywhere(scene, 1 if options.all else 13)
        except PermissionError as error:
            print(error)
            return UNTRACEABLE
        print(f"{scene.name}: {kills} kills, {time.monotonic() - begun:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
