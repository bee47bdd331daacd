"""Where a worker's results go, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from minato._core.codes import SKIPPED
from minato.batching.arena import Arena
from minato.batching.layout import rows_of
from minato.batching.serialization import LocalStore
from minato.errors import SKIP
from tests.batching.test_writer import Desk
from tests.datasets import flat


def desk_of(bound: bool, collate_fn: Callable[[Any], Any] = list) -> Desk:
    arena = Arena(shared=False)
    return Desk(LocalStore(arena.segment), arena, collate_fn, bound=bound, skips=True)


def test_a_skipped_sample_completes_the_batch_that_its_place_is_in() -> None:
    desk = desk_of(bound=False)
    (old, *_), (new, *_) = opened = [desk.open(1), desk.open(2)]
    assert [desk.workers[0].claim(2).batch for _ in range(2)] == [old, new]
    desk.ledger.bind_late(old, new)
    desk.writers[0].deliver_free(1, [1, 2], ["sample 1", "sample 2"])
    desk.writers[0].deliver_free(0, [0], [SKIP])
    assert desk.ledger.describe(new).flags & SKIPPED
    assert sorted(flat(desk.read(batch, slot) for batch, slot, _ in opened)) == [
        "sample 1",
        "sample 2",
    ]


class Counted:
    """A worker's end of a ledger that notes for how many samples each call fills places."""

    def __init__(self, writer: Any) -> None:
        self._ledger, writer._ledger = writer._ledger, self
        self.runs: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def fill(self, position: int, place: int, count: int = 1) -> int:
        self.runs.append(count)
        return int(self._ledger.fill(position, place, count))


def test_neighbours_take_places_together() -> None:
    desk = desk_of(bound=False)
    writer = desk.writers[0]
    counted, opened = Counted(writer), [desk.open(2), desk.open(3)]
    assert None not in [desk.workers[0].claim(2), desk.workers[0].claim(3)]
    writer.deliver_free(2, [2, 3, 4], ["c", "d", "e"])
    writer.deliver_free(0, [0, 1], ["a", "b"])
    assert counted.runs == [2, 1, 2]
    assert [desk.ledger.occupants(batch) for batch, *_ in opened] == [[2, 3], [4, 0, 1]]
    assert [desk.read(batch, slot) for batch, slot, _ in opened] == [["c", "d"], ["e", "a", "b"]]


def test_rows_take_places_together() -> None:
    desk = desk_of(bound=False, collate_fn=default_collate)
    writer = desk.writers[0]
    counted, opened = Counted(writer), [desk.open(2), desk.open(3)]
    assert None not in [desk.workers[0].claim(2), desk.workers[0].claim(3)]
    for place, indices in ((2, [4, 2, 0]), (0, [1, 3])):
        rows: Any = rows_of(torch.arange(5), indices)
        assert writer.deliver_rows(place, rows) == len(indices)
    assert counted.runs == [2, 1, 2]
    assert [desk.read(batch, slot).tolist() for batch, slot, _ in opened] == [[4, 2], [0, 1, 3]]


@pytest.mark.parametrize("whole", [True, False])
def test_skipped_samples_are_not_collated(whole: bool) -> None:
    desk = desk_of(bound=True)
    batch, slot, _ = desk.open(3)
    desk.workers[0].claim(3)
    desk.writers[0].deliver(batch, 0, [0, 1, 2], [SKIP, "b", "c"], whole=whole)
    assert desk.ledger.skipped(batch) == [0]
    assert desk.read(batch, slot) == ["b", "c"]


@pytest.mark.parametrize("bound", [True, False], ids=["own places", "free places"])
def test_texts_of_a_whole_batch_are_stored_at_once(bound: bool) -> None:
    texts = ["a", "µ" * 1000, ""]
    desk = desk_of(bound, default_collate)
    (whole, *_), (parts, *_) = opened = [desk.open(3), desk.open(3)]
    assert [desk.workers[0].claim(3).batch for _ in range(2)] == [whole, parts]
    for batch, first, last in ((whole, 0, 3), (parts, 0, 1), (parts, 1, 3)):
        indices, given = [*range(first, last)], texts[first:last]
        if bound:
            desk.writers[0].deliver(batch, first, indices, given, whole=batch == whole)
        else:
            desk.writers[0].deliver_free(3 * (batch == parts) + first, indices, given)
    assert desk.ledger.blobs(whole) == {}
    assert [desk.read(batch, slot) for batch, slot, _ in opened] == [texts, texts]
