"""The compiled core: shared-memory primitives that know nothing of loaders.

Every module exists twice, as Cython (``_X_c``) and as pure Python (``_X_py``); this package picks one backend for the
whole process and offers its names. ``MINATO_NO_EXTENSIONS=1`` picks pure Python, at build time and at run time.
"""

from __future__ import annotations

import importlib
import os
import warnings
from time import monotonic_ns as now_ns
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = [
    "DUAL_MODULES",
    "EVENT_COUNT_NBYTES",
    "HISTOGRAM_NBYTES",
    "LEASE_NBYTES",
    "READY_EVENTS_OFFSET",
    "USE_EXTENSIONS",
    "WORK_EVENTS_OFFSET",
    "Arrivals",
    "BatchRecord",
    "Calls",
    "Claim",
    "ConsumerLedger",
    "EventCount",
    "Histogram",
    "Lease",
    "Ledger",
    "Occurrences",
    "Packer",
    "SharedWords",
    "StateSnapshot",
    "StateWriter",
    "WorkerLedger",
    "implementation",
    "mix_seed",
    "now_ns",
    "run_samples",
    "run_steps",
    "sample_key",
    "spread_seed",
    "sum_of_hashes",
    "types_in",
]

DUAL_MODULES = (
    "counting",
    "ledger",
    "packing",
    "sample_loop",
    "seeding",
    "wait",
)
"""Names of the modules that exist in both forms."""


def _choose() -> tuple[list[ModuleType], str]:
    """Decide once per process which backend runs, and why: the compiled modules; none for pure Python."""
    if os.environ.get("MINATO_NO_EXTENSIONS", "") not in ("", "0"):
        return [], "MINATO_NO_EXTENSIONS is set"
    try:
        found = [importlib.import_module(f"minato._core._{name}_c") for name in DUAL_MODULES]
    except ImportError as error:
        reason = f"the compiled core could not be imported ({error})"
        warnings.warn(
            f"minato runs in pure Python: {reason}. Reinstall it with a C compiler present, or set "
            "MINATO_NO_EXTENSIONS=1 to choose this on purpose.",
            RuntimeWarning,
            stacklevel=2,
        )
        return [], reason
    return found, "the compiled core was imported"


_COMPILED, _REASON = _choose()
USE_EXTENSIONS = bool(_COMPILED)

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._counting_py import (
        HISTOGRAM_NBYTES,
        Arrivals,
        Calls,
        Histogram,
        Occurrences,
        sum_of_hashes,
    )
    from minato._core._ledger_py import (
        READY_EVENTS_OFFSET,
        WORK_EVENTS_OFFSET,
        BatchRecord,
        Claim,
        ConsumerLedger,
        Ledger,
        WorkerLedger,
    )
    from minato._core._packing_py import Packer, types_in
    from minato._core._sample_loop_py import LEASE_NBYTES, Lease, run_samples, run_steps
    from minato._core._seeding_py import (
        StateSnapshot,
        StateWriter,
        mix_seed,
        sample_key,
        spread_seed,
    )
    from minato._core._wait_py import EVENT_COUNT_NBYTES, EventCount, SharedWords
else:  # the same names
    for _module in _COMPILED:
        globals().update({name: each for name, each in vars(_module).items() if name in __all__})


def implementation() -> tuple[str, str]:
    """Return ``("compiled" | "pure", reason)`` for this process."""
    return ("compiled" if USE_EXTENSIONS else "pure"), _REASON
