"""``minato.DataLoader`` as torch's: every sample once, the same batches, and everything that may be in one."""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, get_worker_info

import minato
from minato import CostBatches, DataLoader, MinatoWarning, Observe
from tests.datasets import (
    ORDERS,
    TOO_MANY_WORKERS,
    DiesOnce,
    Filled,
    Numbers,
    flat,
    indices,
    plus_one,
    wait_until,
    worker_number,
)
from tests.selection import WORKERS as FEW
from tests.selection import each_of, mostly_slow

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

TorchLoader = torch.utils.data.DataLoader

WORKERS = {
    **FEW,
    **{f"{number}-processes": {"num_workers": number} for number in (1, 7)},
    **{f"{number}-threads": {"num_workers": number, "workers": "thread"} for number in (1, 7)},
}
TWO = {name: FEW[name] for name in ("2-processes", "2-threads")}


# ---- exactly once ---------------------------------------------------------------------------

# size, drop_last, persistent
ROUGHLY = [(13, False, True), (13, True, False)]
THOROUGHLY = [
    *((0, False, False), (0, True, True), (1, False, True), (1, True, False)),
    *((15, False, True), (15, True, False), (13, False, False), (13, True, True), *ROUGHLY),
]


@each_of(WORKERS)
@mostly_slow("order", ORDERS)
def test_every_sample_once_per_epoch(order: str, workers: dict[str, Any]) -> None:
    processes = workers["num_workers"] if "workers" not in workers else 0
    for size, drop_last, persistent in ROUGHLY if processes == 7 else THOROUGHLY:
        persistent = persistent and workers["num_workers"] > 0
        options = {"drop_last": drop_last, "persistent_workers": persistent, **workers}
        loader = DataLoader(Numbers(size), 5, shuffle=size > 1, order=order, **options)
        kept = size // 5 * 5 if drop_last else size
        sizes = sorted(len(range(size)[i : i + 5]) for i in range(0, kept, 5))
        assert len(loader) == len(sizes)
        for _ in range(3 if persistent or not processes else 1):
            batches = indices(loader)
            assert sorted(map(len, batches)) == sizes
            delivered = flat(batches)
            assert len(delivered) == len(set(delivered)) == kept
            assert set(delivered) <= set(range(size))


@each_of(TWO)
@pytest.mark.parametrize("order", ORDERS)
def test_break_and_begin_again_with_persistent_workers(order: str, workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(40), 4, order=order, persistent_workers=True, **workers)
    for number in range(20):
        for _ in zip(range(number % 6), loader, strict=False):
            pass
        assert sorted(flat(indices(loader))) == list(range(40))


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
    outer = DataLoader(Outer(8), 1, worker_init_fn=undaemonic, num_workers=4)
    assert flat(indices(outer)) == [True] * 8
    assert torch.equal(held, copies)
    assert len(list(inner)) == 5


def undaemonic(_: int) -> None:
    """Lets a worker have workers."""
    multiprocessing.current_process()._config["daemon"] = False


@each_of(TWO)
def test_workers_end_with_the_epoch(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(8), 2, **workers)
    iterator = iter(loader)
    assert len(indices(iterator)) == 4
    assert multiprocessing.active_children() == []
    wait_until(lambda: not any("minato" in thread.name for thread in threading.enumerate()))
    assert next(iterator, None) is None


# ---- streams --------------------------------------------------------------------------------


class Uneven(IterableDataset[int]):
    """Worker k has its own number of samples; worker 1 has none."""

    def __iter__(self) -> Iterator[int]:
        worker = max(worker_number(), 0)
        return iter(range(100 * worker, 100 * worker + (3, 0, 11)[worker]))


@pytest.mark.filterwarnings("ignore:.* of 3 readers received nothing")
def test_transforms_of_a_stream() -> None:
    options: Any = {"num_workers": 3, "transforms": [plus_one, float]}
    found = [
        indices(DataLoader(Uneven(), 2, workers=kind, **options)) for kind in ("process", "thread")
    ]
    assert found[0] == found[1]
    assert sorted(flat(found[0])) == [1.0, 2.0, 3.0, *map(float, range(201, 212))]


# ---- workers --------------------------------------------------------------------------------


def test_nothing_changes_in_the_main_process() -> None:
    before = torch.get_num_threads(), torch.initial_seed(), get_worker_info()
    for workers in FEW.values():
        list(DataLoader(Numbers(20), 2, transforms=[plus_one], **workers))
    assert (torch.get_num_threads(), torch.initial_seed(), get_worker_info()) == before


@each_of(TWO)
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


# ---- the loader as an object ----------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_the_end_of_a_block_ends_the_workers(persistent: bool) -> None:
    # With a window that does not grow no worker ends with the epoch before the block does.
    options: Any = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": persistent}
    with DataLoader(Numbers(40), 2, **options) as loader:
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


