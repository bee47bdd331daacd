"""The datasets of SPDL's measurements of loaders, written again: many byte strings, and few large payloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

STRING_BYTES = 64


class ByteStrings:
    """Byte strings that all differ; a sample is the length of one."""

    def __init__(self, nbytes: int) -> None:
        self.strings = [b"images/%012d.jpg" % i for i in range(nbytes // STRING_BYTES)]
        self.strings = [string.ljust(STRING_BYTES, b".") for string in self.strings]

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, index: int) -> int:
        return len(self.strings[index])


class Payloads(IterableDataset[Any]):
    """Payloads of bytes, NumPy or torch, made in the worker: one that is sent each time, but each tensor is new."""

    def __init__(self, kind: str, nbytes: int, count: int) -> None:
        self.kind, self.nbytes, self.count = kind, nbytes, count

    def make(self) -> Any:
        if self.kind == "bytes":
            return bytes(self.nbytes)
        if self.kind == "numpy":
            return np.zeros(self.nbytes // 4, np.float32)
        return torch.zeros(self.nbytes // 4)

    def __iter__(self) -> Iterator[Any]:
        # torch moves a tensor to shared memory when it is first sent, which a second sending would not show.
        kept = None if self.kind == "torch" else self.make()
        for _ in range(self.count):
            yield {"data": self.make() if kept is None else kept}
