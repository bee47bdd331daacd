"""A worker is killed after every store: nothing is lost, repeated or altered."""

from __future__ import annotations

import pytest

from tests.stress.kill_points import SCENES
from tests.stress.tracee import UNTRACEABLE
from tests.subprocesses import python

LONG_S = 100
"""From which ``--stress-s`` on there is time for every store; else it is each thirteenth."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("core", ["pure", "compiled"])
def test_a_kill_after_any_store_alters_nothing(core: str, stress_s: float) -> None:
    arguments = ["--all"] if stress_s >= LONG_S else []
    pure = {"MINATO_NO_EXTENSIONS": "1"} if core == "pure" else {}
    done = python("-m", "tests.stress.kill_points", *arguments, timeout_s=1800, **pure)
    if done.returncode == UNTRACEABLE:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len(done.stdout.splitlines()) == len(SCENES)
