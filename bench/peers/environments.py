"""An environment for each peer, because their requirements contradict each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.peers.adapters import adapter
from bench.record import ROOT

FOLDER = ROOT / "build" / "peers"
COMMON = ("torch==2.13.0", "numpy==2.4.6")
"""In every environment; a peer that needs an older numpy gets it."""
_INSTALLING_S = 900.0


class PeerMissingError(RuntimeError):
    """A peer cannot be installed here."""


def interpreter(peer: str) -> Path:
    """The Python of a peer's environment, which is made where it is not there yet.

    Raises:
        PeerMissingError: pip could not install it; the message is pip's last line.
    """
    requirements = adapter(peer).REQUIREMENTS
    if not requirements:
        return Path(sys.executable)
    own_numpy = any(requirement.startswith("numpy") for requirement in requirements)
    return environment(peer, (*(COMMON[:1] if own_numpy else COMMON), *requirements))


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """The Python of an environment with these packages, which is made where it is not there yet.

    Raises:
        PeerMissingError: pip could not install them; the message is pip's last line.
    """
    python = FOLDER / name / "bin" / "python"
    complete = FOLDER / name / "complete"
    wanted = "\n".join(requirements)
    if complete.exists() and complete.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / name], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    try:
        subprocess.run(
            [*pip, *requirements],
            check=True,
            capture_output=True,
            text=True,
            timeout=_INSTALLING_S,
        )
    except subprocess.CalledProcessError as error:
        raise PeerMissingError(f"{error.stderr.strip().splitlines()[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerMissingError(f"not installed after {_INSTALLING_S:g} s") from error
    complete.write_text(wanted)
    return python
