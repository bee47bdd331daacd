"""A chain behind ``__getitem__``, for loaders that take no ``transforms=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset


class Mapped(Dataset[Any]):
    """A dataset with a chain applied to each sample."""

    def __init__(self, dataset: Dataset[Any], transforms: list[Callable[[Any], Any]]) -> None:
        self.dataset = dataset
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        for transform in self.transforms:
            sample = transform(sample)
        return sample
