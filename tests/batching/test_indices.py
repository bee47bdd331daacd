"""Which sample a worker is on, and which batch it collates, as messages name them."""

from __future__ import annotations

import importlib
import mmap
from typing import Any

import pytest

from minato._core.segment import Segment
from minato.batching.serialization import LocalStore, StoredIndices


@pytest.mark.parametrize("form", ["py", "c"])
def test_samples_whose_own_batch_is_gone_are_left_out_of_a_message(form: str) -> None:
    module: Any = importlib.import_module(f"minato._core._ledger_{form}")
    ledger = module.ConsumerLedger(mmap.mmap(-1, 1 << 14), (1, 2, 8))
    worker = ledger.worker(0)
    ledger.open_epoch(0)
    slot = 4096, 4160, 1 << 20
    first = ledger.open([10, 11], 2, slot, 0, 0, 0, False)
    second = ledger.open([12, 13], 2, slot, 0, 0, 0, False)
    for _ in range(2):
        assert worker.claim(2) is not None
    # Each batch gets the samples of the other one.
    for position in (2, 3, 0, 1):
        place, _, _ = worker.reserve(position)
        worker.fill(position, place)
    indices = StoredIndices(ledger, LocalStore(Segment(4096, shared=False)))
    assert indices.describe(second) == "indices 10, 11"
    ledger.retire(first)
    assert ledger.open([14, 15], 2, slot, 0, 0, 0, False) == first
    assert indices.describe(second) == "indices that are no longer known"
