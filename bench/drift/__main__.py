"""Command line; see ``python -m bench.drift --help``."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import record
from bench.drift.work import SCALE, Drifting, InTurn, chain
from bench.simulate.control import DRIFT
from bench.simulate.report import draw
from minato import DataLoader

DURATION_S, SHORT_S = 60.0, 1.0
LOOK_S = 0.25
SLOWER = 0.75
"""Share of the time after which the consumer is slower."""
PHASES = (
    ("costs as at first", 0.0, 1 / 3),
    ("costs rise", 1 / 3, 2 / 3),
    ("costs have doubled", 2 / 3, 1.0),
    ("and the consumer is four times as slow", 1.0, float("inf")),
)
"""Name, begin and end: shares of the samples that come before the consumer becomes slower."""


@dataclass(frozen=True)
class Moment:
    """What the loader said of itself.

    Args:
        at_s: When, since the first batch was asked for.
        samples: Delivered so far.
        threshold_s, slow_share: As ``slow_samples()`` has them.
        ready: Batches that lay ready.
        workers: That worked.
    """

    at_s: float
    samples: int
    threshold_s: float
    slow_share: float
    ready: int
    workers: int


def run(dataset: Drifting, duration_s: float) -> tuple[list[Moment], int, float]:
    """One epoch: how the loader stood over time, the samples before the consumer became slower, and when that was."""
    loader: DataLoader[list[object]] = DataLoader(
        dataset,
        DRIFT.workload.batch_size,
        sampler=InTurn(len(dataset)),
        num_workers="auto",
        transforms=chain(),
        order="arrival",
    )
    journal = loader._experience.journal
    assert journal is not None
    moments: list[Moment] = []
    begun_s, turned, turned_s = time.perf_counter(), 0, 0.0
    samples, due_s = 0, 0.0
    for _, indices in loader:
        samples += len(indices)
        now_s = time.perf_counter() - begun_s
        if not turned and now_s >= SLOWER * duration_s:
            turned, turned_s = samples, now_s
        glance = journal.glance()
        if now_s >= due_s and glance is not None and glance.standing is not None:
            due_s = now_s + LOOK_S
            slow = loader.slow_samples()
            standing = glance.standing
            moments.append(
                Moment(
                    now_s, samples, slow.threshold_s, slow.share, standing.ready, standing.workers
                )
            )
        time.sleep(DRIFT.step_s(now_s / duration_s) * SCALE)
    if samples != len(dataset):
        raise RuntimeError(f"{samples} samples came, not {len(dataset)}")
    return moments, turned, turned_s


def table(moments: Sequence[Moment], dataset: Drifting, turned: int) -> list[str]:
    """What held in the second half of each phase, as Markdown."""
    length = len(dataset)
    lines = [
        "| in the second half of the phase | seconds | workers that would do | workers | threshold, ms | slow share "
        "| ready batches |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, begin, end in PHASES:
        slower = begin >= 1.0
        first = turned if slower else begin * length
        last = length if slower else min(end * length, turned)
        phase = [each for each in moments if first <= each.samples < last]
        late = phase[len(phase) // 2 :]
        if not late:
            continue
        step_s = DRIFT.step_s(1.0 if slower else 0.0) * SCALE
        cost_s = dataset.mean_s(late[0].samples, late[-1].samples)
        workers = [each.workers for each in late]
        lines.append(
            f"| {name} | {late[0].at_s:.0f} to {late[-1].at_s:.0f} "
            f"| {DRIFT.workload.batch_size * cost_s / step_s:.1f} "
            f"| {statistics.fmean(workers):.1f} ({min(workers)}–{max(workers)}) "
            f"| {1e3 * statistics.median(each.threshold_s for each in late):.0f} "
            f"| {100 * statistics.fmean(each.slow_share for each in late):.0f} % "
            f"| {statistics.fmean(each.ready for each in late):.1f} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drift",
        description="Load samples whose costs change, with the number of workers left to the loader.",
    )
    parser.add_argument("--short", action="store_true", help="a smoke run: too short to judge by")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write drift.md and drift.png there"
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    conditions = record.environment()
    duration_s = SHORT_S if options.short else DURATION_S
    dataset = Drifting(duration_s)
    moments, turned, turned_s = run(dataset, duration_s)
    size, mean_s = DRIFT.workload.batch_size, dataset.mean_s(0, len(dataset) // 3)
    step_s = DRIFT.step_s(0.0) * SCALE
    lines = [
        "# A load that drifts",
        "",
        "Written by `python -m bench.drift --out docs/benchmarks`: one epoch of a real loader, with",
        '`num_workers="auto"`, `order="arrival"` and a chain of five sleeping transforms, so that slow samples can be',
        "set aside. Costs are drawn as the MinatoLoader paper's segmentation has them,",
        f"{1e3 * mean_s:.0f} ms on average at first, and double over the middle third of the samples. Batches are of",
        f"{size}; the consumer takes {1e3 * step_s:.0f} ms for each, and after {turned_s:.0f} s four times as long.",
        "This is the load of the [simulation](simulate.md#worker-controllers), a second of which takes",
        f"{SCALE:g} s here. Every {LOOK_S:g} s the loop asks the loader how it stands.",
        "",
        "*Slow share* counts the latest samples that cost more than the threshold that was in force when they ran: it",
        "rises while costs do, until the threshold has followed. If it stays high, the 90th percentile replaces the",
        "75th for a while, and flags fewer. *Ready batches* lie ready for the consumer: none, and workers are added.",
        "",
        "![Threshold, share of slow samples, ready batches and workers over time](drift.png)",
        "",
        *table(moments, dataset, turned),
    ]
    print("\n".join(lines[-5:]), flush=True)
    record.finish(lines, conditions, options.out and options.out / "drift.md")
    if options.out:
        title = f"Costs double in the middle third; the consumer is four times as slow from {turned_s:.0f} s on"
        draw(moments, options.out / "drift.png", title, "time, s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
