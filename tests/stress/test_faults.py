"""The fault matrix, for as long as there is time."""

from __future__ import annotations

import pytest

from tests.stress.faults import FAULTS, METHODS, SENSELESS, choose, report
from tests.subprocesses import python


@pytest.mark.slow
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_faults_in_all_orders_with_all_kinds_of_workers(stress_s: float) -> None:
    """In a process of its own, which has no threads when it forks the cells."""
    done = python("-m", "tests.stress.faults", "--seconds", stress_s, timeout_s=900)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def test_the_matrix_has_every_cell_that_makes_sense() -> None:
    cells = choose(1, list(FAULTS), list(METHODS))
    assert len(set(cells)) == len(cells) == 4 * (len(FAULTS) * len(METHODS) - len(SENSELESS))
    text = report({cells[0]: 1.0}, {cells[1]: "no disk"}, 10, 1)
    assert text.count("1 of 4") == 1
    assert "Skipped: no disk." in text
    assert text.count("| – ") == len(SENSELESS)
