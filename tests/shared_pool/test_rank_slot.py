"""Whom a batch is for."""

from __future__ import annotations

import pytest

from minato.batching.arena import Slot
from minato.shared_pool.messages import Greeting
from minato.shared_pool.rank_slot import Round, Seat, next_seat, refusal


class Nothing:
    arena = None


def seats_of(*states: str) -> tuple[list[Seat], Round]:
    seats = [Seat(rank) for rank in range(len(states))]
    for seat, state in zip(seats, states, strict=True):
        seat.state = state
    return seats, Round(Nothing(), 0, 0, 3, len(seats), 0, tuple)  # type: ignore[arg-type]


def deal(seats: list[Seat], this: Round, in_turn: bool) -> int:
    seat = next_seat(seats, this, in_turn)
    seat.dealt += 1
    this.fetched += 1
    return seat.rank


def test_in_turn() -> None:
    seats, this = seats_of("in", "out", "away")
    assert [deal(seats, this, True) for _ in range(9)] == [0, 1, 2] * 3


def test_whoever_has_waited_longest() -> None:
    seats, this = seats_of("in", "in", "in")
    seats[0].turn, seats[1].turn, seats[2].turn = 7, 5, 6
    seats[0].wants = seats[2].wants = 1
    assert deal(seats, this, False) == 2
    seats[2].wants = 0
    assert deal(seats, this, False) == 0


@pytest.mark.parametrize("states", [("in", "in"), ("in", "away"), ("away", "out"), ("out", "in")])
def test_each_gets_as_many_in_the_end(states: tuple[str, str]) -> None:
    seats, this = seats_of(*states)
    seats[0].wants = 1  # always
    for _ in range(6):
        deal(seats, this, False)
    assert [seat.dealt for seat in seats] == [3, 3]


def test_those_that_are_there_come_first() -> None:
    seats, this = seats_of("out", "away", "in")
    assert [deal(seats, this, False) for _ in range(7)] == [2, 2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("who", "words"),
    [
        (Greeting(1, 5, {"batch_size": "8"}), None),
        (Greeting(1, 5, {"batch_size": "9"}), "here it has batch_size=9, and there batch_size=8"),
        (Greeting(1, 4, {"batch_size": "8"}), "start the ranks of a node by torchrun"),
        (Greeting(2, 6, {"batch_size": "8"}), "start the ranks of a node by torchrun"),
        (Greeting(0, 4, {"batch_size": "8"}), "taken"),
    ],
)
def test_who_gets_a_seat(who: Greeting, words: str | None) -> None:
    seats, _ = seats_of("out", "out")
    why = refusal(seats, Greeting(0, 4, {"batch_size": "8"}), who, waits=False)
    assert (why is None) == (words is None)
    assert words is None or words in str(why)


@pytest.mark.parametrize("waits", [False, True])
def test_whose_process_has_ended_may_come_again(waits: bool) -> None:
    seats, _ = seats_of("out", "out")
    seats[1].gone = "local rank 1 (process 7) has ended"
    why = refusal(
        seats, Greeting(0, 4, {"batch_size": "8"}), Greeting(1, 5, {"batch_size": "8"}), waits
    )
    assert (
        why is None if waits else "process 7) has ended, and the others do without it" in str(why)
    )


def test_the_memory_of_a_rank_goes_with_its_process() -> None:
    seat = Seat(1)
    seat.arenas.add(0)
    seat.given_back.add((0, Slot(4096, 8192)))
    seat.end("local rank 1 has ended")
    assert (seat.arenas, seat.given_back) == (set(), set())
