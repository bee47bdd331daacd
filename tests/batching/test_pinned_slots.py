"""Locked pages of slots: as far as batches reach, and free when the device has read them."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from minato._core.segment import Segment
from minato.batching.arena import Arena, PinnedSlots, Slot
from tests.delivery.recorder import DeviceEvent, Recorder

PAGE = mmap.PAGESIZE
SLOT = Slot(PAGE, PAGE + (1 << 21))


def pinned_arena(recorder: Recorder) -> tuple[Arena, PinnedSlots]:
    arena = Arena(Segment(1 << 30))
    arena.pin_slots(recorder)
    assert arena.pinned_slots is not None
    return arena, arena.pinned_slots


def locks() -> tuple[PinnedSlots, Recorder, Segment]:
    recorder, segment = Recorder(), Segment(1 << 30)
    return PinnedSlots(recorder, segment), recorder, segment


def test_a_slot_is_locked_as_far_as_its_longest_batch() -> None:
    some, recorder, segment = locks()
    start = segment.address + SLOT.start
    some.lock(SLOT, 0)
    assert recorder.locked == {}
    some.lock(SLOT, 3 * PAGE - 1)
    assert recorder.locked == {start: 3 * PAGE}
    some.lock(SLOT, 3 * PAGE)
    assert recorder.unlocked == []
    some.lock(SLOT, 3 * PAGE + 1)  # one range for all of it, and somewhat more
    assert recorder.locked == {start: 5 * PAGE}
    assert recorder.unlocked == [start]
    some.lock(SLOT, 1 << 21)
    assert recorder.locked == {start: 1 << 21}  # and no more than the slot
    some.unlock(SLOT)
    some.unlock(SLOT)
    assert recorder.locked == {}


def test_where_locking_fails_it_is_not_tried_again() -> None:
    recorder = Recorder(fails=True)
    some = PinnedSlots(recorder, Segment(1 << 30))
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        some.lock(SLOT, 10)
    some.lock(SLOT, 10)
    assert recorder.locked == {}


def test_a_slot_comes_back_when_its_mark_is_passed() -> None:
    arena, slots = pinned_arena(recorder := Recorder())
    one, other = arena.acquire(), arena.acquire()
    views = [arena.lease(slot, 100) for slot in (one, other)]
    slots.in_use_until(one, DeviceEvent(recorder, 2))
    slots.in_use_until(other, DeviceEvent(recorder, 1))
    views.clear()
    assert arena.num_leased == 0
    assert arena.acquire() not in (one, other)
    recorder.ran = 1
    assert arena.acquire() == other
    assert arena.acquire() not in (one, other)
    recorder.ran = 2
    assert arena.acquire() == one


def test_the_memory_is_unlocked_with_its_last_view_and_when_it_was_read() -> None:
    arena, slots = pinned_arena(recorder := Recorder())
    slot = arena.acquire()
    view, kept = arena.lease(slot, 100), arena.segment.array[:10]
    copied = recorder.queue(torch.from_numpy(view[:10]))
    slots.in_use_until(slot, recorder.record_event())
    del view, arena, slots
    gc.collect()
    assert len(recorder.locked) == 1
    assert recorder.ran == 0
    del kept
    assert recorder.locked == {}
    assert copied.sum() == 0  # it was waited for


def test_a_forked_child_leaves_the_device_alone() -> None:
    arena, _ = pinned_arena(recorder := Recorder())
    view = arena.lease(arena.acquire(), 100)
    child = os.fork()
    if child == 0:
        recorder.record_event = None  # type: ignore[assignment, method-assign]
        del view
        failed = arena.num_leased != 0
        del arena
        gc.collect()
        os._exit(failed or len(recorder.locked) != 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(recorder.locked) == 1
