"""Account of keys: both forms of it, against each other and against a list."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

TWIN = "counting"


def index_hash(key: Any) -> int:
    return len(key)


@pytest.fixture
def arrivals(twin: ModuleType) -> Any:
    return twin.Arrivals(index_hash)


def test_keys_arrive_in_any_order(twin: ModuleType, arrivals: Any) -> None:
    arrivals.ask([5, 3, -1])
    arrivals.ask(["abc", 1 << 80])
    assert (arrivals.asked[0], arrivals.prefix, arrivals.beyond) == (5, 0, [])
    arrivals.deliver([14, 11], 10)
    assert (arrivals.prefix, arrivals.beyond) == (0, [1, 4])
    arrivals.deliver([10, 12, 13], 10)
    assert (arrivals.prefix, arrivals.beyond, arrivals.unexpected) == (5, [], 0)
    assert arrivals.delivered == arrivals.asked
    assert arrivals.asked[1] == twin.sum_of_hashes([1 << 80, 3, "abc", 5, -1], index_hash)
    assert arrivals.asked[1] == twin.sum_of_hashes([5, 3, -1, 3, 0], index_hash)  # modulo 2**64


def test_what_was_not_waited_for_is_a_stray(twin: ModuleType, arrivals: Any) -> None:
    arrivals.ask([7, 8])
    arrivals.deliver([0, 0, 2], 0)
    assert (arrivals.unexpected, arrivals.delivered[0]) == (2, 1)
    arrivals.deliver([0], 0)
    assert arrivals.unexpected == 3
    arrivals.deliver([-1], -5)
    assert arrivals.unexpected == 3  # a place where nothing lies


def test_skipped_keys_may_lie_in_a_batch(twin: ModuleType, arrivals: Any) -> None:
    arrivals.ask([7, 8, 9])
    arrivals.skip([1, 1, 99], 0)
    arrivals.deliver([0, 1, 2], 0)
    assert (arrivals.unexpected, arrivals.prefix) == (0, 3)
    assert arrivals.skipped == (1, twin.sum_of_hashes([8], index_hash))
    assert arrivals.delivered == (2, twin.sum_of_hashes([7, 9], index_hash))


def test_empty_batches_take_a_number_and_do_not_count(twin: ModuleType, arrivals: Any) -> None:
    arrivals.ask([])
    arrivals.ask([4])
    arrivals.deliver([1], 0)
    assert (arrivals.prefix, arrivals.beyond, arrivals.asked[0]) == (0, [1], 1)
    arrivals.deliver([0], 0)
    assert (arrivals.prefix, arrivals.delivered, arrivals.unexpected) == (2, arrivals.asked, 0)


def test_what_does_not_exist_is_dropped(twin: ModuleType, arrivals: Any) -> None:
    arrivals.ask([1, 2, 3, 4])
    arrivals.deliver([11], 10)
    arrivals.drop([13], 10)
    assert (arrivals.prefix, arrivals.beyond) == (0, [1, 3])
    arrivals.drop(range(10, 14), 10)  # what is delivered or dropped stays so
    assert (arrivals.prefix, arrivals.beyond, arrivals.unexpected) == (4, [], 0)
    assert arrivals.dropped == (3, twin.sum_of_hashes([1, 3, 4], index_hash))
    assert arrivals.delivered == (1, twin.sum_of_hashes([2], index_hash))


def test_tallies_to_start_from(twin: ModuleType) -> None:
    arrivals = twin.Arrivals(index_hash, (3, 2**64 - 1), (2, 5), (1, 6))
    arrivals.ask([0])
    hashed = twin.sum_of_hashes([0], index_hash)
    assert arrivals.asked == (4, (2**64 - 1 + hashed) % 2**64)
    assert (arrivals.delivered, arrivals.skipped) == ((2, 5), (1, 6))


def test_a_failing_hash_propagates(twin: ModuleType) -> None:
    with pytest.raises(TypeError):
        twin.Arrivals(index_hash).ask([None])
    with pytest.raises(TypeError):
        twin.sum_of_hashes([None], index_hash)


@given(
    st.lists(st.lists(st.integers(-(2**70), 2**70), max_size=900), max_size=6),
    st.randoms(use_true_random=False),
)
def test_twins_agree(twins: tuple[ModuleType, ModuleType], batches: Any, random: Any) -> None:
    both = [half.Arrivals(index_hash) for half in twins]
    waiting: list[int] = []
    asked = 0
    for keys in batches:
        waiting += range(asked, asked + (len(keys) or 1))
        asked += len(keys) or 1
        random.shuffle(waiting)
        cut = random.randrange(len(waiting) + 1)
        settled, waiting = waiting[:cut], waiting[cut:]
        for one in both:
            one.ask(keys)
            one.skip([3 + number for number in settled[: cut // 4]], 3)
            one.deliver([3 + number for number in settled], 3)
        first, second = (
            (one.asked, one.delivered, one.skipped, one.unexpected, one.prefix, one.beyond)
            for one in both
        )
        assert first == second
        assert first[3] == 0
        done = set(range(asked)) - set(waiting)
        assert set(range(first[4])) | set(first[5]) == done


def test_each_key_is_counted(twin: ModuleType) -> None:
    occurrences = twin.Occurrences(4, index_hash)
    assert occurrences.count([0, 3, 4, -1, 1 << 80, "ab"], 0) is None
    assert occurrences.count([], 1) is None
    keys = [1, 3, 3, 4, -1, 1 << 80, "ab", "abc"]
    for _ in range(2):  # as after an interruption
        assert occurrences.count(keys, 2) == [0, 1, 2, 1, 1, 1, 1, 0]
    # The other kind: by their numbers.
    assert occurrences.count(("ab", b"abc", [0, 0, 0]), 3) == [2, 3, 4]
    assert occurrences.count([2], 4) is None
    assert twin.Occurrences(0, index_hash).count([0, 1, 0], 0) == [0, 0, 1]


def test_an_interrupted_count_has_no_effect(twin: ModuleType) -> None:
    calls = iter([KeyboardInterrupt])

    def hashed(key: object) -> int:
        for error in calls:
            raise error
        return 3

    occurrences = twin.Occurrences(4, hashed)
    with pytest.raises(KeyboardInterrupt):
        occurrences.count([1, 1, "a", b"3"], 0)
    assert occurrences.count([1, 1, "a", b"3"], 0) == [0, 1, 0, 0]
    assert occurrences.count([1, "a", 3], 1) == [2, 1, 1]


@given(st.lists(st.lists(st.integers(-3, 12) | st.sampled_from("ab"))), st.integers(0, 9))
def test_counts_agree(twins: Any, batches: list[list[Any]], length: int) -> None:
    pure, compiled = (half.Occurrences(length, index_hash) for half in twins)
    before: list[Any] = []
    for number, keys in enumerate(batches):
        found = pure.count(keys, number)
        assert found == compiled.count(keys, number)
        counts = []
        for key in keys:
            counts.append(before.count(key))
            before.append(key)
        assert (found or [0] * len(keys)) == counts
