"""What may be in a batch: the same objects, or the same errors, as from torch's loader."""

from __future__ import annotations

import re
import time
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler, default_collate

from minato import DataLoader
from tests.datasets import (
    Filled,
    Numbers,
    Pair,
    Samples,
    assert_same,
    double,
    flat,
    indices,
    outcomes,
    plus_one,
)

TorchLoader = torch.utils.data.DataLoader

WORKERS = {
    "inline": {"num_workers": 0},
    "2-processes": {"num_workers": 2},
    "2-threads": {"num_workers": 2, "workers": "thread"},
}
each = pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS.keys())


class Tensor2(torch.Tensor):
    """A subclass of Tensor."""


class Text(str):
    """A subclass of str."""


class Point(tuple):
    """A subclass of tuple whose constructor takes one argument."""


# Three samples, one batch, each.
GOOD: dict[str, list[Any]] = {
    "int": [1, 2, 3],
    "float": [1.5, float("nan"), float("inf")],
    "bool": [True, False, True],
    "str": ["a", "ä", ""],
    "bytes": [b"a", b"", b"\0"],
    "text-subclass": [Text("a"), Text("b"), Text("c")],
    "mixed-numbers": [1, 2.5, True],
    "float-then-int": [1.5, 2, 3],
    "numpy-scalars": [np.float32(1), np.float32(2), np.float32(3)],
    "numpy-bool": [np.bool_(True), np.bool_(False), np.bool_(True)],
    "tensor": [torch.arange(6).view(2, 3) + i for i in range(3)],
    "tensor-0d": [torch.tensor(i) for i in range(3)],
    "tensor-empty": [torch.empty(0, 4) for _ in range(3)],
    "tensor-subclass": [torch.ones(2).as_subclass(Tensor2) * i for i in range(3)],
    "parameter": [torch.nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(3)],
    "bfloat16": [torch.ones(3, dtype=torch.bfloat16) * i for i in range(3)],
    "complex": [torch.ones(2, dtype=torch.complex64) * 1j for _ in range(3)],
    "strided": [torch.arange(12.0).view(3, 4).t()[::2] for _ in range(3)],
    "expanded": [torch.ones(1).expand(5) for _ in range(3)],
    "array": [np.arange(4, dtype=np.int16) for _ in range(3)],
    "array-fortran": [np.asfortranarray(np.arange(6.0).reshape(2, 3)) for _ in range(3)],
    "array-read-only": [np.frombuffer(b"abcd", np.uint8).copy() for _ in range(3)],
    "list": [[1, 2.0, "x"], [3, 4.0, "y"], [5, 6.0, "z"]],
    "tuple": [(1, torch.ones(2)), (2, torch.zeros(2)), (3, torch.ones(2))],
    "tuple-of-texts": [("a", "b"), ("c", "d"), ("e", "f")],
    "empty-list": [[], [], []],
    "namedtuple": [Pair(np.ones(2), i) for i in range(3)],
    "tuple-subclass": [Point([1, 2]), Point([3, 4]), Point([5, 6])],
    "dict": [{"image": np.ones((2, 2)), "label": i, "path": f"{i}.png"} for i in range(3)],
    "dict-keys": [{1: 1, None: 2, (1, 2): 3} for _ in range(3)],
    "empty-dict": [{}, {}, {}],
    "nested": [{"a": [(n, {"b": torch.ones(m)}) for m in (1, 2)], "c": "t"} for n in range(3)],
    "ordered-dict": [OrderedDict(a=i, b=float(i)) for i in range(3)],
    "default-dict": [defaultdict(int, a=i) for i in range(3)],
    "user-dict": [UserDict(a=i) for i in range(3)],
    "dict-with-equal-keys": [{1: 1, "b": 2}, {True: 3, "b": 4}, {1.0: 5, "b": 6}],
    "dict-in-other-order": [{"a": 1, "b": 2}, {"b": 4, "a": 3}, {"a": 5, "b": 6}],
    "dict-with-more-keys": [{"a": 1}, {"a": 2, "b": 3}, {"a": 4}],
    "float32-then-float64": [np.ones(2, np.float32), np.ones(2, np.float64), np.ones(2)],
    "other-dtype-later": [torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2)],
    "list-then-tuple": [[1, 2], (3, 4), [5, 6]],
    "text-then-number": ["a", 1, 2.0],
}
BAD: dict[str, list[Any]] = {
    "int-beyond-int64": [2**70, 1, 2],
    "later-int-beyond-int64": [1, 2**70, 2],
    "none": [None, None, None],
    "later-none": [1, None, 3],
    "ragged": [torch.ones(2), torch.ones(3), torch.ones(2)],
    "ragged-arrays": [np.ones(2), np.ones((2, 1)), np.ones(2)],
    "ragged-lists": [[1, 2], [3], [4, 5]],
    "ragged-in-dict": [{"a": torch.ones(2)}, {"a": torch.ones(2)}, {"a": torch.ones(1)}],
    "text-array": [np.array(["a"]), np.array(["b"]), np.array(["c"])],
    "object-array": [np.array([None]), np.array([None]), np.array([None])],
    "datetime": [np.datetime64("2020-01-01")] * 3,
    "object": [range(3), slice(3), ...],
    "set": [{1}, {2}, {3}],
    "fewer-keys": [{"a": 1, "b": 1}, {"a": 2}, {"a": 3, "b": 3}],
    "number-then-tensor": [1, torch.ones(2), 3],
    "tensor-then-array": [torch.ones(2), np.ones(2), torch.ones(2)],
    "none-in-dict": [{"a": 1}, {"a": None}, {"a": 3}],
}
# torch can collate these without workers only.
PARTLY = {
    "conjugated": [(torch.ones(2, dtype=torch.complex64) * 1j).conj() for _ in range(3)],
    "higher-dtype-later": [torch.tensor(1), torch.tensor(2.5), torch.tensor(True)],
}
ALL = {**GOOD, **BAD, **PARTLY}


