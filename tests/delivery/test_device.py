"""Batches that go to a device: what arrives, when slots are used again, and what counts as delivered.

There is no device: its place is taken by a recorder, whose copies run late and read whatever is in the slot by then.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections import UserDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from minato import DataLoader, DeviceCopies, MinatoWarning
from minato._core.segment import Segment
from minato.delivery import device
from minato.delivery.device import move_leaves
from tests.datasets import (
    ORDERS,
    TOO_MANY_WORKERS,
    Failing,
    Filled,
    Held,
    Numbers,
    Pair,
    Parts,
    Samples,
    flat,
    indices,
    wait_until,
)
from tests.delivery.recorder import (
    GRUMBLES,
    DeviceEvent,
    Recorder,
    accelerated,
    indices_of,
    watch_slots,
)
from tests.selection import each_of

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

WORKERS: dict[str, dict[str, Any]] = {
    "in line": {"num_workers": 0},
    "processes": {"num_workers": 2, "prefetch_factor": 2},
    "threads": {"num_workers": 2, "prefetch_factor": 2, "workers": "thread"},
}
each_method = each_of(WORKERS)
each_order = pytest.mark.parametrize("order", ORDERS)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Takes the place of the device "meta"."""
    recorder = Recorder()
    use(recorder, monkeypatch)
    return recorder


