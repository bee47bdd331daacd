"""What each operation of the ledger does, in one process. Every test runs on both twins."""

from __future__ import annotations

import array
import importlib
import itertools
import mmap
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minato._core import _ledger_py as spec
from minato._core import codes
from tests.core.ledger_tools import (
    BOUND,
    DONE,
    FILLED,
    LAYOUT,
    NUMBER,
    SLOT,
    Desk,
    claimed,
    exactly,
    values,
)

TWIN = "ledger"


@pytest.fixture
def desk(twin: ModuleType) -> Desk:
    desk = Desk(twin)
    desk.ledger.open_epoch(0)
    return desk


# ------------------------------------------------------------------------------- creating, attaching


def test_sizes_are_checked(twin: ModuleType) -> None:
    memory = mmap.mmap(-1, 1 << 16)
    for positions in (0, 3, 12, -4):
        with pytest.raises(
            ValueError, match=f"position_capacity {positions} is not a power of two"
        ):
            twin.ConsumerLedger(memory, (1, 1, positions))
    for workers in (0, 4097):
        with pytest.raises(ValueError, match=f"num_workers {workers} is not between 1 and 4096"):
            twin.ConsumerLedger(memory, (workers, 1, 4))
    needed = twin.ConsumerLedger.nbytes(4, 4, 1024)
    with pytest.raises(ValueError, match=f"a ledger of {needed} bytes does not fit 65536"):
        twin.ConsumerLedger(memory, (4, 4, 1024))


def test_memory_that_was_used_before_is_refused(desk: Desk) -> None:
    with pytest.raises(ValueError, match="made in memory of zeros, and this one has been used"):
        Desk(desk.twin, memory=desk.memory)
    assert desk.ledger.capacity == (4, 16)


def test_a_second_party_sees_the_same_ledger(desk: Desk) -> None:
    batch = desk.open(2)
    other = desk.twin.WorkerLedger(desk.memory, 1)
    assert other.capacity == desk.ledger.capacity == (4, 16)
    assert values(other.claim(5)) == (batch, 0, 2)
    assert desk.ledger.unclaimed() == 0


def test_memory_that_is_too_small_read_only_or_foreign_is_refused(desk: Desk) -> None:
    whole, open_worker = bytearray(desk.memory[:]), desk.twin.WorkerLedger
    for nbytes in (0, 8, spec._HEADER.itemsize - 1):
        with pytest.raises(ValueError, match=f"{nbytes} bytes are no ledger"):
            open_worker(whole[:nbytes], 0)
    with pytest.raises(ValueError, match=f"a ledger of {desk.nbytes} bytes does not fit"):
        open_worker(whole[: desk.nbytes - 1], 0)
    assert open_worker(whole[: desk.nbytes], 0).capacity == (4, 16)
    with pytest.raises(BufferError):
        open_worker(bytes(whole), 0)
    for at in (0, 8):
        foreign = bytearray(whole)
        foreign[at] ^= 0x40
        with pytest.raises(RuntimeError, match="no ledger of this version of minato"):
            open_worker(foreign, 0)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [("c", "py", "the pure implementation"), ("py", "c", "the compiled implementation")],
    ids=["compiled-pure", "pure-compiled"],
)
def test_processes_with_different_twins_refuse_each_other(
    ours: str, theirs: str, text: str
) -> None:
    desk = Desk(importlib.import_module(f"minato._core._ledger_{theirs}"))
    with pytest.raises(RuntimeError, match=f"{text} of minato .* set MINATO_NO_EXTENSIONS alike"):
        importlib.import_module(f"minato._core._ledger_{ours}").WorkerLedger(desk.memory, 0)


def test_it_keeps_its_memory(twin: ModuleType) -> None:
    memory = mmap.mmap(-1, 1 << 16)
    ledger = twin.ConsumerLedger(memory, (1, 1, 4))
    with pytest.raises(BufferError):
        memory.close()
    del ledger
    memory.close()


def test_a_ledger_is_opened_at_one_of_its_ends(desk: Desk) -> None:
    with pytest.raises(TypeError, match="two ends: ConsumerLedger and WorkerLedger"):
        desk.twin.Ledger(desk.memory, None, -1)
    for number in (3, 4095):
        with pytest.raises(IndexError, match=f"worker {number} is not below 3"):
            desk.twin.WorkerLedger(desk.memory, number)
        with pytest.raises(IndexError, match=f"worker {number} is not below 3"):
            desk.ledger.worker(number)
    assert [worker.number for worker in desk.workers] == [0, 1, 2]


# ------------------------------------------------------------------------------------------ claiming


