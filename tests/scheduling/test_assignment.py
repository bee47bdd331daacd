"""Which worker a batch is for."""

from __future__ import annotations

from collections import Counter

from minato.scheduling.orders import Assignment, RoundRobin


def none_held(owner: int) -> int:
    return 0


def choose(turns: RoundRobin, count: int = 1) -> list[int | None]:
    """The owners of the next batches, which are opened."""
    found = []
    for _ in range(count):
        found.append(turns.choose(none_held))
        if found[-1] is not None:
            turns.opened(found[-1])
    return found


def test_any_worker_takes_any_batch() -> None:
    anybody = Assignment()
    assert [anybody.choose(none_held) for _ in range(3)] == [0, 0, 0]
    anybody.ended(0, 0)
    assert not anybody.over
    assert not anybody.runs_cancelled


def test_turns_go_round() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert choose(turns, 7) == [1, 2, 3, 1, 2, 3, 1]
    turns.reset()
    assert choose(turns) == [1]


def test_a_turn_is_over_when_the_batch_is_open() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert [turns.choose(none_held) for _ in range(3)] == [1, 1, 1]
    for _ in range(2):
        turns.opened(1)
    assert turns.choose(none_held) == 2


def test_workers_that_ended_are_left_out() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert choose(turns) == [1]
    turns.ended(2, 0)
    assert choose(turns, 3) == [3, 1, 3]
    turns.ended(1, 0)
    turns.ended(3, 0)
    assert turns.over
    assert choose(turns) == [None]
    turns.reset()
    assert not turns.over


def test_out_of_order_nobody_takes_more_than_a_share() -> None:
    turns = RoundRobin(2, in_order=False, capacity=4)
    held = Counter[int]()
    for owner in (1, 2, 1, 2, None):
        assert turns.choose(held.__getitem__) == owner
        if owner is not None:
            turns.opened(owner)
            held[owner] += 1
    held[2] -= 1
    assert turns.choose(held.__getitem__) == 2
