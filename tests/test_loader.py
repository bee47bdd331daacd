"""``minato.DataLoader`` as torch's: every sample once, the same batches, and everything that may be in one."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import get_worker_info

from minato import DataLoader, Observe
from tests.datasets import (
    ORDERS,
    TOO_MANY_WORKERS,
    Filled,
    Numbers,
    Roll,
    double,
    flat,
    indices,
    plus_one,
    wait_until,
    worker_number,
)
from tests.selection import mostly_slow

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

TorchLoader = torch.utils.data.DataLoader

WORKERS = {
    "inline": {"num_workers": 0},
    "1-process": {"num_workers": 1},
    "2-processes": {"num_workers": 2},
    "7-processes": {"num_workers": 7},
    "1-thread": {"num_workers": 1, "workers": "thread"},
    "2-threads": {"num_workers": 2, "workers": "thread"},
    "7-threads": {"num_workers": 7, "workers": "thread"},
}
FEW = {name: WORKERS[name] for name in ("inline", "2-processes", "2-threads")}


def each(workers: dict[str, dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("workers", workers.values(), ids=workers.keys())


# ---- exactly once ---------------------------------------------------------------------------

# size, drop_last, persistent
ROUGHLY = [(13, False, True), (13, True, False)]
THOROUGHLY = [
    *((0, False, False), (0, True, True), (1, False, True), (1, True, False)),
    *((15, False, True), (15, True, False), (13, False, False), (13, True, True), *ROUGHLY),
]


@each(WORKERS)
@pytest.mark.parametrize("order", mostly_slow(ORDERS, quick=2))
def test_every_sample_once_per_epoch(order: str, workers: dict[str, Any]) -> None:
    processes = workers["num_workers"] if "workers" not in workers else 0
    for size, drop_last, persistent in ROUGHLY if processes == 7 else THOROUGHLY:
        persistent = persistent and workers["num_workers"] > 0
        loader = DataLoader(
            Numbers(size),
            5,
            shuffle=size > 1,
            drop_last=drop_last,
            order=order,
            persistent_workers=persistent,
            **workers,
        )
        kept = size // 5 * 5 if drop_last else size
        sizes = sorted(len(range(size)[i : i + 5]) for i in range(0, kept, 5))
        assert len(loader) == len(sizes)
        for _ in range(3 if persistent or not processes else 1):
            batches = indices(loader)
            assert sorted(map(len, batches)) == sizes
            delivered = flat(batches)
            assert len(delivered) == len(set(delivered)) == kept
            assert set(delivered) <= set(range(size))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(method: str) -> None:
    loader = DataLoader(
        Filled(13, 2),
        3,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
        transforms=[double, plus_one],
        worker_init_fn=no_op,
        seed=3,
    )
    for _ in range(2):
        seen = [row.tolist() for batch in loader for row in batch]
        assert sorted(seen) == [[2 * i + 1.0] * 2 for i in range(13)]
    del loader


def no_op(_: int) -> None:
    """A ``worker_init_fn`` at the top level."""


@each(FEW)
def test_break_and_begin_again(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(40), 4, **workers)
    for _ in range(3):
        for batch in loader:
            if batch[0] == 8:
                break
        assert indices(loader) == [list(range(i, i + 4)) for i in range(0, 40, 4)]


@each({name: FEW[name] for name in ("2-processes", "2-threads")})
@pytest.mark.parametrize("order", ORDERS)
def test_break_and_begin_again_with_persistent_workers(order: str, workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(40), 4, order=order, persistent_workers=True, **workers)
    for number in range(20):
        for _ in zip(range(number % 6), loader, strict=False):
            pass
        assert sorted(flat(indices(loader))) == list(range(40))


@each(FEW)
def test_two_iterators_at_once(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(24), 4, **workers)
    expected = [list(range(i, i + 4)) for i in range(0, 24, 4)]
    first, second = iter(loader), iter(loader)
    begin = [next(first).tolist(), next(first).tolist()]
    other = indices(second)
    assert begin + indices(first) == expected
    assert other == expected
    assert next(first, None) is None


def test_persistent_workers_have_one_iterator_as_with_torch() -> None:
    for kind in (TorchLoader, DataLoader):
        loader = kind(Numbers(6), 2, num_workers=1, persistent_workers=True)
        first = iter(loader)
        assert next(first).tolist() == [0, 1]
        assert iter(loader) is first
        assert indices(first) == [[0, 1], [2, 3], [4, 5]]
        assert next(first, None) is None
        pids = {process.pid for process in multiprocessing.active_children()}
        assert indices(loader) == [[0, 1], [2, 3], [4, 5]]
        assert {process.pid for process in multiprocessing.active_children()} == pids
        del loader, first
        gc.collect()


@each({name: FEW[name] for name in ("2-processes", "2-threads")})
def test_iterator_dropped_while_workers_run(workers: dict[str, Any]) -> None:
    iterator = iter(DataLoader(Numbers(1000), 1, **workers))
    assert next(iterator).tolist() == [0]
    names = {thread.name for thread in threading.enumerate()}
    assert multiprocessing.active_children() or any("minato" in name for name in names)
    del iterator
    wait_until(lambda: not multiprocessing.active_children())
    wait_until(lambda: not any("minato" in thread.name for thread in threading.enumerate()))


@each({name: FEW[name] for name in ("2-processes", "2-threads")})
def test_forked_child_does_not_end_its_parents_workers(workers: dict[str, Any]) -> None:
    iterator = iter(DataLoader(Numbers(200), 1, **workers))
    first = next(iterator)
    child = os.fork()
    if child == 0:
        try:
            del iterator, first
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert indices([first, *iterator]) == [[i] for i in range(200)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loaders_within_datasets(num_workers: int) -> None:
    # The inner loader has been used before the workers were forked; each of them has a copy of it.
    class Outer(Numbers):
        """Samples that iterate over a loader themselves, and look whether somebody else writes to its batches."""

        def __getitem__(self, index: int) -> bool:
            return all(
                torch.equal(batch, copy) and batch.min() >= 1000 * os.getpid()
                for batch in inner
                for copy in [batch.clone() for _ in range(3)]
            )

    class Own(Filled):
        """Arrays that also hold the process in which they were made."""

        def __getitem__(self, index: int) -> Any:
            return np.full(self.shape, index + 1000 * os.getpid(), np.int64)

    inner = DataLoader(Own(20, 20_000), 4, num_workers=num_workers)
    list(inner)
    held = next(iter(inner))
    copies = held.clone()
    assert (
        flat(indices(DataLoader(Outer(8), 1, worker_init_fn=undaemonic, num_workers=4)))
        == [True] * 8
    )
    assert torch.equal(held, copies)
    assert len(list(inner)) == 5


def undaemonic(_: int) -> None:
    """Lets a worker have workers."""
    multiprocessing.current_process()._config["daemon"] = False


@each({"inline": FEW["inline"], "2-threads": FEW["2-threads"]})
def test_a_forked_child_goes_on_by_itself(workers: dict[str, Any]) -> None:
    # With threads it has none, but it cannot disturb those of its parent either.
    iterator = iter(DataLoader(Filled(40, 100), 2, **workers))
    held = next(iterator)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"wrong"
        try:
            held.fill_(7)
            if workers["num_workers"] == 0 and len(list(iterator)) == 19:
                answer = b"right"
        finally:
            os.write(writer, answer)
            os._exit(0)
    rest = [int(batch[0, 0]) for batch in iterator]
    os.waitpid(child, 0)
    assert os.read(reader, 10) == (b"right" if workers["num_workers"] == 0 else b"wrong")
    os.close(reader)
    os.close(writer)
    assert rest == list(range(2, 40, 2))
    assert held[:, 0].tolist() == [0, 1]


def test_number_of_workers_may_be_changed() -> None:
    loader = DataLoader(Filled(12, 10), 3, num_workers=1)
    for number in (1, 0, 2, 0):
        loader.num_workers = number
        assert [int(batch[0, 0]) for batch in loader] == [0, 3, 6, 9]


@each(FEW)
def test_iteration_in_another_thread(workers: dict[str, Any]) -> None:
    seen: list[Any] = []

    def iterate() -> None:
        loader = DataLoader(Numbers(20), 4, **workers)
        seen.extend(indices(loader))
        seen.extend(indices(loader))

    thread = threading.Thread(target=iterate)
    thread.start()
    thread.join()
    assert seen == [list(range(i, i + 4)) for i in range(0, 20, 4)] * 2


@each({name: FEW[name] for name in ("2-processes", "2-threads")})
def test_workers_end_with_the_epoch(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(8), 2, **workers)
    iterator = iter(loader)
    assert len(indices(iterator)) == 4
    assert multiprocessing.active_children() == []
    assert not any("minato" in thread.name for thread in threading.enumerate())
    assert next(iterator, None) is None


def test_length_is_torchs() -> None:
    for size in (0, 1, 9, 10):
        for options in ({}, {"drop_last": True}, {"batch_size": None}):
            options = {"batch_size": 5, **options}
            ours, theirs = (kind(Numbers(size), **options) for kind in (DataLoader, TorchLoader))
            assert len(ours) == len(theirs)
            assert len(iter(ours)) == len(iter(theirs))


def test_it_is_torchs_class() -> None:
    loader = DataLoader(Numbers(4), 2)
    assert isinstance(loader, TorchLoader)
    assert isinstance(iter(loader), torch.utils.data.dataloader._BaseDataLoaderIter)
    assert DataLoader[int](Numbers(4)).batch_size == 1
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(loader))
    with pytest.raises(ValueError, match="attribute should not be set after"):
        loader.batch_size = 3


@each(FEW)
def test_loader_can_be_copied_and_pickled(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(6), 3, transforms=[plus_one], seed=4, **workers)
    assert indices(loader) == [[1, 2, 3], [4, 5, 6]]
    for twin in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert indices(twin) == [[1, 2, 3], [4, 5, 6]]


# ---- workers --------------------------------------------------------------------------------


class Surroundings(Numbers):
    """What a sample sees of the process that it runs in, which is one of two."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.both = Roll(2)

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        self.both()
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "worker": -1 if info is None else info.id,
            "workers": -1 if info is None else info.num_workers,
            "seed": -1 if info is None else info.seed,
            "dataset": info is not None and info.dataset is self,
            "initial_seed": torch.initial_seed(),
            "mark": os.environ.get("MINATO_TEST_MARK", "none"),
        }


