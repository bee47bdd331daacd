"""Fields of tensors are found in memory for sure, or not used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minato._core import tensor_memory


def test_it_is_found_in_this_torch() -> None:
    """A new release that moves it must be noticed, not just be slower."""
    found = tensor_memory.find()
    assert found is not None
    assert len({found.keys, found.gradient, found.dtype}) == 3  # all in torch's own object
    assert found.dtypes[torch.uint8] != found.dtypes[torch.uint1]


def test_it_is_the_same_whatever_the_program_has_set() -> None:
    expected = tensor_memory.find()
    for setting in (torch.inference_mode(), torch.device("meta"), torch.no_grad()):
        with setting:
            assert tensor_memory.find() == expected


def garbled(words: Callable[[torch.Tensor], list[int]]) -> Callable[[torch.Tensor], list[int]]:
    """Each bit of a special tensor is another one's too."""
    return lambda tensor: [2 * word + 1 for word in words(tensor)] * 2


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys.implementation, "name", "other"),
        (torch.Tensor, "_cdata", None),
        (torch.Tensor, "_cdata", 8),
        (tensor_memory, "_IMPL_WORDS", 4),
        (tensor_memory, "_words", garbled(tensor_memory._words)),
    ],
    ids=["not CPython", "no address", "unmapped", "not found", "found twice"],
)
def test_what_is_not_found_for_sure_is_not_used(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(where, name, value, raising=False)
    assert tensor_memory.find() is None


def test_memory_is_left_alone_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINATO_DIRECT_MEMORY", "0")
    assert tensor_memory.find() is None
