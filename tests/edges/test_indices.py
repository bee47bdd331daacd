"""What a sampler yields reaches the dataset as it is, whatever its type, with every kind of worker."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader as TorchLoader

from minato import DataLoader, ErrorPolicy, Record
from tests.datasets import Numbers, flat, outcomes
from tests.selection import loaders


class Sized(list):  # type: ignore[type-arg]
    """A batch with the size of its images."""

    def __init__(self, indices: list[int], size: int) -> None:
        super().__init__(indices)
        self.size = size


class Whole(Numbers):
    """Returns what it gets."""

    def __getitems__(self, batch: Any) -> list[str]:
        if isinstance(batch, dict) and "indices" in batch:
            return [f"{index} {batch['size']}" for index in batch["indices"]]
        if isinstance(batch, (slice, int)) or (torch.is_tensor(batch) and not batch.ndim):
            return [str(batch)] * 2
        extra = getattr(batch, "size", "") if isinstance(batch, list) else ""
        return [f"{type(batch).__name__} {extra} {index!r}" for index in batch]


BATCHES: dict[str, list[Any]] = {
    "lists": [[0, 1], [2, 3]],
    "tuples": [(0, 1), (2, 3)],
    "arrays": [np.array([0, 1]), np.array([2, 3], np.int32)],
    "tensors": [torch.tensor([0, 1]), torch.tensor([2, 3])],
    "ranges": [range(2), range(2, 4)],
    "strings": ["ab", "c"],
    "dictionaries": [{"indices": [0, 1], "size": 224}, {"indices": [2], "size": 96}],
    "of one": [{"indices": [0, 1, 2]} | {"size": 1}, Sized([5], 7)],
    "sets": [{0, 1}, {2}],
    "slices": [slice(0, 2), slice(2, 4)],
    "integers": [3, torch.tensor(4)],
    "deques": [deque([0, 1]), deque([2])],
    "subclasses": [Sized([0, 1], 224), Sized([2, 3], 96)],
}
WORKERS = loaders("inline", "fork", "threads", "compat")


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_dataset_that_takes_lists_gets_the_samplers_object(name: str, workers: str) -> None:
    expected = list(TorchLoader(Whole(8), batch_sampler=BATCHES[name], collate_fn=list))
    loader = DataLoader(Whole(8), batch_sampler=BATCHES[name], collate_fn=list, **WORKERS[workers])
    assert list(loader) == expected


class Refuses(Whole):
    def __getitems__(self, batch: Any) -> list[str]:
        if 2 in (batch["indices"] if isinstance(batch, dict) else batch):
            raise ValueError("no two")
        return super().__getitems__(batch)


def test_a_batch_that_is_more_than_a_list_is_not_divided_to_skip_a_sample() -> None:
    # A call for its single indices would lack the size, and so return other samples.
    batches = [Sized([0, 1], 1), Sized([2, 3], 2), [2, 3]]
    loader = DataLoader(
        Refuses(8), batch_sampler=batches, collate_fn=list, errors=ErrorPolicy(on_error="skip")
    )
    with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
        first, second, third = outcomes(iter(loader))
    assert first == ("batch", ["Sized 1 0", "Sized 1 1"])
    assert second[:2] == ("raised", ValueError)
    assert third == ("batch", ["list  3"])


@pytest.mark.parametrize("name", ["dictionaries", "subclasses"])
def test_what_a_record_could_not_hold_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "order.jsonl"
    loader = DataLoader(Whole(8), batch_sampler=BATCHES[name], recording=Record(path))
    message = "must get as it is, and recording=Record.* writes indices only"
    with pytest.raises(ValueError, match=message):
        next(iter(loader))


class Changing:
    """A sampler that yields one object again and again, and changes it in between."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __iter__(self) -> Iterator[Any]:
        for step in range(6):
            self.index[...] = step
            yield self.index


class Read(Numbers):
    def __getitem__(self, index: Any) -> int:
        return int(index[0])


@pytest.mark.parametrize("workers", ["inline", "fork", "threads"])
@pytest.mark.parametrize("index", [torch.zeros(1, dtype=torch.int64), np.zeros(1, np.int64)])
def test_a_sampler_may_change_an_index_that_it_has_yielded(index: Any, workers: str) -> None:
    loader = DataLoader(
        Read(8), batch_size=None, sampler=Changing(index), collate_fn=int, **WORKERS[workers]
    )
    assert list(loader) == list(range(6))


class Popping(Numbers):
    """Takes the indices out of its list. Its first calls draw nothing, then one draws, and every other one fails."""

    fails = False
    calls = 0

    def __getitems__(self, batch: list[int]) -> list[int]:
        popped = [batch.pop(0) for _ in range(len(batch))]
        self.calls += 1
        if self.calls > 20:
            random.random()
        if self.fails and self.calls % 2:
            raise ValueError("every other call")
        return popped

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__(index)


@pytest.mark.parametrize("workers", ["inline", "fork", "threads"])
@pytest.mark.parametrize("own", [{}, {"errors": "retry"}, {"order": "arrival"}])
def test_a_dataset_may_change_the_list_that_it_gets(own: dict[str, Any], workers: str) -> None:
    dataset = Popping(120)
    dataset.fails = "errors" in own
    batches = DataLoader(dataset, 4, collate_fn=list, seed=1, **own, **WORKERS[workers])
    assert sorted(flat(batches)) == list(range(120))


@pytest.mark.parametrize("workers", ["inline", "fork", "threads"])
@pytest.mark.parametrize("own", [{}, {"errors": "retry"}])
def test_a_dataset_may_change_an_index(own: dict[str, Any], workers: str) -> None:
    dataset = Popping(120)
    dataset.fails = "errors" in own
    lists = BatchSampler(range(120), 4, False)
    batches = DataLoader(dataset, None, sampler=lists, seed=1, **own, **WORKERS[workers])
    assert flat(batches) == list(range(120))
