"""The six workloads of hyperloader's benchmark, written again: every sample differs from every other."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

WIDTH = 512
"""Numbers in a row of the texts and tables."""


class Plain:
    """The samples of a dataset by index and nothing else of it: no loader can take a shorter way.

    Args:
        dataset: It is hidden behind ``plain[i]``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class EncodedPictures:
    """uint8 tensors (3, side, side), decoded from PNG by Pillow.

    Args:
        side: Width and height.
        count: Pictures.
    """

    def __init__(self, side: int, count: int) -> None:
        from PIL import Image

        base = np.arange(3 * side * side).reshape(side, side, 3) * 37
        self._encoded: list[bytes] = []
        for index in range(count):
            stored = io.BytesIO()
            pixels = ((base + index * 19 + index // 251) % 251).astype(np.uint8)
            Image.fromarray(pixels).save(stored, "PNG")
            self._encoded.append(stored.getvalue())

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        with Image.open(io.BytesIO(self._encoded[index])) as picture:
            return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


@dataclass(frozen=True)
class Feed:
    """One workload.

    Args:
        title: What a sample is.
        batch_size: Samples in a batch.
        make: Its dataset, of a number of samples, with files in a folder where it has any.
        collate: Makes a batch of a list of samples.
    """

    title: str
    batch_size: int
    make: Callable[[int, Path], Any]
    collate: Callable[[list[Any]], Any]


def tensor_of(batch: Any) -> torch.Tensor:
    """The numbers of a batch as one tensor: columns become one as in hyperloader's own benchmark."""
    if isinstance(batch, dict):
        batch = batch["tokens"]
    found: torch.Tensor = torch.stack(batch, dim=1) if isinstance(batch, list) else batch
    return found


def _tokens(count: int) -> torch.Tensor:
    return torch.arange(WIDTH, dtype=torch.int64) + 1000 * torch.arange(count)[:, None]


def _uneven_rows(count: int, folder: Path) -> Any:
    return tuple(
        row[: WIDTH // 2 + index % (WIDTH // 2 + 1)].clone()
        for index, row in enumerate(_tokens(count))
    )


def _table(count: int, folder: Path) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"tokens": _tokens(count).tolist()})


def _mapped(count: int, folder: Path) -> Any:
    rows = np.memmap(folder / "rows.bin", dtype=np.int64, mode="w+", shape=(count, WIDTH))
    rows[:] = _tokens(count).numpy()
    rows.flush()
    return rows


FEEDS = {
    "images-light": Feed(
        "PNG of 64 × 64 pixels", 64, lambda count, _: EncodedPictures(64, count), torch.stack
    ),
    "images-heavy": Feed(
        "PNG of 512 × 512 pixels", 8, lambda count, _: EncodedPictures(512, count), torch.stack
    ),
    "fixed-text": Feed(
        "row of an int64 tensor, 512 wide", 64, lambda count, _: _tokens(count), torch.stack
    ),
    "varlen-text": Feed("int64 tensor of 256 to 512, padded", 64, _uneven_rows, pad_sequence),
    "arrow-tabular": Feed(
        "row of a Hugging Face table, a list of 512 int64", 64, _table, default_collate
    ),
    "numpy-array": Feed("row of a mapped int64 file, 512 wide", 64, _mapped, default_collate),
}
