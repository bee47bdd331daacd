"""The types of the public interface, as a type checker sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.subprocesses import python


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_constructor_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = Path(__file__).with_name("constructor.py")
    done = python(
        "-m", "mypy", "--warn-unused-ignores", f"--cache-dir={tmp_path}", file, timeout_s=390
    )
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), (
        done.stdout + done.stderr
    )
