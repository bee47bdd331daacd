"""Nothing keeps a loader, its iterator or its dataset: cycles through the dataset are collected, and workers end."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import operator
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import minato
from minato import DataLoader, Observe, Readers, Record, StragglerPolicy
from minato.caching import MemoryCache
from minato.observe import at_exit
from minato.observe.epoch_log import EpochLog
from tests.behaviour import states
from tests.datasets import TOO_MANY_WORKERS, Failing, Numbers, Parts, raising, wait_until
from tests.pairwise import pairwise
from tests.selection import loaders, mostly_slow, sweep
from tests.threads import run_together

pytestmark = [
    pytest.mark.filterwarnings(TOO_MANY_WORKERS),
    pytest.mark.filterwarnings("ignore:the dataset or its transforms hold random generators"),
]

PATIENCE_S = 60.0


class Knows(Numbers):
    """A dataset that knows its loader and its iterator."""

    def __init__(self, size: int = 60) -> None:
        super().__init__(size)
        self.known: list[Any] = []
        self.rng = random.Random(0)

    def __getitem__(self, index: int) -> int:
        return index + self.rng.randrange(1)


class Steady(Knows):
    """Its samples may be cached."""

    def __getitem__(self, index: int) -> int:
        return index


class Stateful(states.Stateful, Knows):
    kept = ("size",)


class Coroutines(Knows):
    async def __aget__(self, index: int) -> int:
        return index


class Stream(states.Stateful, Parts):
    kept = ("size",)

    def __init__(self) -> None:
        super().__init__(60)
        self.known: list[Any] = []


class Adds:
    """A transform that knows the loader, too."""

    known: Any = None

    def __call__(self, sample: int) -> int:
        return sample + 1


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda folder: {},
    "unmeasured": lambda folder: {"observe": False},
    "trace": lambda folder: {"observe": Observe(trace=folder / "trace.json")},
    "errors": lambda folder: {"errors": minato.ErrorPolicy("skip", log=folder / "errors")},
    "costs": lambda folder: {"stragglers": StragglerPolicy(history=folder)},
    "record": lambda folder: {"recording": Record(folder / "order")},
    "arrival": lambda folder: {"order": "arrival", "transforms": [Adds()]},
    "transforms": lambda folder: {"transforms": [Adds()], "collate_fn": operator.itemgetter(0)},
    "concurrent": lambda folder: {"fetch_concurrency": 3},
    "cached": lambda folder: {"cache": MemoryCache(1 << 20, version="1"), "transforms": [Adds()]},
    "fingerprint": lambda folder: {"cache": MemoryCache(1 << 20)},
    "auto": lambda folder: {"num_workers": minato.AutoScale(max=2)},
    "seeded": lambda folder: {"seed": 3, "shuffle": True},
}
"""Some of them keep a log, a file or a thread."""


POOLS = loaders("inline", "threads", "fork", "forkserver")
DATASETS = {each.__name__: each for each in (Knows, Steady, Stateful, Coroutines, Stream)}
BATCHES = (0, 3, None)
"""How many batches are taken before the iterator is dropped; None: all."""


def left() -> tuple[int, int, int]:
    """Children, threads and descriptors of this process."""
    children = len(multiprocessing.active_children())
    return children, threading.active_count(), len(os.listdir("/proc/self/fd"))


def begin(dataset: Any, batches: int | None, **options: Any) -> None:
    """Make a loader and an iterator that the dataset knows, and take some batches."""
    loader = DataLoader(dataset, 4, **options)
    iterator = iter(loader)
    dataset.known = [loader, iterator]
    for transform in options.get("transforms", ()):
        transform.known = loader
    for _ in itertools.islice(iterator, batches):
        pass


def check(
    dataset: str, batches: int | None, options: Callable[[], dict[str, Any]], before: Any
) -> None:
    given = options()
    kind: Any = DATASETS[dataset]
    if given.get("multiprocessing_context") == "forkserver":
        made = kind()
    else:  # a class that only this call has, and that knows it
        kind = type(dataset, (kind,), {})
        made = kind.newest = kind()
    reference = weakref.ref(made)
    begin(made, batches, **given)
    del made, kind, given
    end = time.monotonic() + PATIENCE_S
    gc.collect()
    # Threads end by themselves, and those that load refer to the dataset until they have loaded enough.
    while any(map(operator.gt, left(), before)) or reference() is not None:
        assert time.monotonic() < end, (reference(), left(), before)
        time.sleep(0.01)
        gc.collect()


def options(pool: str, name: str, persistent: bool, folder: Path) -> dict[str, Any]:
    found = {**POOLS[pool], **OPTIONS[name](folder)}
    if persistent and found.get("num_workers"):
        found["persistent_workers"] = True
    return found


CACHED = "cached", "fingerprint"
NOT_OF_STREAMS = "concurrent", *CACHED, "seeded", "record", "arrival", "errors", "auto"
ALL = [
    (pool, name, dataset, batches, persistent)
    for pool, name, dataset, batches, persistent in itertools.product(
        POOLS, OPTIONS, DATASETS, BATCHES, (False, True)
    )
    if not (persistent and pool == "inline")
    and not (dataset == "Stream" and (name in NOT_OF_STREAMS or pool == "threads"))
    and not (dataset == "Stateful" and name == "arrival")
    and not (dataset == "Coroutines" and name != "concurrent")
    and not (name == "auto" and pool in ("inline", "forkserver"))
    and (name in CACHED) == (dataset == "Steady")
    and not (name in CACHED and pool not in ("inline", "threads"))
]
SOME = pairwise(each for each in ALL if each[0] != "forkserver")[:16]


@mostly_slow("cases", [SOME, pairwise(ALL)], ids=["some", "more"])
def test_cycles_through_the_dataset_are_collected(cases: list[Any], tmp_path: Path) -> None:
    # What is made once, such as the fork server, is made here.
    for pool in {case[0] for case in cases}:
        list(DataLoader(Numbers(8), 2, **POOLS[pool]))
    gc.collect()
    for number, (pool, name, dataset, batches, persistent) in enumerate(cases):
        here = tmp_path / str(number)
        here.mkdir()
        given = functools.partial(options, pool, name, persistent, here)
        try:
            check(dataset, batches, given, left())
        except Exception as error:
            raise AssertionError(f"{cases[number]}: {error}") from error


@pytest.mark.parametrize("where", ["worker", "main"])
def test_a_stream_is_collected_wherever_it_is_read(where: str) -> None:
    """And whatever the number of workers becomes."""

    def options(persistent: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"num_workers": minato.AutoScale(max=2), "transforms": [Adds()]}
        found |= {"readers": Readers(1, where=where), "persistent_workers": persistent}
        return found | {"multiprocessing_context": "fork"}

    for persistent, batches in itertools.product((False, True), BATCHES):
        check("Stream", batches, functools.partial(options, persistent), left())


def test_a_report_at_exit_keeps_no_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINATO_REPORT", str(tmp_path / "report.txt"))
    monkeypatch.setattr(at_exit, "_at_exit", at_exit._AtExit())
    before = left()
    for batches in BATCHES:
        check("Knows", batches, lambda: POOLS["fork"], before)


def test_reports_of_loaders_that_begin_in_several_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Old(EpochLog):
        @property
        def active_ns(self) -> int:
            time.sleep(0.002)  # other threads have their turn
            return 0

    kept: dict[EpochLog, Any] = {Old(): None for _ in range(at_exit.MOST_LOADERS)}
    monkeypatch.setattr(at_exit, "_at_exit", at_exit._AtExit(os.getpid(), prints=True, kept=kept))
    new = [EpochLog() for _ in range(3)]
    keep = functools.partial(at_exit.keep, lambda: Any, ())
    run_together(*(functools.partial(keep, log) for log in new), limit_s=60)
    assert len(kept) == at_exit.MOST_LOADERS
    assert at_exit._at_exit.dropped == 3


def test_without_a_report_at_exit_a_loader_is_not_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(at_exit, "_at_exit", at_exit._AtExit())
    at_exit.keep(pytest.fail, (), Any)


# ---- without a collection ---------------------------------------------------------------------


class Broken(Parts):
    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        raise ValueError


USES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "map": (lambda: Numbers(8), {}),
    "error": (lambda: Failing(8, {3: ValueError}), {}),
    "single error": (lambda: Failing(8, {3: StopIteration}), {"batch_size": None}),
    "collate": (lambda: Numbers(8), {"collate_fn": raising(ValueError)}),
    "transforms": (lambda: Failing(8, {3: ValueError}), {"transforms": [Adds()]}),
    "cost": (lambda: Numbers(8), {"batch_size": minato.CostBatches(30, abs)}),
    "stream": (lambda: Parts(8), {}),
    "stream error": (lambda: Broken(8), {}),
}


@pytest.mark.usefixtures("collected_on_request")
@pytest.mark.filterwarnings("ignore:reader . ended by an exception")
@sweep(use=[*USES], pool=["inline", "fork"], batches=[2, 100])
def test_what_is_dropped_is_gone_without_a_collection(use: str, pool: str, batches: int) -> None:
    make, options = USES[use]
    dataset = make()
    loader = DataLoader(dataset, **{"batch_size": 2, **POOLS[pool], **options})
    kept: list[Any] = [weakref.ref(dataset), weakref.ref(loader)]
    for _ in range(2):
        iterator = iter(loader)
        kept += [weakref.ref(iterator), weakref.ref(iterator._source)]  # type: ignore[attr-defined]
        for _ in range(batches):
            with contextlib.suppress(ValueError, RuntimeError, StopIteration):
                next(iterator)
    del dataset, loader, iterator
    assert not any(reference() for reference in kept)


@pytest.mark.usefixtures("collected_on_request")
def test_the_readers_of_a_thread_are_gone_without_a_collection() -> None:
    dataset = Parts(8)
    loader = DataLoader(dataset, 2, **POOLS["threads"])
    assert sum(map(len, loader)) == 8
    gone = weakref.ref(dataset)
    del dataset, loader
    wait_until(lambda: gone() is None)
