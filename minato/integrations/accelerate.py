"""Hugging Face Accelerate, which rebuilds loaders as torch's from a fixed list of attributes.

``Accelerator.prepare`` and ``skip_first_batches`` construct a new loader from parts of the given one. With this adapter
they call the given loader's ``_rebuilt`` instead, if it has one, so that ``accelerator.prepare(loader)`` works.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from minato._support.loader_class import rebind
from minato.errors import MinatoWarning

__all__ = ["install"]

_REBUILDERS = ("prepare_data_loader", "skip_first_batches")
_WRAPPERS = ("DataLoaderShard", "DataLoaderDispatcher")


class _Build:
    """One rebuilding of a loader.

    Attributes:
        make: Constructs a loader like the given one; None if that is not minato's.
        done: Whether it was called.
    """

    def __init__(self, make: Callable[..., Any] | None) -> None:
        self.make = make
        self.done = False


_current: ContextVar[_Build | None] = ContextVar("minato_accelerate_build", default=None)


def install(module: Any) -> None:
    """Adapt ``accelerate.data_loader``; warn if it lacks an expected name."""
    expected = (*_REBUILDERS, *_WRAPPERS, "DataLoader")
    missing = [name for name in expected if not hasattr(module, name)]
    if missing:
        warnings.warn(
            f"minato does not know this version of accelerate ({module.__name__} has no {', '.join(missing)}): "
            "accelerator.prepare() turns a minato.DataLoader into a loader with torch's engine",
            MinatoWarning,
            stacklevel=2,
        )
        return
    if module.DataLoader is _make_loader:
        return
    module.DataLoader = _make_loader
    for name in _REBUILDERS:
        original = getattr(module, name)
        adapted = _rebuilding_alike(original)
        setattr(module, name, adapted)
        rebind(original, adapted)
    for name in _WRAPPERS:
        wrapper = getattr(module, name)
        wrapper.set_epoch = _forwarding_to_minato(wrapper.set_epoch)


def _make_loader(*arguments: Any, **keywords: Any) -> Any:
    """Replaces torch's class in accelerate."""
    build = _current.get()
    if build is None or build.make is None:
        return torch.utils.data.DataLoader(*arguments, **keywords)
    build.done = True
    return build.make(*arguments, **keywords)


@contextmanager
def _building(build: _Build) -> Iterator[None]:
    token = _current.set(build)
    try:
        yield
    finally:
        _current.reset(token)


def _rebuilding_alike(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rebuild)
    def adapted(dataloader: object, *arguments: object, **keywords: object) -> Any:
        build = _Build(getattr(dataloader, "_rebuilt", None))
        with _building(build):
            result = rebuild(dataloader, *arguments, **keywords)
        if build.make is not None and not build.done:
            warnings.warn(
                f"accelerate's {rebuild.__name__} made another loader from a minato.DataLoader, so it loads "
                "without minato; omit use_stateful_dataloader to keep it",
                MinatoWarning,
                stacklevel=2,
            )
        return result

    return adapted


def _forwarding_to_minato(set_epoch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_epoch)
    def adapted(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        if hasattr(self.base_dataloader, "_rebuilt"):
            self.base_dataloader.set_epoch(epoch)

    return adapted
