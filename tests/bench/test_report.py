"""The measurements of the report run, and tell whether an advice was good."""

from __future__ import annotations

import pytest

from bench.report import __main__ as report
from bench.report.works import Collate, Costly, Step, Work, works


def test_a_short_run_is_reported(tmp_path, capsys, monkeypatch):
    tiny = Work("step", {"dataset": Costly(80), "batch_size": 4, "num_workers": 0}, 0.02)
    monkeypatch.setattr(report, "works", lambda cores: [tiny])
    assert report.main(["--short", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "report.md").read_text()
    (row,) = [line for line in written.splitlines() if line.startswith("| step")]
    assert row in capsys.readouterr().out
    assert len(row.strip("|").split("|")) == 6


def test_an_advice_that_brings_nothing_is_not_good():
    work = Work(
        "source",
        {"dataset": Costly(60, 0.003), "batch_size": 4, "num_workers": 1},
        0.0,
        1,
        {"seed": 1},
    )
    row, good = report.advise(work, 1)
    assert not good
    assert row.endswith("| **no** |")


@pytest.mark.parametrize("work", works(2), ids=lambda work: work.name)
def test_workloads_cost_what_they_say(work):
    assert work.arguments["dataset"][3].item(0) == 3
    assert Step()(5) == 5
    assert Collate(0.0)([work.arguments["dataset"][0]]).shape[0] == 1


def test_the_cost_has_a_page_of_its_own(tmp_path, capsys):
    assert report.main(["--short", "--only", "cost", "--out", str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["report-cost.md"]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["0", "0", "2"]
