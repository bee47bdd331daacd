"""``minato demo``: every loader returns every sample, and the table has a row for each."""

from __future__ import annotations

import re

import pytest

from minato.cli import demo
from tests.subprocesses import output


def test_every_loader_returns_every_sample_once() -> None:
    runs = list(demo.compare(48))
    assert [run.name for run in runs] == ["torch", "torch, in_order=False", "minato"]
    assert all(run.is_complete for run in runs)
    assert all(0 < run.first_s <= run.waiting_s < run.epoch_s for run in runs)


@pytest.mark.slow
def test_it_prints_a_table_with_the_bound() -> None:
    table = output("-W", "error", "-m", "minato", "demo")
    rows = re.findall(r"^(\S.*?) {2,}.* (\d\.\d\d)$", table, re.MULTILINE)
    assert [name for name, _ in rows] == [
        *("torch", "torch, in_order=False", "minato", "ideal (lower bound)")
    ]
    assert all(float(ratio) >= 1 for _, ratio in rows)
    assert "expect 1.0×" in table
