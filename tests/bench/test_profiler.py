"""The benchmark of the profiler runs and reports, and really switches the profiler."""

from __future__ import annotations

import pytest

from bench.profiler import __main__ as profiler
from bench.profiler.work import Load


def test_a_short_run_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiler, "LOADS", (Load(50, 64, 2),))
    assert profiler.main(["--short", "--out", str(tmp_path)]) == 0
    (row,) = [
        line
        for line in (tmp_path / "profiler.md").read_text().splitlines()
        if line.startswith("| 50 |")
    ]
    assert row in capsys.readouterr().out
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "2"
    assert float(cells[2]) > 0
    assert float(cells[4].rstrip(" %")) > -100
    assert 0 <= float(cells[6].rstrip(" %")) <= 100


def test_the_profiler_is_switched():
    with profiler.switchable() as measures:
        loads = profiler.Measured(Load(50, 64, 2), 1.0, measures)

        def counts(measured):
            loads.epoch_ns(measured)
            run = loads.loader._iterator._source.profile().run
            return run["total"].count, run["dataset"].count

        before = counts(True)
        assert before[1] > 0
        assert counts(False) == before
        assert counts(True)[0] == before[0] + 64
    assert len(loads.pids) == 1


def test_all_samples_must_come():
    with profiler.switchable() as measures:
        loads = profiler.Measured(Load(50, 64, 0), 1.0, measures)
        loads.samples = 65
        with pytest.raises(RuntimeError, match="64 samples came, not 65"):
            loads.epoch_ns(True)
