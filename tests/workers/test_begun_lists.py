"""``__beginitems__``: workers read further batches while they wait for one, and nothing else is different."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import minato
from minato.workers.reads import BegunLists
from tests.datasets import Numbers
from tests.workers.test_concurrent_reads import (
    Deadly,
    Draws,
    assert_deaths_lose_nothing,
    assert_fifty_in_fours,
    augmented,
)

Done = Callable[[Callable[[], Any] | None], None]
WORKERS = [(0, "process"), (2, "process"), (2, "thread")]


class Begins(Numbers):
    """Batches that a library reads, the later ones faster; notes how many it reads at once in this process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.running = 0
        self.lock = threading.Lock()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.sample(index, 0) for index in indices]

    def sample(self, index: int, running: int) -> Any:
        return {"value": index, "running": running}

    def __beginitems__(self, indices: Sequence[int], done: Done) -> bool:
        with self.lock:
            self.running += 1
            running = self.running

        def arrive() -> None:
            with self.lock:
                self.running -= 1
            done(lambda: [self.sample(index, running) for index in indices])

        threading.Timer(0.02 if indices[0] % 8 else 0.04, arrive).start()
        return True

    def __getstate__(self) -> Any:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, lock=threading.Lock())


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


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "value": 2 * sample["value"]}


@pytest.mark.parametrize("dataset", [Begins, Refuses])
@pytest.mark.parametrize(("num_workers", "method"), WORKERS)
@pytest.mark.parametrize("order", ["strict", "batch", "arrival"])
def test_each_sample_comes_once_and_in_its_order(
    dataset: Callable[[int], Begins], num_workers: int, method: str, order: str
) -> None:
    loader = minato.DataLoader(
        dataset(50),
        batch_size=4,
        num_workers=num_workers,
        workers=method,
        order=order,
        transforms=[doubled],
        persistent_workers=num_workers > 0,
    )
    for _ in range(2):
        assert_fifty_in_fours([(batch["value"] / 2).tolist() for batch in loader], order)


@pytest.mark.parametrize(
    ("arguments", "most"),
    [({}, 2), ({"order": "arrival"}, 2), ({"compat": "torch"}, 0), ({"num_workers": 0}, 0)],
)
def test_batches_are_read_ahead_where_that_changes_nothing_else(
    arguments: dict[str, Any], most: int
) -> None:
    given = {"num_workers": 1, "batch_size": 4, **arguments}
    running = max(int(batch["running"].max()) for batch in minato.DataLoader(Begins(80), **given))
    assert running >= most if most else running == 0


def test_an_abandoned_epoch_is_followed_by_a_whole_one() -> None:
    loader = minato.DataLoader(Begins(40), batch_size=4, num_workers=2, persistent_workers=True)
    next(iter(loader))
    assert [batch["value"].tolist()[0] for batch in loader] == list(range(0, 40, 4))


class DrawsInLists(Draws):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [minato.numpy_rng().random() for _ in indices]


class DrawsBegun(DrawsInLists):
    def __beginitems__(self, indices: Sequence[int], done: Done) -> bool:
        threading.Timer(0.002, done, [lambda: self.__getitems__(indices)]).start()
        return True


def test_random_numbers_are_those_of_getitems() -> None:
    def drawn(dataset: Any) -> list[Any]:
        loader = minato.DataLoader(
            dataset, 4, num_workers=2, seed=7, transforms=[wrapped, augmented], collate_fn=list
        )
        return list(loader)

    assert drawn(DrawsBegun(24)) == drawn(DrawsInLists(24))


def wrapped(value: float) -> list[float]:
    return [value]


class Fails(Begins):
    def sample(self, index: int, running: int) -> Any:
        if index in (5, 6, 21):
            raise ValueError(f"bad {index}")
        return super().sample(index, running)


def test_an_error_is_raised_in_place_of_its_batch() -> None:
    iterator = iter(minato.DataLoader(Fails(24), batch_size=4, num_workers=2))
    found: list[Any] = []
    for _ in range(6):
        try:
            found.append(next(iterator)["value"].tolist())
        except ValueError as error:
            found.append(str(error).splitlines()[-1])
    assert found[0] == [0, 1, 2, 3]
    assert "bad 5" in found[1]
    assert found[2:5] == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert "bad 21" in found[5]


@pytest.mark.parametrize("order", ["strict", "batch", "arrival", "fast_first"])
def test_samples_of_a_list_that_raise_are_skipped_in_every_order(order: str) -> None:
    loader = minato.DataLoader(Fails(24), batch_size=4, num_workers=2, errors="skip", order=order)
    with pytest.warns(minato.MinatoWarning, match="3 samples of this epoch were skipped"):
        values = [value for batch in loader for value in batch["value"].tolist()]
    assert sorted(values) == [index for index in range(24) if index not in (5, 6, 21)]
    assert order != "strict" or values == sorted(values)


class DeadlyBegun(Deadly):
    """A batch whose reading kills its process, twice."""

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return [self[index] for index in indices]

    def __beginitems__(self, indices: Sequence[int], done: Done) -> bool:
        threading.Timer(0.002, done, [lambda: self.__getitems__(indices)]).start()
        return True


def test_a_worker_that_dies_with_reads_under_way_loses_none() -> None:
    assert_deaths_lose_nothing(DeadlyBegun(24))


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
    assert limit_after(ms, 40 * ms) == 1
    assert limit_after(10 * ms, 40 * ms) == 1
    assert limit_after(20 * ms, 40 * ms) == 2
    assert limit_after(150 * ms, 70 * ms) == 4
    assert limit_after(150 * ms, ms) == 128 // 32
    assert limit_after(150 * ms, ms, samples=4) == 128 // 4
    assert limit_after(150 * ms, ms, samples=1000) == 2


def test_the_limit_falls_again_when_the_store_is_near() -> None:
    ms, reads = 1_000_000, BegunLists(lambda key, done: True)
    assert limit_after(150 * ms, ms, reads=reads) == 4
    reads.adapt(10**9, 45 * ms, ms, 10**9 + 50 * ms, 32)  # a read that was alone in flight
    assert reads.limit == 1
    assert limit_after(ms, 40 * ms, reads=reads) == 1
