"""Giving another object all the module-level names that one object has."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["Name", "rebind"]

Name = tuple[ModuleType, str]


def rebind(old: object, new: object) -> list[Name]:
    """Bind all names of ``old`` in imported modules to ``new``; minato's own modules keep theirs.

    Returns:
        The names that were bound anew.
    """
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