def test_runs_are_as_long_as_asked_for_and_end_with_their_batch(desk: Desk) -> None:
    first, second = desk.open(5), desk.open(3)
    leases = [desk.claim(number % 2, length) for number, length in enumerate((2, 1, 99, 99, 99))]
    assert leases == [(first, 0, 2), (first, 2, 1), (first, 3, 2), (second, 0, 3), None]


def test_what_is_left_of_a_whole_batch_is_claimed_when_its_first_sample_is_done(desk: Desk) -> None:
    batch = desk.open(3)
    desk.fill(1, desk.claim_position(1))
    assert desk.claim(0, 0) == (batch, 1, 2)


def test_a_run_ends_where_somebody_else_is_at_work(desk: Desk) -> None:
    batch = desk.open(6)
    desk.claim(0, 6)
    desk.ledger.release(0)
    desk.set_ticket(3, claimed(1, 3))
    assert desk.claim(0, 6) == (batch, 0, 3)
    assert desk.claim(0, 6) == (batch, 4, 2)


def test_samples_with_an_owner_are_claimed_by_nobody_else(desk: Desk) -> None:
    of_1, of_any, of_0 = owned_by(desk, 1, 2), owned_by(desk, -1, 2), owned_by(desk, 0, 2)
    assert claims(desk, 2) == [(of_any, 0, 2)]
    assert desk.ledger.unclaimed() == 6  # an upper bound
    assert claims(desk, 0) == [(of_0, 0, 2)]
    assert desk.claim(1, 1) == (of_1, 0, 1)
    desk.ledger.release(1)
    assert claims(desk, 0) == []
    assert claims(desk, 1) == [(of_1, 0, 2)]
    assert desk.ledger.unclaimed() == 0


def owned_by(desk: Desk, worker: int, count: int, bound: bool = True) -> int:
    """A batch that only one worker may claim; -1: any."""
    keys = list(range(count))
    return int(desk.ledger.open(keys, count, SLOT, 0, 0, 0, bound, wake=9, owner=worker + 1))


def claims(desk: Desk, worker: int, max_run: int = 9) -> list[Any]:
    """All that a worker can claim."""
    return [*iter(lambda: desk.claim(worker, max_run), None)]


def test_an_offered_sample_is_claimed_by_anybody(desk: Desk) -> None:
    work, _ = event_counts(desk)
    batch = owned_by(desk, 1, 3)
    desk.claim(1, 9)
    owner, events = desk.workers[1], work.events
    for position in (2, 0):
        assert not owner.is_offered(position)
        owner.offer(position)
        assert owner.is_offered(position)
    assert work.events == events + 2
    assert desk.ledger.unclaimed() >= 2
    assert desk.claim(1, 9, fresh=True) is None
    assert desk.claim(0, 9) == (batch, 0, 1)
    assert not owner.is_offered(0)
    assert desk.claim(1, 9) == (batch, 2, 1)  # the owner, too
    assert desk.claim(2, 9) is None
    for worker, position in ((0, 0), (1, 2), (1, 1)):
        desk.fill(worker, position)
    assert desk.deliver(batch) == [0, 1, 2]


def test_a_run_ends_where_a_sample_is_another_ones(desk: Desk) -> None:
    batch = owned_by(desk, 0, 4)
    desk.claim(0, 9)
    for position in (1, 2):
        desk.workers[0].offer(position)
    desk.ledger.release(0)  # what it had not offered is its own again
    assert desk.claim(0, 9, fresh=True) == (batch, 0, 1)
    assert desk.claim(0, 9, fresh=True) == (batch, 3, 1)
    assert desk.claim(2, 9) == (batch, 1, 2)


def test_a_sample_that_went_round_the_ring_is_not_offered(twin: ModuleType) -> None:
    desk = Desk(twin, positions=2)
    batch = owned_by(desk, 0, 2)
    desk.claim(0, 2)
    desk.workers[0].offer(1)
    desk.work(0)
    desk.fill(0, 0)
    desk.ledger.retire(batch)
    owned_by(desk, 0, 2)
    desk.claim(0, 2)
    desk.workers[0].offer(3)
    assert desk.workers[0].is_offered(3)
    assert not desk.workers[0].is_offered(1)


def test_an_offered_sample_of_a_dead_worker_stays_offered(desk: Desk) -> None:
    batch = owned_by(desk, 1, 1)
    desk.claim(1)
    desk.workers[1].offer(0)
    assert desk.claim(0) == (batch, 0, 1)
    desk.ledger.release(0)
    assert desk.workers[1].is_offered(0)
    assert desk.claim(2) == (batch, 0, 1)
    desk.ledger.release(2)
    # The item of its owner's own claim is read again.
    assert desk.claim(1) == (batch, 0, 1)
    desk.ledger.release(1)
    assert not desk.workers[1].is_offered(0)
    assert desk.claim(0) is None
    assert desk.claim(1, fresh=True) == (batch, 0, 1)


