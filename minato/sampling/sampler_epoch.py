"""The epoch of samplers that have ``set_epoch``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["epoch_of", "nested", "set_sampler_epoch"]

_DEEPEST = 8
"""Most nested samplers; an object with more returns something for every attribute."""


def nested(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the one it draws from, and so on, by the attributes ``sampler`` and ``batch_sampler``."""
    for _ in range(_DEEPEST):
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


def epoch_of(sampler: Any) -> int | None:
    """Return the ``epoch`` of the first nested sampler that has one; None without."""
    for one in nested(sampler):
        epoch = getattr(one, "epoch", None)
        if isinstance(epoch, int):
            return epoch
    return None


def set_sampler_epoch(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` of all nested samplers that have it, as trainers do."""
    for one in nested(sampler):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
