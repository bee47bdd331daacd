"""Making torch's loader be ours, for code that one cannot edit."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Literal

from minato._fork_safety import forget_in_children
from minato._support.loader_class import Name, TorchDataLoader, compat_of_all, rebind, stand_in
from minato.checks import check_choice
from minato.loader import DataLoader

# Where torch's class is to be found: pickle looks there for the class of a loader.
_TORCHS_NAME = TorchDataLoader.__module__, TorchDataLoader.__qualname__
_OUR_NAME = "minato._support.loader_class", "TorchDataLoader"

_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


forget_in_children(_renew_lock)
_names: list[Name] = []


def patch(compat: Literal["torch"] | None = None) -> ExitStack:
    """Make ``torch.utils.data.DataLoader`` be ``minato.DataLoader``, from this call on.

    Every module-level name of torch's class is bound to ours, in torch and in all modules that are imported by
    now; modules that are imported later find ours in torch. Loaders and subclasses that exist already stay what
    they are, and still count as instances and subclasses of ``torch.utils.data.DataLoader``.

    Holds for the whole process until ``unpatch()``, or for a block: ``with minato.patch(): ...``. Calls nest:
    each is undone by one ``unpatch()`` or by the end of its block.

    Args:
        compat: The argument ``compat`` of all loaders that are made without it meanwhile. ``"torch"``: random numbers
            are torch's, too. Of calls that nest, the last one counts.

    Returns:
        A context manager that undoes this call when its block ends.

    Raises:
        ValueError: ``compat`` is something else.
    """
    check_choice("compat", compat, (None, "torch"))
    with _lock:
        compat_of_all.append(compat)
        if len(compat_of_all) == 1:
            stand_in(DataLoader)
            _names.extend(rebind(TorchDataLoader, DataLoader))
            TorchDataLoader.__module__, TorchDataLoader.__qualname__ = _OUR_NAME
    undo = ExitStack()
    undo.callback(unpatch)
    return undo


def unpatch() -> None:
    """Undo one ``patch()``; does nothing if there is none.

    With the last one, the names that were bound to our class get torch's back. A module that was first imported
    in between, and took the class from torch then, keeps ours.
    """
    with _lock:
        if not compat_of_all:
            return
        compat_of_all.pop()
        if not compat_of_all:
            while _names:
                module, name = _names.pop()
                if vars(module).get(name) is DataLoader:
                    vars(module)[name] = TorchDataLoader
            stand_in(None)
            TorchDataLoader.__module__, TorchDataLoader.__qualname__ = _TORCHS_NAME
