"""Workers that die at random instructions, for as long as there is time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.kills import PATHS, report, run
from tests.stress.scenario import write_section


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_nothing_is_lost_when_workers_die_at_any_instruction(stress_s: float) -> None:
    seed = int(stress_s)
    figures = run(stress_s, seed)
    print(report(stress_s, seed, figures))
    assert sum(row["kills"] for row in figures.values()) >= max(stress_s / 4, 1)
    assert stress_s < 300 or set(figures) == set(PATHS)


def test_each_program_replaces_its_own_section_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_section(page, "## One\n\n1\n")
    write_section(page, "## Two\n\n2\n")
    write_section(page, "## One\n\n3\n")
    assert page.read_text() == "# Chaos run\n\n## One\n\n3\n\n## Two\n\n2\n"
