"""The comparison of changing and fixed numbers of workers runs and reports."""

from __future__ import annotations

import time

import pytest

from bench.auto import __main__ as auto
from bench.auto.loads import LOADS, Computing, Load, Sleeping


def test_a_short_run_is_reported(tmp_path, capsys, monkeypatch):
    tiny = Load("tiny", "one ms", Sleeping(0.001), 0.0, (1, 2))
    monkeypatch.setattr(auto, "LOADS", (tiny,))
    assert auto.main(["--short", "--out", str(tmp_path)]) == 0
    (row,) = [line for line in (tmp_path / "auto.md").read_text().splitlines() if "tiny" in line]
    assert row in capsys.readouterr().out
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert [part.split(":")[0] for part in cells[2].split(", ")] == ["1", "2"]
    assert float(cells[4].split()[0]) > 0
    assert 1 <= int(cells[5]) <= auto.MOST


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_samples_are_their_indices(load):
    assert load.dataset[7] == 7
    assert len(load.dataset) > 1_000_000


def test_computing_uses_its_core_for_as_long_as_stated():
    begun_s = time.thread_time()
    Computing(0.01)[0]
    assert time.thread_time() - begun_s >= 0.01
