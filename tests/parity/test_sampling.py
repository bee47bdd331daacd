"""What is loaded: samplers of every kind, keys of every type, data that changes between passes."""

from __future__ import annotations

import decimal
import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import minato
from tests.datasets import Numbers, Pair
from tests.parity.harness import (
    EITHER,
    attempt,
    describe,
    drain,
    each,
    generator_states,
    same_for_both,
)
from tests.parity.material import Listed, OnlyIter, identity

pytestmark = pytest.mark.usefixtures("torch_looks_often")

# ---- keys -----------------------------------------------------------------------------------


class Colour(enum.Enum):
    """Keys may be members of enumerations."""

    RED = 1


class Whole(enum.IntEnum):
    """And such that are integers, too."""

    TWO = 2


@dataclass(frozen=True)
class Address:
    """And objects of the user."""

    street: str
    number: int


class Echo(data.Dataset[Any]):
    """Tells the type and the value of its key."""

    def __getitem__(self, key: Any) -> str:
        return f"{type(key).__name__}: {key!r}"


KEYS = [
    *(0, -1, 2**63 - 1, -(2**63), 2**63, 2**200, True, None, ..., 1.5, float("nan"), 2j),
    *("name", "", "ünïcode", b"bytes", bytearray(b"array"), (1, "two"), (), [1, 2], {3}, {"a": 1}),
    *(np.int64(3), np.float32(0.5), np.str_("text"), np.arange(3), torch.tensor(4), torch.ones(2)),
    *(Colour.RED, Whole.TWO, Address("Hill", 3), Pair(1, 2), slice(1, 5, 2), range(3)),
    *(decimal.Decimal("1.50"), frozenset({1}), int, "x" * 10_000),
]


