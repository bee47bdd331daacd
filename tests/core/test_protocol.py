"""The description of the protocol says what both cores, the model, and the loader's own parts do."""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from minato._core import _ledger_py as spec
from minato._core import codes
from minato.batching.arena import Arena
from minato.batching.collate import Collate
from minato.batching.serialization import LocalStore
from minato.batching.writer import BatchWriter
from minato.errors import SKIP
from tests.model import explore
from tests.model.ledger import CODE, COLLATING, Ledger, Setting
from tests.protocol import PATHS, STORES, WORDS, delivery
from tests.stress.tracee import POSSIBLE, Tracee

TWIN = "ledger"
SLOT = (4096, 4160, 1 << 20)
SIZES = 2, 2, 4
BLOB = 64 | codes.SAMPLE_BLOB


# ------------------------------------------------------------------------- the cores, store by store


class Words:
    """The words of a ledger, which say in which order they change."""

    def __init__(self, twin: ModuleType, bound: bool) -> None:
        self.memory = mmap.mmap(-1, 1 << 14)
        self.ledger = twin.ConsumerLedger(self.memory, SIZES)
        self.worker = self.ledger.worker(0)
        offset = spec._HEADER.itemsize + SIZES[0] * spec._WORKER.itemsize
        self.batches = np.frombuffer(self.memory, spec._BATCH, SIZES[1], offset)
        offset += self.batches.nbytes
        self.positions = np.frombuffer(self.memory, spec._POSITION, SIZES[2], offset)
        self.ledger.open_epoch(0)
        self.batch = self.ledger.open([7, 8], 2, SLOT, 0, 0, 0, bound)
        self.before = self.now()
        self.changed: list[str] = []

    def now(self) -> dict[str, bytes]:
        words = {}
        for name in WORDS:
            record = self.batches if name in ("result", "state") else self.positions
            words[name] = record[name].tobytes()
        return words

    def look(self) -> None:
        now = self.now()
        changed = [name for name in WORDS if now[name] != self.before[name]]
        assert len(changed) <= 1, f"{changed} change at once"
        self.changed += changed
        self.before = now


def run_pure(words: Words, run: Callable[[], object]) -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "_core" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        words.look()
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    words.look()


def run_compiled(words: Words, run: Callable[[], object]) -> None:
    try:
        tracee = Tracee(lambda pause: (pause(), run(), pause()))
    except PermissionError as error:
        pytest.skip(str(error))
    while tracee.step():
        words.look()
    tracee.finish()


def operations(
    ledger: Any, worker: Any, batch: int
) -> dict[str, tuple[list[Callable[[], object]], bool]]:
    """For each operation of the description what goes before, it itself last, and whether places are bound."""

    def claim() -> object:
        return worker.claim(2)

    def layout() -> object:
        return worker.publish_layout(batch, 4160)

    def reserve(position: int) -> Callable[[], object]:
        return lambda: worker.reserve(position)

    def fill(position: int) -> Callable[[], object]:
        return lambda: worker.fill(position, position)

    def attach() -> object:
        return worker.attach(0, BLOB, 1)

    def result() -> object:
        return worker.set_result(batch, BLOB, 1)

    def fill_run() -> object:
        return worker.fill_run(batch, 0, 2)

    def half() -> object:
        return worker.fill_run(batch, 0, 1)

    def release() -> object:
        return ledger.release(0)

    def skip() -> object:
        return worker.skip(1)

    def ready() -> object:
        return worker.set_ready(batch, BLOB, 1)

    return {
        "claim": ([claim], True),
        "reserve": ([claim, reserve(0)], False),
        "attach": ([claim, attach], True),
        "set_result": ([claim, result], True),
        "fill": ([claim, layout, reserve(0), reserve(1), fill(0), fill(1)], False),
        "fill_run": ([claim, layout, fill_run], True),
        "skip": ([claim, layout, half, skip], True),
        "set_ready": ([claim, attach, fill_run, ready], True),
        "release": ([claim, attach, release], True),
        "release, result": ([claim, result, release], True),
    }


@pytest.mark.parametrize("name", STORES)
def test_a_core_stores_what_is_described(twin: ModuleType, name: str) -> None:
    compiled = twin.__name__.endswith("_c")
    if compiled and not POSSIBLE:
        pytest.skip("processes can be stepped on x86-64 Linux only")
    bound = operations(None, None, 0)[name][1]
    words = Words(twin, bound)
    *before, operation = operations(words.ledger, words.worker, words.batch)[name][0]
    for each in before:
        each()
    words.before = words.now()
    (run_compiled if compiled else run_pure)(words, operation)
    assert without_repeats(words.changed, "state") == STORES[name]


def without_repeats(changed: list[str], name: str) -> tuple[str, ...]:
    """A batch may be COLLATING for a moment before it is READY: there is one change of its state."""
    runs = itertools.groupby(changed)
    return tuple(word for word, run in runs for _ in range(1 if word == name else len(list(run))))


# ------------------------------------------------------------------------------------- the model


