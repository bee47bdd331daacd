"""Environments with other projects' packages, and programs of this repository that run in them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import record

ENVIRONMENTS = record.ROOT / "build" / "peers"
COMMON = ("torch==2.13.0", "numpy==2.4.6")
"""In every environment; a peer that needs an older numpy gets it."""
MARK = "TRIAL "
"""Begins a line with readings; peers may print others."""
_INSTALLING_S = 900.0


class PeerMissingError(RuntimeError):
    """A peer cannot be installed here."""


class TrialFailedError(RuntimeError):
    """A program in a peer's environment did not end well; the message says why.

    Attributes:
        readings: Those that it had printed before.
    """

    def __init__(self, message: str, readings: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.readings = list(readings)


def interpreter(name: str, own: Sequence[str], without_dependencies: Sequence[str] = ()) -> Path:
    """The Python of a peer's environment, which is made where it is missing.

    Args:
        name: Of the environment.
        own: What pip installs beside torch and numpy; nothing: it runs in this environment.
        without_dependencies: What pip installs after that, without the packages that it asks for.

    Raises:
        PeerMissingError: pip could not install it; the message is pip's last line.
    """
    if not own and not without_dependencies:
        return Path(sys.executable)
    has_numpy = any(requirement.startswith("numpy") for requirement in own)
    requirements = (*(COMMON[:1] if has_numpy else COMMON), *own)
    python = ENVIRONMENTS / name / "bin" / "python"
    complete = ENVIRONMENTS / name / "complete"
    wanted = "\n".join((*requirements, *without_dependencies))
    if complete.exists() and complete.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENTS / name], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _install([*pip, *requirements])
    if without_dependencies:
        _install([*pip, "--no-deps", *without_dependencies])
    complete.write_text(wanted)
    return python


def _install(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALLING_S)
    except subprocess.CalledProcessError as error:
        raise PeerMissingError(f"{error.stderr.strip().splitlines()[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerMissingError(f"not installed after {_INSTALLING_S:g} s") from error


def run_in(
    python: Path, module: str, arguments: Sequence[str], limit_s: float
) -> list[dict[str, Any]]:
    """Run ``python -m module`` there: its readings.

    Raises:
        TrialFailedError: It failed, printed no reading, or took longer than ``limit_s``.
    """
    try:
        ended = subprocess.run(
            [str(python), "-m", module, *arguments],
            cwd=record.ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        raise TrialFailedError(f"not ready after {limit_s:g} s", _readings(said)) from None
    found = _readings(ended.stdout)
    if ended.returncode or not found:
        lines = ended.stderr.strip().splitlines() or ["nothing on stderr"]
        raise TrialFailedError(f"exit code {ended.returncode}: {lines[-1][:200]}", found)
    return found


def _readings(said: str) -> list[dict[str, Any]]:
    marked = [line for line in said.splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in marked]


def tell(reading: dict[str, Any]) -> None:
    """In a peer's environment: print a reading for ``run_in``."""
    print(MARK + json.dumps(reading), flush=True)


def versions(names: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed where this runs."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