@each
@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_keys_of_any_type(batch_size: Any, workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        return [*make(Echo(), batch_size, sampler=KEYS, **workers)]

    outcome = same_for_both(case, **own)
    assert outcome[0] == "list"
    assert len(outcome[1]) == -(-len(KEYS) // (batch_size or 1))


@each
def test_getitems_gets_python_integers_and_the_container_that_was_drawn(
    workers: Any, own: Any
) -> None:
    def case(make: Any) -> Any:
        subset = data.Subset(Listed(20), [*range(19, 0, -2)])
        batches = [[1, 2], (3, 4), range(5), np.arange(3), torch.arange(2), []]
        return [
            [*make(subset, 4, collate_fn=identity, **workers)],
            [*make(subset, 3, shuffle=True, collate_fn=identity, **workers)],
            [*make(Listed(9), batch_sampler=batches, collate_fn=identity, **workers)],
            [*make(data.Subset(subset, np.arange(5)), 2, collate_fn=identity, **workers)],
            [*make(subset, None, sampler=[2, 1], **workers)],
        ]

    outcome = same_for_both(case, **own)
    first = outcome[1][0][1][0]
    assert first == describe(
        [(19, "list", "int"), (17, "list", "int"), (15, "list", "int"), (13, "list", "int")]
    )


class Tensorial(Numbers):
    """``__getitems__`` returns one tensor, which ``default_collate`` refuses."""

    def __getitems__(self, keys: list[int]) -> Any:
        return torch.tensor(keys)


@each
def test_a_tensor_is_no_list_of_samples(workers: Any, own: Any) -> None:
    outcome = same_for_both(lambda make: [*make(Tensorial(4), 2, **workers)], **own)
    assert outcome[:2] == ("raised", "TypeError")


class Both(Numbers):
    """``__getitems__`` may be switched off by None, as torch's own wrappers do."""

    __getitems__ = None


@each
def test_getitems_that_is_none(workers: Any, own: Any) -> None:
    same_for_both(lambda make: [*make(Both(5), 2, **workers)], **own)


class Patched(Numbers):
    """Its ``__getitem__`` is replaced on the instance, which indexing does not see."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.__getitem__ = lambda index: -index  # type: ignore[method-assign]


def test_indexing_means_the_type() -> None:
    same_for_both(lambda make: [*make(Patched(5), 2)])


@each
def test_mappings_and_sequences_as_dataset(workers: Any, own: Any) -> None:
    samplers = {"sampler": ["b", "a"]}, {"sampler": [1, 1]}
    for dataset, options in (
        ({"a": 1, "b": 2}, samplers[0]),
        ("text", {}),
        (b"bytes", {}),
        (range(5, 9), {}),
        (np.arange(6.0).reshape(3, 2), {}),
        (torch.arange(6).view(3, 2), {}),
        (((1, "a"), (2, "b")), {}),
        ([None, 1], samplers[1]),
    ):
        same_for_both(lambda make: [*make(dataset, 2, **options, **workers)], **own)  # noqa: B023


# ---- samplers -------------------------------------------------------------------------------


class Counted:
    """A sampler that knows how much was asked of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.iterators = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        self.iterators += 1
        for key in itertools.count() if self.size < 0 else range(self.size):
            self.drawn += 1
            yield key

    def __len__(self) -> int:
        return self.size


@each
@pytest.mark.parametrize("size", [10**9, -1], ids=["billion", "endless"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_long_samplers_are_consumed_lazily(
    size: int, batched: bool, workers: Any, own: Any
) -> None:
    prefetch = {"prefetch_factor": 3} if workers["num_workers"] else {}

    def case(make: Any) -> Any:
        sampler = Counted(size)
        loader = make(Echo(), 2 if batched else None, sampler=sampler, **workers, **prefetch)
        seen = [*itertools.islice(loader, 5)]
        return seen, sampler.drawn, sampler.iterators, attempt(lambda: len(loader))

    same_for_both(case, **own)


@pytest.mark.parametrize(
    "workers", [{"num_workers": 2}, {"num_workers": 2, "workers": "thread"}], ids=str
)
def test_without_a_prefetch_factor_an_endless_sampler_is_not_run_through(workers: Any) -> None:
    sampler = Counted(-1)
    iterator = iter(minato.DataLoader(Echo(), 2, sampler=sampler, **workers))
    for _ in range(50):
        next(iterator)
    assert sampler.drawn < 2000


@each
def test_how_often_a_sampler_is_asked(workers: Any, own: Any) -> None:
    for persistent in (False, True) if workers["num_workers"] else (False,):

        def case(make: Any, persistent: bool = persistent) -> Any:
            alone, batched = Counted(6), Counted(6)
            loaders = [
                make(Numbers(6), None, sampler=alone, persistent_workers=persistent, **workers),
                make(Numbers(6), 4, sampler=batched, persistent_workers=persistent, **workers),
            ]
            for loader in (*loaders, *loaders):
                assert len([*loader]) in (2, 6)
            return alone.iterators, batched.iterators, alone.drawn, batched.drawn

        same_for_both(case, **own)


class Deck:
    """Its own iterator, which shuffles whenever it is asked for one."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, list[int]()

    def __iter__(self) -> Iterator[Any]:
        self.left = torch.randperm(self.size).tolist()
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return [self.left.pop()]


@each
def test_a_sampler_that_is_its_own_iterator(workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        loader = make(Numbers(7), batch_sampler=Deck(7), **workers)
        return [*loader], [*itertools.islice(loader, 3)], [*loader], torch.rand(2)

    same_for_both(case, **own)


def test_a_sampler_that_is_its_own_iterator_is_resumed() -> None:
    torch.manual_seed(5)
    loader = minato.DataLoader(Numbers(9), batch_sampler=Deck(9))
    iterator = iter(loader)
    seen = [int(next(iterator)) for _ in range(4)]
    other = minato.DataLoader(Numbers(9), batch_sampler=Deck(9))
    other.load_state_dict(loader.state_dict())
    assert [int(batch) for batch in other] == [int(batch) for batch in iterator]
    assert len({*seen}) == 4


class Drawing(OnlyIter):
    """Draws from torch's generator for each key."""

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            yield (key + int(torch.randint(100, ()))) % 7


@each
def test_generators_after_each_batch(workers: Any, own: Any) -> None:
    prefetch = {"prefetch_factor": 2} if workers["num_workers"] else {}

    def case(make: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        states = []
        for sampler in (Drawing(range(30)), data.RandomSampler(range(90), replacement=True)):
            loader = make(
                Numbers(90), 2, sampler=sampler, generator=generator, **workers, **prefetch
            )
            states.append(generator_states(generator))
            iterator = iter(loader)
            for batch in itertools.islice(iterator, 12):
                states.append((batch, generator_states(generator)))
            del iterator
        return states

    same_for_both(case, **own)


class Reluctant:
    """An iterator that raises now and then, and yet goes on."""

    def __iter__(self) -> Reluctant:
        self.calls = 0
        return self

    def __next__(self) -> int:
        self.calls += 1
        if self.calls == 3:
            raise LookupError("not now")
        if self.calls > 6:
            raise StopIteration
        return self.calls


def test_sampler_that_raises_and_goes_on() -> None:
    batches = {"batch_sampler": [[1], 2, "34", [5]], "collate_fn": identity}
    for options in (
        {"sampler": Reluctant(), "batch_size": None},
        {"sampler": Reluctant(), "batch_size": 2},
        batches,
    ):
        same_for_both(lambda make: drain(iter(make(Numbers(9), **options))))  # noqa: B023


@each
def test_sampler_that_is_changed_between_passes(workers: Any, own: Any) -> None:
    for persistent in (False, True) if workers["num_workers"] else (False,):

        def case(make: Any, persistent: bool = persistent) -> Any:
            keys = [3, 1]
            subset = data.SubsetRandomSampler([5, 6, 7])
            batches = data.BatchSampler(range(4), 3, drop_last=False)
            loaders = [
                make(Numbers(9), sampler=keys, persistent_workers=persistent, **workers),
                make(Numbers(9), 2, sampler=subset, persistent_workers=persistent, **workers),
                make(Numbers(9), batch_sampler=batches, persistent_workers=persistent, **workers),
            ]
            seen = [[*loader] for loader in loaders]
            keys.append(8)
            subset.indices = [1, 2]
            batches.batch_size = 2
            batches.drop_last = True
            return [*seen, *([*loader] for loader in loaders), [len(loader) for loader in loaders]]

        same_for_both(case, **own)


class Announced(OnlyIter):
    """Says how large its batches are."""

    batch_size = 70_000


@each
def test_batches_larger_than_any_usual_one(workers: Any, own: Any) -> None:
    large = range(Announced.batch_size)

    def case(make: Any) -> Any:
        return [
            [len(batch) for batch in make(large, batch_sampler=batches, **workers)]
            for batches in ([large, range(2)], Announced([[0], large]))
        ]

    same_for_both(case, **own)
    for kind in EITHER if workers["num_workers"] else ():
        unknown = minato.DataLoader(large, batch_sampler=OnlyIter([large]), workers=kind, **workers)
        with pytest.raises(ValueError, match=r"70000 samples .* attribute batch_size"):
            next(iter(unknown))


# ---- data that changes ----------------------------------------------------------------------


@each
def test_without_batching(workers: Any, own: Any) -> None:
    samples = [
        *(1, 2.5, True, None, "text", b"bytes", 3j),
        *(np.float64(2), np.int8(1), np.bool_(True), np.arange(3), np.array(["text"]), np.array(5)),
        *(torch.ones(2), [np.arange(2), 1], (np.ones(1), "a"), {"a": np.ones(2), "b": (1, 2)}),
        *(Pair(np.ones(2), 1), {1, 2}, range(3), [], (), {}, [[np.zeros(1)]]),
    ]
    for function in (None, data.default_convert, identity, type):
        options = {"collate_fn": function, **workers}
        same_for_both(lambda make: [*make(samples, None, **options)], **own)  # noqa: B023


# ---- iterators ------------------------------------------------------------------------------
