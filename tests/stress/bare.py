"""Single modules of the core, without the rest of the package.

``import minato`` imports torch, and a process with torch in it takes several times as long to fork. Programs that
start hundreds of processes import the core's modules by themselves.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def core(name: str) -> ModuleType:
    """Module ``minato._core.NAME``; for programs, not for tests."""
    for package in ("minato", "minato._core"):
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [str(ROOT / package.replace(".", "/"))]
    return importlib.import_module(f"minato._core.{name}")


def fork(run: Callable[[], None]) -> int:
    """Run a function in a forked process, which ends with 0, or with 1 and a traceback; returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # only of forking beside threads
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
