"""Samples on their way into a batch, and the batch on its way out: the writer and the reader together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, default_convert

from minato._core import ConsumerLedger
from minato._core.codes import FIRST_COLLATED, OPEN, READY
from minato._core.segment import Segment
from minato.batching.arena import Arena
from minato.batching.blobs import SampleError
from minato.batching.collate import Collate
from minato.batching.reader import COPIED_NBYTES, BatchReader
from minato.batching.serialization import LocalStore, SharedStore, Store
from minato.batching.writer import BatchWriter
from minato.errors import SKIP
from tests.datasets import assert_same

STORES = {"shared": SharedStore, "local": LocalStore}


class Desk:
    """Batches, written by two workers and read by one consumer; their samples have their own places if ``bound``."""

    def __init__(
        self,
        store: Store,
        arena: Arena,
        collate_fn: Callable[[Any], Any] = default_collate,
        batched: bool = True,
        bound: bool = True,
        skips: bool = False,
    ) -> None:
        sizes = (2, 8, 64)
        self.arena = arena
        self.segment = Segment(ConsumerLedger.nbytes(*sizes))
        self.ledger = ConsumerLedger(self.segment.array, sizes, self.segment.descriptor)
        self.workers = [self.ledger.worker(number) for number in range(2)]
        self.ledger.open_epoch(0)
        self.reader = BatchReader(self.ledger, arena, store)
        self.store, self.bound = store, bound
        self.writers = [
            BatchWriter(worker, store, Collate(collate_fn, batched), skips=skips)
            for worker in self.workers
        ]

    def open(self, count: int) -> tuple[int, Any, int]:
        slot = self.arena.acquire()
        span = (slot.start, slot.start, slot.end)
        batch = self.ledger.open(list(range(count)), count, span, 0, 0, 0, self.bound)
        return batch, slot, self.ledger.describe(batch).first

    def fill(self, batch: int, k: int, samples: list[Any], worker: int = 0) -> None:
        """Run samples k, k+1, …: exceptions among them are what a sample raised."""
        self.workers[worker].claim(len(samples))
        before = [*itertools.takewhile(lambda each: not isinstance(each, BaseException), samples)]
        error = samples[len(before)] if len(before) < len(samples) else None
        indices = range(100 + k, 100 + k + len(samples))
        self.writers[worker].deliver(batch, k, indices, before, error)

    def batch(self, samples: list[Any], run: int = 2) -> Any:
        """Write a batch in runs by two workers, and read it."""
        batch, slot, _ = self.open(len(samples))
        for number, k in enumerate(range(0, len(samples), run)):
            assert self.ledger.state(batch) == OPEN
            self.fill(batch, k, samples[k : k + run], number % 2)
        return self.read(batch, slot)

    def read(self, batch: int, slot: Any) -> Any:
        assert self.ledger.state(batch) == READY
        try:
            return self.reader.read(batch, slot)
        finally:
            self.reader.discard(batch, slot)
            self.ledger.retire(batch)


Make = Callable[..., Desk]


@pytest.fixture(params=STORES.values(), ids=STORES.keys())
def make(request: pytest.FixtureRequest) -> Make:
    def make(*arguments: Any, **options: Any) -> Desk:
        arena = Arena(Segment(1 << 30))
        return Desk(request.param(arena.segment), arena, *arguments, **options)

    return make


def shared_desk(nbytes: int, **options: Any) -> Desk:
    arena = Arena(Segment(nbytes))
    return Desk(SharedStore(arena.segment), arena, **options)


SAMPLES: dict[str, list[Any]] = {
    "arrays": [np.full((3, 4), i, np.float32) for i in range(5)],
    "tensors": [{"x": torch.full((2,), i), "y": i} for i in range(5)],
    "texts": [{"x": np.full(2, i), "name": f"number {i}"} for i in range(5)],
    "only-texts": ["a", "b", "c", "d", "e"],
    "misfit": [1, 2, 3.5, 4, 5],
    "misfit-among-texts": [(1, "a"), (2, "b"), (2.5, "c"), (4, "d"), (5, "e")],
    "misfit-first": [1.5, 2, 3, 4, 5],
    "larger-later": [{"a": 1}, {"a": 2}, {"a": 3, "b": 3}, {"a": 4}, {"a": 5}],
    "no-layout": [torch.nn.Parameter(torch.ones(1), requires_grad=False)] * 5,
    "nothing": [[], [], [], [], []],
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("run", [1, 2, 5])
def test_batches_are_those_of_default_collate(make: Make, name: str, run: int) -> None:
    desk = make()
    for _ in range(2):  # the second one in records and a slot that were used before
        assert_same(desk.batch(SAMPLES[name], run), default_collate(SAMPLES[name]))


def test_batches_of_changing_layout_in_the_same_records(make: Make) -> None:
    desk = make()
    for name in [*SAMPLES, *reversed(SAMPLES)]:
        assert_same(desk.batch(SAMPLES[name][:3]), default_collate(SAMPLES[name][:3]))


@pytest.mark.parametrize("name", ["texts", "misfit-among-texts"])
@pytest.mark.parametrize("filled", range(5))
def test_texts_of_a_worker_that_dies_while_it_fills_places(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, filled: int
) -> None:
    """Its texts lie at the place of the first sample; those of the samples that another one runs again count."""
    desk, samples = make(), SAMPLES[name]
    batch, slot, _ = desk.open(5)
    dead, writer = desk.workers[0], desk.writers[0]
    assert dead.claim(5).count == 5
    monkeypatch.setattr(writer, "_fill", lambda batch, k, count: dead.fill_run(batch, k, filled))
    earlier = [*samples[:filled], *[samples[0]] * (5 - filled)]  # the others draw anew
    writer.deliver(batch, 0, range(5), earlier)
    assert desk.ledger.release(0) == 5 - filled
    desk.fill(batch, filled, samples[filled:], 1)
    assert_same(desk.read(batch, slot), default_collate(samples))


def test_what_is_collated_as_it_is_outlives_the_slot(make: Make) -> None:
    """Beside a text, ``default_collate`` keeps each sample itself, also one that another worker has written."""
    desk = make()
    kept = []
    for number in range(4):
        batch, slot, _ = desk.open(3)
        desk.fill(batch, 0, ["text"], 0)
        desk.fill(batch, 1, [(torch.full((2,), number), np.full(2, number))], 1)
        desk.fill(batch, 2, ["text"], 0)
        kept.append(desk.read(batch, slot))
    assert desk.arena.num_slots == 1
    for number, (_, (tensor, array), _) in enumerate(kept):
        assert (tensor.tolist(), array.tolist()) == ([number] * 2, [number] * 2)


def test_samples_that_cannot_be_collated_raise_torchs_error(make: Make) -> None:
    samples = [torch.ones(2), torch.ones(3)]
    with pytest.raises(RuntimeError) as theirs:
        default_collate(samples)
    desk = make()
    with pytest.raises(RuntimeError) as ours:
        desk.batch(samples)
    assert str(ours.value) == str(theirs.value)
    (note,) = ours.value.__notes__
    assert "Tensor of shape (2,)" in note
    assert "Tensor of shape (3,)" in note
    assert_same(desk.batch(samples[:1]), default_collate(samples[:1]))


def test_the_first_error_of_a_batch_is_raised(make: Make) -> None:
    desk = make()
    samples = [1, ValueError("first"), 3, KeyError("second")]
    with pytest.raises(ValueError, match="first") as caught:
        desk.batch(samples)
    assert caught.value.__notes__ == ["raised by the sample with index 101"]
    assert desk.batch([1, 2]).tolist() == [1, 2]


def test_an_exception_without_room_for_a_note_is_raised_all_the_same() -> None:
    @dataclass(frozen=True)
    class FrozenError(Exception):
        code: int

    with pytest.raises(FrozenError) as caught:
        raise SampleError(FrozenError(3), 4).exception()
    assert caught.value.code == 3


def test_interrupts_get_no_note() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        raise SampleError(KeyboardInterrupt(), 3).exception()
    assert not hasattr(caught.value, "__notes__")


def total(samples: list[Any]) -> dict[str, Any]:
    return {"samples": samples, "sum": sum(samples)}


def test_a_collate_fn_gets_the_samples(make: Make) -> None:
    desk = make(total)
    samples = [np.full(3, i) for i in range(4)]
    assert desk.writers[0].collates
    for run in (1, 4):
        assert_same(desk.batch(samples, run), total(samples))


def test_the_cost_of_a_handover_is_measured(make: Make) -> None:
    desk = make(total)
    assert desk.writers[0].handover_ns == 0
    desk.batch([np.full(3, i) for i in range(4)], 1)
    first = desk.writers[0].handover_ns
    assert first > 0
    desk.writers[0]._note_handover(17 * first)  # a pause in between
    assert desk.writers[0].handover_ns == pytest.approx(2 * first)
    desk.writers[0]._note_handover(first / 2)
    assert desk.writers[0].handover_ns == pytest.approx(first / 2)


def test_a_whole_batch_is_collated_by_its_worker(make: Make) -> None:
    desk = make(total)
    batch, slot, _ = desk.open(2)
    desk.workers[0].claim(2)
    desk.writers[0].deliver(batch, 0, [0, 1], [1, 2], whole=True)
    assert desk.read(batch, slot) == {"samples": [1, 2], "sum": 3}


def test_without_batching_the_collate_fn_gets_the_sample(make: Make) -> None:
    desk = make(default_convert, batched=False)
    assert_same(desk.batch([{"a": np.ones(2)}]), {"a": torch.ones(2, dtype=torch.float64)})


def test_a_batch_that_a_worker_left_is_collated_by_another(make: Make) -> None:
    desk = make(total)
    batch, slot, _ = desk.open(2)
    for writer in desk.writers:  # each saw that the other one was not done
        writer._collate_rest = lambda batch, k, samples: False  # type: ignore[method-assign]
    desk.writers[1].collate_and_publish = lambda batch: None  # type: ignore[method-assign]  # it must collate, and dies
    for k, worker in ((0, 0), (1, 1)):
        desk.fill(batch, k, [k + 1], worker)
    desk.ledger.release(1)
    claim = desk.workers[0].claim(1)
    assert (claim.batch, claim.count) == (batch, 0)
    desk.writers[0].collate_and_publish(batch)
    assert desk.read(batch, slot) == {"samples": [1, 2], "sum": 3}


def test_a_worker_collates_samples_of_its_own_that_cannot_be_sent() -> None:
    """The items of a reader, of which no other worker can run one again."""
    locks = [threading.Lock() for _ in range(3)]
    desk = shared_desk(1 << 30, collate_fn=lambda samples: [locks.index(each) for each in samples])
    for _ in range(2):
        assert desk.batch(locks[:2], 2) == [0, 1]
        batch, slot, _ = desk.open(3)
        for k in range(3):
            desk.fill(batch, k, locks[k : k + 1])
        assert desk.read(batch, slot) == [0, 1, 2]
        assert len(desk.writers[0]._unsent) == 2  # not those of batches that are gone
    with pytest.raises(TypeError, match="pickle"):
        desk.batch(locks[:2], 1)


@pytest.mark.parametrize("run", [1, 2])
def test_the_last_worker_collates_its_own_samples_as_they_are(make: Make, run: int) -> None:
    own, others = [object() for _ in range(run)], [1, SKIP, 3]
    collated: list[list[Any]] = []
    desk = make(lambda samples: collated.append(samples) or len(samples), skips=True)
    batch, slot, _ = desk.open(3 + run)
    desk.fill(batch, 0, others, 0)
    desk.fill(batch, 3, own, 1)
    assert desk.read(batch, slot) == 2 + run
    (samples,) = collated
    assert samples[:2] == [1, 3]
    assert all(there is here for there, here in zip(samples[2:], own, strict=True))


def test_a_bad_sample_of_another_worker_is_the_error_of_the_batch(make: Make) -> None:
    desk = make(total)
    batch, slot, _ = desk.open(3)
    desk.fill(batch, 0, [1, ValueError("bad")], 0)
    desk.fill(batch, 2, [3], 1)
    with pytest.raises(ValueError, match="bad"):
        desk.read(batch, slot)


def test_a_lease_says_that_a_batch_is_collated_also_after_a_sample_of_it_has_run_again() -> None:
    steps: list[tuple[int | None, int]] = []

    def collate(samples: list[int]) -> int:
        position, _, step = desk.ledger.lease(1)
        steps.append((position, step))
        return sum(samples)

    def run_again(batch: int, position: int, index: object) -> list[int]:
        desk.workers[1].lease.begin(position, 1)
        return [7]

    desk = shared_desk(1 << 30, collate_fn=collate)
    desk.writers[1]._run_again = run_again
    batch, slot, _ = desk.open(2)
    desk.fill(batch, 0, [threading.Lock()], 0)
    desk.fill(batch, 1, [1], 1)
    assert desk.read(batch, slot) == 8
    assert steps == [(None, FIRST_COLLATED - batch)]


def test_a_result_that_cannot_travel_becomes_an_error() -> None:
    desk = shared_desk(1 << 30)
    with pytest.raises(TypeError, match="cannot pickle"):
        desk.batch([1, threading.Lock(), 3])
    assert desk.batch([1, 2, 3]).tolist() == [1, 2, 3]
    collating = shared_desk(1 << 30, collate_fn=lambda samples: threading.Lock())
    with pytest.raises(TypeError, match="cannot pickle"):
        collating.batch([1, 2])


def test_a_sample_that_is_larger_than_its_slot_says_what_to_do() -> None:
    desk = shared_desk(16 << 20)  # slots of 2 MiB
    for samples in ([np.zeros(1 << 20, np.uint8)] * 4, [np.zeros(3 << 20, np.uint8)] * 2):
        with pytest.raises(MemoryError, match="2097152 bytes of address space.*smaller batches"):
            desk.batch(samples)
    assert desk.batch([1, 2, 3]).tolist() == [1, 2, 3]
    assert desk.arena.num_slots == 1


def test_a_batch_that_two_workers_begin_together_takes_its_memory_once(make: Make) -> None:
    desk = make()
    batch, slot, _ = desk.open(4)
    # The other worker has published nothing yet.
    assert desk.workers[1].reserve_fields(batch, 4 * 8000) == slot.start
    desk.fill(batch, 0, [np.full(1000, i, np.float64) for i in range(4)])
    assert desk.ledger.describe(batch).used_nbytes < 5 * 8000
    assert desk.read(batch, slot)[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("room", [0, 64, 2048])
def test_a_batch_that_fills_its_slot_says_what_to_do(room: int) -> None:
    """Whether or not there is room left for the error."""
    desk = shared_desk(16 << 20, collate_fn=lambda samples: bytes(4096))
    batch, slot, _ = desk.open(2)
    desk.workers[0].allocate(batch, (2 << 20) - room)
    desk.fill(batch, 0, [1, 2])
    with pytest.raises(MemoryError, match="2097152 bytes of address space.*smaller batches"):
        desk.read(batch, slot)


# ---- slots ----------------------------------------------------------------------------------


def test_a_slot_is_free_again_when_its_batch_is_gone(make: Make) -> None:
    desk = make()
    for _ in range(5):
        value = desk.batch([torch.ones(COPIED_NBYTES)] * 2)
        assert desk.arena.num_leased == 1
        assert value.data_ptr() % 64 == 0
        del value
        assert desk.arena.num_leased == 0
    assert desk.arena.num_slots == 1


def test_a_small_batch_holds_no_slot(make: Make) -> None:
    desk = make()
    held = [desk.batch([torch.full((3,), i), torch.zeros(3)]) for i in range(5)]
    assert (desk.arena.num_slots, desk.arena.num_leased) == (1, 0)
    assert [batch[0].tolist() for batch in held] == [[i] * 3 for i in range(5)]


def test_a_batch_that_is_nothing_but_an_error_holds_no_slot(make: Make) -> None:
    desk = make()
    for _ in range(3):
        with pytest.raises(ValueError, match="bad"):
            desk.batch([ValueError("bad"), 2])
    assert desk.arena.num_slots == 1


@pytest.mark.parametrize("collate_fn", [default_collate, total])
def test_dropped_batches_leave_nothing(make: Make, collate_fn: Any) -> None:
    desk = make(collate_fn)
    for samples in ([1, 2], ["a", "b"], [1, 2.5], [1, ValueError("bad")]):
        if collate_fn is total and "a" in samples:
            continue
        batch, slot, _ = desk.open(2)
        desk.fill(batch, 0, samples)
        desk.reader.discard(batch, slot)
        desk.ledger.retire(batch)
    half, slot, _ = desk.open(2)
    desk.fill(half, 0, ["half"])
    assert desk.ledger.state(half) == OPEN
    desk.reader.discard(half, slot)
    desk.ledger.retire(half)
    assert desk.arena.num_slots == 1
    assert vars(desk.store).get("_values", {}) == {}
