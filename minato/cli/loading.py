"""Functions that the user names on the command line: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["Refused", "made"]


class Refused(Exception):
    """An argument of the command is invalid; the message contains the remedy."""


def made(factory: str) -> Any:
    """Call the function ``module:function`` or ``file.py:function``, and return its result.

    Raises:
        Refused: It does not exist, or raised.
    """
    place, _, name = factory.rpartition(":")
    if not place or not name:
        raise Refused(f"{factory!r} names no function: write module:function or file.py:function")
    module = _imported(place)
    make = getattr(module, name, None)
    if not callable(make):
        raise Refused(f"{place!r} has no function {name!r}: check its name")
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise Refused(f"{factory} raised {type(error).__name__}: {error}") from None


def _imported(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise Refused(f"there is no file {place!r}: check the path")
        sys.path.insert(0, str(path.parent))  # spawned workers import it by this name
        module = importlib.import_module(path.stem)
        if (
            getattr(module, "__file__", None) is None
            or Path(module.__file__ or "").resolve() != path
        ):
            sys.path.remove(
                str(path.parent)
            )  # otherwise workers import the file instead of the module
            raise Refused(
                f"{place!r} has the name of another module, {path.stem!r}, which Python imports instead: rename it"
            )
        return module
    except Refused:
        raise
    except ModuleNotFoundError as error:
        raise Refused(
            f"{place!r} cannot be imported: {error}; check its name and the directory"
        ) from None
    except (Exception, SystemExit) as error:
        raise Refused(f"importing {place!r} raised {type(error).__name__}: {error}") from None
