"""Several consumers of one loader: what each gets, and that none can hold up the others."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from minato import DataLoader, ErrorPolicy
from minato import consumers as module
from tests.datasets import ORDERS, TOO_MANY_WORKERS, Failing, Filled, Numbers, Sleepy, wait_until
from tests.delivery.recorder import GRUMBLES, Recorder, indices_of, watch_slots
from tests.selection import each

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""


def in_threads(work: Iterable[Callable[[], Any]]) -> list[Future[Any]]:
    """Run each in a thread; returns when all are through."""
    work = list(work)
    with ThreadPoolExecutor(len(work)) as threads:
        return [threads.submit(each) for each in work]


def by_each_of(loader: DataLoader[Any], train: Callable[[Any], Any]) -> list[Any]:
    """What a function of a consumer gives in three threads."""
    done = in_threads(functools.partial(train, consumer) for consumer in loader.consumers(3))
    return [each.result() for each in done]


def flat(batches: Iterable[torch.Tensor]) -> list[int]:
    return [each for batch in batches for each in batch.flatten().tolist()]


@pytest.mark.parametrize("order", ORDERS)
@each
def test_together_they_get_each_index_once_per_epoch(workers: Any, order: str) -> None:
    loader = DataLoader(Numbers(83), 4, shuffle=True, order=order, **workers)
    together = threading.Barrier(3)

    def train(consumer: Any) -> list[list[int]]:
        epochs = []
        for _ in range(3):
            together.wait(PATIENCE_S)
            epochs.append(flat(consumer))
        return epochs

    parts = by_each_of(loader, train)
    for epoch in range(3):
        assert sorted(itertools.chain(*(part[epoch] for part in parts))) == list(range(83))


def test_persistent_workers_stay_and_passes_need_no_agreement() -> None:
    loader = DataLoader(Numbers(40), 4, num_workers=2, persistent_workers=True)
    consumers = loader.consumers(2)
    for consumer in (*consumers, *consumers):
        got = flat(consumer)
        assert got in (list(range(40)), [])
    assert loader._minato_position.epoch == 1


def test_whoever_has_waited_longest_is_next() -> None:
    loader = DataLoader(Numbers(40), 1)
    one, other = (iter(each) for each in loader.consumers(2))
    assert [int(next(each)) for each in (one, other, one, other)] == [0, 1, 2, 3]
    assert [int(next(one)) for _ in range(3)] == [4, 5, 6]  # nobody else asked
    assert int(next(other)) == 7


def test_none_gets_two_while_another_waits() -> None:
    there = threading.Semaphore(0)

    def given() -> Iterator[int]:
        for number in range(6):
            there.acquire()
            yield number
        there.acquire()

    group = module.Group(given)
    log: list[int] = []

    def train(number: int) -> None:
        for _ in module.Consumer(group, None):
            log.append(number)

    with ThreadPoolExecutor(3) as threads:
        for number in range(3):
            threads.submit(train, number)
            wait_until(lambda so_many=number + 1: len(group._waiting) == so_many)
        for so_many in range(1, 7):
            there.release()
            wait_until(lambda so_many=so_many: len(log) == so_many and len(group._waiting) == 3)
        there.release()
    assert log == [0, 1, 2, 0, 1, 2]


def test_a_thread_that_ended_while_it_fetched_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LIVENESS_S", 0.05)
    (consumer,) = DataLoader(Numbers(8), 2).consumers(1)
    part = iter(consumer)
    fetching = threading.Event()
    gone = threading.Thread(target=fetching.wait, args=(PATIENCE_S,))
    gone.start()
    consumer._group._fetcher = gone
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(flat, part)
        time.sleep(0.2)
        assert not waiting.done()  # as long as it is there
        fetching.set()
        assert waiting.result(PATIENCE_S) == [*range(8)]
    gone.join()


@each
def test_what_one_leaves_is_for_the_others(workers: Any) -> None:
    one, other = DataLoader(Numbers(60), 2, **workers).consumers(2)
    part = iter(one)
    got = [next(part) for _ in range(3)]
    del part
    assert sorted(flat([*got, *other])) == list(range(60))


def test_the_next_epoch_waits_for_those_that_are_in_the_last() -> None:
    one, other = DataLoader(Numbers(40), 2, num_workers=1).consumers(2)
    part = iter(other)
    first = [next(part)]
    begun = threading.Event()

    def train() -> list[int]:
        first.append(next(iter(one)))
        begun.set()
        return flat(one)

    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(train)
        assert begun.wait(PATIENCE_S)
        first += part
        assert second.result(PATIENCE_S) == list(range(40))
    assert sorted(flat(first)) == list(range(40))


def test_a_thread_that_would_wait_for_itself_is_told() -> None:
    one, other = DataLoader(Numbers(10), 2).consumers(2)
    part = iter(other)
    next(part)
    assert len([*zip(one, range(1), strict=False)]) == 1
    with pytest.raises(RuntimeError, match="this thread is itself in the middle"):
        iter(one)
    del part
    assert flat(one) == list(range(10))


def test_one_that_is_closed_leaves_the_rest_to_the_others() -> None:
    one, other = DataLoader(Numbers(20), 2).consumers(2)
    part = iter(other)
    got = [next(part)]
    other.close()
    assert [*part] == []
    assert flat([*got, *one]) == list(range(20))
    other.close()
    assert flat(other) == list(range(20))


def test_a_thread_that_ends_in_mid_epoch_holds_up_nobody() -> None:
    one, other = DataLoader(Numbers(20), 2).consumers(2)
    kept: list[Any] = []

    def ends() -> None:
        kept.append(iter(other))
        kept.append(next(kept[0]))

    in_threads([ends])
    assert flat([kept[1], *one]) == list(range(20))
    assert flat(one) == list(range(20))


@each
def test_an_error_is_that_of_one_consumer(workers: Any) -> None:
    loader = DataLoader(Failing(60, GRUMBLES), 2, **workers)

    got: list[Any] = []

    def train(consumer: Any) -> str:
        try:
            for batch in consumer:
                got.append(batch)
        except LookupError as error:
            return str(error)
        return ""

    (error,) = filter(None, by_each_of(loader, train))
    assert "sample 10" in error
    assert sorted(flat(got)) == sorted({*range(60)} - {10, 11})


def test_after_an_error_a_consumer_may_go_on() -> None:
    part = iter(DataLoader(Failing(20, GRUMBLES), 2).consumers(1)[0])
    got = [next(part) for _ in range(5)]
    with pytest.raises(LookupError):
        next(part)
    assert flat([*got, *part]) == [each for each in range(20) if each not in (10, 11)]


def test_the_death_of_a_worker_ends_all_of_them() -> None:
    policy = ErrorPolicy(on_worker_death="raise")
    loader = DataLoader(Sleepy(400, 0.005), 2, num_workers=1, errors=policy)

    def train(consumer: Any) -> str:
        try:
            for number, _ in enumerate(consumer):
                if number == 1:
                    for child in torch.multiprocessing.active_children():
                        with contextlib.suppress(ProcessLookupError):  # another one was quicker
                            os.kill(child.pid, signal.SIGKILL)
        except RuntimeError as error:
            return str(error)
        return "ended"

    assert any("exited unexpectedly" in said for said in by_each_of(loader, train))


def test_workers_that_a_thread_of_an_executor_has_forked_end_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One may begin when the other has done all.
    monkeypatch.setattr("minato.workers.supervision._GRACE_S", PATIENCE_S)

    def train() -> list[int | None]:
        iterator: Any = iter(DataLoader(Numbers(20), 2, num_workers=2))
        processes = iterator._source._pool.processes
        iterator._source._pool.grow(2)
        deque(iterator, 0)
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]

    assert in_threads([train])[0].result() == [0, 0]


def test_the_loaders_state_is_that_of_all_of_them() -> None:
    loader = DataLoader(Numbers(40), 2, num_workers=1, seed=1, shuffle=True)
    parts = [iter(each) for each in loader.consumers(2)]
    got = [next(part) for part in (*parts, *parts)]
    state = loader.state_dict()
    rest = DataLoader(Numbers(40), 2, num_workers=0, seed=1, shuffle=True)
    rest.load_state_dict(state)
    got += itertools.chain(*rest.consumers(2))
    assert sorted(flat(got)) == list(range(40))


# ---- devices --------------------------------------------------------------------------------


def test_each_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Filled(12, 3), 2, num_workers=1)
    consumers = loader.consumers(devices=["meta", "cpu"])
    one, other = (iter(each) for each in consumers)
    assert [each.device for each in consumers] == [torch.device("meta"), None]
    assert next(one).is_meta
    assert not next(other).is_meta


def test_slots_wait_for_the_device_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(module, "accelerator_of", lambda device: recorder)
    monkeypatch.setattr(module, "memory_pinner", lambda: recorder)
    taken = watch_slots(recorder, monkeypatch)
    loader = DataLoader(Filled(90, 20, 30), 3, num_workers=2, prefetch_factor=2)
    parts = [iter(each) for each in loader.consumers(devices=["meta", "meta"])]
    batches = []
    for number in range(30):
        batches.append(next(parts[number % 2]))
        assert recorder.waited >= recorder.position_of(batches[-1])
        if number % 3 == 0:
            recorder.run(len(recorder.copies) - 1)
    recorder.run()
    assert indices_of(batches) == [[i, i + 1, i + 2] for i in range(0, 90, 3)]
    assert len(set(taken)) < len(taken)
    assert recorder.pageable == []


def test_what_is_asked_for_is_checked() -> None:
    loader = DataLoader(Numbers(3))
    for n, devices, match in (
        (0, None, "n=0 is too small"),
        (10**30, None, f"n={10**30} is too large: give at most 4096"),
        (None, None, "give one of the two"),
        (2, ["meta"], "give one of the two"),
        (None, [], r"devices=\[\] is empty"),
        (None, ["cuda:99"], "device='cuda:99' is not there"),
    ):
        with pytest.raises(ValueError, match=match):
            loader.consumers(n, devices=devices)
    with pytest.raises(TypeError, match="devices='meta' is one: give a list"):
        loader.consumers(devices="meta")
    with pytest.raises(ValueError, match="device='meta' is one device for all"):
        DataLoader(Numbers(3), device="meta").consumers(2)


def test_who_has_not_woken_up_gets_no_second_batch_and_none_of_another_epoch() -> None:
    epochs = itertools.count()
    group = module.Group(lambda: iter([(epoch := next(epochs), 0), (epoch, 1)]))
    sleeper, fetcher = group.enter(0), group.enter(0)
    group._waiting.append(sleeper)  # as if its thread were still to be woken
    assert group.next(fetcher) == (0, 1)
    assert [batch for batch, _ in sleeper.inbox] == [(0, 0)]
    with pytest.raises(StopIteration):
        group.next(fetcher)
    group.leave(sleeper)
    assert group.next(fetcher) == (0, 0)  # and the sleeper, when it wakes up, nothing
    group.leave(fetcher)
    fetcher = group.enter(1)
    assert [group.next(fetcher) for _ in range(2)] == [(1, 0), (1, 1)]
    assert not sleeper.inbox


def test_threads_that_close_each_others_parts_get_no_batch_twice_or_of_another_epoch() -> None:
    epochs = itertools.count()

    def batches(epoch: int) -> Iterator[tuple[int, int]]:
        for number in range(8):
            yield epoch, number
            time.sleep(1e-4)  # the others wait for it

    group = module.Group(lambda: batches(next(epochs)))
    consumers = [module.Consumer(group, None) for _ in range(3)]

    def train(consumer: module.Consumer, chance: random.Random) -> list[tuple[int, int, int]]:
        got = []
        for _ in range(150):
            part: Any = iter(consumer)
            for epoch, number in part:
                got.append((part.epoch, epoch, number))
                if chance.random() < 0.05:
                    chance.choice(consumers).close()
        return got

    parts = in_threads(
        functools.partial(train, each, random.Random(seed)) for seed, each in enumerate(consumers)
    )
    got = [batch for part in parts for batch in part.result()]
    assert all(asked == given for asked, given, _ in got)
    assert len(got) == len(set(got))
