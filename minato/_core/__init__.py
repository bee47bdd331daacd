"""The compiled core: shared-memory primitives that know nothing of loaders.

Every module exists twice, as Cython (``_X_c``) and as pure Python (``_X_py``), and ``X`` picks one
for the whole process. ``MINATO_NO_EXTENSIONS=1`` picks pure Python, at build time and at run time.
"""

from __future__ import annotations

import importlib
import os
import warnings

__all__ = ["DUAL_MODULES", "USE_EXTENSIONS", "implementation"]

DUAL_MODULES = (
    "arrivals",
    "claims",
    "clock",
    "column",
    "copy",
    "histogram",
    "ledger",
    "records",
    "run",
    "seeding",
    "steps",
    "wait",
)
"""Names of the modules that exist in both forms."""


def _choose() -> tuple[bool, str]:
    """Decide once per process which backend runs, and why."""
    if os.environ.get("MINATO_NO_EXTENSIONS", "") not in ("", "0"):
        return False, "MINATO_NO_EXTENSIONS is set"
    try:
        for name in DUAL_MODULES:
            importlib.import_module(f"minato._core._{name}_c")
    except ImportError as error:
        reason = f"the compiled core could not be imported ({error})"
        warnings.warn(
            f"minato runs in pure Python: {reason}. Reinstall it with a C compiler present, or set "
            "MINATO_NO_EXTENSIONS=1 to choose this on purpose.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False, reason
    return True, "the compiled core was imported"


USE_EXTENSIONS, _REASON = _choose()


def implementation() -> tuple[str, str]:
    """Return ``("compiled" | "pure", reason)`` for this process."""
    return ("compiled" if USE_EXTENSIONS else "pure"), _REASON
