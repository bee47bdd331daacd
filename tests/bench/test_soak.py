"""The soak counts what a job uses, and finds what stays open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

from bench import soak
from tests.datasets import Numbers, Roll
from tests.selection import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
OPEN = ("descriptors", "threads", "processes")


class Together(Numbers):
    """Its first samples wait until all workers are at work."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.roll = Roll(soak.WORKERS)

    def __getitem__(self, index: int) -> int:
        self.roll()
        return index


@pytest.mark.parametrize(("row", "count", "last"), [("epochs", 20, -1), ("samples", 100_000, 10)])
@mostly_slow("order", soak.ORDERS)
def test_a_job_opens_no_more_as_it_goes_on(
    order: str, row: str, count: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "Numbers", Together)
    readings = soak.RUNS[row](order, "fork", count)
    assert len(readings) == soak.READINGS
    first, later = readings[soak.WARM_UP], readings[last]
    # Less, where what tests before have left is collected meanwhile.
    assert [key for key in OPEN if later[key] > first[key]] == []
    assert later["processes"] >= 1 + soak.WORKERS * (row == "samples")


@pytest.mark.parametrize("row", soak.RUNS)
def test_lost_samples_are_found(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "Numbers", lambda count: [1, *range(1, count)])
    with pytest.raises(RuntimeError, match="not each sample once|with the sum"):
        soak.RUNS[row]("strict", "fork", 20 if row == "epochs" else 5000)


def test_the_page_shows_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(target: str, *case: Any, limit_s: float) -> dict[str, Any]:
        used = {"descriptors": 8, "threads": 2, "processes": 3}
        return {"readings": [{"mib": 100.0 + i, **used} for i in range(20)], "seconds": 7.0}

    monkeypatch.setattr(soak, "call", call)
    assert not soak.main(["--short", "--out", str(tmp_path)])
    page = (tmp_path / "soak.md").read_text()
    line = "| 105.0 → 119.0 | 119.0 | 8 → 8 | 2 → 2 | 3 → 3 | 7 |"
    assert page.count(line) == len(soak.ORDERS) * len(soak.METHODS) * len(soak.RUNS)