@pytest.mark.parametrize("wrap", [iter, functools.partial(map, abs), itertools.chain])
def test_close_ends_the_workers_of_a_wrapped_iterator(wrap: Callable[[Any], Any]) -> None:
    class Wrapped(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return wrap(super()._get_iterator())

    loader = Wrapped(Numbers(40), 2, num_workers=2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    loader.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)


def test_a_loader_that_another_thread_closes_within_iter() -> None:
    class Closed(DataLoader[Any]):
        closes = 1

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_iterator" and value is not None and self.closes:
                self.closes -= 1
                self.close()  # as another thread does

    loader = Closed(
        Numbers(8), 2, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert flat(indices(loader)) == list(range(8))
    assert loader.closes == 0
    loader.close()


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

    options: Any = {"errors": "skip", "in_order": False, "workers": "thread"}
    loader = Named(Numbers(4), 2, observe=Observe(name="val"), **options)
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


@pytest.mark.parametrize("given", [{"sampler": [1, 2]}, {"batch_sampler": [[1, 2]]}])
def test_a_sampler_and_no_workers_take_the_place_of_a_loaders(given: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"prefetch_factor": 5, "persistent_workers": True, "timeout": 60}
    torchs = TorchLoader(Numbers(8), 2, shuffle=True, num_workers=1, **parts)
    loader: Any = DataLoader.from_torch(torchs, num_workers=0, **given)
    assert indices(loader) == [[1, 2]]


@pytest.mark.parametrize("sizes", [(None, 2), (2, None), (2, CostBatches(8))], ids=str)
@pytest.mark.parametrize("make", [TorchLoader, DataLoader])
def test_another_batch_size_has_its_own_collate_fn(make: Any, sizes: tuple[Any, Any]) -> None:
    loader = DataLoader.from_torch(make(Numbers(4), sizes[0]), batch_size=sizes[1])
    assert loader.collate_fn == DataLoader(Numbers(4), sizes[1]).collate_fn


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
@pytest.mark.parametrize("make", [TorchLoader, DataLoader])
def test_a_sampler_of_something_else_than_the_dataset_is_taken_over(make: Any, kind: Any) -> None:
    loader = DataLoader.from_torch(make(Numbers(9), 2, sampler=kind(range(4))))
    assert sorted(flat(indices(loader))) == [0, 1, 2, 3]


def test_a_batch_sampler_that_was_put_in_by_force_is_taken_over() -> None:
    torchs = TorchLoader(Numbers(8), 2)
    torchs.batch_sampler.batch_size = 4  # type: ignore[union-attr]
    assert len(DataLoader.from_torch(torchs)) == 2
    torchs._DataLoader__initialized = False  # type: ignore[attr-defined]
    torchs.batch_sampler = [[5], [6, 7]]  # type: ignore[assignment]
    assert indices(DataLoader.from_torch(torchs)) == [[5], [6, 7]]


@pytest.mark.parametrize("other", [None, [1, 2], Numbers(4), DataLoader])
def test_what_is_no_loader_is_not_taken_over(other: Any) -> None:
    with pytest.raises(TypeError, match=f"^loader is a {type(other).__name__}: give a torch"):
        DataLoader.from_torch(other)


def test_whether_minato_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, torchs = DataLoader(Numbers(4), num_workers=1), TorchLoader(Numbers(4))
    assert minato.is_active(loader)
    with minato.patch():
        assert minato.is_active(torch.utils.data.DataLoader(Numbers(4)))
        assert not minato.is_active(torchs)
    piped = torch.utils.data.datapipes.iter.IterableWrapper([1, 2])  # type: ignore[attr-defined]
    for other in (torchs, DataLoader(piped), [1, 2], None):
        assert not minato.is_active(other)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_loop", print)
    assert not minato.is_active(loader)


def test_what_workers_do_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    dataset, method = DiesOnce(16, tmp_path / "died"), "forkserver"
    loader = DataLoader(dataset, 2, num_workers=1, multiprocessing_context=method)
    with (
        caplog.at_level(logging.INFO, "minato"),
        pytest.warns(MinatoWarning, match="killed by signal"),
    ):
        assert len(list(loader)) == 8
    started, *later = [record.getMessage() for record in caplog.records]
    assert started == "1 workers start from the fork server of multiprocessing"
    died = re.compile(r"worker 0 \(process \d+\) has died: exit code -9")
    assert (
        len([*filter(died.fullmatch, later)]) == 1
    )  # the prefetch window may grow before it, and after


def test_events_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "minato"):
        DataLoader(Numbers(4), observe=Observe(name="mine")).close()
    texts = [record.getMessage().split(") ")[1] for record in caplog.records]
    assert texts == ["is made", "is closed"]
