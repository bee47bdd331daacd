"""One peer on some rows, in the peer's environment; its clock readings go to standard output as JSON."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from dataclasses import asdict
from typing import Any

from bench.macro.trial import run_trial
from bench.peers.adapters import adapter
from bench.peers.rows import PEER_ROWS

MARK = "TRIAL "
"""Begins the line with the readings; peers may print others."""


def main(peer: str, contender: str, row_name: str, seed: str, short: str) -> None:
    """Run one trial and print what was measured, and with which versions."""
    module = adapter(peer)
    row = PEER_ROWS[row_name]
    if short == "short":
        row = row.short()
    chosen = next(one for one in module.CONTENDERS if one.name == contender)
    for name in module.IMPORTS:
        importlib.import_module(name)  # before the clock starts
    names = [name.partition("==")[0].partition("[")[0] for name in module.REQUIREMENTS]
    trial: dict[str, Any] = asdict(run_trial(chosen, row, row.make(row.samples), int(seed)))
    trial["versions"] = {name: importlib.metadata.version(name) for name in (*names, "torch")}
    print(MARK + json.dumps(trial), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
