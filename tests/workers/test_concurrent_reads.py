"""``fetch_concurrency``: several reads in flight, and nothing else is different."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato._support.counters import shared_integers
from minato._support.threads import start_thread
from minato.workers.reads import BegunLists, Read, ThreadReads
from tests.datasets import ORDERS, Journal, Numbers, Stream, drain, flat, indices, wait_until
from tests.selection import WORKERS, each, sweep

Done = Callable[[Callable[[], Any] | None], None]


class Waits(Numbers):
    """Reads that note how many run at once in this process; none ends before ``least`` do."""

    def __init__(self, size: int, least: int = 0) -> None:
        super().__init__(size)
        self.least = least
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    def delay_s(self, index: int) -> float:
        return 0.01 * random.Random(index).random()

    def change(self, by: int) -> int:
        with self.lock:
            self.running += by
            self.most = max(self.most, self.running)
            return self.running

    def __getitem__(self, index: int) -> Any:
        self.change(1)
        wait_until(lambda: self.most >= self.least)
        time.sleep(self.delay_s(index))
        self.change(-1)
        return {"value": index, "most": self.most}

    def __getstate__(self) -> Any:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, lock=threading.Lock())


class Awaits(Waits):
    """The same with coroutines."""

    async def __aget__(self, index: int) -> Any:
        self.change(1)
        while self.most < self.least:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.delay_s(index))
        self.change(-1)
        return {"value": index, "most": self.most}


class Begins(Waits):
    """Batches that a library reads, the later ones faster."""

    def __getitems__(self, indices: Sequence[int], running: int = 0) -> list[Any]:
        return [{"value": index, "running": running} for index in indices]

    def __beginitems__(self, indices: Sequence[int], done: Done) -> bool:
        running = self.change(1)

        def arrive() -> None:
            self.change(-1)
            done(lambda: self.__getitems__(indices, running))

        threading.Timer(0.02 if indices[0] % 8 else 0.04, arrive).start()
        return True


class Refuses(Begins):
    """The library refuses some batches, breaks at some and loses some: then ``__getitems__`` reads."""

    def __beginitems__(self, indices: Sequence[int], done: Done) -> bool:
        case = indices[0] // 4 % 4
        if case == 0:
            return False
        if case == 1:
            raise RuntimeError("the library is not ready")
        if case == 2:
            threading.Timer(0.002, done, [None]).start()
            return True
        return super().__beginitems__(indices, done)


READS: dict[str, tuple[Callable[[int], Numbers], dict[str, Any]]] = {
    "threads": (Waits, {"fetch_concurrency": 6}),
    "coroutines": (Awaits, {"fetch_concurrency": 6}),
    "lists": (Begins, {}),
    "lists that are refused": (Refuses, {}),
}


class Begun(Numbers):
    """The lists of another kind of samples, begun and read by another thread."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def __beginitems__(self, indices: Sequence[int], done: Done) -> bool:
        threading.Timer(0.002, done, [lambda: self.__getitems__(indices)]).start()
        return True


class Fails(Numbers):
    """Reads of which three raise, the later one of a batch sooner."""

    def __getitem__(self, index: int) -> int:
        if index == 5:
            time.sleep(0.02)
        return self.checked(index)

    def checked(self, index: int) -> int:
        if index in (5, 6, 21):
            raise ValueError(f"bad {index}")
        return index


class FailsBegun(Fails, Begun):
    pass


class FailsAwaiting(Fails):
    async def __aget__(self, index: int) -> int:
        await asyncio.sleep(0)
        return self.checked(index)


class Draws(Numbers):
    """Reads that ask minato for their random numbers, after a wait of another length each time."""

    def __getitem__(self, index: int) -> Any:
        first = minato.numpy_rng().random()
        time.sleep(0.004 * np.random.default_rng().random())
        return [index, first, minato.python_rng().random()]


