"""``convert`` makes of single samples what torch's ``default_convert`` makes of them."""

from __future__ import annotations

from collections import OrderedDict, UserList, deque, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import _utils, default_convert

from minato import DataLoader
from minato.batching.collate import convert
from tests.datasets import TORCH_TAKES_BOOLS, assert_same

Pair = namedtuple("Pair", ["left", "right"])


class Names(list[Any]):
    """A list with an attribute, which a copy of it keeps."""

    origin = "here"


class Grown(torch.Tensor):
    """A tensor of a class of its own."""


LEAVES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    st.text(max_size=3) | st.binary(max_size=3),
    st.sampled_from(
        [
            *(torch.arange(3), torch.tensor(2.5), torch.zeros(2).as_subclass(Grown)),
            *(np.arange(4.0), np.float32(1.5), np.int64(7), np.array(["a", "b"])),
            *([np.bool_(True)] if TORCH_TAKES_BOOLS else []),
            *(
                2j,
                object,
                range(3),
                Pair(1, np.arange(2)),
                frozenset([1]),
                b"x",
                deque([np.ones(1)]),
            ),
            *(Names([np.ones(2), 1]), UserList([np.zeros(1)]), MappingProxyType({"a": np.ones(1)})),
            OrderedDict(b=np.ones(1), a=2),
        ]
    ),
)
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(SAMPLES)
def test_it_equals_torchs(sample: Any) -> None:
    """Containers are new ones, and what is no container is the sample's own."""
    found, expected = convert(sample), default_convert(sample)
    assert_same(found, expected)
    assert (found is sample) is (expected is sample)


def test_an_error_is_torchs() -> None:
    """With the errors that led to it."""
    sample = {"a": [np.datetime64("2020-01-01")]}

    def chain(function: Callable[[Any], Any]) -> list[str]:
        with pytest.raises(TypeError) as found:
            function(sample)
        errors: list[BaseException | None] = [found.value]
        while (error := errors[-1]) is not None:
            errors.append(error.__context__)
        return [*map(repr, errors)]

    assert len(chain(default_convert)) > 2
    assert chain(convert) == chain(default_convert)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_without_batches_converts(workers: int) -> None:
    samples = [{"row": np.full(2, index), "ids": [index, 0.5], "name": "x"} for index in range(3)]
    loader = DataLoader(samples, batch_size=None, num_workers=workers)
    for found, sample in zip(loader, samples, strict=True):
        assert_same(found, default_convert(sample))


def test_a_function_that_a_program_puts_in_its_place_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For what a container holds, as by torch's own; also by a loader that is there already."""
    loader = DataLoader([[1, "x"], [2, "y"]], batch_size=None)
    assert list(loader) == [[1, "x"], [2, "y"]]
    monkeypatch.setattr(_utils.collate, "default_convert", lambda part: ("converted", part))
    assert list(loader) == [default_convert([1, "x"]), default_convert([2, "y"])]
    assert convert([1]) == [("converted", 1)]
