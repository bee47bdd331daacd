"""Hugging Face Accelerate, which rebuilds loaders as torch's from a fixed list of attributes.

``Accelerator.prepare`` and ``skip_first_batches`` make a new loader out of parts of the given one. Here they are told
to make it with the given one's own ``_rebuilt``, if it has that, so that a plain ``accelerator.prepare(loader)`` works.
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
        make: Makes a loader like the given one; None if that is not ours.
        done: It was asked to.
    """

    def __init__(self, make: Callable[..., Any] | None) -> None:
        self.make = make
        self.done = False


_current: ContextVar[_Build | None] = ContextVar("minato_accelerate_build", default=None)


def install(module: Any) -> None:
    """Adapt ``accelerate.data_loader``; a warning says so if it is not as expected."""
    wanted = (*_REBUILDERS, *_WRAPPERS, "DataLoader")
    missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        warnings.warn(
            f"minato does not know this version of accelerate ({module.__name__} has no {', '.join(missing)}): "
            "what accelerator.prepare() makes of a minato.DataLoader will load with torch's engine",
            MinatoWarning,
            stacklevel=2,
        )
        return
    if module.DataLoader is _make_loader:
        return
    module.DataLoader = _make_loader
    for name in _REBUILDERS:
        original = getattr(module, name)
        adapted = _like_the_given(original)
        setattr(module, name, adapted)
        rebind(original, adapted)
    for name in _WRAPPERS:
        wrapper = getattr(module, name)
        wrapper.set_epoch = _telling_ours(wrapper.set_epoch)


def _make_loader(*arguments: Any, **keywords: Any) -> Any:
    """What accelerate calls by the name of torch's class."""
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


def _like_the_given(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rebuild)
    def adapted(dataloader: Any, *arguments: Any, **keywords: Any) -> Any:
        build = _Build(getattr(dataloader, "_rebuilt", None))
        with _building(build):
            result = rebuild(dataloader, *arguments, **keywords)
        if build.make is not None and not build.done:
            warnings.warn(
                f"accelerate's {rebuild.__name__} made a loader of another kind from a minato.DataLoader, so it loads "
                "without minato; leave use_stateful_dataloader out to keep it",
                MinatoWarning,
                stacklevel=2,
            )
        return result

    return adapted


def _telling_ours(set_epoch: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_epoch)
    def adapted(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        if hasattr(self.base_dataloader, "_rebuilt"):
            self.base_dataloader.set_epoch(epoch)

    return adapted
