"""Profiles: adding up what workers measured, and keeping it for the next run."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minato._core import HISTOGRAM_NBYTES, Histogram
from minato.errors import MinatoWarning
from minato.observe.stats.costs import CostHistoryStore, CostStats, Meters
from minato.observe.stats.histograms import (
    EMPTY,
    Summary,
    from_words,
    merged,
    share_above,
    to_words,
)
from minato.scheduling.slow_threshold import SlowThreshold
from tests.datasets import Numbers, double, plus_one

STEPS = ("Crop", "Flip")


def histogram(*values: int) -> Histogram:
    recorded = Histogram()
    for value in values:
        recorded.record(value)
    return recorded


def sample(meters: Meters, crop_ns: int, flip_ns: int) -> None:
    meters.total.record(crop_ns + flip_ns + 10)
    meters.cpu.record(crop_ns)
    meters.size.record(4096)
    meters.transforms.record(2)
    meters.dataset.record(10)
    meters.steps[0].record(crop_ns)
    meters.steps[1].record(flip_ns)


def test_workers_are_added_up_by_part():
    workers = [Meters(2), Meters(2, bytearray(Meters.nbytes(2)))]
    sample(workers[0], 1000, 20)
    sample(workers[1], 3000, 22)
    profile = CostStats(STEPS)
    profile.update(workers)
    fixed = (
        "total",
        "cpu",
        "bytes",
        "transforms",
        "dataset",
        "deferred",
        "window_full",
    )
    assert profile.names == (*fixed, "0 Crop", "1 Flip")
    assert profile.run["total"].max == 3032
    assert profile.run["transforms"].percentile(0.5) == 2


def test_the_window_is_what_came_since_the_last_update():
    meters, profile = Meters(2), CostStats(STEPS)
    sample(meters, 1000, 20)
    profile.update([meters])
    sample(meters, 5000, 30)
    profile.update([meters])
    figures = profile.summary()["0 Crop"]
    assert (figures["run"]["count"], figures["window"]["count"]) == (2, 1)
    assert (figures["run"]["mean"], figures["window"]["mean"]) == (3000, 5000)
    assert json.loads(json.dumps(profile.summary())) == profile.summary()


def test_meters_of_shared_memory_are_seen_from_both_sides():
    memory = bytearray(3 * Meters.nbytes(1))
    part = memoryview(memory)[Meters.nbytes(1) : 2 * Meters.nbytes(1)]
    Meters(1, part).steps[0].record(7)
    assert Meters(1, part).steps[0].count == 1
    assert not any(memory[: Meters.nbytes(1)])


def test_a_profile_survives_its_file(tmp_path):
    meters, profile = Meters(2), CostStats(STEPS)
    sample(meters, 1000, 20)
    profile.update([meters])
    profile.save(tmp_path / "profiles", "key", recent=histogram(5, 6))
    loaded = CostStats.load(tmp_path / "profiles", "key")
    assert loaded is not None
    again, recent = loaded
    assert again.names == profile.names
    assert {name: Summary.of(values) for name, values in again.run.items()} == {
        name: Summary.of(values) for name, values in profile.run.items()
    }
    assert (recent.count, recent.total) == (2, 11)
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["key.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": [0, 0]}',
        '{"format": [1, 5824], "names": ["total"], "run": {}}',
    ],
)
def test_a_file_that_is_none_is_no_profile(tmp_path, content):
    (tmp_path / "key.json").write_text(content)
    assert CostStats.load(tmp_path, "key") is None
    assert CostStats.load(tmp_path, "absent") is None


def test_costs_of_other_samples_are_other_files(tmp_path):
    def files(dataset, *steps):
        CostHistoryStore(str(tmp_path), dataset, steps).save(CostStats(), EMPTY)
        return {file.name for file in tmp_path.iterdir()}

    first = files(Numbers(10), double, plus_one)
    assert files(Numbers(10), double, plus_one) == first
    others = [
        files(Numbers(11), double, plus_one),
        files(Numbers(10), plus_one, double),
        files([0] * 10, double, plus_one),
        files(Numbers(10), double, functools.partial(np.clip, a_min=0, a_max=1)),
        files(Numbers(10), double, functools.partial(np.clip, a_min=0, a_max=2)),
        files(Numbers(10), double, lambda sample: sample + 1),
        files(Numbers(10), double, lambda sample: sample + 2),
    ]
    assert [len(found) for found in others] == list(range(2, 9))


def test_costs_without_a_fingerprint_are_not_kept(tmp_path):
    with pytest.warns(MinatoWarning, match="is not used, as the costs have no name: .*pickled"):
        store = CostHistoryStore(str(tmp_path), (i for i in range(3)), [])
    store.save(CostStats(), EMPTY)
    assert store.costs() is None
    assert list(tmp_path.iterdir()) == []


values = st.lists(st.integers(0, 2**48), max_size=200)


@settings(max_examples=50)
@given(values, values)
def test_words_keep_a_histogram(first, second):
    recorded = histogram(*first)
    kept = from_words(json.loads(json.dumps(to_words(recorded))))
    assert to_words(kept) == to_words(recorded)
    assert to_words(merged([kept, histogram(*second)])) == to_words(histogram(*first, *second))


@settings(max_examples=100)
@given(st.lists(st.integers(0, 31), min_size=1, max_size=200), st.integers(0, 32))
def test_the_share_above_is_exact_where_buckets_are(drawn, limit):
    exact = sum(value > limit for value in drawn) / len(drawn)
    assert share_above(histogram(*drawn), limit) == pytest.approx(exact, abs=1 / 2000)


def test_nothing_is_above_in_an_empty_histogram():
    assert share_above(Histogram(), 0) == 0
    assert Summary.of(Histogram()) == Summary(0, 0.0, 0, 0, 0, 0, 0)


WORDS = st.dictionaries(
    st.integers(-3, HISTOGRAM_NBYTES // 8 + 3).map(str) | st.text(max_size=3),
    st.integers(-1, 5) | st.integers(0, 2**64) | st.none() | st.floats(),
    max_size=8,
)


def consistent(words: dict[int, int]) -> dict[str, int]:
    """The words of a histogram that may have been: what its buckets count, is its count."""
    memory = bytearray(HISTOGRAM_NBYTES)
    values = Histogram(memory)
    for bucket, count in words.items():
        for _ in range(count):
            values.record(bucket)
    return to_words(values)


WORDS = WORDS | st.dictionaries(st.integers(0, 2**62), st.integers(0, 30), max_size=5).map(
    consistent
)
HISTORIES = st.fixed_dictionaries(
    {
        "format": st.just([1, HISTOGRAM_NBYTES]),
        "names": st.lists(st.sampled_from(["total", "cpu", "x"]), max_size=4) | st.integers(),
        "run": st.dictionaries(st.sampled_from(["total", "cpu", "x"]), WORDS | st.none()),
        "recent": WORDS | st.none(),
    }
).map(json.dumps) | st.binary(max_size=50)


@settings(max_examples=150)
@given(content=HISTORIES)
@example(content=b"[" * 100_000)
@example(content=b'{"format": ' + b"9" * 5000)
def test_any_cost_history_is_used_or_left(
    content: str | bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_cost_history(content, tmp_path_factory.getbasetemp())


def check_cost_history(content: str | bytes, folder: Path) -> None:
    """Whatever another user of a shared folder has written: it changes what is expected, and ends nothing."""
    path = folder / "history.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    kept = CostStats.load(folder, "history")
    if kept is None:
        return
    profile, recent = kept
    profile.summary()
    policy, times = SlowThreshold(None, recent), Histogram()
    for _ in range(200):
        times.record(1000)
        if policy.due(times.count):
            policy.observe(times)
    assert policy.decision.threshold_ns >= 0
    assert 0 <= share_above(recent, 5) <= 1


def test_a_pipe_in_the_place_of_a_cost_history_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history.json")
    assert CostStats.load(tmp_path, "history") is None
    (tmp_path / "history.json").unlink()
    assert CostStats.load(tmp_path, "history") is None
