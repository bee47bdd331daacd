"""How many bytes a sample holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minato.observe.stats.size import nbytes_of


class Image:
    """Looks like one of Pillow's."""

    size = (20, 10)

    def getbands(self) -> tuple[str, ...]:
        return "R", "G", "B"


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
        (Image(), 600),
        (object(), 0),
        (torch.eye(3).to_sparse(), 0),
        ((torch.zeros(2), torch.eye(3).to_sparse()), 8),
    ],
)
def test_bytes_of_a_sample(value: Any, nbytes: int) -> None:
    assert nbytes_of(value) == nbytes
