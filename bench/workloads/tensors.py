"""Batches of small tensors, with and without direct reading of their fields."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

__all__ = ["tensor_us"]

_MODULE = "minato._core.tensor_memory"
_EPOCHS = 3


def tensor_us(direct: bool, workers: int, samples: int) -> float:
    """In a process of its own: microseconds per sample, with or without direct reading of the fields of tensors."""
    if "minato" in sys.modules:
        raise RuntimeError("minato is imported, and has chosen how it reads tensors")
    if not direct:
        absent: Any = types.ModuleType(_MODULE)
        absent.find = lambda: None
        sys.modules[_MODULE] = absent
    import torch

    from bench.harness.datasets import Held
    from minato import DataLoader

    persistent = bool(workers)
    dataset = Held([(row, index) for index, row in enumerate(torch.rand(samples, 16))])
    loader = DataLoader(dataset, 256, num_workers=workers, persistent_workers=persistent)
    for epoch in range(_EPOCHS + 1):
        if epoch == 1:  # the first one warms up
            begun_s = time.perf_counter()
        if sum(len(labels) for _, labels in loader) != samples:
            raise RuntimeError("samples were lost")
    return 1e6 * (time.perf_counter() - begun_s) / (_EPOCHS * samples)