def test_killed_between_an_offer_and_the_head(desk: Desk) -> None:
    batch = owned_by(desk, 1, 1)
    desk.claim(1)
    desk.set_ticket(0, spec.OFFERED | desk.ticket(0) & NUMBER)
    assert desk.claim(0) is None  # the head is behind it
    desk.ledger.release(1)
    assert desk.claim(0) == (batch, 0, 1)


def test_an_offered_sample_keeps_the_place_that_it_is_bound_to(desk: Desk) -> None:
    old = owned_by(desk, 0, 2, bound=False)
    desk.claim(0, 2)
    new = desk.open(2, bound=False)
    desk.ledger.bind_late(old, new)
    desk.workers[0].offer(1)
    assert [desk.ticket(1) & NUMBER, desk.workers[0].is_offered(1)] == [4, True]
    assert desk.claim(2) == (old, 1, 1)
    for worker, position in ((2, 1), (0, 0)):
        desk.fill(worker, position)
    desk.work(2)
    assert (desk.deliver(old), desk.deliver(new)) == ([2, 3], [0, 1])


def test_a_list_of_small_integers_can_be_held_and_nothing_else(desk: Desk) -> None:
    others = [[], (1, 2), range(2), [1, 2**63], [-(2**63) - 1], [2**200, 1], [1, True], [1, "2"]]
    for keys in (*others, [1, np.int64(2)], None):
        assert not desk.ledger.can_hold(keys), keys
    assert desk.ledger.can_hold([-1, 2**63 - 1, -(2**63)])


def test_a_worker_learns_what_it_has_claimed(desk: Desk) -> None:
    desk.open(2)
    batch = desk.ledger.open([-1, 2**63 - 1, -(2**63)], 3, SLOT, 0, -4, -5, False)
    assert values(desk.ledger.describe(batch))[:9] == (1, 2, 3, 0, False, -4, -5, 0, 0)
    assert desk.ledger.indices(batch, 0, 3) == [-1, 2**63 - 1, -(2**63)]
    assert desk.ledger.indices(batch, 1, 1) == [2**63 - 1]
    pickled = desk.ledger.open(
        None, 2, SLOT, 3, 1, 2, True, indices_offset=4096, indices_nbytes=77, wake=0
    )
    assert values(desk.ledger.describe(pickled))[:9] == (1, 5, 2, 3, True, 1, 2, 4096, 77)


def test_leases_and_activity(desk: Desk) -> None:
    ledger = desk.ledger
    assert ledger.lease(1) == (None, 0, 0)
    desk.workers[1].lease.begin(7, 1234)
    assert ledger.lease(1) == (7, 1234, -1)
    assert (ledger.lease(0), ledger.lease(2)) == ((None, 0, 0), (None, 0, 0))
    desk.workers[1].end(3, 100, 20)
    desk.workers[1].end(1, 50, 7)
    assert ledger.lease(1)[0] is None
    assert ledger.activity(1) == (4, 150, 27)
    assert ledger.activity(0) == (0, 0, 0)


# ----------------------------------------------------------------------------------- filling, places


def test_costs_of_a_full_batch_by_index(desk: Desk) -> None:
    keys = [70, codes.NO_INTEGER, -72, 73, 74]
    batch = desk.ledger.open(keys, 5, SLOT, 0, 0, 0, False, indices_offset=128, indices_nbytes=9)
    desk.claim(0, 5)
    desk.workers[0].note_costs(0, array.array("q", [500, 600, 700, 0, 9]), 4)
    for position in (2, 0, 1, 3, 4):
        desk.fill(0, position)
    # In the order of the places that they took, without those of which cost or integer is unknown.
    assert desk.ledger.costs(batch) == [(-72, 700), (70, 500)]
    assert desk.ledger.num_slow(batch) == 0  # nothing is slow yet
    desk.ledger.slow_ns = 500
    assert desk.workers[0].slow_ns == 500
    assert desk.ledger.num_slow(batch) == 2
    with pytest.raises(ValueError, match="8 bytes hold no 2 costs"):
        desk.workers[0].note_costs(0, array.array("q", [1]), 2)


def test_a_bound_batch_is_published_when_its_last_place_is_filled(desk: Desk) -> None:
    batch = desk.open(3)
    desk.claim(0, 3)
    outcomes = [desk.fill(0, position) for position in (2, 0, 1)]
    assert outcomes == [codes.NOT_COMPLETE, codes.NOT_COMPLETE, codes.PUBLISHED]
    assert desk.deliver(batch) == [0, 1, 2]
    assert desk.ledger.settled(batch)


