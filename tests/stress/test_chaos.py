"""Loaders under fire, for as long as there is time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.stress.chaos import LIVES, report, run
from tests.stress.scenario import write_section


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_nothing_is_lost_in_chaos(stress_s: float) -> None:
    seed = int(stress_s)
    figures, recoveries_s = run(stress_s, seed)
    print(report(stress_s, seed, figures, recoveries_s))
    assert figures["training runs killed"] >= 2 * LIVES
    assert figures["loaders"] >= 2


def test_report_names_what_happened() -> None:
    figures = Counter({"samples": 70, "workers killed": 3})
    text = report(40, 7, figures, [0.01, 0.02, 0.03])
    assert "| samples delivered | 70 |" in text
    assert "| workers killed | 3 |" in text
    assert "median 20.0 ms" in text


def test_each_program_replaces_its_own_section_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_section(page, "## One\n\n1\n")
    write_section(page, "## Two\n\n2\n")
    write_section(page, "## One\n\n3\n")
    assert page.read_text() == "# Chaos run\n\n## One\n\n3\n\n## Two\n\n2\n"
