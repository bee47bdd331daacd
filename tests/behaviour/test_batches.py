"""What may be in a batch, in every order; ``tests/parity/test_collation.py`` compares kinds of samples with torch."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import default_collate, get_worker_info

from minato import DataLoader
from tests.datasets import (
    Filled,
    Numbers,
    Parts,
    Samples,
    assert_same,
    double,
    flat,
    indices,
    plus_one,
)
from tests.parity.material import identity
from tests.parity.test_collation import ODD
from tests.selection import each

TorchLoader = torch.utils.data.DataLoader


@each
@pytest.mark.parametrize("name", ["keys-in-other-order", "equal-keys"])
def test_the_keys_are_the_first_samples_even_if_it_comes_last(name: str, workers: Any) -> None:
    first, *rest = ODD[name]

    def late() -> Any:
        time.sleep(0.2)
        return first

    (ours,) = DataLoader(Samples([late, *rest]), len(ODD[name]), **workers)
    (theirs,) = TorchLoader(Samples(ODD[name]), len(ODD[name]))
    assert_same(ours, theirs)
    assert [*map(type, ours)] == [*map(type, theirs)]


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


@each
def test_custom_collate_fn_in_arrival_order(workers: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(50), 3, collate_fn=identity, order="arrival", **workers)
    batches = list(loader)
    assert sorted(flat(batches)) == list(range(50))
    assert sorted(map(len, batches)) == [2] + [3] * 16


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
    """Its ``__getitems__`` returns the batch itself, which is no list."""

    def __getitems__(self, keys: list[int]) -> Any:
        return {"keys": torch.tensor(keys)}


@each
@pytest.mark.parametrize(
    "dataset", [Listed(11), Fewer(11), More(11), Whole(11)], ids=lambda d: type(d).__name__
)
def test_getitems(dataset: Listed, workers: dict[str, Any]) -> None:
    for options in ({}, {"collate_fn": identity})[isinstance(dataset, Whole) :]:
        make = {"dataset": dataset, "batch_size": 3, **options}
        assert_same(list(DataLoader(**make, **workers)), list(TorchLoader(**make)))


@each
def test_getitems_in_arrival_order_and_without_batching(workers: dict[str, Any]) -> None:
    free = list(DataLoader(Listed(11), 3, order="arrival", collate_fn=identity, **workers))
    assert sorted(key for batch in free for key, _ in batch) == list(range(11))
    assert sorted(map(len, free)) == [2, 3, 3, 3]
    with pytest.raises(AssertionError, match="fetched together"):
        list(DataLoader(Listed(11), None, **workers))
    if workers["num_workers"]:
        with pytest.raises(ValueError, match="returned . samples for . keys.*order='batch'"):
            list(DataLoader(Fewer(11), 3, order="arrival", **workers))


class Columns(Listed):
    """Its ``__getitems__`` returns the batch as columns, as many as there are keys."""

    def __getitems__(self, keys: list[int]) -> Any:
        return dict.fromkeys("abc"[: len(keys)], keys)


@each
def test_keys_of_a_whole_batch_are_no_samples(workers: dict[str, Any]) -> None:
    options: list[dict[str, Any]] = [{"transforms": [identity]}]
    if workers.get("workers") == "thread":  # processes keep batches whole until samples are known
        options.append({"order": "arrival"})
    for each_options in options:
        with pytest.raises(TypeError, match=r"__getitems__ returned a dict, .* return a list"):
            list(DataLoader(Columns(3), 3, collate_fn=identity, **each_options, **workers))


class Table(UserDict[str, list[int]]):
    """Columns whose rows a loop gives, as one over a TensorDict does."""

    def __iter__(self) -> Iterator[Any]:
        return map(dict, ({"a": value} for value in self["a"]))

    def keys(self) -> Any:
        return self.data.keys()

    def __len__(self) -> int:
        return len(self["a"])


class Rows(Listed):
    """Its ``__getitems__`` returns a table of the samples."""

    def __getitems__(self, keys: list[int]) -> Any:
        table = Table()
        table["a"] = [*keys]
        return table


@each
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_a_mapping_whose_rows_a_loop_gives_is_a_batch_of_samples(
    order: str, workers: dict[str, Any]
) -> None:
    options = {"order": order, "transforms": [identity], "collate_fn": identity}
    found = [*DataLoader(Rows(4), 2, **options, **workers)]
    assert sorted(sample["a"] for batch in found for sample in batch) == [0, 1, 2, 3]


@each
def test_transforms_follow_the_dataset(workers: dict[str, Any]) -> None:
    expected = [[2 * i + 1 for i in range(j, min(j + 4, 10))] for j in range(0, 10, 4)]
    loader = DataLoader(Numbers(10), 4, transforms=[double, plus_one], **workers)
    assert indices(loader) == expected
    alone = DataLoader(Numbers(10), None, transforms=[double, plus_one], **workers)
    assert list(alone) == flat(expected)
    listed = DataLoader(Fewer(9), 9, transforms=[double, plus_one], collate_fn=identity, **workers)
    assert list(listed) == [[3, 5, 7, 11, 13, 15]]


class ImagesOfParts(Parts):
    """Images with channels last."""

    def __iter__(self) -> Any:
        for _ in super().__iter__():
            yield torch.ones(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("order", ["strict", "arrival"])
@pytest.mark.parametrize("size", [3, 2])
def test_all_batches_of_threads_are_made_alike(order: str, size: int) -> None:
    """Where a reader begins, its thread is one of torch's workers, but makes no batches as such."""
    stream, threads = ImagesOfParts(12), {"num_workers": 2, "workers": "thread", "order": order}
    expected = next(iter(TorchLoader(stream, size))).stride()
    assert {each.stride() for each in DataLoader(stream, size, **threads)} == {expected}
    inside = DataLoader(
        stream, size, collate_fn=lambda images: get_worker_info() is None, **threads
    )
    assert {*inside} == {True}


@each
def test_batches_may_be_changed_in_place(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(40, 5), 4, seed=1, shuffle=True, **workers)
    for _ in range(2):
        kept = []
        for batch in loader:
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
