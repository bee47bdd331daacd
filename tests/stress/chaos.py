"""Loaders under fire: whatever happens to their workers, each sample arrives once, with its content.

    python -m tests.stress.chaos --seconds 600 --figures docs/benchmarks/chaos.md

Round after round draws an order, a start method, worker processes or threads and everything else, and runs a few
epochs. Meanwhile workers, and those that stand by, are killed and stopped; samples are slow, hang, raise, or end their
process; epochs are left early and resumed. Then training runs are killed as a whole and go on from their last saved
state. Both forms of the core take turns, each turn in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

import minato
from tests import subprocesses
from tests.stress import scenario
from tests.stress.disturber import Disturber
from tests.stress.rounds import Round

PROGRAM = "tests.stress.chaos"
TURN_S = 20.0
"""How long one form of the core runs before the other has its turn."""
LIVES, LIVES_S = 16, 400.0
"""So many training runs are killed in one turn, which takes so long at most, on a busy machine."""


def take_turn(options: argparse.Namespace) -> dict[str, Any]:
    """Run rounds with this process's form of the core."""
    multiprocessing.set_forkserver_preload(["tests.stress.rounds"])
    disturber = Disturber(options.seed + 1)

    def play_round(draw: random.Random) -> None:
        number = draw.randrange(1 << 30)
        with tempfile.TemporaryDirectory() as directory:
            one = Round(number, directory, disturber)
            print(f"round {number}: {one}", file=sys.stderr, flush=True)
            one.run(disturber.figures)

    try:
        scenario.play(options.turn, options.seed, play_round)
    finally:
        disturber.close()
    return {"figures": disturber.figures, "recoveries_s": disturber.recoveries_s}


def lives(seed: int, pure: bool) -> dict[str, Any]:
    """Kill training runs and let them go on; at the end each sample was trained once in each epoch."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = LIVES, seed, directory
        out = subprocesses.run("training.py", *arguments, pure=pure, timeout_s=LIVES_S)
        killed, trained = out.split()
    figures = {"training runs killed": int(killed), "samples": int(trained)}
    return {"figures": figures, "recoveries_s": []}


def run(seconds: float, seed: int) -> tuple[Counter[str], list[float]]:
    """Let both forms of the core take turns; returns all figures and the times to recover."""
    figures: Counter[str] = Counter()
    recoveries_s: list[float] = []
    end = time.monotonic() + seconds
    turn = 0
    while (left := end - time.monotonic()) > 1 or turn < 4:
        pure = turn % 2 == 1
        if turn % 4 < 2:
            turn_s = max(min(TURN_S, seconds / 3, left), 1)
            found = scenario.turn(PROGRAM, turn_s, seed + turn, pure)
        else:
            found = lives(seed + turn, pure)
        figures.update(found["figures"])
        recoveries_s += found["recoveries_s"]
        turn += 1
    return figures, recoveries_s


def report(seconds: float, seed: int, figures: Counter[str], recoveries_s: list[float]) -> str:
    """A section of figures, in Markdown."""
    median, p99 = np.percentile(recoveries_s, [50, 99]) * 1e3 if recoveries_s else (0.0, 0.0)
    counts = figures.copy()
    del counts["samples"]
    about = [
        "Workers and whole training runs are killed (`tests/stress/chaos.py`), in all orders, with all start methods,",
        "with processes and threads, compiled and pure. Each epoch is compared with the expected one: every sample",
        "once, with its content.",
    ]
    lines = [
        f"On {os.cpu_count()} cores, minato {minato.__version__}, torch {torch.__version__}:",
        "",
        "| what | how often |",
        "|---|---|",
        f"| samples delivered | {figures['samples']} |",
        "| samples lost, repeated or altered | 0 |",
        *(f"| {what} | {count} |" for what, count in sorted(counts.items())),
        "",
        f"From a kill to the start of the replacing worker: median {median:.1f} ms, P99 {p99:.1f} ms,",
        f"over {len(recoveries_s)} kills. This includes the time until the training loop waits for a batch again:",
        "workers are replaced when it does. A worker that is no longer needed is not replaced.",
    ]
    return scenario.section("Loaders under random faults", about, PROGRAM, seconds, seed, lines)


def section(options: argparse.Namespace) -> str:
    return report(options.seconds, options.seed, *run(options.seconds, options.seed))


def main() -> int:
    parser = scenario.parser(PROGRAM)
    parser.add_argument("--turn", type=float, help="only this core, for so many seconds")
    return scenario.main(parser.parse_args(), section, take_turn)


if __name__ == "__main__":
    sys.exit(main())
