"""Samples of which each is a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


class Stored(Dataset[T_co]):
    """What all data sets of files have in common.

    Args:
        paths: The files, in this order.
        missing: What to say if there are none.
        length: Samples in an epoch, more than there are files or fewer; as many as there are when omitted.
    """

    def __init__(self, paths: Iterable[Path], missing: str, length: int | None) -> None:
        self.paths = list(paths)
        if not self.paths:
            raise FileNotFoundError(f"{missing}: run 'make data'")
        self.length = length or len(self.paths)

    def __len__(self) -> int:
        return self.length

    def path_of(self, index: int) -> Path:
        """Where a sample is stored."""
        return self.paths[index % len(self.paths)]
