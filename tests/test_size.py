"""How many bytes a sample holds."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from minato._support.objects import nbytes_of


class Lazy(Mapping[str, int]):
    """A row whose columns would be fetched when they are asked for."""

    def __len__(self) -> int:
        raise AssertionError("it is asked")

    __iter__ = __getitem__ = values = __len__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (torch.zeros(3, 4), 48),
        (np.zeros((2, 5), np.uint8), 10),
        (b"12345", 5),
        ("text", 4),
        (7, 8),
        (0.5, 8),
        (None, 0),
        ([], 0),
        ((np.zeros(4), 1), 40),
        ({"image": torch.zeros(2), "label": [1, 2]}, 24),
        ([0.0] * 5000, 40000),
        (Image.new("RGB", (20, 10)), 600),
        (UserDict(ids=[1, 2]), 16),
        (OrderedDict.fromkeys(range(800), 1), 6400),
        (Lazy(), 0),
        (object(), 0),
        (torch.eye(3).to_sparse(), 0),
        ((torch.zeros(2), torch.eye(3).to_sparse()), 8),
    ],
)
def test_bytes_of_a_sample(value: Any, nbytes: int) -> None:
    assert nbytes_of(value) == nbytes
