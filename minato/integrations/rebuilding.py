"""Trainers that build torch's loader from parts of a given one: they build minato's again, if that is minato's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["building", "make_loader", "rebuilding_alike"]


class _Build:
    """One rebuilding of a loader.

    Args:
        loader: The given loader.

    Attributes:
        make: Constructs a loader like the given one; None if that is not minato's.
        done: Whether it was called.
    """

    def __init__(self, loader: object) -> None:
        self.make: Callable[..., Any] | None = getattr(loader, "_rebuilt", None)
        self.done = False


_current: ContextVar[_Build | None] = ContextVar("minato_build", default=None)


def building() -> _Build | None:
    """The rebuilding of a loader of minato's that is going on; None if there is none."""
    build = _current.get()
    return None if build is None or build.make is None else build


def make_loader(*arguments: Any, **keywords: Any) -> Any:
    """Takes the place of torch's class in the module of a trainer."""
    build = building()
    if build is None or build.make is None:
        return torch.utils.data.DataLoader(*arguments, **keywords)
    build.done = True
    return build.make(*arguments, **keywords)


def rebuilding_alike(
    rebuild: Callable[..., Any], loader_at: int = 0, lost: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """Wrap a function that rebuilds a loader.

    Args:
        loader_at: The position of the loader among its arguments.
        lost: Called if it made another loader than minato's.
    """

    @functools.wraps(rebuild)
    def adapted(*arguments: Any, **keywords: Any) -> Any:
        given = arguments[loader_at] if len(arguments) > loader_at else None
        given = keywords.get("dataloader", keywords.get("data_loader", given))
        build = _Build(given)
        token = _current.set(build)
        try:
            result = rebuild(*arguments, **keywords)
        finally:
            _current.reset(token)
        if build.make is not None and not build.done and result is not given:
            lost()
        return result

    return adapted