def essence(outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    """An outcome as it is without workers: of an error's text only its own, not the worker's traceback."""
    if outcome[0] == "batch":
        return outcome
    _, kind, text = outcome
    caught = re.match(
        rf"Caught {kind.__name__} in DataLoader worker (process|thread) \d+\.\n", text
    )
    if caught:
        assert text[caught.end() :].startswith("Original Traceback (most recent call last):\n")
        text = re.split(rf"^(?:\w+\.)*{kind.__name__}: ", text, flags=re.MULTILINE)[-1].rstrip("\n")
    return "raised", kind, text


@each
def test_batches_and_errors_are_those_of_default_collate(workers: dict[str, Any]) -> None:
    dataset = Samples(flat(ALL.values()))
    processes = 0 if "workers" in workers else workers["num_workers"]
    theirs = outcomes(iter(TorchLoader(dataset, 3, num_workers=processes)))
    ours = outcomes(iter(DataLoader(dataset, 3, **workers)))
    assert len(ours) == len(theirs) == len(ALL)
    for name, our, their in zip(ALL, ours, theirs, strict=True):
        assert name in PARTLY or (their[0] == "batch") is (name in GOOD), f"{name}: {their}"
        assert_same(essence(our), essence(their), name)


@each
@pytest.mark.parametrize("name", ["dict-in-other-order", "dict-with-equal-keys"])
def test_the_keys_are_the_first_samples_even_if_it_comes_last(
    name: str, workers: dict[str, Any]
) -> None:
    first, *rest = GOOD[name]

    def late() -> Any:
        time.sleep(0.2)
        return first

    (ours,) = DataLoader(Samples([late, *rest]), len(GOOD[name]), **workers)
    (theirs,) = TorchLoader(Samples(GOOD[name]), len(GOOD[name]))
    assert_same(ours, theirs)
    assert [*map(type, ours)] == [*map(type, theirs)]


@each
def test_negative_strides_fail_as_with_torch(workers: dict[str, Any]) -> None:
    dataset = Samples([np.arange(6.0)[::-1]] * 3)
    (outcome,) = outcomes(iter(DataLoader(dataset, 3, **workers)))
    (theirs,) = outcomes(iter(TorchLoader(dataset, 3)))
    assert essence(outcome)[:2] == theirs[:2]
    assert "stride in the given numpy array is negative" in outcome[2]
    assert theirs[1] is ValueError


@pytest.mark.parametrize("order", ["batch", "arrival", "fast_first"])
@each
def test_misfits_in_the_other_orders(order: str, workers: dict[str, Any]) -> None:
    # Of these the collated values do not depend on which samples come together.
    samples = [{"a": np.full(3, i, np.float32), "i": i} if i % 7 else {"i": i} for i in range(70)]
    loader = DataLoader(Samples(samples), 1, order=order, **workers)
    seen = {int(batch["i"]): batch for batch in loader}
    assert sorted(seen) == list(range(70))
    for i, batch in seen.items():
        assert_same(batch, default_collate([samples[i]]))


def nothing(samples: list[Any]) -> list[Any]:
    """A ``collate_fn`` that leaves the samples alone."""
    return samples


def padded(samples: list[Any]) -> tuple[torch.Tensor, list[int]]:
    """A ``collate_fn`` for tensors of different lengths."""
    return torch.nn.utils.rnn.pad_sequence(samples), [len(sample) for sample in samples]


def nobody(samples: list[Any]) -> None:
    """A ``collate_fn`` without a result."""


COLLATED: dict[str, tuple[Callable[[list[Any]], Any], list[Any]]] = {
    "nothing": (nothing, [None, {1}, range(2), torch.ones(2), np.ones(3), "a", 2.5]),
    "padded": (padded, [torch.arange(1 + i % 3) for i in range(7)]),
    "nobody": (nobody, list(range(7))),
    "sum": (sum, list(range(7))),
    "large": (nothing, [np.full((64, 64, 64), i) for i in range(7)]),
}


@each
@pytest.mark.parametrize("name", COLLATED)
def test_custom_collate_fn(name: str, workers: dict[str, Any]) -> None:
    collate_fn, samples = COLLATED[name]
    make = {"dataset": Samples(samples), "batch_size": 3, "collate_fn": collate_fn}
    theirs = list(TorchLoader(**make))
    assert_same(list(DataLoader(**make, **workers)), theirs)
    assert_same(list(DataLoader(**make, **workers, order="batch"))[:0], theirs[:0])


@each
def test_custom_collate_fn_in_arrival_order(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(50), 3, collate_fn=nothing, order="arrival", **workers)
    batches = list(loader)
    assert sorted(flat(batches)) == list(range(50))
    assert sorted(map(len, batches)) == [2] + [3] * 16


@each
def test_views_and_shared_storages_survive_the_journey(workers: dict[str, Any]) -> None:
    base = torch.arange(1000.0)
    samples = [{"view": base[i : i + 3], "strided": base[:12].view(3, 4).t()} for i in range(6)]
    (theirs,) = TorchLoader(Samples(samples), 6, collate_fn=nothing)
    (ours,) = DataLoader(Samples(samples), 6, collate_fn=nothing, **workers)
    assert_same(ours, theirs)


@each
def test_without_batching(workers: dict[str, Any]) -> None:
    samples = [*(sample for group in GOOD.values() for sample in group[:1]), None, {1}]
    dataset = Samples(samples)
    theirs = list(TorchLoader(dataset, None))
    assert_same(list(DataLoader(dataset, None, **workers)), theirs)


@each
def test_batch_sampler(workers: dict[str, Any]) -> None:
    uneven = [[3, 1], [2], [0, 1, 2, 3, 4, 5, 6], [], [9, 9, 9], (7, 8)]
    for sampler in (uneven, BatchSampler(SequentialSampler(Numbers(10)), 4, drop_last=False)):
        make = {"dataset": Numbers(10), "batch_sampler": sampler, "collate_fn": nothing}
        assert_same(list(DataLoader(**make, **workers)), list(TorchLoader(**make)))


class Keys(list):
    """A dataset that gives back its key, with the key's type."""

    def __getitem__(self, key: Any) -> str:
        return f"{type(key).__name__} {key!r}"


@each
def test_keys_of_any_type(workers: dict[str, Any]) -> None:
    keys = [
        "a",
        (1, "b"),
        7,
        True,
        np.int64(3),
        -1,
        2**63,
        2**100,
        1.5,
        None,
        b"x",
        ("c", (2,)),
        {4},
    ]
    for kind, expected in ((TorchLoader, []), (DataLoader, workers)):
        loader = kind(Keys(), 2, sampler=keys, **dict(expected))
        seen = flat(loader)
        assert seen == [f"{type(key).__name__} {key!r}" for key in keys]
    tensors = [torch.tensor(3), torch.tensor([1, 2])]
    assert flat(DataLoader(Keys(), 1, sampler=tensors, **workers)) == [
        f"Tensor {key!r}" for key in tensors
    ]


class Mapped(dict):
    """A dataset that is a mapping from names."""


@each
def test_mapping_as_dataset(workers: dict[str, Any]) -> None:
    dataset = Mapped(a=1, b=2, c=3)
    assert indices(DataLoader(dataset, 2, sampler=["c", "a", "b"], **workers)) == [[3, 1], [2]]


class Listed(Numbers):
    """A dataset with ``__getitems__``, which says with whom each sample was fetched."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are to be fetched together")

    def __getitems__(self, keys: list[int]) -> Any:
        return [(key, len(keys)) for key in keys]


class Fewer(Listed):
    """Its ``__getitems__`` leaves samples out."""

    def __getitems__(self, keys: list[int]) -> Any:
        return [key for key in keys if key % 4]


class More(Listed):
    """Its ``__getitems__`` returns more samples than were asked for."""

    def __getitems__(self, keys: list[int]) -> Any:
        return [twice for key in keys for twice in (key, -key)]


class Whole(Listed):
    """Its ``__getitems__`` returns something that is no list."""

    def __getitems__(self, keys: list[int]) -> Any:
        return {"keys": torch.tensor(keys)}


@each
@pytest.mark.parametrize(
    "dataset", [Listed(11), Fewer(11), More(11)], ids=lambda d: type(d).__name__
)
def test_getitems(dataset: Listed, workers: dict[str, Any]) -> None:
    for options in ({}, {"collate_fn": nothing}):
        make = {"dataset": dataset, "batch_size": 3, **options}
        assert_same(list(DataLoader(**make, **workers)), list(TorchLoader(**make)))


@each
def test_getitems_that_builds_the_batch_itself(workers: dict[str, Any]) -> None:
    make = {"dataset": Whole(11), "batch_size": 3, "collate_fn": nothing}
    assert_same(list(DataLoader(**make, **workers)), list(TorchLoader(**make)))


@each
def test_getitems_in_arrival_order_and_without_batching(workers: dict[str, Any]) -> None:
    free = list(DataLoader(Listed(11), 3, order="arrival", collate_fn=nothing, **workers))
    assert sorted(key for batch in free for key, _ in batch) == list(range(11))
    assert sorted(map(len, free)) == [2, 3, 3, 3]
    with pytest.raises(AssertionError, match="fetched together"):
        list(DataLoader(Listed(11), None, **workers))


@each
def test_transforms_follow_the_dataset(workers: dict[str, Any]) -> None:
    expected = [[2 * i + 1 for i in range(j, min(j + 4, 10))] for j in range(0, 10, 4)]
    loader = DataLoader(Numbers(10), 4, transforms=[double, plus_one], **workers)
    assert indices(loader) == expected
    alone = DataLoader(Numbers(10), None, transforms=[double, plus_one], **workers)
    assert list(alone) == flat(expected)
    listed = DataLoader(Fewer(9), 9, transforms=[double, plus_one], collate_fn=nothing, **workers)
    assert list(listed) == [[3, 5, 7, 11, 13, 15]]


@each
def test_batches_own_their_storage(workers: dict[str, Any]) -> None:
    for batch in DataLoader(Filled(12, 5), 4, **workers):
        storage = batch.untyped_storage()
        assert storage.nbytes() == batch.numel() * batch.itemsize
        assert batch.is_contiguous()
        assert batch.data_ptr() % 64 == 0


@each
def test_batches_may_be_changed_in_place(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(40, 5), 4, seed=1, shuffle=True, **workers)
    for _ in range(2):
        seen: Iterator[Any] = iter(loader)
        kept = []
        for batch in seen:
            kept += batch[:, 0].tolist()
            batch.fill_(-1)
        assert sorted(kept) == list(range(40))


def test_large_tensors_in_line() -> None:
    """So large that all of torch's threads copy them."""
    images = torch.rand(12, 300, 256, 3)
    items = [(images[i].permute(2, 0, 1), images[i].conj(), i) for i in range(12)]
    batches = list(DataLoader(items, batch_size=6))
    for number, batch in enumerate(batches):
        assert_same(batch, default_collate(items[6 * number : 6 * number + 6]))
    assert len(batches) == 2
