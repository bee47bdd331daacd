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
    assert float(cells[3].rstrip(" %")) > -100


@pytest.mark.parametrize("measured", [True, False])
def test_the_profiler_is_switched(measured):
    load = Load(50, 64, 2)
    if measured:
        loads = profiler.Measured(load, 1.0)
    else:
        with profiler.unmeasured():
            loads = profiler.Measured(load, 1.0)
            loads.epoch_ns()
    counts = {name: h.count for name, h in loads.loader._iterator._source.profile().run.items()}
    assert (counts["total"] > 0) == measured
    assert (counts["dataset"] > 0) == measured
    assert len(loads.pids) == 1


def test_all_samples_must_come(monkeypatch):
    loads = profiler.Measured(Load(50, 64, 0), 1.0)
    loads.samples = 65
    with pytest.raises(RuntimeError, match="64 samples came, not 65"):
        loads.epoch_ns()
