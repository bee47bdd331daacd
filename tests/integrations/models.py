"""A dataset whose samples say which they are, and a model that learns nothing from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

OURS = ["BatchIterator"]
"""What ``engines()`` sees if nothing is loaded by torch's engine."""


class Indexed(Dataset[dict[str, Any]]):
    """Samples of two numbers, with their index."""

    def __init__(self, size: int, duration_s: float = 0) -> None:
        self.size = size
        self.duration_s = duration_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.duration_s)
        return {"x": torch.tensor([index / self.size, 1.0]), "index": index}


class Stream(IterableDataset[dict[str, Any]]):
    """The same from an iterable dataset."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return map(Indexed(self.size).__getitem__, range(self.size))


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that draws, and marks the sample."""
    return {**sample, "noise": torch.rand(()), "marked": True}


class Model(torch.nn.Module):
    """Two weights; remembers the indices that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
        self.seen: list[int] = []

    def forward(
        self, x: torch.Tensor, index: torch.Tensor, **more: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.seen += index.tolist()
        output = self.line(x)
        return {"loss": (output - 1).square().mean(), "output": output}


def lightning_module() -> Any:
    """A class of Lightning's modules that keep the batches that they train, as ``kept`` has them, by epoch."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 1)
            self.epochs: dict[int, list[Any]] = {}

        def kept(self, batch: dict[str, Any]) -> Any:
            return batch["index"].tolist()

        def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
            self.epochs.setdefault(self.current_epoch, []).append(self.kept(batch))
            return self.model(batch["x"]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    return Module


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "remove_unused_columns": False,
}
"""Arguments of the Hugging Face Trainer."""
QUIET_LIGHTNING: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of Lightning's Trainer."""


IN_TWO_RANKS: dict[str, Any] = {**QUIET_LIGHTNING, "devices": 2, "strategy": "ddp", "logger": False}
"""The same for jobs of two ranks."""


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process: not those of one test for another."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
