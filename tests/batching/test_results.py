"""Where a worker's results go, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from minato._core import ConsumerLedger
from minato._core.codes import READY, SKIPPED
from minato.batching.arena import Arena, Slot
from minato.batching.collate import Collate
from minato.batching.layout import rows_of
from minato.batching.reader import BatchReader
from minato.batching.serialization import LocalStore
from minato.batching.writer import BatchWriter
from minato.errors import SKIP


class Case:
    """A worker with a real writer, and batches in an arena."""

    def __init__(
        self, bound: bool, collate_fn: Callable[[Any], Any] = list, end: Any = None
    ) -> None:
        arena = Arena(shared=False)
        self.ledger = ConsumerLedger(bytearray(1 << 16), (2, 4, 16))
        self.worker = self.ledger.worker(0)
        self.ledger.open_epoch(0)
        self.bound = bound
        self.store = LocalStore(arena.segment)
        self.acquire = arena.acquire
        self.slots: dict[int, Slot] = {}
        self.reader = BatchReader(self.ledger, arena, self.store)
        collate = Collate(collate_fn, True)
        if end is not None:
            end._ledger = self.worker
        self.writer = BatchWriter(end or self.worker, self.store, collate, skips=True)

    def open(self, count: int) -> int:
        slot = self.acquire()
        arguments = (slot.start, slot.start, slot.end), 0, 0, 0, self.bound
        batch = int(self.ledger.open(list(range(count)), count, *arguments))
        self.slots[batch] = slot
        return batch

    def read(self, batch: int) -> Any:
        return self.reader.read(batch, self.slots[batch])

    def result(self, batch: int) -> Any:
        result = self.ledger.describe(batch).result
        return self.store.get(result & ~63, 0)


def test_a_skipped_sample_completes_the_batch_that_its_place_is_in() -> None:
    case = Case(bound=False)
    old, new = case.open(1), case.open(2)
    assert [case.worker.claim(2).batch for _ in range(2)] == [old, new]
    case.ledger.bind_late(old, new)
    case.writer.deliver_free(1, [1, 2], ["sample 1", "sample 2"])
    case.writer.deliver_free(0, [0], [SKIP])
    assert case.ledger.state(old) == case.ledger.state(new) == READY
    assert case.ledger.describe(new).flags & SKIPPED
    assert sorted(case.result(old) + case.result(new)) == ["sample 1", "sample 2"]


class Counted:
    """A worker's end of a ledger that notes for how many samples each call fills places."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self.runs: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def fill(self, position: int, place: int, count: int = 1) -> int:
        self.runs.append(count)
        return int(self._ledger.fill(position, place, count))


def test_neighbours_take_places_together() -> None:
    case = Case(bound=False, end=(counted := Counted(None)))
    batches = [case.open(2), case.open(3)]
    assert None not in [case.worker.claim(2), case.worker.claim(3)]
    case.writer.deliver_free(2, [2, 3, 4], ["c", "d", "e"])
    case.writer.deliver_free(0, [0, 1], ["a", "b"])
    assert counted.runs == [2, 1, 2]
    assert [case.ledger.occupants(batch) for batch in batches] == [[2, 3], [4, 0, 1]]
    assert [case.result(batch) for batch in batches] == [["c", "d"], ["e", "a", "b"]]


def test_rows_take_places_together() -> None:
    case = Case(bound=False, collate_fn=default_collate, end=(counted := Counted(None)))
    batches = [case.open(2), case.open(3)]
    assert None not in [case.worker.claim(2), case.worker.claim(3)]
    for place, indices in ((2, [4, 2, 0]), (0, [1, 3])):
        rows: Any = rows_of(torch.arange(5), indices)
        assert case.writer.deliver_rows(place, rows) == len(indices)
    assert counted.runs == [2, 1, 2]
    assert [case.read(batch).tolist() for batch in batches] == [[4, 2], [0, 1, 3]]


@pytest.mark.parametrize("whole", [True, False])
def test_skipped_samples_are_not_collated(whole: bool) -> None:
    case = Case(bound=True)
    batch = case.open(3)
    case.worker.claim(3)
    case.writer.deliver(batch, 0, [0, 1, 2], [SKIP, "b", "c"], whole=whole)
    assert case.ledger.state(batch) == READY
    assert case.result(batch) == ["b", "c"]
    assert case.ledger.skipped(batch) == [0]


@pytest.mark.parametrize("bound", [True, False], ids=["own places", "free places"])
def test_texts_of_a_whole_batch_are_stored_at_once(bound: bool) -> None:
    texts = ["a", "µ" * 1000, ""]
    case = Case(bound, default_collate)
    whole, parts = case.open(3), case.open(3)
    assert [case.worker.claim(3).batch for _ in range(2)] == [whole, parts]
    for batch, first, last in ((whole, 0, 3), (parts, 0, 1), (parts, 1, 3)):
        indices, given = [*range(first, last)], texts[first:last]
        if bound:
            case.writer.deliver(batch, first, indices, given, whole=batch == whole)
        else:
            case.writer.deliver_free(3 * (batch == parts) + first, indices, given)
    assert case.result(whole) == texts
    assert all(offset == 0 for _, offset, _ in case.ledger.blobs(whole))
    assert case.read(whole) == case.read(parts) == texts