# ------------------------------------------------------------------------------ starting samples early


def order_of_claims(desk: Desk) -> list[int]:
    return [desk.first(batch) + k for batch, k, _ in claims(desk, 0, 1)]


def test_a_sample_is_claimed_before_its_turn(desk: Desk) -> None:
    desk.open(4)
    desk.open(4)
    assert all(itertools.starmap(desk.ledger.start_early, ((6, 4), (3, 1))))
    assert desk.workers[0].front == 0
    assert order_of_claims(desk) == [0, 1, 6, 3, 2, 4, 5, 7]
    assert desk.workers[0].front == 8
    assert desk.ledger.unclaimed() == 0


def test_of_several_the_one_that_should_begin_first_does(desk: Desk) -> None:
    desk.open(8)
    assert all(itertools.starmap(desk.ledger.start_early, ((4, 1), (5, 60), (7, 6))))
    assert order_of_claims(desk) == [5, 0, 7, 1, 2, 4, 3, 6]
    assert not desk.header["hints"].any()


def test_hints_may_be_wrong(desk: Desk) -> None:
    batch = desk.open(3)
    assert desk.claim(0) == (batch, 0, 1)
    for position in (0, 1, 1, 2, 40):
        assert desk.ledger.start_early(position, 1000)
    desk.ledger.cancel(batch)
    assert desk.claim(0) is None
    other = desk.open(2)
    assert desk.claim(0, 5) == (other, 0, 2)
    assert desk.claim(0) is None


def test_so_many_hints_and_no_more(desk: Desk) -> None:
    desk.open(4)
    assert all(desk.ledger.start_early(position % 4, 1) for position in range(256))
    assert not desk.ledger.start_early(0, 1)
    assert order_of_claims(desk) == [0, 1, 2, 3]
    assert desk.ledger.start_early(0, 1)


def event_counts(desk: Desk) -> tuple[Any, Any]:
    """The event counts that workers and the consumer sleep on."""
    count = importlib.import_module(desk.twin.__name__.replace("ledger", "wait")).EventCount
    offsets = desk.twin.WORK_EVENTS_OFFSET, desk.twin.READY_EVENTS_OFFSET
    work, ready = (count(desk.memory, offset) for offset in offsets)
    return work, ready


def test_publishing_wakes_the_workers_and_a_ready_batch_the_consumer(desk: Desk) -> None:
    work, ready = event_counts(desk)
    for kind, events in ((0, 1), (codes.SAMPLE_BLOB, 2)):
        batch = desk.open(1)
        assert work.events == events
        position = desk.claim_position(0)
        assert ready.events == events - 1
        desk.fill(0, position, blob=kind)
        assert ready.events == events
        assert desk.ledger.state(batch) == codes.READY
    desk.ledger.release(0)
    assert work.events == 3
    desk.ledger.shut_down()
    assert work.events == 4


def test_a_worker_without_work_wakes_a_waiting_consumer_only(desk: Desk) -> None:
    _, ready = event_counts(desk)
    for waits in (False, True):
        assert desk.ledger.waiting is False
        desk.ledger.waiting = waits
        assert desk.ledger.waiting is waits
        desk.workers[0].notify_idle()
        assert ready.events == waits


def test_shutting_down_is_seen(desk: Desk) -> None:
    other = desk.workers[0]
    seen = [(other.stopping, other.draining)]
    for drain in (True, False):
        desk.ledger.shut_down(drain=drain)
        seen.append((other.stopping, other.draining))
    assert seen == [(False, False), (False, True), (True, False)]


RESULT = 16384 | codes.SAMPLE_BLOB, 20


def result_of(ledger: Any, batch: int) -> tuple[int, int]:
    record = ledger.describe(batch)
    return record.result, record.result_nbytes


