"""Samples of different lengths in one batch."""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from minato import DataLoader, MinatoWarning, PadCollate, pad_stack
from tests.datasets import Numbers, Pair, assert_same


def test_arrays_are_filled_up_to_the_longest() -> None:
    stack, lengths = pad_stack([torch.tensor([1, 2]), np.array([3]), torch.tensor([4, 5, 6])], -1)
    assert stack.tolist() == [[1, 2, -1], [3, -1, -1], [4, 5, 6]]
    assert lengths.tolist() == [2, 1, 3]
    assert (stack.dtype, lengths.dtype) == (torch.int64, torch.int64)
    stack, _ = pad_stack([torch.ones(3, 2), torch.ones(5, 2)], multiple_of=4)
    assert stack.shape == (2, 8, 2)
    assert stack.sum() == 16
    stack, lengths = pad_stack([torch.ones(0), torch.ones(0)])
    assert stack.shape == (2, 0)
    assert lengths.tolist() == [0, 0]


def test_gradients_reach_what_was_padded() -> None:
    samples = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    PadCollate()(samples).sum().backward()
    assert [each.grad.tolist() for each in samples if each.grad is not None] == [[1] * 2, [1] * 3]


def test_what_cannot_be_padded_is_named() -> None:
    with pytest.raises(TypeError, match="the padding value 'a' is a str: give a number"):
        pad_stack([torch.ones(2)], "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are no arrays to stack: give at least one"):
        pad_stack([])


@pytest.mark.parametrize("multiple_of", [0, -4])
def test_a_multiple_below_one_is_refused(multiple_of: int) -> None:
    with pytest.raises(ValueError, match=f"multiple_of={multiple_of} is too small"):
        PadCollate(multiple_of=multiple_of)([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    "dtypes",
    ["int64 float64", "uint8 int64", "bool int8", "float16 bfloat16", "int64 float32 bool"],
)
def test_the_dtype_of_a_batch_holds_the_values_of_all_samples(dtypes: str) -> None:
    values = [torch.tensor([1, 3]).to(getattr(torch, name)) for name in dtypes.split()]
    expected = torch.stack(values)
    for samples in (values, [*reversed(values)]):
        stack, _ = pad_stack(samples)
        assert stack.dtype == expected.dtype
        ragged, _ = pad_stack([*samples, torch.ones(3, dtype=torch.bool)])
        assert ragged.dtype == torch.promote_types(expected.dtype, torch.bool)
    stack, _ = pad_stack([torch.tensor([1]), torch.tensor([1.5, 300])])
    assert stack.tolist() == [[1, 0], [1.5, 300]]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((-1, "uint8"), (300, "uint8"), (1 << 70, "int64"), (7, "bool")),
        *((0.5, "int64"), (float("nan"), "int64"), (1j, "int64")),
    ],
)
def test_a_padding_value_that_the_samples_cannot_hold_is_refused(value: Any, dtype: str) -> None:
    samples = [torch.ones(n, dtype=getattr(torch, dtype)) for n in (1, 2)]
    with pytest.raises(ValueError, match=f"{value!r} is none of torch.{dtype}"):
        pad_stack(samples, value)


@pytest.mark.parametrize("sample", [{"a": torch.ones(2)}, torch.ones(2), 1])
def test_a_single_sample_is_refused(sample: Any) -> None:
    loader = DataLoader([sample], batch_size=None, collate_fn=PadCollate())
    with pytest.raises(TypeError, match=f"got a {type(sample).__name__}: batch_size=None gives"):
        next(iter(loader))
    lists = DataLoader([[sample, sample]], batch_size=None, collate_fn=PadCollate())
    assert_same(next(iter(lists)), PadCollate()([sample, sample]))


def test_what_getitems_returns_for_a_batch_is_padded_whatever_holds_it() -> None:
    rows = [np.ones(2), np.ones(3)]
    ragged = np.empty(2, object)
    ragged[:] = rows
    expected = PadCollate()(rows)
    for samples in (tuple(rows), deque(rows), ragged):
        assert_same(PadCollate()(samples), expected)
    for equal in (np.ones((2, 3)), torch.ones(2, 3)):
        assert_same(PadCollate()(equal), PadCollate()([*equal]))


@pytest.mark.parametrize("samples", [[torch.ones(2, 3), torch.ones(2, 4)], [torch.ones(())] * 2])
def test_only_lengths_may_differ(samples: list[Any]) -> None:
    with pytest.raises(ValueError, match="only the first dimension is padded.*the shapes"):
        pad_stack(samples)