def mark(worker: int) -> None:
    """A ``worker_init_fn``; it also sees the worker that it initialises."""
    assert worker == worker_number()
    os.environ["MINATO_TEST_MARK"] = f"worker {worker}"


def test_worker_processes_are_as_torchs() -> None:
    generator = torch.Generator()
    seen: list[Any] = []
    for kind in (TorchLoader, DataLoader):
        generator.manual_seed(5)
        loader = kind(
            Surroundings(40), None, num_workers=2, worker_init_fn=mark, generator=generator
        )
        seen.append({sample["worker"]: sample for sample in loader})
    theirs, ours = seen
    assert set(ours) == {0, 1}
    for number in (0, 1):
        assert ours[number].pop("pid") != os.getpid()
        theirs[number].pop("pid")
    assert ours == theirs
    assert ours[1]["threads"] == 1
    assert ours[1]["dataset"] is True
    assert ours[1]["mark"] == "worker 1"


def test_nothing_changes_in_the_main_process() -> None:
    before = torch.get_num_threads(), torch.initial_seed(), get_worker_info()
    for workers in FEW.values():
        list(DataLoader(Numbers(20), 2, transforms=[plus_one], **workers))
    assert (torch.get_num_threads(), torch.initial_seed(), get_worker_info()) == before


@each({"2-processes": FEW["2-processes"], "2-threads": FEW["2-threads"]})
def test_first_workers_do_not_wait_for_the_others(workers: dict[str, Any]) -> None:
    class Late:
        """The second worker has not started before the consumer has its batches."""

        over = multiprocessing.RawValue("b", 0)

        def __call__(self, number: int) -> None:
            if number == 1:
                wait_until(lambda: bool(self.over.value))

    late = Late()
    iterator = iter(DataLoader(Numbers(40), 2, worker_init_fn=late, timeout=50, **workers))
    assert [next(iterator).tolist() for _ in range(10)] == [[2 * i, 2 * i + 1] for i in range(10)]
    late.over.value = 1
    del iterator


