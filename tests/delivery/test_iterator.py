"""The iterator between torch's protocol and the source of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.autograd.profiler import profile

from minato.delivery.iterator import BatchIterator
from tests.datasets import Numbers


@dataclass
class Source:
    """Hands out what each pass draws, and writes down how it is used."""

    base_seed: int
    foretells_rightly: bool = True
    journal: list[Any] = field(default_factory=list)
    batches: Iterator[Any] = iter(())

    def begin(
        self,
        batches: Iterator[Any],
        epoch: int,
        seed: int,
        expected: Callable[[], Any],
        progress: Any,
        size: Callable[[], int | None],
    ) -> bool:
        assert progress == f"of {epoch}"
        self.journal.append(("begin", epoch, seed, expected()))
        self.batches = batches
        return self.foretells_rightly

    def next(self) -> Any:
        for batch in self.batches:
            return torch.tensor(batch)
        raise StopIteration

    def shut_down(self) -> None:
        self.journal.append("shut down")


class Pass:
    """A run over the sampler."""

    disappointed = 0

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seed = -1
        self.progress = f"of {epoch}"
        self.times_entered = 0

    def entering(self) -> None:
        self.times_entered += 1

    def seeded(self, base_seed: int) -> int:
        self.seed = base_seed
        return base_seed

    def batches(self, indices: Iterator[Any]) -> Iterator[Any]:
        yield from indices

    def size(self) -> int:
        return 4

    def expected(self) -> str:
        return f"after {self.epoch}"

    def prediction_failed(self) -> None:
        Pass.disappointed += 1


@pytest.fixture
def make() -> Callable[..., BatchIterator]:
    epochs = iter(range(100))
    Pass.disappointed = 0

    def make(sampler: Any = None, **options: Any) -> BatchIterator:
        sampler = {"batch_sampler": sampler} if sampler else {"batch_size": 2}
        loader = torch.utils.data.DataLoader(Numbers(6), **sampler, **options)
        return BatchIterator(loader, Source, lambda _: Pass(next(epochs)))

    return make


def test_a_pass_is_begun_and_the_source_ends_with_it(make: Callable[..., BatchIterator]) -> None:
    torch.manual_seed(1)
    iterator = make()
    torch.manual_seed(1)
    seed = torch.empty((), dtype=torch.int64).random_().item()
    source: Any = iterator._source
    assert source.base_seed == seed
    assert source.journal == [("begin", 0, seed, "after 0")]
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    assert source.journal[1:] == ["shut down"]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert source.journal[1:] == ["shut down"]
    assert iterator._num_yielded == 3


def test_persistent_workers_outlive_the_pass(make: Callable[..., BatchIterator]) -> None:
    iterator = make(num_workers=1, persistent_workers=True)
    source: Any = iterator._source
    assert len(list(iterator)) == 3
    assert next(iterator, None) is None
    loader = torch.utils.data.DataLoader(Numbers(2), 2)
    iterator._reset(loader)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]
    assert [entry[1] for entry in source.journal] == [0, 1]
    assert len({entry[2] for entry in source.journal}) == 1  # the base seed stays, as with torch


def test_wrong_expectations_are_reported(make: Callable[..., BatchIterator]) -> None:
    iterator = make(num_workers=1, persistent_workers=True)
    assert Pass.disappointed == 0
    source: Any = iterator._source
    source.foretells_rightly = False
    iterator._reset(torch.utils.data.DataLoader(Numbers(2), 2))
    assert Pass.disappointed == 1


def test_a_profiler_sees_the_range_that_torch_records(make: Callable[..., BatchIterator]) -> None:
    with profile() as recorded:
        next(make())
    names = [event.name for event in recorded.function_events]
    assert names.count("enumerate(DataLoader)#BatchIterator.__next__") == 1
