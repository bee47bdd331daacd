"""The compiled core: shared-memory primitives that know nothing of loaders.

Every module exists twice, as Cython (``_X_c``) and as pure Python (``_X_py``); this package picks one backend for the
whole process and offers its names. ``MINATO_NO_EXTENSIONS=1`` picks pure Python, at build time and at run time.
"""

from __future__ import annotations

import importlib
import os
import warnings
from time import monotonic_ns as now_ns
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
else:
    from minato._core._counting_c import (
        HISTOGRAM_NBYTES,
        Arrivals,
        Calls,
        Histogram,
        Occurrences,
        sum_of_hashes,
    )
    from minato._core._ledger_c import (
        READY_EVENTS_OFFSET,
        WORK_EVENTS_OFFSET,
        BatchRecord,
        Claim,
        ConsumerLedger,
        Ledger,
        WorkerLedger,
    )
    from minato._core._packing_c import Packer, types_in
    from minato._core._sample_loop_c import LEASE_NBYTES, Lease, run_samples, run_steps
    from minato._core._seeding_c import (
        StateSnapshot,
        StateWriter,
        mix_seed,
        sample_key,
        spread_seed,
    )
    from minato._core._wait_c import EVENT_COUNT_NBYTES, EventCount, SharedWords


def implementation() -> tuple[str, str]:
    """Return ``("compiled" | "pure", reason)`` for this process."""
    return ("compiled" if USE_EXTENSIONS else "pure"), _REASON