@pytest.mark.parametrize(
    ("kinds", "layout", "outcome"),
    [
        ("", True, "PUBLISHED"),
        ("", False, "MUST_COLLATE"),
        ("SAMPLE_BLOB", True, "MUST_COLLATE"),
        ("SAMPLE_BLOB", False, "MUST_COLLATE"),
        ("TEXT_BLOB", True, "PUBLISHED"),
        ("ERROR_BLOB", False, "PUBLISHED"),
        ("ERROR_BLOB SAMPLE_BLOB", True, "PUBLISHED"),
        ("TEXT_BLOB SAMPLE_BLOB", True, "MUST_COLLATE"),
        ("END_BLOB", False, "PUBLISHED"),
    ],
)
def test_what_lies_at_the_places_says_what_is_left_to_do(
    desk: Desk, kinds: str, layout: bool, outcome: str
) -> None:
    ledger, worker, batch = desk.ledger, desk.workers[0], desk.open(3)
    desk.claim(0, 3)
    if layout:
        worker.publish_layout(batch, LAYOUT)
    expected = {
        k: (getattr(codes, name), 8192 + 64 * k, 10 + k) for k, name in enumerate(kinds.split())
    }
    for place, (kind, offset, nbytes) in expected.items():
        worker.attach(place, offset | kind, nbytes)
    assert worker.fill_run(batch, 0, 3) == getattr(codes, outcome)
    assert ledger.blobs(batch) == expected
    if outcome == "MUST_COLLATE":
        assert ledger.state(batch) == codes.COLLATING
        worker.set_ready(batch, *RESULT)
    assert ledger.state(batch) == codes.READY
    record = ledger.describe(batch)
    flags = {"SAMPLE": "RAGGED", "ERROR": "FAILED", "TEXT": "TEXTS", "END": "ENDED"}
    for kind, flag in flags.items():
        assert bool(record.flags & getattr(codes, flag)) == (f"{kind}_BLOB" in kinds.split())
    assert (record.layout, record.used_nbytes) == (LAYOUT if layout else 0, 64)
    assert result_of(ledger, batch) == (RESULT if outcome == "MUST_COLLATE" else (0, 0))


def two_unbound(desk: Desk, *workers: int) -> tuple[int, int]:
    """Two batches of two samples; the workers that have claimed these."""
    batches = desk.open(2, bound=False), desk.open(2, bound=False)
    assert [desk.claim_position(worker) for worker in workers] == [0, 1, 2, 3]
    return batches


def test_samples_take_the_oldest_open_place(desk: Desk) -> None:
    first, second = two_unbound(desk, 0, 0, 0, 0)
    for position in (3, 1, 2, 0):
        desk.fill(0, position)
    assert (desk.deliver(first), desk.deliver(second)) == ([3, 1], [2, 0])


def test_late_samples_take_the_newest_open_place_unless_the_consumer_waits(desk: Desk) -> None:
    first, second = two_unbound(desk, 0, 0, 0, 0)
    desk.fill(0, 0, late=True)
    desk.ledger.waiting = True
    desk.fill(0, 1, late=True)
    desk.ledger.waiting = False
    desk.fill(0, 2, late=True)
    desk.fill(0, 3, late=True)
    assert (desk.deliver(first), desk.deliver(second)) == ([1, 3], [2, 0])


def test_a_place_far_behind_is_not_taken_for_the_one_that_has_its_record(twin: ModuleType) -> None:
    """Late samples do not move the cursor of open places; it falls behind by rounds of the ring."""
    desk = Desk(twin, positions=8)
    desk.ledger.open_epoch(0)
    for _ in range(5):
        batches = [desk.open(3, bound=False), desk.open(3, bound=False)]
        desk.work(0, late=True)
        for batch in batches:
            desk.deliver(batch)
            desk.ledger.retire(batch)
    batch = desk.open(3, bound=False)
    desk.work(0, late=False)
    assert desk.deliver(batch) == [30, 31, 32]


# ---------------------------------------------------------------------------------------- late samples


def test_overdue_samples_are_bound_to_the_new_batch(desk: Desk) -> None:
    old = desk.open(3, bound=False)
    desk.claim(0, 2)  # 0 and 1 run, 2 is free
    desk.fill(0, 1)
    new = desk.open(4, bound=False)
    desk.ledger.bind_late(old, new)
    assert [desk.workers[0].reserve(0)[0], desk.ticket(2) & 0xFFFF] == [3, 5]
    for position in range(2, 7):
        assert desk.claim_position(1) == position
    for position in (6, 5, 4, 3, 2, 0):
        desk.fill(1 if position else 0, position)
    assert desk.deliver(old) == [1, 6, 5]
    assert desk.deliver(new) == [0, 2, 4, 3]


def test_overdue_samples_beyond_the_new_batch_take_the_oldest_places(desk: Desk) -> None:
    old = desk.open(4, bound=False)
    new = desk.open(1, bound=False)
    desk.ledger.bind_late(old, new)
    desk.work(0)
    assert (desk.deliver(old), desk.deliver(new)) == ([1, 2, 3, 4], [0])


# ---------------------------------------------------------------------------------------- dead workers


def delivered_exactly_once(desk: Desk, batches: list[int]) -> bool:
    """Let another worker do what is left; whether each sample then lies at one place."""
    desk.work(2)
    members = [position for batch in batches for position in desk.deliver(batch)]
    count = sum(desk.ledger.describe(batch).count for batch in batches)
    return exactly(members, range(count)) and all(map(desk.ledger.settled, batches))


