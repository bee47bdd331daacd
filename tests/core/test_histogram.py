from __future__ import annotations

import array
import math
import mmap
import multiprocessing
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato._core._counting_py import HISTOGRAM_NBYTES

TWIN = "counting"
TOP = 2**48 - 1


durations = st.lists(
    st.one_of(st.integers(0, 100), st.integers(0, 2**36), st.integers(2**47, 2**70)), max_size=200
)
shares = st.one_of(st.sampled_from([0.0, 0.5, 0.75, 0.9, 0.99, 1.0]), st.floats(0, 1))


def exact(values: list[int], q: float) -> int:
    """The smallest value with at least the share ``q`` of all values up to it."""
    return sorted(min(value, TOP) for value in values)[max(math.ceil(q * len(values)), 1) - 1]


def recorded(twin: ModuleType, values: list[int], *memory: Any) -> Any:
    histogram = twin.Histogram(*memory)
    for value in values:
        histogram.record(value)
    return histogram


def summary(histogram: Any) -> tuple[Any, ...]:
    points = [histogram.percentile(q) for q in (0, 0.1, 0.5, 0.75, 0.9, 0.99, 1)]
    return (histogram.count, histogram.total, histogram.max, histogram.mean, *points)


@given(values=durations.filter(len), q=shares)
def test_percentiles_are_within_one_part_in_32(
    twin: ModuleType, values: list[int], q: float
) -> None:
    expected = exact(values, q)
    assert abs(recorded(twin, values).percentile(q) - expected) <= expected / 32


@given(exponent=st.integers(5, 47), offset=st.integers(0, 2**47))
def test_the_worst_value_of_a_bucket_is_within_one_part_in_32(
    twin: ModuleType, exponent: int, offset: int
) -> None:
    value = 2**exponent + offset % 2**exponent
    histogram = recorded(twin, [value, TOP])
    assert abs(histogram.percentile(0) - value) <= value / 32


@given(values=durations)
def test_count_total_max_and_mean_are_exact(twin: ModuleType, values: list[int]) -> None:
    histogram = recorded(twin, values)
    kept = [min(value, TOP) for value in values]
    assert histogram.count == len(values)
    assert histogram.total == sum(kept)
    assert histogram.max == max(kept, default=0)
    assert histogram.mean == (sum(kept) / len(kept) if kept else 0.0)
    assert histogram.percentile(1) == histogram.max
    assert values or set(summary(histogram)) == {0}


@given(first=durations, second=durations)
def test_merging_is_recording_both(twin: ModuleType, first: list[int], second: list[int]) -> None:
    merged = recorded(twin, first)
    merged.merge(recorded(twin, second))
    assert summary(merged) == summary(recorded(twin, first + second))


@given(older=durations, newer=durations)
def test_subtracting_leaves_the_window(
    twin: ModuleType, older: list[int], newer: list[int]
) -> None:
    histogram = recorded(twin, older)
    before = histogram.snapshot()
    for value in newer:
        histogram.record(value)
    window, expected = histogram.subtract(before), recorded(twin, newer)
    assert (window.count, window.total) == (expected.count, expected.total)
    assert abs(window.max - expected.max) <= expected.max / 32
    for q in (0.1, 0.5, 0.9):
        expected_ns = exact(newer, q) if newer else 0
        assert abs(window.percentile(q) - expected_ns) <= expected_ns / 32
    assert histogram.count == len(older) + len(newer)
    assert before.count == len(older)


