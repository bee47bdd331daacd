"""What is done of a pass, what is left of it, and the proof that both are all of it."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minato import DataLoader
from minato._support.hashes import index_hash, key_hash
from minato.errors import CoverageError
from minato.sampling.progress import Completed, Outgoing, Progress, Tally, remaining_batches
from minato.sampling.readers import merged


def ordinals(ranges: Any) -> set[int]:
    return {ordinal for first, end in ranges for ordinal in range(first, end)}


def is_tidy(ranges: Any) -> bool:
    ends = [end for pair in ranges for end in pair]
    return ends == sorted(set(ends))


@given(st.data())
def test_ranges_grow_as_sets_do(data: Any) -> None:
    expected: set[int] = set()
    done = Completed()
    for _ in range(4):
        left = [ordinal for ordinal in range(60) if ordinal not in expected]
        numbers = data.draw(st.sets(st.integers(0, max(len(left) - 1, 0)))) if left else set()
        expected |= {left[number] for number in numbers}
        placed = done.placed([(number, number + 1) for number in sorted(numbers)])
        done = Completed(tuple(merged([*done.ranges, *placed])))
        assert ordinals(done.ranges) == expected
        assert is_tidy(done.ranges)
        assert done.end == max(expected, default=-1) + 1


def run(progress: Progress, batches: list[list[Any]], delivered: list[list[int]]) -> None:
    progress.requested(batches, 0)
    for numbers in delivered:
        progress.delivered([number + 100 for number in numbers], 100)


def remaining(batches: list[Any], done: Completed, mixes: bool, drop_last: bool = False) -> Any:
    left = remaining_batches(iter(batches), done, mixes, drop_last)
    return None if left is None else list(left)


def test_whole_batches_are_left() -> None:
    batches = [[10, 11], [], [12, 13], [14]]
    progress = Progress(0)
    run(progress, batches, [[3, 4], [2]])
    done = progress.done()
    assert (done.ranges, done.batches) == (((2, 5),), 2)
    assert remaining(batches, done, mixes=False) == [[10, 11], [14]]
    progress = Progress(0, done)
    run(progress, [[10, 11], [14]], [[2]])
    assert progress.done().ranges == ((2, 6),)
    assert remaining(batches, progress.done(), mixes=False) == [[10, 11]]


def test_keys_that_are_left_are_cut_anew() -> None:
    batches = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    progress = Progress(0)
    run(progress, batches, [[1, 3, 4]])
    left = remaining(batches, progress.done(), mixes=True)
    assert left == [[0, 2, 5], [6, 7, 8], [9]]


def test_skipped_keys_shorten_the_last_batch() -> None:
    batches = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    progress = Progress(0)
    progress.requested(batches, 0)
    progress.skipped([1], 0)
    progress.delivered([0, 2, 3], 0)
    done = progress.done()
    assert remaining(batches, done, mixes=True) == [[4, 5, 6], [7, 8]]
    assert remaining(batches, done, mixes=True, drop_last=True) == [[4, 5, 6]]


@pytest.mark.parametrize("name", ["prefix", "beyond", "delivered_batches", "delivered", "skipped"])
def test_a_state_is_that_of_one_moment(name: str) -> None:
    class Meanwhile:
        """What has arrived: when a part of it is asked for, another thread gets a batch."""

        def __getattr__(self, asked: str) -> Any:
            if asked == name and meanwhile:
                arrivals.deliver(meanwhile.pop(0), 0)
            return getattr(arrivals, asked)

    loader, other = DataLoader([*range(8)], 2), DataLoader([*range(8)], 2)
    next(iter(loader))
    loader.state_dict()  # the batch is recorded
    progress: Any = loader._minato_position.last and loader._minato_position.last.progress
    arrivals, meanwhile = progress._arrivals, [[2, 3], [4, 5]]
    progress._arrivals = Meanwhile()
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[6, 7]]
    assert meanwhile == []


@pytest.mark.parametrize("mixes", [False, True])
def test_another_order_is_refused(mixes: bool) -> None:
    progress = Progress(0)
    run(progress, [[0, 1], [2, 3]], [[0, 1]])
    for others in ([[0, 2], [1, 3]], [[0]], []):
        assert remaining(others, progress.done(), mixes) is None
    assert (remaining([[0, 1, 2], [3]], progress.done(), mixes) is None) == (not mixes)
    run(progress, [], [[2, 3]])  # the same keys in one batch: nothing is lost
    assert remaining([[1, 0], [2, 3]], progress.done(), mixes) == []


@given(st.data())
def test_nothing_is_lost_however_often_a_pass_is_resumed(data: Any) -> None:
    size = data.draw(st.integers(0, 40))
    batch_size = data.draw(st.integers(1, 7))
    mixes, drop_last = data.draw(st.booleans()), data.draw(st.booleans())
    keys = data.draw(st.permutations(range(size)))
    end = size // batch_size * batch_size if drop_last else size
    batches = [keys[i : i + batch_size] for i in range(0, end, batch_size)]
    random = data.draw(st.randoms(use_true_random=False))
    got: list[int] = []
    done = Completed()
    for last in (False, False, False, True):
        progress = Progress(0, done)
        left = remaining(batches, done, mixes, drop_last)
        assert len(left) == len(batches) - done.batches
        progress.requested(left, 0)
        flat = [key for batch in left for key in batch]
        numbers = list(range(len(flat)))
        if mixes:
            for i in numbers[:]:  # nobody comes much too late
                j = min(len(numbers) - 1, i + random.randrange(9))
                numbers[i], numbers[j] = numbers[j], numbers[i]
        following = iter(numbers)
        parts = [[next(following) for _ in batch] for batch in left]
        if not mixes:
            random.shuffle(parts)
        for part in parts if last else parts[: random.randrange(len(parts) + 1)]:
            progress.delivered(part, 0)
            got += [flat[number] for number in part]
        done = progress.done()
    assert sorted(got) == sorted(key for batch in batches for key in batch)
    progress.finish()
    assert progress.coverage().complete


def test_the_end_of_a_pass_that_lost_or_repeated_keys_raises() -> None:
    lost, repeated, whole = (Progress(3) for _ in range(3))
    run(lost, [[0, 1, 2]], [[0, 1]])
    with pytest.raises(CoverageError, match=r"epoch 3 .* requested 3 samples, delivered 2, "):
        lost.finish()
    run(repeated, [[0, 1]], [[0, 1], [1]])
    with pytest.raises(CoverageError, match="repeated 1"):
        repeated.finish()
    run(whole, [[0, 1]], [[0, 1]])
    whole.finish()
    whole.finish()
    assert whole.finished


def test_a_batch_that_comes_while_another_thread_looks_is_counted() -> None:
    progress, first, second = Progress(0), Outgoing(), Outgoing()
    progress.requested([[0], [1]], 0)

    def meanwhile() -> None:
        progress.last = second

    first.records = meanwhile, progress.returns([0], 0)
    second.records = (progress.returns([1], 0, ahead=1),)
    first.is_given = second.is_given = True
    progress.last = first
    progress.settle()
    assert progress.num_samples() == (2, 2, 0)


def test_coverage_of_a_pass_under_way() -> None:
    progress = Progress(1)
    run(progress, [[4, 5], [6]], [[0, 1]])
    coverage = progress.coverage()
    assert [tally.samples for tally in (coverage.requested, coverage.delivered)] == [3, 2]
    assert (coverage.outstanding.samples, coverage.skipped) == (1, Tally(0, 0))
    assert not coverage.complete
    other = Progress(1)
    run(other, [[6], [5, 4]], [[0]])
    assert other.coverage().requested == coverage.requested
    assert other.coverage().delivered == coverage.outstanding


def test_numbers_of_keys() -> None:
    assert index_hash(np.int64(-3)) == index_hash(torch.tensor(-3)) == -3
    assert index_hash(True) == 1
    distinct = ["a", "b", "\ud800", b"a", ("a", 1), (1, "a"), ("a", (1,)), None, 1.5, (), 2**70]
    assert len({index_hash(key) for key in distinct}) == len(distinct)
    assert index_hash(["a", 1]) == index_hash(("a", 1))
    assert index_hash("a" * 3) == index_hash("".join(["a", "aa"]))
    key = lambda: 0  # noqa: E731  # which cannot be pickled
    assert index_hash(key) == index_hash(key)
    # Keys of one dictionary that are equal are one, whatever their types.
    assert len({key_hash(key) for key in (1, 1.0, True, Decimal(1), 1 + 0j)}) == 1
    assert len({key_hash((key,)) for key in (-1, -1.0, Fraction(-1))}) == 1
    assert key_hash((-1,)) != key_hash((-2,))