class Sentences(Numbers):
    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        tokens = torch.arange(index + 1)
        return {"tokens": tokens, "pair": Pair(tokens.float().numpy(), index), "text": f"{index}"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_structure_is_as_without_padding(num_workers: int) -> None:
    collate = PadCollate({"tokens": 9}, multiple_of=2, masks={"mask": "tokens"})
    (batch,) = DataLoader(Sentences(3), 3, num_workers=num_workers, collate_fn=collate)
    assert batch["tokens"].tolist() == [[0, 9, 9, 9], [0, 1, 9, 9], [0, 1, 2, 9]]
    assert batch["mask"].tolist() == [[n < m for n in range(4)] for m in (1, 2, 3)]
    assert type(batch["pair"]) is Pair
    assert batch["pair"].image.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 2, 0]]
    assert batch["pair"].label.tolist() == [0, 1, 2]
    assert batch["text"] == ["0", "1", "2"]


def test_what_needs_no_padding_is_collated_as_ever() -> None:
    samples = [(torch.ones(2), 1.5, "a", {"x": np.ones((2, 2))}) for _ in range(3)]
    assert_same(PadCollate()(samples), default_collate(samples))


def test_a_value_for_a_field_that_is_not_there_is_told() -> None:
    sample = {"tokens": torch.ones(2), "more": [{"labels": torch.ones(1)}]}
    collate = PadCollate({"tokens": 1, "labels": -1})
    with warnings.catch_warnings(action="error"):
        collate([sample])
        with pytest.raises(MinatoWarning, match=r"names 'labels', and .* \['tokens'\]"):
            collate([{"tokens": torch.ones(2)}])


def test_a_mask_is_of_a_field() -> None:
    with pytest.raises(KeyError, match="words"):
        PadCollate(masks={"mask": "words"})([{"tokens": torch.ones(2)}])


@pytest.mark.parametrize(
    ("masks", "samples", "error"),
    [
        (["mask"], [{"x": torch.ones(2)}], r"masks=\['mask'\] is a list: give a dictionary"),
        ({"m": "x"}, [torch.ones(2)], "samples are of type Tensor: return dictionaries"),
        ({"m": "x"}, [(torch.ones(2), 1)], "samples are of type tuple: return dictionaries"),
        ({"x": "x"}, [{"x": torch.ones(2)}], "have a field 'x' already"),
        ({"m": "x"}, [{"x": 1}], "field 'x' is not padded"),
        ({"m": "x"}, [{"x": "text"}], "field 'x' is not padded"),
    ],
)
def test_masks_that_cannot_be_are_refused(masks: Any, samples: list[Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        PadCollate(masks=masks)(samples)


def test_a_dictionary_in_a_tuple_has_masks_too() -> None:
    fields, labels = PadCollate(masks={"m": "x"})([({"x": torch.ones(n)}, n) for n in (1, 2)])
    assert fields["m"].tolist() == [[True, False], [True, True]]
    assert labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([(1, 2), (1,)], "sample 1: tuple of length 1"),
        ([{"x": [1]}, {"x": [1, 2]}], "sample 1, field ['x']: list of length 2"),
        ([{"x": 1, "y": 1}, {"x": 1}], "sample 1: dict with the keys ['x']"),
        ([np.ones(2), torch.ones(3), 1], "sample 2: int 1"),
        ([{"x": torch.ones(2)}, {"x": None}], "sample 1, field ['x']: None"),
    ],
)
def test_samples_of_different_kinds_are_named(samples: list[Any], told: str) -> None:
    with pytest.raises((LookupError, RuntimeError, TypeError, ValueError)) as caught:
        PadCollate()(samples)
    assert told in "".join(caught.value.__notes__)


class Moving(dict[str, Any]):
    """A dictionary with a method and an attribute."""

    device = "cpu"

    def to(self, device: str) -> Moving:
        self.device = device
        return self


class Strict(dict[str, Any]):
    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise TypeError


@pytest.mark.parametrize("kind", [dict, OrderedDict, Moving, Strict, types.MappingProxyType])
def test_mappings_keep_their_class_as_with_torch(kind: Any) -> None:
    samples = [kind({"x": torch.ones(2), "n": i}) for i in range(3)]
    if kind is Moving:
        samples[0].to("meta")
    mine, theirs = PadCollate(masks={"mask": "x"})(samples), default_collate(samples)
    assert type(mine) is type(theirs)
    assert vars(mine) == vars(theirs) if kind is Moving else True
    assert [*mine] == [*theirs, "mask"]
    assert torch.equal(mine["x"], theirs["x"])
    assert [*samples[0]] == ["x", "n"]
