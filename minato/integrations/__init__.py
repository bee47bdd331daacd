"""Adapters to trainers, installed when the trainer is imported and a ``minato.DataLoader`` exists.

This package imports no trainer. The environment variable ``MINATO_INTEGRATIONS=0`` disables all adapters.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from minato._compat import LIGHTNING_PREDICT_SAMPLER
from minato._system import FIRST_PID

_connected = False


def connect() -> None:
    """Install the adapters of imported trainers now, and of others when they are imported; once per process."""
    global _connected
    if _connected or os.environ.get("MINATO_INTEGRATIONS") == "0":
        return
    _connected = True
    hook = _ImportHook(set(_ADAPTERS))
    sys.meta_path.insert(0, hook)
    for name in _ADAPTERS.keys() & sys.modules.keys():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if os.getpid() != FIRST_PID and getattr(spec, "_initializing", False):
            continue  # the thread of the parent that imports it is not in this forked child
        try:
            module = importlib.import_module(name)  # waits while another thread imports it
        except Exception:  # that thread gets it
            continue
        if isinstance(module, ModuleType):  # a test may have put something else there
            hook.adapt(module)


_ADAPTERS = {
    "accelerate.data_loader": "install_accelerate",
    "lightning.pytorch.loops.training_epoch_loop": "install_lightning",
    "pytorch_lightning.loops.training_epoch_loop": "install_lightning",
    "ray.train.torch.train_loop_utils": "install_ray_train",
    "ray.train.v2.torch.train_loop_utils": "install_ray_train",
}
"""The function of ``trainers`` that adapts a module of a trainer."""


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

    def adapt(self, module: ModuleType) -> None:
        """Adapt a module that was imported, once."""
        if module.__name__ not in self._names:
            return
        self._names.remove(module.__name__)
        if not self._names:
            sys.meta_path.remove(self)
        from minato.integrations import trainers  # needed with a trainer only

        getattr(trainers, _ADAPTERS[module.__name__])(module)

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in self._names:
                del loader.exec_module
                self.adapt(module)

        # Replaced on this loader object, which the module keeps: it looks up resources and sources.
        loader.exec_module = exec_module


def counts_batches(batch_sampler: object) -> bool:
    """Whether the trainer takes the k-th batch for the k-th of this batch sampler: Lightning's ``predict``."""
    return type(batch_sampler).__name__ == LIGHTNING_PREDICT_SAMPLER