@pytest.mark.parametrize("filled", range(4))
def test_a_result_completes_its_batch_however_far_its_worker_came(desk: Desk, filled: int) -> None:
    """The places of such a batch hold nothing, so none of its samples may go out again."""
    ledger, batch = desk.ledger, desk.open(3)
    assert desk.claim(0, 3) == (batch, 0, 3)
    desk.workers[0].attach(1, codes.SKIP_BLOB, 0)
    desk.workers[0].set_result(batch, *RESULT)
    for k in range(filled):
        if k == 1:
            desk.workers[0].skip(1)
        elif k < 2:
            desk.workers[0].fill_run(batch, k, 1)
        else:
            desk.set_place(2, FILLED | 3)  # all but the ticket
    assert ledger.release(0) == 0
    assert ledger.state(batch) == codes.OPEN
    assert desk.workers[1].claim(3) is None  # who looks for work finds the batch
    assert ledger.state(batch) == codes.READY
    assert result_of(ledger, batch) == RESULT
    assert ledger.settled(batch)
    assert ledger.skipped(batch) == [1]


def test_the_error_of_a_dead_worker_stays_once_its_place_is_filled(desk: Desk) -> None:
    ledger, batch = desk.ledger, desk.open(3)
    desk.workers[0].claim(3)
    desk.workers[0].attach(1, 16384 | codes.ERROR_BLOB, 20)
    assert desk.workers[0].fill_run(batch, 1, 1) == codes.NOT_COMPLETE
    assert ledger.release(0) == 2
    for k in (0, 2):
        assert desk.claim(1, 3) == (batch, k, 1)
        desk.workers[0].publish_layout(batch, LAYOUT)
        outcome = desk.workers[1].fill_run(batch, k, 1)
    assert outcome == codes.PUBLISHED
    assert ledger.describe(batch).flags & codes.FAILED
    assert ledger.blobs(batch) == {1: (codes.ERROR_BLOB, 16384, 20)}


def test_what_a_worker_owns_when_it_ends(desk: Desk) -> None:
    ledger, worker, batch = desk.ledger, desk.workers[0], desk.open(2)

    def state(position: int) -> tuple[bool, bool]:
        return ledger.owns(0), ledger.is_unfinished(0, position)

    assert not ledger.owns(0)
    worker.claim(2)
    assert state(1) == (True, True)
    assert (ledger.owns(1), ledger.is_unfinished(1, 1)) == (False, False)
    worker.attach(0, 64 | codes.SAMPLE_BLOB, 1)
    assert worker.fill_run(batch, 0, 1) == codes.NOT_COMPLETE
    assert state(0) == (True, False)
    assert worker.fill_run(batch, 1, 1) == codes.MUST_COLLATE
    assert state(1) == (True, True)  # the batch that it collates
    worker.set_ready(batch, 128 | codes.SAMPLE_BLOB, 1)
    assert state(1) == (False, False)
    ledger.retire(batch)
    assert not ledger.is_unfinished(0, 1)
    batch = desk.open(1)
    worker.claim(1)
    worker.set_result(batch, 64 | codes.SAMPLE_BLOB, 1)
    assert state(2) == (True, False)  # the place is still to be filled


def test_killed_between_place_and_ticket_and_found_when_the_place_has_gone_round(
    twin: ModuleType,
) -> None:
    """The batch is delivered, its record used again, and only then somebody notices the death."""
    desk = Desk(twin, batches=3, positions=4)
    desk.ledger.open_epoch(0)
    first, second = two_unbound(desk, 1, 1, 0, 1)
    desk.fill(1, 0)
    place = desk.workers[0].reserve(2)[0]  # a sample of the second batch at a place of the first
    assert place == 1
    desk.set_place(place, FILLED | 3)
    desk.fill(1, 1)
    desk.fill(1, 3)
    desk.ledger.release(2)  # of another worker: the full first batch is found and published
    assert desk.claim(1) is None
    assert desk.deliver(first) == [0, 2]
    desk.ledger.retire(first)
    third = desk.open(2, bound=False)
    assert desk.place(place) == 6
    assert desk.ledger.release(0) == 0
    assert desk.ticket(2) == DONE | 2
    assert desk.ledger.settled(second)
    assert desk.work(2) == [4, 5]
    assert (desk.deliver(second), desk.deliver(third)) == ([1, 3], [4, 5])


def test_an_overdue_sample_keeps_one_place_of_the_two_taken_for_it(desk: Desk) -> None:
    """Its worker is killed before it says its place; meanwhile the consumer binds it."""
    old = desk.open(2, bound=False)
    desk.claim_position(0)
    desk.set_place(0, BOUND | 1)
    new = desk.open(2, bound=False)
    desk.ledger.bind_late(old, new)
    # The pure twin finds the first place, the compiled one takes another.
    assert desk.ticket(0) & 0xFFFF
    desk.ledger.release(0)
    assert delivered_exactly_once(desk, [old, new])


