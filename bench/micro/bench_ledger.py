"""The scheduling of one batch of 256 samples: published, claimed, filled, delivered, retired."""

from __future__ import annotations

from types import ModuleType

from bench.micro._twins import Operations, main

SIZES = (4, 64, 4096)
KEYS = list(range(256))
SLOT = (0, 0, 1 << 20)


def operations(module: ModuleType) -> Operations:
    def bound(run: int) -> None:
        batch = ledger.publish(KEYS, 256, SLOT, 0, 0, 0, True)
        ledger.set_result(batch, 64, 64)
        while (lease := ledger.claim(0, run)) is not None:
            ledger.fill_run(0, *lease)
        ledger.occupants(batch)
        ledger.retire(batch)

    def arrival() -> None:
        batch = ledger.publish(KEYS, 256, SLOT, 0, 0, 0, False)
        ledger.set_result(batch, 64, 64)
        first = ledger.describe(batch)[1]
        while (lease := ledger.claim(0, 1)) is not None:
            position = first + lease[1]
            ledger.fill(0, position, ledger.reserve(0, position)[0])
        ledger.occupants(batch)
        ledger.retire(batch)

    ledger = module.Ledger(bytearray(module.Ledger.nbytes(*SIZES)), SIZES)
    ledger.open_pass(0)
    full = module.Ledger(bytearray(module.Ledger.nbytes(*SIZES)), SIZES)
    full.open_pass(0)
    for _ in range(16):
        full.publish(KEYS, 256, SLOT, 0, 0, 0, False)
    names = {"bound": bound, "arrival": arrival, "ledger": ledger, "full": full}
    return {
        "a batch of 256 in one run": ("bound(256)", names),
        "a batch of 256, sample by sample": ("bound(1)", names),
        "a batch of 256, places by arrival": ("arrival()", names),
        "claim with nothing to claim": ("ledger.claim(0, 1)", names),
        "claim 256 and die, 4096 in flight": ("full.claim(1, 256); full.release(1)", names),
    }


if __name__ == "__main__":
    main("ledger", operations)
