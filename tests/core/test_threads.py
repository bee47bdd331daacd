"""Objects of the core that several threads reach, which on a Python without a GIL run at the same time."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minato._core import Arrivals, Packer
from minato.batching.serialization import LocalStore

THREADS, ROUNDS = 8, 2000


def at_once(*programs: Callable[[], object]) -> None:
    """Run functions in threads that start together; raises what one of them raised."""
    together = threading.Barrier(len(programs))
    errors: list[BaseException] = []

    def run(program: Callable[[], object]) -> None:
        together.wait(20)
        try:
            program()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has a GIL"
)
def test_the_import_leaves_the_gil_off() -> None:
    script = "import minato, sys; minato.DataLoader; raise SystemExit(sys._is_gil_enabled())"
    # In a process without PYTHON_GIL, which would overrule the extension modules.
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], env={}, timeout=60)
    assert done.returncode == 0


def test_objects_of_a_store_get_different_places() -> None:
    store = LocalStore()
    places: list[list[int]] = [[] for _ in range(THREADS)]

    def put(number: int) -> None:
        for i in range(ROUNDS):
            places[number].append(store.put(lambda nbytes: 0, (number, i))[0])

    at_once(*(lambda number=number: put(number) for number in range(THREADS)))
    assert len({place for own in places for place in own}) == THREADS * ROUNDS
    for number, own in enumerate(places):
        assert [store.get(place, 0) for place in own] == [(number, i) for i in range(ROUNDS)]


def test_arrivals_are_looked_at_while_they_grow() -> None:
    arrivals, done = Arrivals(hash), threading.Event()

    def consume() -> None:
        try:
            for start in range(0, 100 * ROUNDS, 100):
                arrivals.ask(range(start, start + 100))
                if start % 5000 == 4900:  # until then, its rings grow
                    arrivals.deliver(list(range(start - 4900, start + 100)), 0)
        finally:
            done.set()

    def look() -> None:
        while not done.is_set():
            assert arrivals.beyond == sorted(arrivals.beyond)
            assert arrivals.prefix >= 0

    at_once(consume, look, look)
    assert arrivals.asked == arrivals.delivered
    assert (arrivals.prefix, arrivals.beyond) == (100 * ROUNDS, [])


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

    def pack() -> None:
        while not done.is_set():
            answers.add(packer.pack(sample, memory.ctypes.data, 0))

    at_once(change, pack, pack)
    assert answers <= {(), None}
    values = memory.view(np.float64)
    assert set(values.tolist()) <= {0.0, 1.0}
