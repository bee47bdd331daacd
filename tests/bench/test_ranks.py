"""The comparison of ranks runs and reports."""

from __future__ import annotations

import pytest

from bench.ranks import __main__ as ranks
from tests.datasets import TOO_MANY_WORKERS


@pytest.mark.filterwarnings(TOO_MANY_WORKERS)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_short_run_is_reported(tmp_path, monkeypatch):
    tiny = {"tiny": ranks.Load("1 ms", [0.001] * 32)}
    monkeypatch.setattr(ranks, "loads", lambda count: tiny)
    assert ranks.main(["--short", "--out", str(tmp_path)]) == 0
    rows = [line for line in (tmp_path / "ranks.md").read_text().splitlines() if "tiny" in line]
    assert [row.split(" | ")[2] for row in rows] == list(ranks.LOADERS)
