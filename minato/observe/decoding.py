"""Whether samples are photographs that PIL decodes: then how to decode them decides more than the loader does."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from minato._support.objects import attribute, mro_of

__all__ = ["uses_pil"]

_NESTED = ("dataset", "datasets")
"""Attributes with the datasets that a dataset wraps, in torch's Subset and ConcatDataset and in classes like them."""
_DEEPEST = 4


def uses_pil(objects: Iterable[object]) -> bool:
    """Whether the code of a dataset or transform refers to PIL, as far as its module shows.

    Args:
        objects: Datasets, transforms and functions.
    """
    try:
        return _uses_pil(objects, 0)
    except Exception:  # of a property of the user's
        return False


def _uses_pil(objects: Iterable[object], depth: int) -> bool:
    for each in objects:
        kinds = (each,) if type(each) is FunctionType else mro_of(type(each))
        if any(_module_refers_to_pil(attribute(kind, "__module__")) for kind in kinds):
            return True
        inner = [attribute(each, name) for name in _NESTED]
        nested = [one for value in inner for one in _listed(value)]
        if nested and depth < _DEEPEST and _uses_pil(nested, depth + 1):
            return True
    return False


def _listed(value: Any) -> list[Any]:
    if issubclass(type(value), (list, tuple)):
        return list(value)
    return [] if value is None else [value]


def _module_refers_to_pil(name: object) -> bool:
    module = sys.modules.get(name) if type(name) is str else None
    values = () if type(module) is not ModuleType else list(vars(module).values())
    origins = [attribute(value, each) for value in values for each in ("__module__", "__name__")]
    return any(type(origin) is str and origin.partition(".")[0] == "PIL" for origin in origins)
