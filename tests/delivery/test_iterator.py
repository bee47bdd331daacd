"""The iterator between torch's protocol and the source of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.autograd.profiler import profile

from minato import DataLoader
from minato.delivery.iterator import BatchIterator
from minato.sampling.progress import Outgoing
from tests.datasets import Numbers


class Source:
    """Yields the indices of each batch, and records how it is used."""

    predicts = True

    def __init__(self, epoch: FakeEpoch) -> None:
        self.base_seed = epoch.seed
        self.journal: list[Any] = []
        self.batches: Iterator[Any] = iter(())

    def begin(self, epoch: FakeEpoch, batches: Iterator[Any]) -> bool:
        self.journal.append(("begin", epoch.number, epoch.seed))
        self.batches = batches
        return self.predicts

    def next(self) -> Outgoing:
        for batch in self.batches:
            return Outgoing(torch.tensor(batch))
        raise StopIteration

    def shut_down(self) -> None:
        self.journal.append("shut down")


class FakeDraw:
    """The states from which an epoch's indices are drawn."""

    def before_iter(self) -> None:
        """Torch asks the sampler twice."""


class FakeEpoch:
    """An epoch over the sampler."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seed = -1
        self.prefetches_next = True
        self.draw = FakeDraw()

    def has_begun(self) -> None:
        """Its first batches were drawn."""

    def set_base_seed(self, drawn: int) -> int:
        self.seed = drawn
        return drawn

    def batches(self, indices: Iterator[Any]) -> Iterator[Any]:
        yield from indices


@pytest.fixture
def epochs() -> list[FakeEpoch]:
    return []


@pytest.fixture
def make(epochs: list[FakeEpoch]) -> Callable[..., BatchIterator]:
    class Epochs:
        def begin(self, loader: Any) -> Any:
            epochs.append(FakeEpoch(len(epochs)))
            return epochs[-1]

        def again(self, epoch: Any) -> None:
            """No other epoch was chosen."""

    def make(**options: Any) -> BatchIterator:
        loader = torch.utils.data.DataLoader(Numbers(6), 2, **options)
        make_source: Any = Source
        return BatchIterator(loader, make_source, Epochs())

    return make


def test_an_epoch_is_begun_and_the_source_ends_with_it(make: Callable[..., BatchIterator]) -> None:
    torch.manual_seed(1)
    iterator = make()
    torch.manual_seed(1)
    seed = torch.empty((), dtype=torch.int64).random_().item()
    source: Any = iterator._source
    assert source.base_seed == seed
    assert source.journal == [("begin", 0, seed)]
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    assert source.journal[1:] == ["shut down"]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert source.journal[1:] == ["shut down"]
    assert iterator._num_yielded == 3


def test_persistent_workers_outlive_the_epoch(make: Callable[..., BatchIterator]) -> None:
    iterator = make(num_workers=1, persistent_workers=True)
    source: Any = iterator._source
    assert len(list(iterator)) == 3
    assert next(iterator, None) is None
    loader = torch.utils.data.DataLoader(Numbers(2), 2)
    iterator._reset(loader)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    assert [entry[1] for entry in source.journal] == [0, 1]
    assert len({entry[2] for entry in source.journal}) == 1  # the base seed stays, as with torch


def test_wrong_predictions_are_reported(
    make: Callable[..., BatchIterator], epochs: list[FakeEpoch]
) -> None:
    iterator = make(num_workers=1, persistent_workers=True)
    source: Any = iterator._source
    source.predicts = False
    iterator._reset(torch.utils.data.DataLoader(Numbers(2), 2))
    assert [epoch.prefetches_next for epoch in epochs] == [True, False]


def test_a_profiler_sees_the_range_that_torch_records(make: Callable[..., BatchIterator]) -> None:
    with profile() as recorded:
        next(make())
    names = [event.name for event in recorded.function_events]
    assert names.count("enumerate(DataLoader)#BatchIterator.__next__") == 1


@pytest.mark.parametrize("workers", [{}, {"workers": "thread"}])
def test_a_generator_that_delegates_to_the_loader_may_be_left_early(workers):
    dataset = torch.arange(40)
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True, **workers)

    def batches():
        yield from loader

    for _ in range(2):
        left = batches()
        assert next(left).tolist() == [0, 1, 2, 3]
        left.close()  # which closes the loader's iterator as well, unlike one of torch's
    assert [batch.tolist() for batch in batches()] == dataset.reshape(10, 4).tolist()
    loader.close()
