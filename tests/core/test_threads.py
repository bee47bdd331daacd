"""Objects of the core that several threads reach, which on a Python without a GIL run at the same time."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from minato._core import Arrivals, ConsumerLedger, Packer, codes, sum_of_hashes
from minato._core.segment import Segment
from minato.batching.serialization import LocalStore
from tests.core.ledger_tools import LAYOUT, Desk
from tests.threads import run_together

THREADS, ROUNDS = 8, 2000


def at_once(*programs: Callable[[], object]) -> None:
    """Run functions in threads that start together; none may raise."""
    together = threading.Barrier(len(programs))

    def run(program: Callable[[], object]) -> None:
        together.wait(60)
        program()

    run_together(*(partial(run, program) for program in programs), limit_s=200)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has a GIL"
)
def test_the_import_leaves_the_gil_off() -> None:
    script = "import minato, sys; minato.DataLoader; raise SystemExit(sys._is_gil_enabled())"
    # In a process without PYTHON_GIL, which would overrule the extension modules.
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env={}, timeout=60)
    assert done.returncode == 0


def test_objects_of_a_store_get_different_places() -> None:
    store = LocalStore(Segment(4096, shared=False))
    places: list[list[int]] = [[] for _ in range(THREADS)]

    def put(number: int) -> None:
        for i in range(ROUNDS):
            places[number].append(store.put(lambda nbytes: 0, (number, i))[0])

    at_once(*(partial(put, number) for number in range(THREADS)))
    assert len({place for own in places for place in own}) == THREADS * ROUNDS
    for number, own in enumerate(places):
        assert [store.get(place, 0) for place in own] == [(number, i) for i in range(ROUNDS)]


def test_arrivals_are_looked_at_while_they_grow() -> None:
    arrivals, done = Arrivals(hash), threading.Event()
    one = sum_of_hashes([7], hash)

    def consume() -> None:
        try:
            for start in range(0, 100 * ROUNDS, 100):
                arrivals.ask([7] * 100)
                if start % 5000 == 4900:  # until then, its rings grow
                    arrivals.deliver(list(range(start - 4900, start + 100)), 0)
        finally:
            done.set()

    def look() -> None:
        while not done.is_set():
            beyond = arrivals.beyond
            assert beyond == sorted(beyond)
            assert arrivals.prefix >= 0
            for count, total in (arrivals.asked, arrivals.delivered):
                assert total == count * one % 2**64

    at_once(consume, look, look)
    assert arrivals.asked == arrivals.delivered
    assert (arrivals.prefix, arrivals.beyond) == (100 * ROUNDS, [])


@pytest.mark.parametrize("bound", [True, False])
def test_what_workers_have_written_is_there_when_a_batch_is_ready(bound: bool) -> None:
    desk = Desk(sys.modules[ConsumerLedger.__module__])
    ledger, workers, positions = desk.ledger, range(desk.sizes[0]), desk.sizes[2]
    ledger.open_epoch(0)
    memory = np.zeros((positions, 64), np.int64)  # a row for each place

    def work(number: int) -> None:
        worker = desk.workers[number]
        while not worker.stopping:
            if (claim := worker.claim(2)) is None:
                time.sleep(1e-5)
                continue
            first = worker.describe(claim.batch).first + claim.k
            for position in range(first, first + claim.count):
                place, where, _ = worker.reserve(position)
                worker.publish_layout(where, LAYOUT)
                memory[place % positions] = np.full(64, position)
                worker.fill(position, place)
            worker.end(claim.count, 1, 1)

    def consume() -> None:
        seen = np.zeros(64, np.int64)
        try:
            for start in range(0, 5 * ROUNDS // 10, 5):
                batch, until = desk.open(5, bound), time.monotonic() + 60
                while ledger.state(batch) != codes.READY or not ledger.settled(batch):
                    assert time.monotonic() < until
                    time.sleep(1e-5)
                for place, position in enumerate(desk.deliver(batch), start):
                    seen[:] = memory[place % positions]
                    assert (seen == position).all()
                ledger.retire(batch)
        finally:
            ledger.shut_down()

    def look() -> None:
        while not ledger.stopping:
            assert ledger.unclaimed() <= positions
            for worker in workers:
                ledger.lease(worker)
                assert ledger.activity(worker).samples <= 5 * ROUNDS
            time.sleep(1e-4)

    at_once(consume, look, *(partial(work, worker) for worker in workers))


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_sample_that_another_thread_changes_is_refused_or_written(kind: str) -> None:
    fields = tuple(("array", "<f8", (4,), 256 * i) for i in range(4))
    keys = tuple("abcd")
    packer = Packer(("list", list, fields) if kind == "list" else ("dict", keys, fields), 8)
    memory = np.zeros(1024, np.uint8)
    sample: Any = [np.ones(4) for _ in range(4)]
    if kind == "dict":
        sample = dict(zip(keys, sample, strict=True))
    done = threading.Event()
    answers = set()

    def change() -> None:
        try:
            for i in range(20 * ROUNDS):
                key = i % 4 if kind == "list" else keys[i % 4]
                sample[key] = np.ones(4)  # the one before goes
                if i % 16 == 0 and kind == "list":
                    sample.append(sample.pop())
        finally:
            done.set()

    def pack(place: int) -> None:
        while not done.is_set():
            answers.add(packer.pack(sample, memory.ctypes.data, place))

    at_once(change, lambda: pack(0), lambda: pack(1))
    assert answers <= {(), None}
    values = memory.view(np.float64)
    assert set(values.tolist()) <= {0.0, 1.0}
