"""Which worker a batch is for."""

from __future__ import annotations

from collections import Counter

from minato._support.items import key_of
from minato.scheduling.orders import Assignment, Hosts, RoundRobin


def none_held(owner: int) -> int:
    return 0


def choose(turns: RoundRobin, count: int = 1) -> list[int | None]:
    """The owners of the next batches, which are opened."""
    found = []
    for _ in range(count):
        found.append(turns.choose([0], none_held))
        if found[-1] is not None:
            turns.opened(found[-1])
    return found


def test_any_worker_takes_any_batch() -> None:
    anybody = Assignment()
    assert [anybody.choose([0], none_held) for _ in range(3)] == [0, 0, 0]
    assert not anybody.runs_cancelled


def test_turns_go_round() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert choose(turns, 7) == [1, 2, 3, 1, 2, 3, 1]
    turns.reset()
    assert choose(turns) == [1]


def test_a_turn_is_over_when_the_batch_is_open() -> None:
    turns = RoundRobin(3, in_order=True, capacity=6)
    assert [turns.choose([0], none_held) for _ in range(3)] == [1, 1, 1]
    for _ in range(2):
        turns.opened(1)
    assert turns.choose([0], none_held) == 2


def test_a_batch_of_a_reader_is_for_its_host() -> None:
    hosts = Hosts(3, num_workers=3)
    batches = [[key_of(reader, 10**6), key_of(reader, 10**6 + 1)] for reader in range(7)]
    assert [hosts.choose(batch, none_held) for batch in batches] == [1, 2, 3, 1, 2, 3, 1]
    assert hosts.runs_cancelled


def test_out_of_order_nobody_takes_more_than_a_share() -> None:
    turns = RoundRobin(2, in_order=False, capacity=4)
    held = Counter[int]()
    for owner in (1, 2, 1, 2, None):
        assert turns.choose([0], held.__getitem__) == owner
        if owner is not None:
            turns.opened(owner)
            held[owner] += 1
    held[2] -= 1
    assert turns.choose([0], held.__getitem__) == 2
