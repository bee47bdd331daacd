"""Where a worker's results go, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minato._core import ConsumerLedger
from minato._core.codes import READY, SKIPPED
from minato.batching.arena import Arena
from minato.batching.collate import Collate
from minato.batching.serialization import LocalStore
from minato.batching.writer import BatchWriter
from minato.errors import SKIP


class Case:
    """A worker with a real writer, and batches in an arena."""

    def __init__(self, bound: bool, collate_fn: Callable[[Any], Any] = list) -> None:
        arena = Arena(shared=False)
        self.ledger = ConsumerLedger(bytearray(1 << 16), (2, 4, 16))
        self.worker = self.ledger.worker(0)
        self.ledger.open_epoch(0)
        self.bound = bound
        self.store = LocalStore(arena.segment)
        self.acquire = arena.acquire
        collate = Collate(collate_fn, True)
        self.writer = BatchWriter(self.worker, self.store, collate, skips=True)

    def open(self, count: int) -> int:
        slot = self.acquire()
        arguments = (slot.start, slot.start, slot.end), 0, 0, 0, self.bound
        return int(self.ledger.open(list(range(count)), count, *arguments))

    def result(self, batch: int) -> Any:
        result = self.ledger.describe(batch).result
        return self.store.peek(result & ~63, 0)


def test_a_skipped_sample_completes_the_batch_that_its_place_is_in() -> None:
    case = Case(bound=False)
    old, new = case.open(1), case.open(2)
    assert [case.worker.claim(2).batch for _ in range(2)] == [old, new]
    case.ledger.bind_late(old, new)
    for position in (1, 2):
        case.writer.deliver_free(position, position, f"sample {position}")
    case.writer.deliver_free(0, 0, SKIP)
    assert case.ledger.state(old) == case.ledger.state(new) == READY
    assert case.ledger.describe(new).flags & SKIPPED
    assert sorted(case.result(old) + case.result(new)) == ["sample 1", "sample 2"]


@pytest.mark.parametrize("whole", [True, False])
def test_skipped_samples_are_not_collated(whole: bool) -> None:
    case = Case(bound=True)
    batch = case.open(3)
    case.worker.claim(3)
    case.writer.deliver(batch, 0, [0, 1, 2], [SKIP, "b", "c"], whole=whole)
    assert case.ledger.state(batch) == READY
    assert case.result(batch) == ["b", "c"]
    assert case.ledger.skipped(batch) == [0]
