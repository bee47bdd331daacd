"""Command line of the simulation; see ``python -m bench.simulate --help``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.simulate import report
from bench.simulate.control import SCENARIOS, Controlled, Moment
from bench.simulate.trials import CONTENDERS, Result, run_trial
from bench.simulate.workloads import ALL_WORKLOADS, SPEECH_10S
from minato.scheduler.controller import CONTROLLERS

WORKERS = 12
BATCHES, SHORT_BATCHES = 1500, 120
DAY_RANKS, DAY_WORKERS = 8, 16
DAY_STEPS, SHORT_DAY_STEPS = 24_000, 100
"""16 workers make a batch of 24 in 3.6 s of a day's 86,400 s."""
DAY_LOADERS = ("torch", "torch, in_order=False", "minato strict", "minato arrival")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    batches = SHORT_BATCHES if options.short else BATCHES
    begun = time.perf_counter()
    results: dict[str, dict[str, Result]] = {
        workload.name: {
            name: run_trial(make, workload, WORKERS, batches) for name, make in CONTENDERS.items()
        }
        for workload in ALL_WORKLOADS
    }
    traces: dict[str, dict[str, list[Moment]]] = {
        scenario.name: {
            name: Controlled(scenario, name, start=2, most=32).run() for name in CONTROLLERS
        }
        for scenario in SCENARIOS
    }
    needed = {scenario.name: scenario.needed() for scenario in SCENARIOS}
    text = "\n".join(
        [
            report.introduction(),
            report.table_2(),
            "",
            report.loaders(results, WORKERS, batches),
            report.control(traces, needed),
        ]
    )
    if options.day:
        steps = SHORT_DAY_STEPS if options.short else DAY_STEPS
        by_loader = {
            name: run_trial(CONTENDERS[name], SPEECH_10S, DAY_WORKERS, steps, ranks=DAY_RANKS)
            for name in DAY_LOADERS
        }
        text += "\n" + report.day(SPEECH_10S.name, by_loader, DAY_RANKS, DAY_WORKERS)
    print(text)
    print(f"simulated in {time.perf_counter() - begun:.0f} s")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "simulate.md").write_text(text)
        report.draw(
            traces["drift"]["corrected"],
            options.out / "simulate.png",
            "Costs double in the middle third; the consumer is four times as slow from 450 s on",
            "virtual time, s",
        )
        print(f"written: {options.out}/simulate.md, simulate.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description="Run loaders in virtual time, with the policies that the engine uses.",
    )
    parser.add_argument("--short", action="store_true", help="short runs: a smoke test")
    parser.add_argument(
        "--day", action="store_true", help="also a day of training on 128 cores and 8 GPUs"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write simulate.md and simulate.png there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
