"""The compiled core against its pure Python form: ns per operation of each module, in one process."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import mmap
import os
import random
import signal
import time
import timeit
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.harness import report

Operations = dict[str, tuple[str, dict[str, Any]]]
"""What is measured: its label, then a statement and the names it uses."""
Figures = dict[str, dict[str, float]]
"""ns per operation: label, then column."""

BACKENDS = {"c": "compiled", "py": "pure"}
KEYS = list(range(256))
BATCH = 32
ROUNDS = 7
_WAIT_S = 1.0


def counting(module: ModuleType) -> Operations:
    """``record`` runs for every sample, ``ask``, ``deliver``, ``count``, ``enter`` and ``leave`` for every batch."""
    full, older = module.Histogram(), module.Histogram()
    for value in range(2000):
        full.record(value**2)
    arrivals, occurrences = module.Arrivals(hash), module.Occurrences(len(KEYS), hash)
    calls = module.Calls(0)
    calls.due_ns = 1 << 62

    def batch() -> None:
        start = -arrivals.prefix
        arrivals.ask(KEYS)
        arrivals.deliver(KEYS, start)

    names = {"full": full, "older": older, "total": module.Histogram()}
    names |= {
        "batch": batch,
        "occurrences": occurrences,
        "keys": KEYS,
        "numbers": itertools.count(),
        "calls": calls,
    }
    return {
        "256 indices requested and delivered": ("batch()", names),
        "256 indices counted": ("occurrences.count(keys, next(numbers))", names),
        "call of next()": ("calls.enter(9_000); calls.leave(9_000, 256, 65_536)", names),
        "record": ("total.record(123_456)", names),
        "percentile": ("full.percentile(0.75)", names),
        "merge": ("total.merge(full)", names),
        "snapshot": ("full.snapshot()", names),
        "subtract": ("full.subtract(older)", names),
    }


def ledger(module: ModuleType) -> Operations:
    """The scheduling of one batch of 256 samples: published, claimed, filled, delivered, retired."""
    sizes, slot = (4, 64, 4096), (0, 0, 1 << 20)

    def bound(most: int) -> None:
        batch = book.open(KEYS, 256, slot, 0, 0, 0, True)
        worker.set_result(batch, 64, 64)
        while (run := worker.claim(most)) is not None:
            worker.describe(batch)
            worker.fill_run(batch, run.k, run.count)
        book.describe(batch)
        book.occupants(batch)
        book.retire(batch)

    def arrival(most: int) -> None:
        batch = book.open(KEYS, 256, slot, 0, 0, 0, False)
        worker.set_result(batch, 64, 64)
        while (run := worker.claim(most)) is not None:
            position = worker.describe(batch).first + run.k
            place, _, count = worker.reserve(position, run.count)
            worker.fill(position, place, count)
        book.describe(batch)
        book.occupants(batch)
        book.retire(batch)

    nbytes = module.ConsumerLedger.nbytes(*sizes)
    book, full = (module.ConsumerLedger(bytearray(nbytes), sizes) for _ in range(2))
    worker = book.worker(0)
    for each in (book, full):
        each.open_epoch(0)
    for _ in range(16):
        full.open(KEYS, 256, slot, 0, 0, 0, False)
    names = {"bound": bound, "arrival": arrival, "worker": worker, "full": full}
    names["dies"] = full.worker(1)
    return {
        "a batch of 256 in one run": ("bound(256)", names),
        "a batch of 256, sample by sample": ("bound(1)", names),
        "a batch of 256 in one run, places by arrival": ("arrival(256)", names),
        "a batch of 256, places by arrival": ("arrival(1)", names),
        "claim with nothing to claim": ("worker.claim(1)", names),
        "claim 256 and die, 4096 in flight": ("dies.claim(256); full.release(1)", names),
    }


def sample_loop(module: ModuleType) -> Operations:
    """What one sample of a run costs besides the dataset's own call: 256 samples that do nothing."""
    names = {
        "run_samples": module.run_samples,
        "fetch": KEYS.__getitem__,
        "keys": KEYS,
        "lease": module.Lease(),
        "durations": array("q", bytes(8 * len(KEYS))),
        "nothing": lambda epoch, key: None,
    }
    call = "run_samples(fetch, keys, 0, lease, durations, {}, 0, Exception)"
    return {
        "256 calls, no bookkeeping": ("[fetch(key) for key in keys]", names),
        "run of 256": (call.format("None"), names),
        "run of 256, each bound": (call.format("nothing"), names),
        **_steps(module),
    }


