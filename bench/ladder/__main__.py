"""Command line of the ladder; see ``python -m bench.ladder --help``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import record
from bench.ladder import report
from bench.ladder.work import STEPS, write
from bench.peers.environments import PeerMissingError, environment

REQUIREMENTS = ("petastorm==0.13.1", "pyarrow==14.0.2", "numpy==1.26.4", "setuptools<81")
"""Petastorm opens files through what later versions of pyarrow no longer have."""
_RUN_S = 120.0


def main() -> int:
    """Run everything; returns the exit status."""
    given = record.options_of("bench.ladder", __doc__ or "", 3).parse_args()
    repeats = 1 if given.short else given.repeats
    conditions = record.environment()
    pythons, notes = {"minato": Path(sys.executable)}, {}
    try:
        pythons["petastorm"] = environment("petastorm", REQUIREMENTS)
    except PeerMissingError as error:
        notes["petastorm"] = f"could not be installed: {error}"
    found: dict[str, dict[str, list[list[float]]]] = {
        side: {step: [] for step in STEPS} for side in pythons
    }
    versions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.parquet"
        write(file)
        for repeat in range(repeats):
            for step in STEPS:
                for side, python in pythons.items():
                    cache = Path(name) / f"{side} {step} {repeat}"
                    result = _run([str(python), side, str(file), str(cache), step])
                    found[side][step].append(result["epochs_s"])
                    versions[side] = result["versions"]
    command = " ".join(["python -m bench.ladder", *sys.argv[1:]])
    text = report.markdown(found, versions, notes, conditions, command, repeats)
    out = given.out or (None if given.short else record.ROOT / "docs" / "benchmarks")
    if out is None:
        print(text)
    else:
        (out / "ladder.md").write_text(text)
        print(f"wrote {out / 'ladder.md'}")
    return 0


def _run(arguments: list[str]) -> Any:
    python, *rest = arguments
    ended = subprocess.run(
        [python, "-m", "bench.ladder.one", *rest],
        cwd=record.ROOT,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
    )
    if ended.returncode:
        raise RuntimeError(f"{rest}: {ended.stderr.strip().splitlines()[-1]}")
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
