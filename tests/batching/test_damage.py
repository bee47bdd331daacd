"""What a broken worker leaves in shared memory is an error, not a crash, a hang, or the end of the epoch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from minato import DataLoader
from minato._core.codes import (
    END_BLOB,
    ERROR_BLOB,
    KIND_MASK,
    SAMPLE_BLOB,
    SKIP_BLOB,
    STATE_BLOB,
    TEXT_BLOB,
)
from minato._core.segment import Segment
from minato.batching.arena import Arena, Slot
from minato.batching.reader import open_batch
from minato.batching.serialization import DamagedError, SharedStore
from minato.shared_pool.source import DescriptorReader
from tests.batching.test_writer import SAMPLES, Desk
from tests.datasets import assert_same, drain
from tests.selection import numbers_for

KINDS = {
    **{
        name: (SAMPLES[name], default_collate) for name in ("arrays", "texts", "misfit-among-texts")
    },
    "objects": ([{"a": {i}, "b": torch.full((3,), i)} for i in range(5)], list),
    "errors": ([*SAMPLES["arrays"][:4], KeyError("no such sample")], default_collate),
}
MARKED = st.sampled_from([0, 1, 63, 64, 4096, 1 << 20, (1 << 30) - 64, 1 << 30, 1 << 40, 1 << 62])
WORDS = st.one_of(MARKED, st.integers(0, 1 << 23), st.integers(0, (1 << 63) - 1))
BYTES = st.tuples(st.just("byte"), st.integers(0, 1 << 13), st.integers(1, 255))
WORDS_THERE = st.tuples(st.just("word"), st.integers(0, 1 << 10), WORDS)
BLOBS = st.tuples(
    st.just("blob"),
    st.integers(0, 4),
    st.integers(0, KIND_MASK),
    WORDS,
    st.one_of(st.none(), WORDS),
)
LAYOUTS = st.tuples(st.just("layout"), WORDS)
RESULTS = st.tuples(st.just("result"), st.integers(0, 7), WORDS, WORDS)
FAULTS = st.lists(st.one_of(BYTES, WORDS_THERE, BLOBS, LAYOUTS, RESULTS), max_size=4)


def damage(desk: Desk, batch: int, slot: Slot, faults: list[Any]) -> None:
    """Write to shared memory what no sound worker would."""
    ledger, memory = desk.workers[0], desk.arena.segment.array
    first = ledger.describe(batch).first
    for fault in faults:
        match fault:
            case ("byte", offset, flips):
                memory[slot.start + offset] ^= flips
            case ("word", number, value):
                start = slot.start + 8 * number
                memory[start : start + 8].view("u8")[0] = value
            case ("blob", place, kind, offset, nbytes):
                if nbytes is None:  # only its kind
                    _, offset, nbytes = ledger.blobs(batch).get(place, (0, 0, 0))
                ledger.attach(first + place, (offset & ~KIND_MASK) | kind, nbytes)
            case ("layout", offset):
                ledger.publish_layout(batch, offset)
            case ("result", kind, offset, nbytes):
                ledger.set_result(batch, (offset & ~KIND_MASK) | kind, nbytes)


def make_desk(collate_fn: Any, elsewhere: bool) -> Desk:
    """Two workers and a reader, which may read batches as another rank does."""
    arena = Arena(Segment(1 << 30))
    desk = Desk(SharedStore(arena.segment), arena, collate_fn)
    if elsewhere:
        desk.reader = DescriptorReader(desk.ledger, arena, desk.store)  # type: ignore[assignment]
    return desk


def read(desk: Desk, batch: int, slot: Slot, elsewhere: bool) -> None:
    found = desk.read(batch, slot)
    if elsewhere:
        open_batch(found.descriptor, desk.arena.segment, desk.store, found.lease)


def check_survived(name: str, early: list[Any], late: list[Any], elsewhere: bool) -> None:
    """Damage a batch when it is half full, and when it is full; then read it, and another one."""
    samples, collate_fn = KINDS[name]
    desk = make_desk(collate_fn, elsewhere)
    batch, slot, _ = desk.open(5)
    desk.fill(batch, 0, samples[:2], 0)
    damage(desk, batch, slot, early)
    desk.fill(batch, 2, samples[2:], 1)
    damage(desk, batch, slot, late)
    try:
        read(desk, batch, slot, elsewhere)
    except StopIteration:
        raise AssertionError("the end of the epoch") from None
    except (DamagedError, KeyError, MemoryError, RuntimeError):
        pass
    if collate_fn is default_collate and not elsewhere:
        assert_same(desk.batch(SAMPLES["texts"]), default_collate(SAMPLES["texts"]))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(KINDS)), FAULTS, FAULTS, st.booleans())
@example("texts", [], [("blob", k, 0, 0, 0) for k in range(5)], False)
@example("texts", [], [("blob", k, 0, 0, 0) for k in range(5)], True)
@example("errors", [], [("blob", 4, 0, 0, None)], False)
@example("texts", [("blob", 0, 1, 0, None)], [], False)
@example("objects", [("blob", 0, 1, 1 << 40, 1 << 40)], [], False)
@example("arrays", [("word", 0, 1 << 62)], [], False)
def test_random_damage(name: str, early: list[Any], late: list[Any], elsewhere: bool) -> None:
    check_survived(name, early, late, elsewhere)


KINDS_OF_BLOBS = [0, SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB, SKIP_BLOB, STATE_BLOB]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("name", "place", "kinds"),
    [
        ("objects", 1, [kind for kind in KINDS_OF_BLOBS if kind != SAMPLE_BLOB]),
        ("texts", 0, [SAMPLE_BLOB, ERROR_BLOB, SKIP_BLOB]),
        ("misfit-among-texts", 0, [SAMPLE_BLOB, ERROR_BLOB]),
        ("error-first", 0, [SAMPLE_BLOB, TEXT_BLOB, SKIP_BLOB]),
    ],
)
def test_a_blob_whose_kind_alone_was_overwritten_is_damaged(
    name: str, place: int, kinds: list[int], elsewhere: bool
) -> None:
    samples, collate_fn = KINDS.get(name) or (KINDS["errors"][0][::-1], default_collate)
    for kind in kinds:
        desk = make_desk(collate_fn, elsewhere)
        batch, slot, _ = desk.open(5)
        desk.fill(batch, 0, samples[:2], 0)
        damage(desk, batch, slot, [("blob", place, kind, 0, None)])
        desk.fill(batch, 2, samples[2:], 1)
        with pytest.raises(DamagedError, match="is damaged: something in one of the processes"):
            read(desk, batch, slot, elsewhere)


def refuse(samples: list[Any]) -> list[Any]:
    raise KeyError("not to be collated")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("collate", "kind"), [(list, ERROR_BLOB), (refuse, SAMPLE_BLOB)])
def test_a_result_whose_kind_alone_was_overwritten_is_damaged(
    collate: Any, kind: int, elsewhere: bool
) -> None:
    desk = make_desk(collate, elsewhere)
    batch, slot, _ = desk.open(5)
    desk.fill(batch, 0, KINDS["objects"][0], 0)
    record = desk.ledger.describe(batch)
    damage(desk, batch, slot, [("result", kind, record.result, record.result_nbytes)])
    with pytest.raises(DamagedError, match="is damaged: something in one of the processes"):
        read(desk, batch, slot, elsewhere)


@pytest.mark.stress
def test_random_damage_for_long(stress_s: float) -> None:
    damaged = given(st.sampled_from(list(KINDS)), FAULTS, FAULTS, st.booleans())
    for number in numbers_for(stress_s, os.getpid()):
        settings(max_examples=500, database=None)(seed(number)(damaged(check_survived)))()


class Broken(SharedStore):
    """Writes over the objects of some samples."""

    def put(
        self, allocate: Any, value: Any, purpose: Any = "sample", kind: int = 0
    ) -> tuple[int, int]:
        offset, nbytes = super().put(allocate, value, purpose, kind)
        if "{9}" in repr(value):
            self.segment.array[offset + 40] ^= 1
        return offset, nbytes


def test_a_damaged_sample_is_an_error_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.engine.engine.SharedStore", Broken)
    dataset = [{"pickled": {index}} for index in range(16)]
    samples, (error,) = drain(DataLoader(dataset, 4, num_workers=2, collate_fn=list))
    assert samples == dataset[:8] + dataset[12:]
    assert type(error) is DamagedError
    assert "is damaged: something in one of the processes" in str(error)
