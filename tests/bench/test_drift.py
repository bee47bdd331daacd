"""The experiment with a drifting load runs and reports."""

from __future__ import annotations

import statistics

import pytest

from bench.drift import __main__ as drift
from bench.drift.work import SCALE, Drifting
from tests.datasets import TOO_MANY_WORKERS


def test_costs_double() -> None:
    dataset = Drifting(60.0)
    length = len(dataset)
    assert length == 6000
    assert dataset.mean_s(0, 1999) == pytest.approx(0.5 * SCALE, rel=0.01)
    assert dataset.mean_s(4000, 5999) == pytest.approx(1.0 * SCALE, rel=0.01)
    assert dataset[17][1] == 17


@pytest.mark.filterwarnings(TOO_MANY_WORKERS)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_short_run_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "LOOK_S", 0.02)
    assert drift.main(["--short", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "drift.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| costs ")]
    assert rows
    assert statistics.fmean(float(row[3].split(" ")[0]) for row in rows) >= 1
    assert (tmp_path / "drift.png").stat().st_size > 10_000
