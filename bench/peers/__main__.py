"""Command line of the comparison with other loaders; see ``python -m bench.peers --help``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import record
from bench.macro.bounds import bound_of
from bench.macro.loaders import Contender
from bench.macro.rows import Row
from bench.macro.suite import RowResult
from bench.macro.trial import Trial
from bench.macro.work import StoredTensors
from bench.peers import report
from bench.peers.adapters import PEERS, adapter
from bench.peers.environments import PeerMissingError, interpreter
from bench.peers.rows import PEER_ROWS
from bench.peers.trial import MARK

ROWS = tuple(PEER_ROWS)
_TRIAL_S = 180.0
"""A run that takes longer is not waited for."""
_DEFAULT_OUT = record.ROOT / "docs" / "benchmarks"


class TrialFailedError(RuntimeError):
    """A peer did not get through a row; the message says why."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    unknown = {*options.peers, *options.rows} - {*PEERS, *ROWS}
    if unknown:
        print(
            f"unknown: {', '.join(sorted(unknown))}; peers: {PEERS}; rows: {ROWS}", file=sys.stderr
        )
        return 2
    conditions = record.environment()
    pythons: dict[str, Path] = {}
    notes: dict[str, str] = {}
    for peer in options.peers:
        try:
            pythons[peer] = interpreter(peer)
        except PeerMissingError as error:
            notes[peer] = f"could not be installed: {error}"
        print(f"{peer}: {notes.get(peer, 'ready')}", flush=True)
    rows = [row for name, row in PEER_ROWS.items() if name in options.rows]
    versions: dict[str, str] = {}
    results = [
        _measure(row, pythons, options.repeats, options.short, versions, notes) for row in rows
    ]
    conditions["load average after"] = record.load_average()
    text = report.markdown(results, conditions, versions, notes, options.repeats)
    print(text)
    whole = options.peers == list(PEERS) and options.rows == list(ROWS) and not options.short
    out = options.out or (_DEFAULT_OUT if whole else None)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "peers.md").write_text(text)
        (out / "peers.json").write_text(report.json_text(results, conditions, versions, notes))
        print(f"written: {out}/peers.md, peers.json")
    return 0


def _measure(
    row: Row,
    pythons: dict[str, Path],
    repeats: int,
    short: bool,
    versions: dict[str, str],
    notes: dict[str, str],
) -> RowResult:
    """All peers on one row, in turn; who fails once is left out of it, with a note."""
    contenders: list[tuple[str, Contender]] = [
        (peer, contender)
        for peer in pythons
        if row.name in getattr(adapter(peer), "ROWS", ROWS)
        for contender in adapter(peer).CONTENDERS
    ]
    sized = row.short() if short else row
    work = sized.make(sized.samples)
    epoch_bytes = work.sample_bytes * len(work) if isinstance(work, StoredTensors) else 0
    result = RowResult(replace(sized, goals=()), epoch_bytes)
    failed: set[str] = set()
    for repeat in range(repeats):
        result.bounds.append(bound_of(sized, work))
        turn = repeat % len(contenders)
        for peer, contender in contenders[turn:] + contenders[:turn]:
            if contender.name in failed:
                continue
            try:
                trial, found = _trial(pythons[peer], peer, contender.name, row.name, repeat, short)
            except TrialFailedError as error:
                failed.add(contender.name)
                result.trials.pop(contender.name, None)
                notes[f"{contender.label}, {row.name}"] = str(error)
                print(f"{row.name} {contender.name}: {error}", flush=True)
                continue
            versions.update(found)
            result.trials.setdefault(contender.name, []).append(trial)
            epoch_s = trial.epoch_s(sized.skips_first_epoch)
            share = result.bounds[-1].epoch_s / epoch_s
            print(
                f"{row.name} {repeat + 1}/{repeats} {contender.name}: {share:.3f} of the bound",
                flush=True,
            )
    return result


def _trial(
    python: Path, peer: str, contender: str, row: str, seed: int, short: bool
) -> tuple[Trial, dict[str, str]]:
    command = [str(python), "-m", "bench.peers.trial", peer, contender, row, str(seed)]
    try:
        ended = subprocess.run(
            [*command, "short" if short else "whole"],
            cwd=record.ROOT,
            capture_output=True,
            text=True,
            timeout=_TRIAL_S,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailedError(f"not ready after {_TRIAL_S:g} s") from None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if ended.returncode or not lines:
        said = ended.stderr.strip().splitlines() or ["nothing on stderr"]
        raise TrialFailedError(f"exit code {ended.returncode}: {said[-1][:200]}")
    readings: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    versions = readings.pop("versions")
    for name in ("epochs_s", "waits_s"):
        readings[name] = tuple(readings[name])
    return Trial(**readings), versions


def _parser() -> argparse.ArgumentParser:
    about = "Compare minato with other loaders, each installed in an environment of its own."
    parser = record.options_of("bench.peers", about, 3)
    parser.add_argument("--peers", type=_names, default=list(PEERS), metavar="NAME,...")
    parser.add_argument("--rows", type=_names, default=list(ROWS), metavar="NAME,...")
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