class DrawsAwaiting(Draws):
    """The same with a task of its own, which draws in another thread, too."""

    def __aget__(self, index: int) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.drawn(index))

    async def drawn(self, index: int) -> Any:
        first = await asyncio.to_thread(lambda: minato.numpy_rng().random())
        await asyncio.sleep(0.004 * np.random.default_rng().random())
        return [index, first, minato.python_rng().random()]


def augmented(sample: Any) -> Any:
    return [
        *sample,
        random.random(),
        np.random.rand(),
        float(torch.rand(())),
        minato.numpy_rng().random(),
    ]


def values(loader: Any) -> list[list[int]]:
    return [batch["value"].tolist() for batch in loader]


def in_fours(size: int) -> list[list[int]]:
    return [list(range(size))[start : start + 4] for start in range(0, size, 4)]


def of(dataset: Any, batch_size: int | None = 4, **options: Any) -> minato.DataLoader[Any]:
    """A loader whose workers stay, where it has any."""
    options.setdefault("persistent_workers", options.get("num_workers", 0) > 0)
    return minato.DataLoader(dataset, batch_size, **options)


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "value": 2 * sample["value"]}


@sweep(reads=READS, workers=WORKERS, order=ORDERS)
def test_each_sample_comes_once_and_in_its_order(
    reads: tuple[Callable[[int], Numbers], dict[str, Any]], workers: dict[str, Any], order: str
) -> None:
    dataset, options = reads
    loader = of(dataset(50), order=order, transforms=[doubled], **workers, **options)
    for _ in range(2):
        batches = [(batch["value"] / 2).tolist() for batch in loader]
        assert sorted(flat(batches)) == list(range(50))
        assert sorted(map(len, batches)) == [2, *[4] * 12]
        if order in ("strict", "batch"):
            assert (batches if order == "strict" else sorted(batches)) == in_fours(50)


@pytest.mark.parametrize("order", ["strict", "batch"])
@each
def test_an_empty_batch_comes_between_lists_that_are_begun(
    workers: dict[str, Any], order: str
) -> None:
    batches: list[list[int]] = [[0, 1], [2], [], [3, 4], [], []]
    loader = of(Begun(5), 1, batch_sampler=batches, order=order, collate_fn=list, **workers)
    for _ in range(2):
        assert sorted(loader) == sorted(batches)


@pytest.mark.parametrize("dataset", [Waits, Awaits])
def test_reads_run_at_once_beyond_the_bounds_of_batches(dataset: Callable[..., Waits]) -> None:
    loader = of(dataset(64, 5), 2, num_workers=1, fetch_concurrency=8, order="arrival")
    assert 5 <= max(int(batch["most"].max()) for batch in loader) <= 8


@pytest.mark.parametrize("dataset", [Waits, Awaits])
def test_reads_never_exceed_the_limit_though_whole_batches_are_claimed(
    dataset: Callable[..., Waits],
) -> None:
    loader = of(dataset(64, 3), 16, num_workers=1, fetch_concurrency=3, collate_fn=list)
    samples = flat(loader)
    assert [sample["value"] for sample in samples] == list(range(64))
    assert max(sample["most"] for sample in samples) == 3


def test_transforms_run_in_the_worker_thread() -> None:
    transforms = [lambda sample: threading.get_ident()]
    loader = of(Waits(20), 5, fetch_concurrency=4, transforms=transforms)
    assert {*flat(indices(loader))} == {threading.get_ident()}


@sweep(dataset=[Fails, FailsAwaiting, FailsBegun], workers=WORKERS, collate=[None, list])
def test_the_first_error_of_a_batch_is_raised_and_the_next_batch_comes(
    dataset: Callable[[int], Any], workers: dict[str, Any], collate: Any
) -> None:
    samples, errors = drain(of(dataset(24), fetch_concurrency=5, collate_fn=collate, **workers))
    assert samples == [*range(4), *range(8, 20)]
    assert ["bad 5" in str(errors[0]), "bad 21" in str(errors[1]), len(errors)] == [True, True, 2]
    assert "index 5" in errors[0].__notes__[0]


