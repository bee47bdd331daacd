"""Whether samples are photographs that PIL decodes: then how to decode them decides more than the loader does."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["uses_pil"]

_NESTED = ("dataset", "datasets")
"""Attributes with the datasets that a dataset wraps, in torch's Subset and ConcatDataset and in classes like them."""
_DEEPEST = 4


def uses_pil(objects: Iterable[object], depth: int = 0) -> bool:
    """Whether the code of a dataset or transform refers to PIL, as far as its module shows.

    Args:
        objects: Datasets, transforms and functions.
        depth: Number of datasets around these.
    """
    for each in objects:
        kinds = (each,) if hasattr(each, "__code__") else type(each).__mro__
        if any(_module_refers_to_pil(getattr(kind, "__module__", "")) for kind in kinds):
            return True
        inner = [getattr(each, name, None) for name in _NESTED]
        nested = [one for value in inner for one in _listed(value)]
        if nested and depth < _DEEPEST and uses_pil(nested, depth + 1):
            return True
    return False


def _listed(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return list(value)
    return [] if value is None else [value]


def _module_refers_to_pil(name: str) -> bool:
    names = vars(sys.modules.get(name, object)).values()
    origins = (
        getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in names
    )
    return any(isinstance(origin, str) and origin.partition(".")[0] == "PIL" for origin in origins)
