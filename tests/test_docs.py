"""The programs that the documentation shows do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_tutorial_program(tmp_path: Path) -> None:
    few_cores = "ignore:This DataLoader will create"  # torch's warning on a machine with one
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-W", few_cores),
            DOCS / "tutorial" / "first_loader.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.findall(r"^(\w.*\w) +([\d.]+) s, (\d+) samples$", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in lines] == ["torch", "minato, in order", "minato, as they come"]
    assert {int(samples) for _, _, samples in lines} == {400}
    seconds = [float(taken) for _, taken, _ in lines]
    assert seconds[1] < seconds[0]
    assert seconds[2] < seconds[0]
