"""Processes of their own for single measurements, also with the packages of other projects."""

from __future__ import annotations

import importlib
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
MARK = "RESULT "
"""Begins the line with the result; peers may print others."""
_OPTIONS = ("-W", "ignore:This DataLoader will create", "-m", "bench.harness.environments")
_INSTALLING_S = 900.0


class PeerMissingError(RuntimeError):
    """A peer cannot be installed here."""


class TrialFailedError(RuntimeError):
    """A call in a process of its own did not end well; the message says why."""


def interpreter(name: str, own: Sequence[str], without_dependencies: Sequence[str] = ()) -> Path:
    """The Python of a peer's environment, made where it is missing; this one for a peer that requires nothing."""
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
    wanted = command[-1]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALLING_S)
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[-1]
        raise PeerMissingError(f"{wanted} could not be installed: {why}") from error
    except subprocess.TimeoutExpired as error:
        why = f"not ready after {_INSTALLING_S:g} s"
        raise PeerMissingError(f"{wanted} could not be installed: {why}") from error


def call(
    target: str, *arguments: Any, python: Path | str = sys.executable, limit_s: float = 600.0
) -> Any:
    """Call ``module:function`` in a process of its own, with values that JSON can carry both ways."""
    try:
        ended = subprocess.run(
            [str(python), *_OPTIONS, target, json.dumps(arguments)],
            cwd=record.ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailedError(f"not ready after {limit_s:g} s") from None
    found = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if ended.returncode or not found:
        lines = ended.stderr.strip().splitlines() or ["nothing on stderr"]
        raise TrialFailedError(f"exit code {ended.returncode}: {lines[-1][:200]}")
    return json.loads(found[-1].removeprefix(MARK))


def tell(result: Any) -> None:
    print(MARK + json.dumps(result), flush=True)


def versions(names: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed where this runs."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions_in(python: Path | str, names: Sequence[str]) -> dict[str, str]:
    """The same of another Python, as conditions of a page."""
    found = call("bench.harness.environments:versions", names, python=python)
    return {f"version of {name}": it for name, it in found.items()}


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    tell(getattr(importlib.import_module(module), function)(*json.loads(sys.argv[2])))
