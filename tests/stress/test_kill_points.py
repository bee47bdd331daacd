"""A worker is killed after every store: nothing is lost, repeated or altered."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import subprocesses
from tests.stress.kill_points import SCENES
from tests.stress.tracee import UNTRACEABLE

LONG_S = 100
"""From which ``--stress-s`` on there is time for every store; else it is each seventh."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("core", ["pure", "compiled"])
def test_a_kill_after_any_store_alters_nothing(core: str, stress_s: float) -> None:
    arguments = ["--all"] if stress_s >= LONG_S else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.kill_points", *arguments],
        cwd=subprocesses.ROOT,
        env=subprocesses.environment(pure=core == "pure"),
        capture_output=True,
        text=True,
    )
    if done.returncode == UNTRACEABLE:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(done.stdout.splitlines()) == len(SCENES)
