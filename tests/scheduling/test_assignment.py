"""Which worker a batch is for."""

from __future__ import annotations

from minato.scheduling.assignment import AnyWorker, RoundRobin


def test_any_worker_takes_any_batch() -> None:
    anybody = AnyWorker()
    assert [anybody.choose() for _ in range(3)] == [0, 0, 0]
    anybody.ended(0, 0)
    assert not anybody.over
    assert not anybody.runs_cancelled


def test_turns_go_round() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert [turns.choose() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    turns.reset()
    assert turns.choose() == 1


def test_workers_that_ended_are_left_out() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert turns.choose() == 1
    turns.ended(2, 0)
    assert [turns.choose() for _ in range(3)] == [3, 1, 3]
    turns.ended(1, 0)
    turns.ended(3, 0)
    assert turns.over
    assert turns.choose() is None
    turns.reset()
    assert not turns.over


def test_out_of_order_nobody_takes_more_than_a_share() -> None:
    turns = RoundRobin(2, in_order=False, capacity=4)
    assert [turns.choose() for _ in range(5)] == [1, 2, 1, 2, None]
    turns.returned(2)
    assert turns.choose() == 2
    assert turns.choose() is None
