"""What one sample of a run costs besides the dataset's own call: 256 samples that do nothing."""

from __future__ import annotations

from array import array
from types import ModuleType

from bench.micro._twins import Operations, main

KEYS = list(range(256))


def operations(run: ModuleType) -> Operations:
    names = {
        "run_samples": run.run_samples,
        "fetch": KEYS.__getitem__,
        "keys": KEYS,
        "lease": array("q", bytes(24)),
        "durations": array("q", bytes(8 * len(KEYS))),
        "nothing": lambda epoch, key: None,
    }
    call = "run_samples(fetch, keys, 0, lease, durations, {}, 0, Exception)"
    return {
        "256 calls, no bookkeeping": ("[fetch(key) for key in keys]", names),
        "run of 256": (call.format("None"), names),
        "run of 256, each bound": (call.format("nothing"), names),
    }


if __name__ == "__main__":
    main("run", operations)
