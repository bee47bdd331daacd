"""Training runs whose process is killed at random moments, again and again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.subprocesses import run

KILLS = 30


@pytest.mark.slow
def test_a_killed_training_run_loses_and_repeats_nothing(tmp_path: Path) -> None:
    killed, _ = run("training.py", KILLS, 1, tmp_path).split()
    assert int(killed) == KILLS


@pytest.mark.stress
def test_hundreds_of_kills(tmp_path: Path, stress_s: float) -> None:
    end = time.monotonic() + stress_s
    seed = 100
    while time.monotonic() < end:
        killed, _ = run("training.py", KILLS, seed, tmp_path).split()
        assert int(killed) == KILLS
        seed += 1