@given(values=durations, others=durations)
def test_a_snapshot_says_the_same_and_stays(
    twin: ModuleType, values: list[int], others: list[int]
) -> None:
    histogram, whole = recorded(twin, values), recorded(twin, others)
    seen, told = histogram.snapshot(), summary(histogram)
    whole.merge(seen)
    assert summary(whole) == summary(recorded(twin, others + values))
    assert summary(whole.snapshot().subtract(seen.snapshot())) == summary(whole.subtract(histogram))
    histogram.record(70)
    assert summary(seen) == summary(seen.snapshot()) == told
    for change in (
        lambda: seen.record(70),
        lambda: seen.record_all(array.array("q", [70]), 1),
        lambda: seen.merge(whole),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert summary(seen) == told


def test_without_a_snapshot_of_its_own_a_histogram_is_all_window(twin: ModuleType) -> None:
    before = recorded(twin, [5, 5, 9])
    for values in ([700], [700, 5, 5], [5]):
        histogram = recorded(twin, values)
        assert summary(histogram.subtract(before)) == summary(histogram)


@given(values=durations, older=durations, q=shares)
def test_twins_write_the_same_bytes_and_read_the_same_answers(
    twins: tuple[ModuleType, ModuleType], values: list[int], older: list[int], q: float
) -> None:
    answers = []
    for twin in twins:
        memory = bytearray(twin.HISTOGRAM_NBYTES)
        histogram = recorded(twin, older, memory)
        before = histogram.snapshot()
        histogram.merge(recorded(twin, values))
        window = histogram.subtract(before)
        answers.append((memory, summary(histogram), summary(window), window.percentile(q)))
    assert answers[0] == answers[1]


def test_another_process_records_into_shared_memory(twin: ModuleType) -> None:
    values = [3, 1000, 250_000]
    with mmap.mmap(-1, twin.HISTOGRAM_NBYTES) as memory:
        reader = twin.Histogram(memory)
        worker = multiprocessing.get_context("fork").Process(
            target=lambda: recorded(twin, values, memory)
        )
        worker.start()
        worker.join()
        for each in (reader, twin.Histogram(memory)):  # a new one adopts what the memory holds
            assert summary(each) == summary(recorded(twin, values))
        del reader, each


UNALIGNED = memoryview(array.array("Q", bytes(HISTOGRAM_NBYTES + 8))).cast("B")[4:-4]


@pytest.mark.parametrize(
    ("memory", "kind", "words"),
    [
        *((bytearray(HISTOGRAM_NBYTES + n), ValueError, str(HISTOGRAM_NBYTES)) for n in (-8, 8)),
        (UNALIGNED, ValueError, "aligned to 8"),
        (bytes(HISTOGRAM_NBYTES), BufferError, None),
    ],
    ids=["short", "long", "unaligned", "read-only"],
)
def test_other_memory_is_refused(
    twin: ModuleType, memory: Any, kind: type[Exception], words: str | None
) -> None:
    with pytest.raises(kind, match=words):
        twin.Histogram(memory)


@pytest.mark.parametrize(
    ("method", "given", "kind", "words"),
    [
        *(("record", value, ValueError, "negative") for value in (-1, -(2**80))),
        *(("record", value, TypeError, None) for value in (1.5, "1", None)),
        *(("percentile", q, ValueError, "between 0 and 1") for q in (-0.1, 1.1, math.nan)),
        *((name, each, TypeError, None) for name in ("merge", "subtract") for each in (None, 3)),
    ],
)
def test_what_is_no_duration_share_or_histogram_is_refused(
    twin: ModuleType, method: str, given: object, kind: type[Exception], words: str | None
) -> None:
    histogram = twin.Histogram()
    with pytest.raises(kind, match=words):
        getattr(histogram, method)(given)
    assert histogram.count == 0


def test_the_largest_of_several_is_told(twin: ModuleType) -> None:
    values = twin.Histogram()
    assert values.record_all(array.array("q", [3, 900, 40, 5000]), 3) == 900
    assert values.record_all(array.array("q", [7]), 0) == 0
    assert (values.count, values.max) == (3, 900)


def test_calls_count_those_that_return_and_the_time_between(twin: ModuleType) -> None:
    calls = twin.Calls(100)
    assert (calls.began_ns, calls.entered_ns, calls.left_ns) == (100, 100, 100)
    calls.enter(110)
    assert not calls.leave(130, 2, 50)  # a first look is due
    assert (calls.waits.count, calls.samples, calls.nbytes, calls.wall_ns) == (0, 0, 0, 0)
    assert calls.leave(140, 2, 50, True)
    calls.due_ns = 100
    calls.enter(150)
    assert calls.leave(155, 1, 5)
    assert (calls.waits.count, calls.waits.total, calls.steps.count) == (2, 35, 1)
    assert (calls.steps.total, calls.samples, calls.nbytes, calls.wall_ns) == (10, 3, 55, 55)
    assert (calls.entered_ns, calls.left_ns) == (150, 155)
    calls.enter(160)
    calls.is_wanted = True
    assert not calls.leave(170, 1, 5)
    calls.is_wanted = False
    assert calls.leave(199, 1, 5)
    calls.enter(200)
    assert not calls.leave(200, 1, 5)
    assert (calls.waits.count, calls.steps.count, calls.samples) == (3, 3, 4)
    calls.enter(150)  # of another clock: no time is negative
    calls.is_wanted = False
    assert calls.leave(140, 1, 5, True)
    waits, steps = summary(calls.waits), summary(calls.steps)
    calls.close()
    calls.enter(300)
    assert calls.is_closed
    assert calls.leave(310, 1, 5)
    assert (summary(calls.waits), summary(calls.steps)) == (waits, steps)
    assert (calls.samples, calls.entered_ns, calls.left_ns) == (5, 150, 140)
    assert (calls.waits.total, calls.steps.total) == (74, 16)
