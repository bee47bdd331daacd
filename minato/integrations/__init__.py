"""Adapters to trainers, installed when the trainer is imported and a ``minato.DataLoader`` exists.

This package imports no trainer. The environment variable ``MINATO_INTEGRATIONS=0`` disables all adapters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
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
    _when_imported("accelerate.data_loader", _adapt_accelerate)


def _adapt_accelerate(module: ModuleType) -> None:
    from minato.integrations import accelerate  # needed with the library only

    accelerate.install(module)


def _when_imported(name: str, install: Callable[[Any], None]) -> None:
    if name in sys.modules:
        install(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportHook(name, install))


class _ImportHook:
    """A finder that finds nothing itself; it adapts one module after its execution, before others import its names."""

    def __init__(self, name: str, install: Callable[[Any], None]) -> None:
        self._name = name
        self._install = install

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
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
            if module.__name__ == self._name:
                del loader.exec_module
                sys.meta_path.remove(self)
                self._install(module)

        # Replaced on this loader object, which the module keeps: it looks up resources and sources.
        loader.exec_module = exec_module


def counts_batches(batch_sampler: object) -> bool:
    """Whether the trainer assumes that the k-th batch is the k-th of this batch sampler: Lightning's ``predict``.

    Otherwise Lightning needs no adapter: it reconstructs loaders from the names of their arguments.
    """
    return type(batch_sampler).__name__ == LIGHTNING_PREDICT_SAMPLER