def test_an_overdue_sample_gets_a_place_though_its_dead_worker_holds_the_last_one(
    desk: Desk,
) -> None:
    old, new = two_unbound(desk, 0, 1, 1, 1)
    for position in (1, 2, 3):
        desk.fill(1, position)
    desk.set_place(3, BOUND | 1)  # the worker of 0 took it, and is killed
    desk.ledger.bind_late(old, new)
    assert desk.ticket(0) == claimed(0, 3)
    assert desk.ledger.release(0) == 1
    assert delivered_exactly_once(desk, [old, new])


def test_a_place_taken_twice_for_a_dead_workers_sample_is_of_use_to_others(
    twins: tuple[ModuleType, ModuleType],
) -> None:
    """Only the compiled twin can take two: the pure one finds the first."""
    desk = Desk(twins[1])
    desk.ledger.open_epoch(0)
    old, new = two_unbound(desk, 0, 1, 1, 1)
    desk.set_place(0, BOUND | 1)
    desk.ledger.bind_late(old, new)
    assert desk.ticket(0) == claimed(0, 2)
    for position in (1, 2, 3):
        desk.fill(1, position)  # 1 is bound to 3; for 2 and 3 there are 1 and the place of 0
    assert desk.ledger.release(0) == 1
    assert delivered_exactly_once(desk, [old, new])


# ----------------------------------------------------------------------------- cancelling, the ring


def test_a_closed_batch_is_never_published(desk: Desk) -> None:
    batch = desk.open(2)
    desk.claim(0, 2)
    desk.fill(0, 0)
    assert desk.ledger.close(batch) is True
    assert desk.fill(0, 1) == codes.NOT_COMPLETE
    desk.ledger.release(0)
    assert desk.claim(1) is None
    assert desk.ledger.state(batch) == codes.CLOSED
    assert desk.ledger.close(batch) is True
    desk.ledger.retire(batch)
    assert desk.ledger.state(batch) == codes.VACANT


def test_a_batch_is_not_closed_while_it_is_collated(desk: Desk) -> None:
    batch = desk.open(2)
    desk.claim(0, 2)
    assert desk.workers[0].fill_run(batch, 0, 2) == codes.MUST_COLLATE
    assert desk.ledger.close(batch) is False
    assert desk.ledger.state(batch) == codes.COLLATING
    desk.collate(batch)
    assert desk.ledger.close(batch) is True
    assert desk.ledger.state(batch) == codes.READY


def test_room_ends_with_the_records_and_with_the_positions(twin: ModuleType) -> None:
    desk = Desk(twin, batches=2, positions=16)
    desk.ledger.open_epoch(0)
    assert desk.ledger.has_room(16)
    assert not desk.ledger.has_room(17)
    batches = [desk.open(1), desk.open(1)]
    assert not desk.ledger.has_room(1)
    with pytest.raises(ValueError, match="there is no room for a batch of 1 samples"):
        desk.open(1)
    desk.work(0)
    desk.ledger.retire(batches[1])
    assert desk.ledger.has_room(14)
    assert not desk.ledger.has_room(15)  # the older batch still holds its place in the ring
    desk.ledger.retire(batches[0])
    assert desk.ledger.has_room(16)


def test_retiring_twice_is_an_error(desk: Desk) -> None:
    batch = desk.open(1)
    desk.work(0)
    desk.ledger.retire(batch)
    assert desk.open(1) == batch
    other = desk.open(1)
    desk.work(0)
    desk.ledger.retire(other)
    with pytest.raises(KeyError):
        desk.ledger.retire(other)
    assert desk.ledger.state(batch) == codes.READY


def test_each_use_of_a_record_has_its_own_generation(desk: Desk) -> None:
    for generation in (1, 2, 3):
        batch = desk.open(2)
        record = desk.ledger.describe(batch)
        assert (batch, record.generation, record.layout) == (0, generation, 0)
        published = [desk.workers[0].publish_layout(batch, at) for at in (LAYOUT, 2 * LAYOUT)]
        assert published == [LAYOUT, LAYOUT]  # the first one holds
        desk.work(0)
        assert desk.ledger.describe(batch).layout == LAYOUT
        desk.ledger.retire(batch)


