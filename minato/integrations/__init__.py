"""Adapters to trainers, installed when the trainer is imported and a ``minato.DataLoader`` exists.

This package imports no trainer. The environment variable ``MINATO_INTEGRATIONS=0`` disables all adapters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from minato._compat import LIGHTNING_PREDICT_SAMPLER

__all__ = ["connect", "counts_batches"]


_connected = False


def connect() -> None:
    """Install the adapters of imported trainers now, and of others when they are imported; once per process."""
    global _connected
    if _connected or os.environ.get("MINATO_INTEGRATIONS") == "0":
        return
    _connected = True
    for name in _ADAPTERS.keys() & sys.modules.keys():
        _adapt(sys.modules[name])
    if later := _ADAPTERS.keys() - sys.modules.keys():
        sys.meta_path.insert(0, _ImportHook(later))


_ADAPTERS = {
    "accelerate.data_loader": "install_accelerate",
    "lightning.pytorch.loops.training_epoch_loop": "install_lightning",
    "pytorch_lightning.loops.training_epoch_loop": "install_lightning",
    "ray.train.torch.train_loop_utils": "install_ray_train",
    "ray.train.v2.torch.train_loop_utils": "install_ray_train",
}
"""The function of ``trainers`` that adapts a module of a trainer."""


def _adapt(module: ModuleType) -> None:
    from minato.integrations import trainers  # needed with a trainer only

    getattr(trainers, _ADAPTERS[module.__name__])(module)


class _ImportHook:
    """A finder that finds nothing itself; it adapts modules after their execution, before others import their names."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        self._follow(spec.loader)
                    return spec
        return None

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in self._names:
                del loader.exec_module
                self._names.remove(module.__name__)
                if not self._names:
                    sys.meta_path.remove(self)
                _adapt(module)

        # Replaced on this loader object, which the module keeps: it looks up resources and sources.
        loader.exec_module = exec_module


def counts_batches(batch_sampler: object) -> bool:
    """Whether the trainer assumes that the k-th batch is the k-th of this batch sampler: Lightning's ``predict``.

    Lightning reconstructs loaders by itself, from the names of their arguments.
    """
    return type(batch_sampler).__name__ == LIGHTNING_PREDICT_SAMPLER