def use(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator_of", lambda device: recorder)


def make(dataset: Any, batch_size: int | None = 3, ahead: int = 2, **options: Any) -> Any:
    return DataLoader(dataset, batch_size, device=DeviceCopies("meta", ahead), **options)


def numbers_of(batches: Iterable[Any], recorder: Recorder) -> list[int]:
    """What batches of numbers hold once the device has come round."""
    recorder.run()
    return flat(indices(batches))


def all_ready(iterator: Any) -> bool:
    dispatcher = iterator._source._dispatcher
    return bool(dispatcher.num_ready == dispatcher.num_open)


# ---- slots ----------------------------------------------------------------------------------


@each_order
@each_method
def test_a_slot_is_used_again_when_the_device_has_read_it_and_not_before(
    order: str, workers: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = watch_slots(recorder, monkeypatch)
    chance = random.Random(1)
    loader = make(Filled(60, 20, 30), order=order, **workers)
    for epoch in range(3):
        batches = []
        for batch in loader:
            assert recorder.waited >= recorder.position_of(batch)
            batches.append(batch)
            if chance.random() < 0.5:  # the device is behind, more or less
                recorder.run(chance.randint(recorder.ran, len(recorder.copies)))
        recorder.run()
        found = indices_of(batches)
        assert sorted(flat(found)) == list(range(60)), epoch
        if order == "strict":
            assert found == [list(range(i, i + 3)) for i in range(0, 60, 3)]
    assert len(set(taken)) < len(taken)
    assert recorder.pageable == []


def test_a_device_that_never_comes_round_gets_ever_new_slots(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = watch_slots(recorder, monkeypatch)
    iterator = iter(make(Filled(60, 20, 30)))
    batches = [*iterator]
    assert recorder.ran == 0
    assert len(set(taken)) == len(taken) == 20
    recorder.run()
    assert flat(indices_of(batches)) == list(range(60))


def test_the_recorder_notices_a_slot_that_is_used_too_early(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_slots(recorder, monkeypatch)
    monkeypatch.setattr(DeviceEvent, "query", lambda mark: True)  # an event that tells lies
    with pytest.raises(AssertionError, match="before the device has read it"):
        deque(make(Filled(60, 20, 30)), 0)


@each_method
def test_all_memory_is_unlocked_at_the_end(workers: Any, recorder: Recorder) -> None:
    loader = make(Filled(30, 20, 30), persistent_workers=workers["num_workers"] > 0, **workers)
    for _ in range(3):
        for _ in loader:
            recorder.run()
    assert recorder.locked
    last = next(iter(loader))
    del loader, _
    gc.collect()
    assert recorder.locked == {}
    recorder.run()
    assert indices_of([last]) == [[0, 1, 2]]


def test_memory_that_cannot_be_locked_is_copied_as_torch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(fails=True)
    use(recorder, monkeypatch)
    with pytest.warns(RuntimeWarning, match="operation not permitted.*as with torch") as warned:
        batches = [*make(Filled(30, 20, 30), num_workers=1)]
    assert [each.category for each in warned].count(MinatoWarning) == 1
    assert flat(indices_of(batches)) == list(range(30))
    assert len(recorder.pageable) == 10
    assert recorder.copies == []


@pytest.mark.parametrize("slow", ["lock", "copy"])
@each_method
def test_a_report_says_what_the_device_takes(
    workers: Any, slow: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, lasts_s = getattr(recorder, slow), 0.06  # far longer than the rest, on a busy machine

    def lasting(*arguments: Any) -> Any:
        time.sleep(lasts_s)
        return does(*arguments)

    monkeypatch.setattr(recorder, slow, lasting)
    if workers["num_workers"]:
        workers = {**workers, "prefetch_factor": 10}  # all batches
    loader = make(Filled(60, 20, 30), **workers)
    iterator = iter(loader)
    if workers["num_workers"]:
        wait_until(lambda: all_ready(iterator))  # the loop waits for nobody else
    kept = list(iterator)
    report, calls = loader.report(), len(recorder.locked if slow == "lock" else recorder.copies)
    times = {"lock": report.run.waiting.pinning_s, "copy": report.run.waiting.queueing_s}
    assert calls == len(kept) == 20
    assert times.pop(slow) >= calls * lasts_s
    assert all(other < calls * lasts_s / 2 for other in times.values())
    assert report.verdict.bottleneck == "transfer"
    assert "device" in report.verdict.summary


def test_pages_are_unlocked_before_they_are_given_back(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard, discarded = Segment.discard, []

    def watched(segment: Segment, start: int, end: int) -> None:
        assert segment.address + start not in recorder.locked
        discarded.append(start)
        discard(segment, start, end)

    monkeypatch.setattr(Segment, "discard", watched)
    for number, _ in enumerate(make(Filled(300, 200, 200), num_workers=1)):
        if number == 40:
            recorder.run()  # until then no slot was free again
    assert discarded
    assert recorder.unlocked


# ---- ahead of its turn ----------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
@each_order
def test_complete_batches_are_sent_before_their_turn(
    ahead: int, order: str, recorder: Recorder
) -> None:
    loader = make(Filled(30, 2, 2), num_workers=1, prefetch_factor=8, ahead=ahead, order=order)
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: all_ready(iterator))
    next(iterator)
    assert len(recorder.copies) == 2 + ahead
    sent = len(recorder.copies)
    batches = [next(iterator)]
    if ahead != 0:
        assert recorder.position_of(batches[0]) <= sent


def test_a_batch_on_the_device_is_not_overtaken(recorder: Recorder) -> None:
    dataset = Held(12, 3, 100)
    loader = make(dataset, num_workers=2, order="batch", prefetch_factor=4, shuffle=False)
    iterator = iter(loader)
    iterator._source._pool.grow(2)  # the first batch needs only one worker
    batches = [next(iterator)]
    wait_until(lambda: iterator._source._dispatcher.num_ready == 2)  # all but the one that waits
    batches.append(next(iterator))
    sent = len(recorder.copies)
    assert sent == 3
    dataset.missing.value = 0
    wait_until(lambda: all_ready(iterator))
    batches.append(next(iterator))
    assert recorder.position_of(batches[-1]) == sent
    batches += iterator
    recorder.run()
    assert indices(batches) == [[0, 1, 2], [6, 7, 8], [9, 10, 11], [3, 4, 5]]


def test_batches_on_the_device_count_for_the_memory_budget(recorder: Recorder) -> None:
    nbytes = 3 * 64 * 64 * 4
    budget = 3 * nbytes + nbytes // 2
    iterator = iter(make(Filled(60, 64, 64), num_workers=2, memory_budget=budget, ahead=8))
    for _ in range(4):  # opened before anybody knew how large they are
        next(iterator)
    for given, _ in enumerate(iterator, 5):
        assert len(recorder.copies) - given <= 3
        assert iterator._source._dispatcher.num_open <= 3
        recorder.run()


@each_order
def test_a_batch_that_was_only_sent_is_not_delivered(order: str, recorder: Recorder) -> None:
    options = {"num_workers": 1, "order": order, "prefetch_factor": 8, "seed": 3}
    first, rest = (make(Numbers(41), shuffle=True, **options) for _ in range(2))
    iterator = iter(first)
    batches = [next(iterator)]
    wait_until(lambda: all_ready(iterator))
    batches.append(next(iterator))
    assert len(recorder.copies) == 4
    assert first.coverage().delivered.samples == 6
    rest.load_state_dict(first.state_dict())
    batches += rest
    assert sorted(numbers_of(batches, recorder)) == list(range(41))


@pytest.mark.parametrize("persistent", [False, True])
@each_order
def test_epochs_that_are_broken_off(
    order: str, persistent: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_slots(recorder, monkeypatch)
    loader = make(Filled(45, 20, 30), num_workers=2, order=order, persistent_workers=persistent)
    for wanted in (2, 1, 5, 15):
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 3:
                recorder.run()
            if len(batches) == wanted:
                break
        recorder.run()
        found = flat(indices_of(batches))
        assert len(set(found)) == 3 * wanted


# ---- errors ---------------------------------------------------------------------------------


@each_method
def test_an_error_is_raised_when_its_turn_has_come(workers: Any, recorder: Recorder) -> None:
    iterator = iter(make(Failing(24, GRUMBLES), **workers))
    batches = [next(iterator) for _ in range(3)]
    with pytest.raises(LookupError, match="sample 10"):
        next(iterator)
    batches += iterator
    assert numbers_of(batches, recorder) == [*range(9), *range(12, 24)]


class Stubborn:
    """An object that does not go to any device."""

    def __init__(self, samples: list[int]) -> None:
        self.number = samples[0]

    def to(self, device: Any, non_blocking: bool = False) -> Stubborn:
        if self.number == 6:
            raise RuntimeError("number 6 stays here")
        return self


@each_method
def test_an_error_of_copying_is_its_batchs(workers: Any, recorder: Recorder) -> None:
    iterator = iter(make(Numbers(15), collate_fn=Stubborn, **workers))
    assert [next(iterator).number for _ in range(2)] == [0, 3]
    with pytest.raises(RuntimeError, match="number 6 stays"):
        next(iterator)
    assert [batch.number for batch in iterator] == [9, 12]


# ---- kinds of batches -----------------------------------------------------------------------


class Nested(Numbers):
    def __getitem__(self, index: int) -> Any:
        image = np.full((4, 5), index, np.float32)
        return {"pair": Pair(image, index), "texts": [f"{index}", {"deep": (float(index),)}]}


@each_method
def test_nested_batches(workers: Any, recorder: Recorder) -> None:
    batches = [*make(Nested(6), **workers)]
    recorder.run()
    pair, texts = batches[1]["pair"], batches[1]["texts"]
    assert type(pair) is Pair
    assert torch.equal(pair.image, torch.tensor([3.0, 4, 5])[:, None, None].expand(3, 4, 5))
    assert pair.label.tolist() == [3, 4, 5]
    assert texts[0] == ("3", "4", "5")
    assert texts[1]["deep"][0].tolist() == [3, 4, 5]
    assert len(recorder.copies) == 6


@each_method
def test_what_torch_itself_can_only_collate_goes_by_its_own_to(workers: Any) -> None:
    def packed(samples: list[int]) -> PackedSequence:
        return pack_sequence([torch.arange(each + 1.0) for each in samples], enforce_sorted=False)

    batches = [*make(Numbers(6), collate_fn=packed, **workers)]
    assert [type(batch) for batch in batches] == [PackedSequence] * 2
    assert all(batch.data.is_meta for batch in batches)


def twice(samples: list[Any]) -> Any:
    return [torch.stack([torch.as_tensor(each) for each in samples]) * 2, "text"]


@each_method
def test_what_a_collate_function_returns(workers: Any, recorder: Recorder) -> None:
    batches = [*make(Filled(6, 4, 5), collate_fn=twice, **workers)]
    recorder.run()
    assert [batch[0][:, 0, 0].tolist() for batch in batches] == [[0, 2, 4], [6, 8, 10]]
    assert [batch[1] for batch in batches] == ["text"] * 2


@each_method
def test_without_batches_and_with_samples_that_differ(workers: Any, recorder: Recorder) -> None:
    samples = [torch.arange(float(i)) for i in range(7)]
    got = [*make(Samples(samples), None, **workers)]
    recorder.run()
    assert all(torch.equal(*pair) for pair in zip(got, samples, strict=True))


class Counting(Parts):
    """Each worker gives every n-th number, and knows where it stands."""

    given = 0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield number
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_with_a_state_goes_on_behind_the_last_batch_handed_out(
    num_workers: int, recorder: Recorder
) -> None:
    loader, rest = (make(Counting(40), num_workers=num_workers) for _ in range(2))
    iterator = iter(loader)
    batches = [next(iterator)]
    if num_workers:
        wait_until(lambda: all_ready(iterator))
    batches.append(next(iterator))
    if num_workers:
        assert len(recorder.copies) > 2  # some are on the device already
    rest.load_state_dict(loader.state_dict())
    batches += rest
    assert sorted(numbers_of(batches, recorder)) == list(range(40))


def test_a_stream_whose_batches_leave_their_slots_before_their_turn(recorder: Recorder) -> None:
    """There is nothing in them for the device, so that others soon write where they, and the state, lay."""
    loader, rest = (make(Counting(40), num_workers=2, collate_fn=list) for _ in range(2))
    iterator, batches = iter(loader), []
    for _ in range(6):
        wait_until(lambda: all_ready(iterator))
        batches.append(next(iterator))
        recorder.run()
    rest.load_state_dict(loader.state_dict())
    batches += rest
    assert sorted(flat(batches)) == list(range(40))


class Rows(NamedTuple):
    """Its fields have the names of methods of tensors."""

    to: Any
    pin_memory: Any


class Deaf:
    """Knows ``to`` with nothing but a device."""

    def to(self, device: Any) -> str:
        return f"moved to {device}"


class Ever(UserDict[str, Any]):
    """A mapping of a class of its own."""


def test_leaves_and_containers() -> None:
    def move(value: Any) -> Any:
        return value.to("meta")

    tensor, text = torch.ones(2), "text"
    ever = Ever(a=tensor)
    ever.note = "kept"  # type: ignore[attr-defined]
    leaves = [Rows(tensor, text), (tensor, 1), deque([tensor]), ever, range(2), Deaf(), None]
    rows, pair, queue, mapping, numbers, deaf, nothing = move_leaves(leaves, move)
    assert type(rows) is Rows
    assert rows.to.is_meta
    assert rows.pin_memory is text
    assert (pair[0].is_meta, pair[1]) == (True, 1)
    assert type(queue) is deque
    assert queue[0].is_meta
    assert type(mapping) is Ever
    assert mapping.note == "kept"
    assert mapping["a"].is_meta
    assert not ever["a"].is_meta
    assert [*numbers] == [0, 1]
    assert (deaf, nothing) == ("moved to meta", None)


# ---- pin_memory -----------------------------------------------------------------------------


def test_a_device_and_pin_memory_do_not_pin_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = accelerated(Recorder(), monkeypatch)
    batches = [*DataLoader(Filled(6, 4, 5), 3, pin_memory=True, device="meta")]
    assert all(batch.is_meta for batch in batches)
    assert recorder.pageable == []


# ---- without a device -----------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu", 0)])
def test_main_memory_is_no_device(device: Any) -> None:
    iterator: Any = iter(DataLoader(Filled(6, 4, 5), 3, device=device))
    assert next(iterator).device.type == "cpu"
    assert iterator._source._copier is None
    assert iterator._source.arena.pinned_slots is None
