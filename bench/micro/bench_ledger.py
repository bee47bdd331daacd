"""The scheduling of one batch of 256 samples: published, claimed, filled, delivered, retired."""

from __future__ import annotations

from types import ModuleType

from bench.micro._twins import Operations, main

SIZES = (4, 64, 4096)
KEYS = list(range(256))


def operations(module: ModuleType) -> Operations:
    def cycle(run: int) -> None:
        batch = ledger.publish(KEYS, 256, (0, 0, 1 << 20), 0, 0, 0, True)
        ledger.set_result(batch, 64, 64)
        while (lease := ledger.claim(0, run)) is not None:
            ledger.fill_run(0, *lease)
        ledger.retire(batch)

    ledger = module.Ledger(bytearray(module.Ledger.nbytes(*SIZES)), SIZES)
    ledger.open_pass(0)
    names = {"cycle": cycle, "ledger": ledger}
    return {
        "a batch of 256 in one run": ("cycle(256)", names),
        "a batch of 256, sample by sample": ("cycle(1)", names),
        "claim with nothing to claim": ("ledger.claim(0, 1)", names),
    }


if __name__ == "__main__":
    main("ledger", operations)
