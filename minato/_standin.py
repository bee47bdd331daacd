"""torch's own loader class, whatever its name stands for, and what lets ours pass for it."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

__all__ = ["StandIn", "TorchDataLoader", "stand_in"]

_standing_in: type | None = None


def stand_in(cls: type | None) -> None:
    """Say which class has taken the name of torch's, None for no one."""
    global _standing_in
    _standing_in = cls


class StandIn(ABCMeta):
    """Type of a class that may take the name of torch's loader.

    While it has the name, torch's loaders count as its instances: code that tests for the name must still
    recognise a loader that was made before, or by a subclass of torch's own. The base is ABCMeta so that
    abstract base classes can be mixed into a loader, as with torch's.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is _standing_in and isinstance(instance, TorchDataLoader):
            return True
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is _standing_in and issubclass(subclass, TorchDataLoader):
            return True
        return super().__subclasscheck__(subclass)
