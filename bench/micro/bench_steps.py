"""Resumable transforms: four that do nothing, against calling them straight through."""

from __future__ import annotations

import time
from types import ModuleType

import numpy as np

from bench.micro._twins import Operations, main


def nothing(value: int) -> int:
    return value


def operations(steps: ModuleType) -> Operations:
    names = {
        "run_steps": steps.run_steps,
        "nothing": nothing,
        "chain": (nothing,) * 4,
        "later_ns": time.monotonic_ns() + 3_600_000_000_000,
        "laps": np.zeros(4, np.int64),
        "cursor": np.zeros(1, np.int64),
    }
    return {
        "four calls, no bookkeeping": ("nothing(nothing(nothing(nothing(1))))", names),
        "no deadline": ("run_steps(chain, 1, 0, 0)", names),
        "deadline": ("run_steps(chain, 1, 0, later_ns)", names),
        "deadline, cursor": ("run_steps(chain, 1, 0, later_ns, None, cursor)", names),
        "deadline, cursor, laps": ("run_steps(chain, 1, 0, later_ns, laps, cursor)", names),
    }


if __name__ == "__main__":
    main("steps", operations)
