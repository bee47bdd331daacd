"""The costs of samples in a file, for the next run."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minato._core import HISTOGRAM_NBYTES, Histogram
from minato.engine.history import CostHistory, from_words, to_words
from minato.observe.meters import merged, share_above
from minato.scheduling.slow_samples import SlowThreshold
from tests.datasets import Numbers, double, plus_one
from tests.observe.histograms import histogram


def history_in(folder: Path) -> CostHistory:
    return CostHistory(str(folder), [0], [])


def file_in(folder: Path) -> Path:
    """The file of that history; it need not exist."""
    file = history_in(folder)._file
    assert file is not None
    return file


def test_costs_survive_their_file(tmp_path):
    folder = tmp_path / "costs"
    assert history_in(folder).costs() is None
    history_in(folder).save(histogram(5, 6))
    kept = history_in(folder).costs()
    assert kept is not None
    assert (kept.count, kept.total) == (2, 11)
    assert [*folder.iterdir()] == [file_in(folder)]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": [0, 0]}', '{"format": [2, 5824]}']
)
def test_a_file_without_costs_is_ignored(tmp_path, content):
    file_in(tmp_path).write_text(content)
    assert history_in(tmp_path).costs() is None


def test_costs_of_other_samples_are_other_files(tmp_path):
    def files(dataset, *steps):
        CostHistory(str(tmp_path), dataset, steps).save(Histogram())
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


values = st.lists(st.integers(0, 2**48), max_size=200)


@settings(max_examples=50)
@given(values, values)
def test_words_keep_a_histogram(first, second):
    recorded = histogram(*first)
    kept = from_words(json.loads(json.dumps(to_words(recorded))))
    assert to_words(kept) == to_words(recorded)
    assert to_words(merged([kept, histogram(*second)])) == to_words(histogram(*first, *second))


WORDS = st.dictionaries(
    st.integers(-3, HISTOGRAM_NBYTES // 8 + 3).map(str) | st.text(max_size=3),
    st.integers(-1, 5) | st.integers(0, 2**64) | st.none() | st.floats(),
    max_size=8,
)


def consistent(words: dict[int, int]) -> dict[str, int]:
    """The words of a histogram that may have been: what its buckets count, is its count."""
    return to_words(histogram(*Counter(words).elements()))


WORDS = WORDS | st.dictionaries(st.integers(0, 2**62), st.integers(0, 30), max_size=5).map(
    consistent
)
FIELDS = {"format": st.just([2, HISTOGRAM_NBYTES]), "recent": WORDS | st.none()}
HISTORIES = st.fixed_dictionaries(FIELDS).map(json.dumps) | st.binary(max_size=50)


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
    path = file_in(folder)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    recent = history_in(folder).costs()
    if recent is None:
        return
    policy, times = SlowThreshold(known=recent), Histogram()
    for _ in range(200):
        times.record(1000)
        if policy.due(times.count):
            policy.observe(times)
    assert policy.decision.threshold_ns >= 0
    assert 0 <= share_above(recent, 5) <= 1


def test_a_pipe_in_the_place_of_a_cost_history_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(file_in(tmp_path))
    assert history_in(tmp_path).costs() is None
