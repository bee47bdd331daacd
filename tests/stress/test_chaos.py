"""Loaders under fire, for as long as there is time."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.stress.chaos import LIVES, report, run


@pytest.mark.slow
@pytest.mark.stress
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
