"""Systems other than Linux, simulated on Linux by a script that takes from Python what the system lacks."""

from __future__ import annotations

import pytest

from tests import subprocesses


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_loaders_without_processes_run_and_processes_are_refused(platform: str) -> None:
    lines = subprocesses.run("other_platform.py", platform, pure=True).splitlines()
    refused = [line for line in lines if line.startswith("worker processes need Linux")]
    assert len(refused) == 3
    assert all(platform in line and "workers='thread' or num_workers=0" in line for line in refused)
    others = [line for line in lines if line not in refused]
    assert len(others) == (2 if platform == "win32" else 0)
    assert all("errors=ErrorPolicy(...) needs Linux or macOS" in line for line in others)
