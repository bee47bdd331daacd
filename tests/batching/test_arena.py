"""Slots of shared memory: handed out, leased, recycled."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import threading

import numpy as np
import pytest
import torch

from minato._core.segment import Segment
from minato.batching.arena import Arena, Slot

MIB = 1 << 20


def pages(arena: Arena) -> int:
    """Bytes of memory that an arena takes."""
    return os.fstat(arena.segment.descriptor).st_blocks * 512


def test_slots_do_not_overlap() -> None:
    arena = Arena(Segment(1 << 34))
    slots = sorted(arena.acquire() for _ in range(200))
    assert slots[0].start > 0  # offset 0 stands for "nothing"
    assert all(one.end <= other.start for one, other in itertools.pairwise(slots))
    assert slots[-1].end <= arena.segment.nbytes
    assert all(slot.start % mmap.PAGESIZE == 0 for slot in slots)
    assert arena.num_slots == 200


def test_an_arena_reserves_much_and_takes_nothing() -> None:
    arena = Arena()
    assert arena.segment.nbytes >= 1 << 40
    slot = arena.acquire()
    assert slot.end - slot.start >= 1 << 32
    assert pages(arena) == 0


def test_the_slot_that_was_used_last_comes_first() -> None:
    arena = Arena(Segment(1 << 30))
    slots = [arena.acquire() for _ in range(3)]
    arena.release(slots[0])
    arena.release(slots[2])
    assert [arena.acquire(), arena.acquire()] == [slots[2], slots[0]]
    assert arena.acquire() not in slots


def test_a_leased_slot_returns_with_the_last_view_of_it() -> None:
    arena = Arena(Segment(1 << 30))
    slot = arena.acquire()
    view = arena.lease(slot, 100)
    assert view.nbytes == slot.end - slot.start
    assert view.ctypes.data == arena.segment.address + slot.start
    tensor = torch.frombuffer(view, dtype=torch.uint8, count=10)
    part = tensor[2:5]
    del view, tensor
    assert arena.num_leased == 1
    assert arena.acquire() != slot
    del part
    assert arena.num_leased == 0
    assert arena.acquire() == slot


def test_a_slot_returns_from_a_reference_cycle_and_from_another_thread() -> None:
    arena = Arena(Segment(1 << 30))
    slot = arena.acquire()
    cycle: list[object] = [arena.lease(slot, 0)]
    cycle.append(cycle)
    del cycle
    assert arena.num_leased == 1
    gc.collect()
    assert arena.num_leased == 0
    held = [arena.lease(arena.acquire(), 0)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert arena.acquire() == slot


def test_a_lease_outlives_its_arena() -> None:
    arena = Arena(Segment(1 << 30))
    view = arena.lease(arena.acquire(), 0)[:100]
    view[:] = 7
    del arena
    gc.collect()
    assert view.tolist() == [7] * 100


@pytest.mark.parametrize("nbytes", [20 * MIB, 900 * MIB])
def test_batches_that_are_kept_leave_room_for_more_of_their_size(nbytes: int) -> None:
    arena = Arena(Segment(1 << 36))
    slots = [arena.acquire() for _ in range(3)]
    views = [arena.lease(slot, nbytes) for slot in slots]
    for _ in range((1 << 34) // nbytes - 3):
        slots.append(arena.acquire())
        views.append(arena.lease(slots[-1], nbytes))
    assert min(slot.end - slot.start for slot in slots) >= nbytes


def test_a_batch_is_the_larger_the_fewer_are_kept() -> None:
    arena = Arena(Segment(1 << 36))
    sizes = [slot.end - slot.start for slot in (arena.acquire() for _ in range(1000))]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size * (k + 1) > (1 << 36) // 13 for k, size in enumerate(sizes, 1))


def test_an_exhausted_arena_says_what_to_do() -> None:
    arena = Arena(Segment(8 * MIB))
    slots = []
    with pytest.raises(MemoryError, match=r"3 batches are alive.*8388608 bytes of address space"):
        while True:
            slots.append(arena.acquire())
    assert len(slots) == 3
    arena.release(slots[1])
    assert arena.acquire() == slots[1]


def test_pages_of_slots_that_are_not_needed_go_back() -> None:
    arena = Arena(Segment(1 << 30))
    slots = [arena.acquire() for _ in range(10)]
    for slot in slots:
        arena.segment.array[slot.start : slot.start + MIB] = 1
    assert pages(arena) >= 10 * MIB
    for slot in slots:
        arena.release(slot, MIB)
    for _ in range(20):
        arena.trim(in_flight=2)
    assert 6 * MIB <= pages(arena) < 7 * MIB
    # The warm ones are handed out first; the others read as zero, and all are there.
    again = [arena.acquire() for _ in range(10)]
    assert set(again) == set(slots)
    content = [int(arena.segment.array[slot.start]) for slot in again]
    assert content == [1] * 6 + [0] * 4


def test_pages_go_back_within_a_few_batches_after_a_burst() -> None:
    arena = Arena(Segment(1 << 30))
    slots = [arena.acquire() for _ in range(100)]
    for slot in slots:
        arena.segment.array[slot.start] = 1
        arena.release(slot, MIB)
    assert pages(arena) >= 100 * mmap.PAGESIZE
    for _ in range(8):
        arena.trim(in_flight=2)
    assert pages(arena) <= 8 * mmap.PAGESIZE


def test_pages_stay_while_fewer_are_in_flight_for_a_short_time() -> None:
    arena = Arena(Segment(1 << 30))
    slots = [arena.acquire() for _ in range(24)]
    arena.trim(in_flight=20)
    for left in range(20, 0, -1):
        slot = slots.pop()
        arena.segment.array[slot.start] = 1
        arena.release(slot, MIB)
        arena.trim(in_flight=left - 1)
    assert pages(arena) >= 20 * mmap.PAGESIZE


def test_trimming_leaves_leased_slots_alone() -> None:
    arena = Arena(Segment(1 << 30))
    slots = [arena.acquire() for _ in range(8)]
    views = [arena.lease(slot, MIB) for slot in slots]
    for view in views:
        view[:MIB] = 5
    for _ in range(10):
        arena.trim(0)
    assert all(np.all(view[:MIB] == 5) for view in views)
    assert Slot(*slots[0]) == slots[0]


@pytest.mark.parametrize("shared", [True, False])
def test_who_else_sees_what_is_written(shared: bool) -> None:
    arena = Arena(shared=shared)
    assert (arena.shared, arena.owner) == (shared, os.getpid())
    slot = arena.acquire()
    memory = arena.segment.array[slot.start : slot.start + 2 * mmap.PAGESIZE]
    memory[:] = 1
    child = os.fork()
    if child == 0:
        memory[0] = 2
        os._exit(int(memory[1] != 1))
    assert os.waitpid(child, 0)[1] == 0
    assert memory[0] == (2 if shared else 1)
    arena.segment.discard(slot.start, slot.start + mmap.PAGESIZE)
    assert memory[0] == 0
    assert memory[-1] == 1