def seeding(module: ModuleType) -> Operations:
    """A sample's randomness; the last operations are the public calls that it replaces."""
    from minato.transforms import rng

    with mock.patch.object(rng, "StateWriter", module.StateWriter):
        randomness = rng.SampleRandomness(5)
    names = {
        "mix_seed": module.mix_seed,
        "bind": randomness.bind,
        "bind_thread": rng.SampleRandomness(5, bind_globals=False).bind,
        "random": random,
        "np": np,
        "draw": torch.zeros(1),
        "generator": torch.default_generator,
    }
    seed = "random.seed(2); np.random.seed(2); generator.manual_seed(2)"
    draws = "random.random(); np.random.random_sample(); draw.random_()"
    return {
        "mix_seed": ("mix_seed(1, 2, 3)", names),
        "bind a sample": ("bind(1, 2)", names),
        "bind a sample, key is text": ("bind(1, 'images/000002.jpg')", names),
        "bind a sample, in a thread": ("bind_thread(1, 2)", names),
        "bind and draw once from each": (f"bind(1, 2); {draws}", names),
        "replaced: seed three generators": (seed, names),
        "replaced: ... and draw once from each": (f"{seed}; {draws}", names),
    }


def _steps(module: ModuleType) -> Operations:
    """Four resumable transforms that do nothing, against calling them straight through."""

    def nothing(value: int) -> int:
        return value

    names = {
        "run_steps": module.run_steps,
        "nothing": nothing,
        "chain": (nothing,) * 4,
        "later_ns": time.monotonic_ns() + 3_600_000_000_000,
        "laps": np.zeros(4, np.int64),
        "lease": module.Lease(),
    }
    return {
        "four steps, no bookkeeping": ("nothing(nothing(nothing(nothing(1))))", names),
        "four steps": ("run_steps(chain, 1, 0, 0)", names),
        "four steps, deadline": ("run_steps(chain, 1, 0, later_ns)", names),
        "four steps, deadline, lease": ("run_steps(chain, 1, 0, later_ns, None, lease)", names),
        "four steps, deadline, lease, laps": (
            "run_steps(chain, 1, 0, later_ns, laps, lease)",
            names,
        ),
    }


def wait(module: ModuleType) -> Operations:
    """Signalling an event, and how soon another process learns of it."""
    names: dict[str, Any] = {
        "event_count": module.EventCount(bytearray(64), 0),
        "missed": module.EventCount(bytearray(b"\1" + bytes(63)), 0),
        "call": _partner(module),
    }
    return {
        "notify, nobody asleep": ("event_count.notify()", names),
        "wait for an event that has been": ("missed.wait(0, 1.0)", names),
        "hand over to another process and back": ("call()", names),
    }