@pytest.mark.parametrize("order", ["arrival", "fast_first"])
def test_where_places_are_free_only_the_bad_samples_are_lost(order: str) -> None:
    got, errors = drain(of(Fails(24), 1, num_workers=2, fetch_concurrency=5, order=order))
    assert sorted(got) == [i for i in range(24) if i not in (5, 6, 21)]
    assert [type(error) for error in errors] == [ValueError] * 3


class Flaky(Numbers):
    """Samples of which some raise at their first try in each process, and some always."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tried: set[int] = set()

    def __getitem__(self, index: int) -> int:
        if index % 7 == 3 and index not in self.tried:
            self.tried.add(index)
            raise OSError(f"not yet {index}")
        if index == 8:
            raise ValueError("never")
        return index


@sweep(
    workers=WORKERS, order=["strict", "arrival"], collate=[None, torch.utils.data.default_collate]
)
@pytest.mark.filterwarnings("ignore:1 sample of this epoch was skipped")
def test_samples_that_raise_are_tried_again_or_left_out(
    workers: dict[str, Any], order: str, collate: Any
) -> None:
    options = {"fetch_concurrency": 5, "order": order, **workers}
    policy = minato.ErrorPolicy(on_error="skip", retries=1)
    collate_fn = collate and (lambda samples: collate(samples))
    loader = of(Flaky(24), collate_fn=collate_fn, errors=policy, **options)
    assert sorted(map(int, flat(loader))) == [i for i in range(24) if i != 8]


class Interrupts(Numbers):
    """The first read of a sample interrupts a thread."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.thread = threading.get_ident()
        self.was_asked, self.is_handled = False, threading.Event()

    def __getitem__(self, index: int) -> int:
        if index == 1 and not self.was_asked:
            self.was_asked = True
            signal.pthread_kill(self.thread, signal.SIGVTALRM)
            assert self.is_handled.wait(60)
        return index


def test_an_interrupted_loop_in_line_goes_on() -> None:
    dataset = Interrupts(8)

    def interrupt(*_: Any) -> None:
        dataset.is_handled.set()
        raise KeyboardInterrupt

    iterator, got, interrupted = iter(of(dataset, fetch_concurrency=2)), [], 0
    handler = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        while len(got) < 8:
            try:
                got += next(iterator).tolist()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.signal(signal.SIGVTALRM, handler)
    assert interrupted == 1
    assert got == list(range(8))


class MakesGenerator:
    """Draws from a generator that its first call makes."""

    drawn: np.random.Generator | None = None

    def __call__(self, sample: list[Any]) -> list[Any]:
        self.drawn = self.drawn or np.random.default_rng()
        return [*sample, self.drawn.random()]


def content(dataset: Any, **arguments: Any) -> dict[int, list[float]]:
    """What each sample holds."""
    loader = of(dataset, seed=7, order="strict", collate_fn=list, **arguments)
    return {index: sample for index, *sample in flat(loader)}