@pytest.mark.parametrize("compat", [None, "torch"])
def test_all_workers_are_forked_in_iter_as_with_torch(compat: str | None) -> None:
    loader = DataLoader(Numbers(12), 2, num_workers=3, compat=compat)
    iterator = iter(loader)
    assert len(multiprocessing.active_children()) == 3
    assert flat(iterator) == [*range(12)]


# ---- the loader as an object ----------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_the_end_of_a_block_ends_the_workers(persistent: bool) -> None:
    with DataLoader(Numbers(40), 2, num_workers=2, persistent_workers=persistent) as loader:
        iterator: Any = iter(loader)
        iterator._source._pool.grow(2)  # the first batch needs only one worker
        batch = next(iterator)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match=r"was closed .*: call iter\(loader\) to start again"):
        next(iterator)
    loader.close()
    assert loader.report().run.throughput.batches == 1
    assert batch.tolist() == [0, 1]
    assert flat(indices(loader)) == list(range(40))


def test_a_finished_iterator_stays_finished() -> None:
    loader = DataLoader(Numbers(4), 2)
    iterator = iter(loader)
    assert len(list(iterator)) == 2
    loader.close()
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_loader_is_shown_in_one_line() -> None:
    class Named(DataLoader[Any]):
        pass

    loader = Named(
        Numbers(4), 2, observe=Observe(name="val"), errors="skip", in_order=False, workers="thread"
    )
    text = "Named(Numbers, batch_size=2, num_workers=0, order='arrival', workers='thread', errors='skip', "
    assert repr(loader) == f"{text}observe={Observe(name='val')})"
    assert repr(pickle.loads(pickle.dumps(DataLoader(Numbers(4))))) == (
        "DataLoader(Numbers, batch_size=1, num_workers=0, order='strict')"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 3, "shuffle": True, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": [[3, 1], [2]]},
        {"batch_size": 2, "sampler": [4, 2, 0]},
        {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True},
    ],
    ids=str,
)
def test_a_loader_of_torchs_is_taken_over(arguments: dict[str, Any]) -> None:
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    torchs = [TorchLoader(Numbers(8), generator=each, **arguments) for each in generators]
    loader = DataLoader.from_torch(torchs[0], observe=Observe(name="train"), memory_budget="1MB")
    assert (loader.observe.name, loader.prefetch_factor) == ("train", torchs[0].prefetch_factor)
    assert [str(batch) for batch in loader] == [str(batch) for batch in torchs[1]]
    seeded = [[str(batch) for batch in DataLoader.from_torch(torchs[0], seed=3)] for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_events_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "minato"),
        DataLoader(Numbers(4), observe=Observe(name="mine")),
    ):
        pass
    assert [record.getMessage().split(") ")[1] for record in caplog.records] == [
        "is made",
        "is closed",
    ]
