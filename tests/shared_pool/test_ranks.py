"""Whom a batch is for."""

from __future__ import annotations

import pytest

from minato.batching.arena import Slot
from minato.shared_pool.channel import Hello
from minato.shared_pool.ranks import PoolEpoch, RankSlot, next_rank, rejection_reason


class Nothing:
    arena = None


def seats_of(*states: str) -> tuple[list[RankSlot], PoolEpoch]:
    rank_slots = [RankSlot(rank) for rank in range(len(states))]
    for slot, state in zip(rank_slots, states, strict=True):
        slot.state = state
    return rank_slots, PoolEpoch(Nothing(), 0, 0, 3, 3 * len(rank_slots), 0, tuple)  # type: ignore[arg-type]


def deal(rank_slots: list[RankSlot], this: PoolEpoch, in_turn: bool) -> int:
    slot = next_rank(rank_slots, this, in_turn)
    slot.dealt += 1
    this.fetched += 1
    return slot.rank


def test_in_turn_or_whoever_is_there_and_has_waited_longest() -> None:
    rank_slots, this = seats_of("in", "out", "away")
    assert [deal(rank_slots, this, True) for _ in range(9)] == [0, 1, 2] * 3
    rank_slots, this = seats_of("out", "away", "in")
    assert [deal(rank_slots, this, False) for _ in range(7)] == [2, 2, 2, 1, 1, 1, 0]
    rank_slots, this = seats_of("in", "in", "in")
    rank_slots[0].asked_at, rank_slots[1].asked_at, rank_slots[2].asked_at = 7, 5, 6
    rank_slots[0].wants = rank_slots[2].wants = 1
    assert deal(rank_slots, this, False) == 2
    rank_slots[2].wants = 0
    assert deal(rank_slots, this, False) == 0


@pytest.mark.parametrize("states", [("in", "in"), ("in", "away"), ("away", "out"), ("out", "in")])
def test_each_gets_as_many_in_the_end(states: tuple[str, str]) -> None:
    rank_slots, this = seats_of(*states)
    rank_slots[0].wants = 1  # always
    for _ in range(6):
        deal(rank_slots, this, False)
    assert [slot.dealt for slot in rank_slots] == [3, 3]


ENDED = "local rank 1 (process 7) has ended"


@pytest.mark.parametrize(
    ("who", "gone", "waits", "words"),
    [
        (Hello(1, 5, {"batch_size": "8"}), None, False, None),
        (Hello(1, 5, {"batch_size": "9"}), None, False, "has batch_size=9, and there batch_size=8"),
        (Hello(1, 4, {"batch_size": "8"}), None, False, "start the ranks of a node by torchrun"),
        (Hello(2, 6, {"batch_size": "8"}), None, False, "start the ranks of a node by torchrun"),
        (Hello(0, 4, {"batch_size": "8"}), None, False, "taken"),
        (Hello(1, 5, {"batch_size": "8"}), ENDED, True, None),
        (Hello(1, 5, {"batch_size": "8"}), ENDED, False, f"{ENDED}, and the other ranks continue"),
    ],
)
def test_who_gets_a_seat(who: Hello, gone: str | None, waits: bool, words: str | None) -> None:
    rank_slots, _ = seats_of("out", "out")
    rank_slots[1].gone = gone
    why = rejection_reason(rank_slots, Hello(0, 4, {"batch_size": "8"}), who, waits)
    assert (why is None) == (words is None)
    assert words is None or words in str(why)


def test_the_memory_of_a_rank_goes_with_its_process() -> None:
    slot = RankSlot(1)
    slot.arenas.add(0)
    slot.given_back.add((0, Slot(4096, 8192)))
    slot.end("local rank 1 has ended", waits=False)
    assert (slot.arenas, slot.given_back) == (set(), set())
