"""The ``collate_fn`` of a loader with transforms, as programs see it that build loaders from a loader's parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert

from minato.transforms.compose import Transforms

__all__ = ["TransformingCollate"]

Collate = Callable[[Any], Any]


class _State(threading.local):
    transformed = False  # what is being collated went through the transforms


_state = _State()


class TransformingCollate:
    """Applies a loader's transforms, then its ``collate_fn``: torch's loader knows no ``transforms=``.

    Programs take ``loader.dataset`` and ``loader.collate_fn`` and make another loader from them, which would
    otherwise return samples without transforms. Inside the loader itself, :attr:`inside` takes its place.

    Args:
        transforms: The loader's.
        collate_fn: The loader's.
        batched: It gets a list of samples; otherwise one sample.

    Attributes:
        transforms: The same.
        collate_fn: The same.
        inside: Collates samples that went through the transforms, even if ``collate_fn`` calls another such object.
    """

    def __init__(self, transforms: Transforms, collate_fn: Collate, batched: bool) -> None:
        self.transforms = transforms
        self.collate_fn = collate_fn
        self.batched = batched
        known = collate_fn is default_collate or collate_fn is default_convert
        self.inside = collate_fn if known else _Inside(collate_fn)

    def __call__(self, samples: Any) -> Any:
        """Collate what the dataset returned."""
        if _state.transformed:
            return self.collate_fn(samples)
        run = self.transforms.run
        return self.inside([run(each) for each in samples] if self.batched else run(samples))


class _Inside:
    """Calls a ``collate_fn`` with samples that went through the transforms."""

    def __init__(self, collate_fn: Collate) -> None:
        self.__qualname__ = getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__)
        self.__self__ = getattr(collate_fn, "__self__", None)  # whose method it is
        self.collate_fn = collate_fn

    def __call__(self, samples: object) -> Any:
        before, _state.transformed = _state.transformed, True
        try:
            return self.collate_fn(samples)
        finally:
            _state.transformed = before