class Alone:
    """Runs the model's operations by themselves, and notes which words they change."""

    def __init__(self, model: Ledger) -> None:
        self.model = model
        self.memory = bytearray(len(model.memory.names))
        self.changed: list[str] = []

    def __call__(self, steps: Any) -> Any:
        """Run an operation; its answer."""
        answer = None
        while True:
            try:
                op = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._do(op)

    def _do(self, op: explore.Op) -> Any:
        code, word, value, other = op
        old = self.memory[word]
        if code in (explore.STORE, explore.STORE_SC, explore.POKE):
            self._store(word, value)
        elif code in (explore.CAS, explore.OWN):
            if old == value:
                self._store(word, other)
            return old == value
        elif code == explore.ADD:
            self.memory[word] += value
        return old

    def _store(self, word: int, value: int) -> None:
        name = self.model.memory.names[word].partition("[")[0]
        if self.memory[word] != value and name in WORDS:
            self.changed.append(name)
        self.memory[word] = value


def modelled(name: str) -> tuple[str, ...]:
    bound = name not in ("reserve", "fill")
    model = Ledger(Setting(((2,),), bound=bound, max_run=2))
    if name in ("skip", "set_ready"):
        model = Ledger(Setting(((2,),), max_run=2, collated="yes"))
    run = Alone(model)
    run(model.open_epoch(0))
    run(model.open(2, 0, 0))

    def attach(kind: int) -> Iterator[explore.Op]:
        yield explore.poke(model.blob[0], kind)

    def write() -> None:
        run(model.write(0, 0))
        run(model.write(1, 1))

    run.changed.clear()
    run(model.claim(0))
    if name == "claim":
        return tuple(run.changed)
    if name in ("reserve", "fill"):
        if name == "fill":
            run(model.reserve(0, 0))
            run(model.reserve(0, 1))
            write()
            run(model.fill(0, 0, 0))
        run.changed.clear()
        run(model.fill(0, 1, 1) if name == "fill" else model.reserve(0, 0))
    elif name in ("attach", "release"):
        run.changed.clear()
        run(attach(2))
        if name == "release":
            run.changed.clear()
            run(model.release(0, (0,)))
    elif name in ("set_result", "release, result"):
        run.changed.clear()
        run(model.set_result(0))
        if name == "release, result":
            run.changed.clear()
            run(model.release(0, (0,)))
    else:
        write()
        if name != "fill_run":
            run(model.fill_run(0, 0, 0, 1))
        run.changed.clear()
        if name == "fill_run":
            run(model.fill_run(0, 0, 0, 2))
        elif name == "skip":
            run(model.skip(0, 1))
        else:
            run(model.fill_run(0, 0, 1, 1))
            run.changed.clear()
            run(model.set_ready(0))
    state = run.memory[model.state[0]]
    assert state & CODE != COLLATING or name == "skip"
    return without_repeats(run.changed, "state")


@pytest.mark.parametrize("name", STORES)
def test_the_model_stores_what_is_described(name: str) -> None:
    assert modelled(name) == STORES[name]


# ------------------------------------------------------------------------------ the loader's parts


class Recorder:
    """A worker's end of a ledger that writes down what changes it."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self.calls: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def attach(self, place: int, blob: int, nbytes: int) -> None:
        kind = {codes.ERROR_BLOB: "error", codes.SKIP_BLOB: "mark", codes.SAMPLE_BLOB: "write"}
        self.calls.append((kind[blob & codes.KIND_MASK], place, 1))
        self._ledger.attach(place, blob, nbytes)

    def set_result(self, *arguments: int) -> None:
        self.calls.append(("result", 0, 1))
        self._ledger.set_result(*arguments)

    def fill_run(self, batch: int, k: int, count: int) -> int:
        self.calls.append(("fill", k, count))
        return int(self._ledger.fill_run(batch, k, count))

    def skip(self, position: int) -> Any:
        self.calls.append(("skip", position, 1))
        return self._ledger.skip(position)


@pytest.mark.parametrize(("count", "bad"), [(1, 0), (4, 0), (4, 2), (4, 3)])
@pytest.mark.parametrize("path", PATHS)
def test_a_worker_delivers_as_is_described(
    twin: ModuleType, path: str, count: int, bad: int
) -> None:
    arena = Arena(shared=False)
    slot = arena.acquire()
    consumer = twin.ConsumerLedger(bytearray(1 << 16), (2, 4, 16))
    ledger: Any = Recorder(consumer.worker(0))
    consumer.open_epoch(0)
    whole = path.startswith("whole")
    size = count if whole else count + 1
    batch = consumer.open(
        list(range(size)), size, (slot.start, slot.start, slot.end), 0, 0, 0, True
    )
    claim = ledger.claim(count)
    assert (claim.batch, claim.k, claim.count) == (batch, 0, count)
    writer = BatchWriter(ledger, LocalStore(arena.segment), Collate(list, True), skips=True)
    keys: list[Any] = list(range(count))
    samples: list[Any] = [SKIP if "skip" in path and key == bad else key for key in keys]
    error = ValueError("bad") if path == "error" else None
    if error is not None:
        samples = samples[:bad]
    writer.deliver(batch, 0, keys, samples, error, whole=whole)
    expected: list[tuple[str, int, int]] = []
    for name, first, number in delivery(path, count, bad):
        if name == "write":
            expected += [("write", first + i, 1) for i in range(number)]
        else:
            expected.append((name, first, number))
    assert ledger.calls == expected
