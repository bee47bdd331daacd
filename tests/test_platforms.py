"""Systems other than Linux, simulated on Linux by a script that takes from Python what the system lacks."""

from __future__ import annotations

from tests import subprocesses


def test_loaders_without_processes_run_and_processes_are_refused() -> None:
    lines = subprocesses.run("other_platform.py", pure=True).splitlines()
    for platform, num_others in {"darwin": 0, "win32": 2}.items():
        told = [line.removeprefix(f"{platform}: ") for line in lines if line.startswith(platform)]
        refused = [line for line in told if line.startswith("worker processes need Linux")]
        assert len(refused) == 3
        words = "workers='thread' or num_workers=0"
        assert all(platform in line and words in line for line in refused)
        others = [line for line in told if line not in refused]
        assert len(others) == num_others
        assert all("errors=ErrorPolicy(...) needs Linux or macOS" in line for line in others)
    assert len(lines) == 8
