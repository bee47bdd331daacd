"""The types of the public interface, as a type checker sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_constructor_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = Path(__file__).with_name("constructor.py")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--warn-unused-ignores",
            f"--cache-dir={tmp_path}",
            str(file),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), (
        done.stdout + done.stderr
    )
