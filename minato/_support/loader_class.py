"""torch's loader class, and the tools that put another class in its place."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader

TorchDataLoader = DataLoader  # torch's own class, whatever stands under its name in torch
Name = tuple[ModuleType, str]
F = TypeVar("F", bound=Callable[..., Any])

_standing_in: type | None = None
compat_of_all: list[str | None] = []
"""``compat`` of loaders that are made without it, for each call that has put another class in torch's place."""


def stand_in(cls: type | None) -> None:
    """Set the class that replaces torch's loader class; None: no class does."""
    global _standing_in
    _standing_in = cls


class StandIn(ABCMeta):
    """Type of a class that may take the name of torch's loader.

    While it has the name, torch's loaders count as its instances: code that tests for the name must still
    recognise a loader that was made before, or by a subclass of torch's own. The base is ABCMeta so that
    abstract base classes can be mixed into a loader, as with torch's.
    """

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, object], /, **options: object
    ) -> StandIn:
        # A class that is made by a call of type() would be one of module "abc", and could not be pickled.
        module = sys._getframe(1).f_globals.get("__name__")
        return super().__new__(mcls, name, bases, {"__module__": module, **namespace}, **options)

    def __instancecheck__(cls, instance: object) -> bool:
        is_torchs = cls is _standing_in and isinstance(instance, TorchDataLoader)
        return is_torchs or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        is_torchs = cls is _standing_in and issubclass(subclass, TorchDataLoader)
        return is_torchs or super().__subclasscheck__(subclass)


def is_made(loader: object) -> bool:
    """Whether our ``__init__`` made a loader, or it passes on what it is asked to one that was.

    A subclass that takes torch's name for its base may set torch's attributes itself. It is a loader of torch's then.
    """
    return getattr(loader, "_minato_position", None) is not None


def is_being_made(loader: object) -> bool:
    """Whether a constructor of a loader runs, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, first = frame.f_code.co_name, frame.f_code.co_varnames[:1]
        if name == "__init__" and first and frame.f_locals.get(first[0]) is loader:
            return True
        frame = frame.f_back
    return False


def made_only(method: F, why_not: Callable[[object], str] = lambda loader: "") -> F:
    """Decorator: only loaders that our ``__init__`` made have this method, which torch's class lacks.

    ``why_not`` says why one of these lacks it, too.
    """
    return cast(F, _MadeOnly(method, why_not))


class _MadeOnly:
    """A method that some instances lack, so that ``hasattr`` returns False for them."""

    def __init__(self, method: Callable[..., object], why_not: Callable[[object], str]) -> None:
        self.__wrapped__ = method
        self.__doc__ = method.__doc__
        self._why_not = why_not

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is not None:
            name = self.__wrapped__.__name__
            lacks = f"{type(instance).__name__!r} object has no attribute {name!r}"
            if why := self._why_not(instance) if is_made(instance) else lacks:
                raise AttributeError(why)
        return self.__wrapped__.__get__(instance, owner)


def rebind(old: object, new: object) -> list[Name]:
    """Bind all names of ``old`` in imported modules to ``new``, but not in minato's own; returns these names."""
    found = []
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for module_name, module in modules:
        # Others put all kinds of objects there; asking those for attributes might import something.
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] == "minato":
            continue
        names = vars(module)
        for name in [name for name, value in list(names.items()) if value is old]:
            names[name] = new
            found.append((module, name))
    return found
