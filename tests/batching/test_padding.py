"""Samples of different lengths in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from minato import DataLoader, PadCollate, pad_stack
from tests.datasets import Numbers, Pair


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
    mine, theirs = PadCollate()(samples), default_collate(samples)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    assert mine[2] == theirs[2]
    assert torch.equal(mine[3]["x"], theirs[3]["x"])


def test_a_mask_is_of_a_field() -> None:
    with pytest.raises(KeyError, match="words"):
        PadCollate(masks={"mask": "words"})([{"tokens": torch.ones(2)}])
