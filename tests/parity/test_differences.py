"""What is meant to differ from torch, and what gives torch's way: the table of ``docs/reference/differences.md``.

Most rows are tested with the rest of their subject; these compare with torch's loader.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import minato
from tests.behaviour.test_order import WaitsForOthers
from tests.datasets import Numbers, worker_number
from tests.parity.harness import TorchLoader
from tests.parity.material import BadSample, Tensors


def test_readiness_order_mixes_batches() -> None:
    arguments = {"batch_size": 2, "num_workers": 2, "in_order": False}
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def batches(make: Any, others: int = 4, **own: Any) -> list[list[int]]:
        dataset = WaitsForOthers(8, others)
        return [batch.tolist() for batch in make(dataset, **{**arguments, **own})]

    assert sorted(batches(TorchLoader)) == whole
    mixed = batches(minato.DataLoader)
    assert sorted(map(sorted, mixed)) != whole
    assert sorted(index for batch in mixed for index in batch) == [*range(8)]
    assert sorted(batches(minato.DataLoader, order="batch")) == whole
    kept = batches(minato.DataLoader, others=8, batch_size=1, batch_sampler=whole)
    assert sorted(kept) == whole != kept


class Busy(WaitsForOthers):
    """Who loads a sample."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        return worker_number()


def test_who_is_free_takes_the_next_sample() -> None:
    def workers(make: Any, others: int = 1, **own: Any) -> list[int]:
        return [*make(Busy(12, others), None, num_workers=2, **own)]

    alternating = [0, 1] * 6
    assert workers(TorchLoader) == alternating
    assert sorted(workers(minato.DataLoader, others=9)) != sorted(alternating)
    assert workers(minato.DataLoader, compat="torch") == alternating


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_of_a_delivered_tensor(workers: int) -> None:
    theirs = next(iter(TorchLoader(Tensors(2), 2, num_workers=workers)))
    ours = next(iter(minato.DataLoader(Tensors(2), 2, num_workers=workers)))
    assert theirs.is_shared() == (workers > 0)
    assert theirs.untyped_storage().resizable() == (workers == 0)
    assert not ours.is_shared()
    # Without workers, a small batch has memory of its own, as with torch.
    assert ours.untyped_storage().resizable() == (workers == 0)
    assert torch.equal(ours, theirs)
    assert ours.clone().resize_(9, 9).shape == (9, 9)
    assert ours.share_memory_().is_shared()


class Called(Numbers):
    """What the process is called that loads a sample."""

    def __getitem__(self, index: int) -> str:
        return multiprocessing.current_process().name


def test_iterators_and_processes_go_by_other_names() -> None:
    for make, has_queues, name in (
        (TorchLoader, True, "Process"),
        (minato.DataLoader, False, "Fork"),
    ):
        iterator = iter(make(Called(1), None, num_workers=1))
        assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
        assert hasattr(iterator, "_index_queues") == has_queues
        assert len(iterator._workers) == 1
        assert next(iterator).startswith(name)


class Chosen(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self.epoch


def test_set_epoch_of_a_stream_reaches_workers_that_persist() -> None:
    def epochs(make: Any) -> list[int]:
        dataset, found = Chosen(), []
        loader = make(dataset, None, num_workers=1, persistent_workers=True)
        for epoch in (3, 4):
            dataset.set_epoch(epoch)
            found += [*loader]
        return found

    assert epochs(TorchLoader) == [3, 3]
    assert epochs(minato.DataLoader) == [3, 4]


@pytest.mark.filterwarnings("always:The given NumPy array is not writable")
@pytest.mark.parametrize("compat", [None, "torch"])
def test_read_only_arrays_are_collated_without_a_warning(compat: Any) -> None:
    rows = np.broadcast_to(np.arange(2), (3, 2))
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="not writable"):
            [expected] = TorchLoader(rows, 3)
        with warnings.catch_warnings(action="error"):
            [batch] = minato.DataLoader(rows, 3, compat=compat)
    finally:
        torch.set_warn_always(False)
    assert batch.tolist() == expected.tolist()


def of_several() -> None:
    raise ExceptionGroup("several", [ValueError("the text")])


@pytest.mark.parametrize("own", [{}, {"workers": "thread"}], ids=["processes", "threads"])
def test_the_text_of_a_group_of_exceptions_arrives(own: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"dataset": BadSample(4, of_several), "num_workers": 1}
    with pytest.raises(TypeError, match="arguments"):
        list(TorchLoader(**arguments))
    with pytest.raises(RuntimeError, match="ValueError: the text"):
        list(minato.DataLoader(**arguments, **own))
