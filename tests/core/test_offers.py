"""Samples that one worker has set aside and another one takes over. Every test runs on both twins."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.core.ledger_tools import Desk, claimed, exactly

TWIN = "ledger"
OFFERED = 1 << 61
bound = pytest.mark.parametrize("bound", [True, False])


@pytest.fixture
def desk(twin: ModuleType) -> Desk:
    desk = Desk(twin)
    desk.ledger.open_pass(0)
    return desk


@bound
def test_an_offer_is_taken_once(desk: Desk, bound: bool) -> None:
    batch = desk.publish(2, bound)
    position = desk.claim_position(0)
    assert desk.ledger.offered(0) == (None, False)
    assert desk.ledger.accept(1) is None
    desk.ledger.offer(0, position, 99)
    assert desk.ledger.offered(0) == (0, True)
    assert not desk.ledger.settled(batch)
    assert desk.ledger.accept(1) == (0, 0, 99)
    assert desk.ticket(0) == claimed(1, 0 if bound else None)
    assert desk.ledger.accept(2) is None
    # Its value is still read.
    assert desk.ledger.offered(0) == (0, False)
    assert not desk.ledger.withdraw(0)
    desk.ledger.accepted(0)
    assert desk.ledger.offered(0) == (None, False)
    desk.fill(1, 0)
    desk.work(2)
    assert exactly(desk.deliver(batch), [0, 1])


@bound
def test_what_nobody_takes_is_taken_back(desk: Desk, bound: bool) -> None:
    batch = desk.publish(1, bound)
    position = desk.claim_position(0)
    assert not desk.ledger.withdraw(0)
    desk.ledger.offer(0, position, 1)
    assert desk.ledger.withdraw(0)
    assert desk.ledger.offered(0) == (None, False)
    assert desk.ledger.accept(1) is None
    assert desk.ticket(0) == claimed(0, 0 if bound else None)
    desk.fill(0, position)
    assert desk.deliver(batch) == [0]


def test_an_offered_sample_can_be_bound_to_a_place(desk: Desk) -> None:
    old, new = desk.publish(1, bound=False), desk.publish(1, bound=False)
    position = desk.claim_position(0)
    desk.ledger.offer(0, position, 1)
    desk.ledger.bind_late(old, new)
    assert desk.ledger.is_placed(position)
    assert desk.ledger.offered(0) == (0, True)
    assert desk.ledger.accept(1) == (0, 0, 1)
    assert desk.ticket(0) == claimed(1, 1)
    desk.fill(1, 0)
    desk.work(2)
    assert (desk.deliver(old), desk.deliver(new)) == ([1], [0])


@bound
def test_an_offer_outlives_its_giver(desk: Desk, bound: bool) -> None:
    batch = desk.publish(2, bound)
    positions = [desk.claim_position(0), desk.claim_position(0)]
    desk.ledger.offer(0, positions[0], 7)
    assert desk.ledger.release(0) == 1
    assert desk.ticket(0) == claimed(0, 0 if bound else None) | OFFERED
    assert desk.work(2) == [1]
    # The next worker of this number finds its room taken, and may take what lies there as any other.
    assert desk.ledger.offered(0) == (0, True)
    assert desk.ledger.accept(0) == (0, 0, 7)
    desk.ledger.accepted(0)
    desk.fill(0, 0)
    assert exactly(desk.deliver(batch), [0, 1])


@bound
def test_what_a_dead_taker_had_goes_out_again_from_the_start(desk: Desk, bound: bool) -> None:
    batch = desk.publish(1, bound)
    desk.ledger.offer(0, desk.claim_position(0), 7)
    assert desk.ledger.accept(1) == (0, 0, 7)
    assert desk.ledger.release(1) == 1
    assert desk.ledger.offered(0) == (None, False)
    assert desk.work(2) == [0]
    assert desk.deliver(batch) == [0]


def test_a_giver_that_dies_before_its_ticket_says_so_has_offered_nothing(desk: Desk) -> None:
    batch = desk.publish(1)
    position = desk.claim_position(0)
    desk.workers["offered"][0] = position + 1
    assert desk.ledger.offered(0) == (0, False)
    assert desk.ledger.accept(1) is None
    assert desk.ledger.release(0) == 1
    assert desk.ledger.offered(0) == (None, False)
    assert desk.work(2) == [0]
    assert desk.deliver(batch) == [0]


def test_the_ring_may_come_round_between_the_look_and_the_claim(twin: ModuleType) -> None:
    """What is named is what lies in the room, whichever sample the taker had seen there."""
    desk = Desk(twin, batches=2, positions=2)
    desk.ledger.open_pass(0)
    for position in range(6):
        batch = desk.publish(1, bound=False)
        assert desk.claim_position(0) == position
        desk.ledger.offer(0, position, 10 + position)
        assert desk.ledger.accept(1) == (0, position, 10 + position)
        desk.ledger.accepted(0)
        desk.fill(1, position)
        assert desk.deliver(batch) == [position]
        desk.ledger.retire(batch)