def _partner(module: ModuleType) -> Callable[[], None]:
    """Start a process that answers each notification; the function notifies it and waits for the answer."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    there, back = module.EventCount(memory, 0), module.EventCount(memory, 64)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        seen = 0
        while os.getppid() == parent:
            if there.wait(seen, _WAIT_S):
                seen += 1
                back.notify()
        os._exit(0)
    atexit.register(os.waitpid, pid, 0)
    atexit.register(os.kill, pid, signal.SIGKILL)

    def call() -> None:
        seen = back.events
        there.notify()
        while not back.wait(seen, _WAIT_S):
            pass

    return call


def packing(module: ModuleType) -> Operations:
    """Writing one sample to its place in a batch. Pages are warm, small samples stay in cache."""
    region = np.zeros((1 << 24) + 4096, np.uint8)
    row = ("array", "<f4", (16,), 0)
    found: Operations = {}

    def add(name: str, spec: tuple[Any, ...], sample: Any, fits: bool = True) -> None:
        packer = module.Packer(spec, BATCH)
        names = {"packer": packer, "sample": sample, "address": region.ctypes.data, "r": region}
        if (packer.pack(sample, names["address"], BATCH // 2) is not None) is not fits:
            raise AssertionError(f"{name} does not fit as expected")
        found[f"pack ({name})"] = (f"packer.pack(sample, address, {BATCH // 2})", names)

    label = ("int", 1 << 24)
    add("array of 16 float32, int", ("tuple", tuple, (row, label)), (np.ones(16, np.float32), 1))
    for name, tensor in _tensors().items():
        field = ("tensor", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0)
        add(name, ("tuple", tuple, (field, label)), (tensor, 1))
    fields = (("float", 0), ("int", 1 << 20), ("text", str))
    add(
        "dict of float, int, str",
        ("dict", ("x", "y", "name"), fields),
        {"x": 1.0, "y": 2, "name": "a"},
    )
    add("a misfit", ("tuple", tuple, (row, label)), (torch.ones(16), 1), fits=False)
    texts = [f"text {k}" for k in range(1000)]
    found["types_in (1000 texts)"] = (
        "types_in(texts)",
        {"types_in": module.types_in, "texts": texts},
    )
    return found


def _tensors() -> dict[str, torch.Tensor]:
    hwc = torch.ones(224, 224, 3, dtype=torch.uint8)
    return {
        "tensor of 16 float32, int": torch.ones(16),
        "tensor 3x64x64 float32, int": torch.ones(3, 64, 64),
        "tensor 3x224x224 uint8, int": hwc.reshape(3, 224, 224),
        "the same, permuted from 224x224x3": hwc.permute(2, 0, 1),
        "crop 224x224x3 of uint8, int": torch.ones(256, 256, 3, dtype=torch.uint8)[16:240, 16:240],
    }


def other_copies() -> dict[str, Operations]:
    """The copy of the tensor alone, by NumPy's and torch's own functions: column, then operations."""
    found: dict[str, Operations] = {"numpy": {}, "torch": {}}
    for name, source in _tensors().items():
        to = torch.zeros(source.shape, dtype=source.dtype)
        arrays = {"copy": np.copyto, "to": to.numpy(), "source": source.numpy()}
        found["numpy"][f"pack ({name})"] = ("copy(to, source)", arrays)
        found["torch"][f"pack ({name})"] = ("to.copy_(source)", {"to": to, "source": source})
    return found


MODULES = {each.__name__: each for each in (counting, ledger, packing, sample_loop, seeding, wait)}


def ns_per_call(statement: str, names: dict[str, Any], rounds: int, round_s: float) -> float:
    """Return the best of ``rounds`` means; the others were disturbed by something."""
    timer = timeit.Timer(statement, globals=names)
    calls = 1
    while (taken_s := timer.timeit(calls)) < round_s / 10:
        calls *= 10
    calls = max(1, int(calls * round_s / taken_s))
    return min(timer.repeat(rounds, calls)) / calls * 1e9


def measure(name: str, backends: list[str], rounds: int, round_s: float) -> Figures:
    time_of = functools.partial(ns_per_call, rounds=rounds, round_s=round_s)
    columns = {
        BACKENDS[backend]: MODULES[name](importlib.import_module(f"minato._core._{name}_{backend}"))
        for backend in backends
    }
    if name == "packing":
        columns.update(other_copies())
    found: Figures = {}
    for column, operations in columns.items():
        for label, (statement, names) in operations.items():
            found.setdefault(label, {})[column] = time_of(statement, names)
    return found


def lines(module: str, figures: Figures, columns: list[str]) -> list[list[str]]:
    found = []
    for label, ns in figures.items():
        cells = [f"{ns[column]:,.0f}" if column in ns else "" for column in columns]
        both = {"compiled", "pure"} <= ns.keys()
        found.append([module, label, *cells, f"{ns['pure'] / ns['compiled']:.1f}" if both else ""])
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("micro", __doc__, ROUNDS, publishes=True, rows=MODULES)
    parser.add_argument("--impl", choices=["py", "c", "both"], default="both")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    backends = ["c", "py"] if options.impl == "both" else [options.impl]
    page = report.Page("core", options.out)
    columns = [*(BACKENDS[backend] for backend in backends), "numpy", "torch"]
    found = []
    for name in options.rows:
        round_s = 0.002 if options.short else 0.05
        found += lines(name, measure(name, backends, options.repeats, round_s), columns)
        page.say(f"{name}: done")
    page.add("# The compiled core against its pure Python form\n")
    page.add("Written by `python -m bench.micro`: ns per operation, the best of several rounds.\n")
    head = ["module", "operation", *columns, "pure / compiled"]
    page.add("## Figures\n", report.table(head, found))
    page.finish()


if __name__ == "__main__":
    report.program(main)