@pytest.mark.parametrize(
    "keys", [[1, "x", 3], [1, 2], [1, 2, 3, 4], [], [1, 2**63, 3], [1, None, 3]]
)
def test_keys_that_are_none_publish_nothing(desk: Desk, keys: list[object]) -> None:
    with pytest.raises((TypeError, ValueError, IndexError, OverflowError)):
        desk.ledger.open(keys, 3, SLOT, 0, 0, 0, False)
    assert desk.claim(0) is None
    assert desk.ledger.has_room(16)
    batch = desk.open(16, bound=False)
    assert exactly(desk.work(0), range(16))
    assert desk.deliver(batch) == list(range(16))


# --------------------------------------------------------------------------------------- slots, layouts


def test_workers_that_begin_a_batch_together_reserve_the_same_room(desk: Desk) -> None:
    batch = desk.ledger.open([1, 2, 3], 3, (4096, 4096, 1 << 20), 0, 0, 0, True)
    one, two, three = desk.workers[:3]
    assert [one.reserve_fields(batch, 1000), two.reserve_fields(batch, 1024)] == [4096, 4096]
    assert desk.ledger.describe(batch).layout == 0
    assert three.reserve_fields(batch, 2000) == 4096 + 1024  # of another layout
    assert two.publish_layout(batch, 8192) == 8192
    assert one.publish_layout(batch, 8256) == 8192  # the first one holds
    assert desk.ledger.describe(batch).layout == 8192
    assert [each.reserve_fields(batch, 1024) for each in (one, three)] == [0, 0]
    assert desk.ledger.describe(batch).used_nbytes == 1024 + 2048


def test_room_for_fields_behind_something_else_and_beyond_the_slot(desk: Desk) -> None:
    batch = desk.ledger.open([1], 1, (4096, 4096, 8192), 0, 0, 0, True)
    worker = desk.workers[0]
    for nbytes in (4097, 1 << 40):
        with pytest.raises(MemoryError, match="4096 bytes of address space"):
            worker.reserve_fields(batch, nbytes)
    assert worker.allocate(batch, 100) == 4096
    assert worker.reserve_fields(batch, 100) == 4096 + 128
    assert worker.publish_layout(batch, 4480) == 4480
    empty = desk.ledger.open([1], 1, (4096, 4096, 8192), 0, 0, 0, True)
    assert [worker.reserve_fields(empty, nbytes) for nbytes in (0, 0, 64)] == [4096, 4096, 4096]


def test_bytes_of_a_slot_are_given_out_once_and_aligned(desk: Desk) -> None:
    batch = desk.ledger.open([1], 1, (4096, 4160, 8192), 0, 0, 0, True)
    offsets = [desk.workers[0].allocate(batch, nbytes) for nbytes in (1, 64, 65, 0, 128)]
    assert offsets == [4160, 4224, 4288, 4416, 4416]
    assert desk.ledger.describe(batch).used_nbytes == 4544 - 4096


# ----------------------------------------------------------------------------------------- skipping


def test_a_skipped_sample_leaves_its_own_place_empty(desk: Desk) -> None:
    ledger, worker, batch = desk.ledger, desk.workers[0], desk.open(3)
    assert desk.claim(0, 3) == (batch, 0, 3)
    assert worker.skip(1) == (batch, codes.NOT_COMPLETE)
    assert worker.fill_run(batch, 0, 1) == codes.NOT_COMPLETE
    assert worker.fill_run(batch, 2, 1) == codes.MUST_COLLATE
    assert ledger.describe(batch).flags & codes.SKIPPED
    assert ledger.blobs(batch) == {1: (codes.SKIP_BLOB, 0, 0)}
    assert ledger.settled(batch)
    assert (ledger.skipped(batch), ledger.occupants(batch)) == ([1], [0, -1, 2])


def test_a_skipped_sample_leaves_a_free_place_to_another(desk: Desk) -> None:
    ledger, worker = desk.ledger, desk.workers[0]
    old, new = two_unbound(desk, 0, 0, 0, 0)
    assert worker.skip(0) == (old, codes.NOT_COMPLETE)
    for position in (1, 2, 3):
        place, _, _ = worker.reserve(position)
        worker.attach(place, 64 * position | codes.SAMPLE_BLOB, 1)
        worker.fill(position, place)
    assert ledger.occupants(old) == [1, 2]
    assert (ledger.skipped(old), ledger.skipped(new)) == ([0], [])
    # Nobody is left for the last place.
    assert ledger.settled(old)
    assert ledger.settled(new)
    ledger.fill_skipped(0)
    orphans_checked = []
    while (lease := desk.claim(1, 9)) is not None:
        orphans_checked.append(lease)
        worker.set_ready(lease[0], 64 | codes.SAMPLE_BLOB, 1)
    assert (new, 0, 0) in orphans_checked
    assert ledger.occupants(new) == [3, -1]
    assert ledger.describe(new).flags & codes.SKIPPED