@pytest.mark.parametrize("closes", [True, False])
def test_threads_whose_start_is_interrupted_end_with_the_others(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        start_thread(thread)
        started.append(thread)
        if len(started) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("minato.workers.reads.start_thread", start)
    threads = ThreadReads(Numbers(8).__getitem__, 2)
    with pytest.raises(KeyboardInterrupt):
        threads.submit(Read(0, 0, None, 0))
    for index in range(1, 4):
        threads.submit(Read(index, 0, None, 0))
    done = threads._done
    wait_until(lambda: len(done) == 4)
    assert len(started) == 3
    if closes:
        threads.close()
    del threads
    wait_until(lambda: not any(thread.is_alive() for thread in started))


def test_content_depends_neither_on_the_concurrency_nor_on_who_reads() -> None:
    plain = content(Draws(24), transforms=[augmented, MakesGenerator()])
    assert len(plain) == 24
    for dataset in (Draws(24), DrawsAwaiting(24)):
        for num_workers in (0, 2):
            steps = [augmented, MakesGenerator()]
            arguments = {"num_workers": num_workers, "transforms": steps}
            assert content(dataset, fetch_concurrency=6, **arguments) == plain


@pytest.mark.parametrize("reads", ["threads", "coroutines", "lists"])
@each
def test_an_abandoned_epoch_leaves_no_threads_and_the_next_is_whole(
    reads: str, workers: dict[str, Any]
) -> None:
    dataset, options = READS[reads]
    loader = of(dataset(40), **workers, **options)
    next(iter(loader))
    assert values(loader) == in_fours(40)


class Lingers(Numbers):
    """Reads that begin a task which outlives them, as libraries for networks do."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.begun: list[asyncio.Task[None]] = []

    async def __aget__(self, index: int) -> int:
        self.begun.append(asyncio.get_running_loop().create_task(asyncio.sleep(1000)))
        return index


def test_tasks_of_the_dataset_are_cancelled_with_the_event_loop() -> None:
    dataset = Lingers(8)
    loader = minato.DataLoader(dataset, 4, num_workers=1, workers="thread", fetch_concurrency=4)
    assert flat(loader) == [*range(8)]
    wait_until(lambda: all(task.cancelled() for task in dataset.begun))
    assert len(dataset.begun) == 8


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(method: str) -> None:
    options = {"num_workers": 1, "multiprocessing_context": method}
    assert values(of(Awaits(12), fetch_concurrency=4, **options)) == in_fours(12)


class Deadly(Journal):
    """A read that kills its process, twice."""

    def __getitem__(self, index: int) -> int:
        value = super().__getitem__(index)
        if index == 9 and self.begun().count(9) <= 2:
            os._exit(0)  # as one that was asked to leave
        return value


class DeadlyBegun(Deadly, Begun):
    pass


@pytest.mark.parametrize(
    ("kind", "options"), [(Deadly, {"fetch_concurrency": 6}), (DeadlyBegun, {})]
)
def test_a_worker_that_dies_with_reads_under_way_loses_none(kind: Any, options: Any) -> None:
    with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
        assert indices(of(kind(24), num_workers=2, **options)) == in_fours(24)


class Fatal(Numbers):
    """A read that always kills its process, while others are under way."""

    def __getitem__(self, index: int) -> int:
        if index == 9:
            os._exit(1)
        time.sleep(0.01)
        return index


class FatalBegun(Fatal, Begun):
    pass


@pytest.mark.filterwarnings("ignore:DataLoader worker")
@pytest.mark.parametrize(("kind", "options"), [(Fatal, {"fetch_concurrency": 6}), (FatalBegun, {})])
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_of_reads_under_way_only_the_deadly_one_is_skipped(
    kind: Any, options: Any, order: str
) -> None:
    loader = of(kind(24), num_workers=1, order=order, errors="skip", **options)
    with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
        assert sorted(flat(loader)) == sorted({*range(24)} - {9})


class FatalTwice(Numbers):
    """Reads 1 and 5 kill their processes. Read 4 goes on when it is read alone, the others when 0 is."""

    def __init__(self) -> None:
        super().__init__(8)
        self.begun = shared_integers(8)

    def __getitem__(self, index: int) -> int:
        begun = self.begun
        begun[index] += 1
        if index in (1, 5):
            wait_until(lambda: begun[index - 1] >= min(begun[index], 3))  # the older read, too
            wait_until(lambda: begun[5] > 2 if index == 1 else begun[5] < 3 or begun[0] > 3)
            os._exit(1)
        wait_until(lambda: begun[4 if index == 4 else 0] > 3)
        return index


@pytest.mark.filterwarnings("ignore:DataLoader worker")
def test_reads_beside_two_deadly_ones_are_not_skipped() -> None:
    loader = minato.DataLoader(FatalTwice(), 8, num_workers=2, errors="skip", fetch_concurrency=4)
    with pytest.warns(RuntimeWarning, match="2 samples of this epoch were skipped"):
        assert flat(loader) == [0, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Numbers(4), {"fetch_concurrency": 0}, "fetch_concurrency=0 is too small"),
        (Numbers(4), {"fetch_concurrency": 1 << 63}, "too large: give at most 9223372036854775807"),
        (Numbers(4), {"fetch_concurrency": 2, "compat": "torch"}, "contradicts compat='torch'"),
        (Stream(0), {"fetch_concurrency": 2}, "an iterable dataset has none"),
        (Stream(0), {"readers": 1 << 63}, "readers=9223372036854775808 is too large"),
    ],
)
def test_what_contradicts_itself_is_refused(dataset: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minato.DataLoader(dataset, **arguments)


# ---- lists that a library reads -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "most"),
    [({}, 2), ({"order": "arrival"}, 2), ({"compat": "torch"}, 0), ({"num_workers": 0}, 0)],
)
def test_batches_are_read_ahead_where_that_changes_nothing_else(
    arguments: dict[str, Any], most: int
) -> None:

    def has_most() -> bool:
        loader = of(Begins(80), **{"num_workers": 1, **arguments}, persistent_workers=False)
        running = max(int(batch["running"].max()) for batch in loader)
        assert most or running == 0
        return running >= most

    wait_until(has_most)  # how many it reads depends on the time that batches take


class DrawsInLists(Numbers):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [[minato.numpy_rng().random()] for _ in indices]


class DrawsBegun(DrawsInLists, Begun):
    pass


def test_random_numbers_are_those_of_getitems() -> None:
    options: Any = {"seed": 7, "collate_fn": list}
    begun, listed = (
        list(of(kind(24), num_workers=2, transforms=[augmented, MakesGenerator()], **options))
        for kind in (DrawsBegun, DrawsInLists)
    )
    assert begun == listed


@pytest.mark.parametrize("order", ORDERS)
def test_samples_of_a_list_that_raise_are_skipped_in_every_order(order: str) -> None:
    loader = of(FailsBegun(24), num_workers=2, errors="skip", order=order)
    with pytest.warns(minato.MinatoWarning, match="3 samples of this epoch were skipped"):
        values = flat(indices(loader))
    assert sorted(values) == [index for index in range(24) if index not in (5, 6, 21)]
    assert order != "strict" or values == sorted(values)


def limit_after(
    latency_ns: int, least_pace_ns: int, samples: int = 32, reads: BegunLists | None = None
) -> int:
    """The limit after many reads of a store, of which one can be taken in ``least_pace_ns``."""
    reads, taken_ns = reads or BegunLists(lambda key, done: True), 0
    for _ in range(100):
        pace_ns = max(latency_ns // reads.limit, least_pace_ns)
        taken_ns += pace_ns
        # What is in flight beyond the store's latency waits for the worker, or in the store's queue.
        duration_ns = max(latency_ns, pace_ns * reads.limit)
        waited_ns = latency_ns if reads.limit == 1 else None
        reads.adapt(taken_ns - duration_ns, duration_ns, waited_ns, taken_ns, samples)
    return reads.limit


def test_the_limit_grows_until_the_worker_or_the_store_is_busy() -> None:
    ms = 1_000_000
    for latency, pace, limit in ((1, 40, 1), (10, 40, 1), (20, 40, 2), (150, 70, 4)):
        assert limit_after(latency * ms, pace * ms) == limit
    assert limit_after(150 * ms, ms) == 128 // 32
    assert limit_after(150 * ms, ms, samples=4) == 128 // 4
    assert limit_after(150 * ms, ms, samples=1000) == 2


def test_the_limit_falls_again_when_the_store_is_near() -> None:
    ms, reads = 1_000_000, BegunLists(lambda key, done: True)
    assert limit_after(150 * ms, ms, reads=reads) == 4
    reads.adapt(10**9, 45 * ms, ms, 10**9 + 50 * ms, 32)  # a read that was alone in flight
    assert reads.limit == 1
    assert limit_after(ms, 40 * ms, reads=reads) == 1
