"""Command line of the comparison; see ``python -m bench.auto --help``."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from typing import Any

from bench import record
from bench.auto.loads import BATCH_SIZE, LOADS, Load
from minato import DataLoader

START, MOST = 2, 16
SETTLING_S, MEASURED_S = 6.0, 6.0
REPEATS = 3


def rate(load: Load, settling_s: float, measured_s: float, **arguments: Any) -> tuple[float, int]:
    """Samples per second after the time to settle, and the workers at the end."""
    loader = DataLoader(load.dataset, BATCH_SIZE, **arguments)
    begun_s = time.perf_counter()
    counted = 0
    first_s = 0.0
    for _ in loader:
        time.sleep(load.pause_s)
        now_s = time.perf_counter()
        if now_s < begun_s + settling_s:
            continue
        if not first_s:
            first_s = now_s
            continue
        counted += BATCH_SIZE
        if now_s >= first_s + measured_s:
            break
    staffing = loader._experience.staffing
    workers = loader.num_workers if staffing is None else staffing.state.workers
    return counted / (now_s - first_s), workers


def compare(load: Load, scale: float, repeats: int) -> str:
    """The row of the report, after a sweep and the changing number, in turn."""
    fixed: dict[int, list[float]] = {workers: [] for workers in load.fixed}
    changing: list[float] = []
    ends: list[int] = []
    for _ in range(repeats):
        for workers, found in fixed.items():
            found.append(
                rate(load, 0.2 * SETTLING_S * scale, 0.5 * MEASURED_S * scale, num_workers=workers)[
                    0
                ]
            )
        got, end = rate(
            load, SETTLING_S * scale, MEASURED_S * scale, num_workers=START, max_workers=MOST
        )
        changing.append(got)
        ends.append(end)
    medians = {workers: statistics.median(found) for workers, found in fixed.items()}
    best = max(medians, key=lambda workers: (round(medians[workers], 1), -workers))
    sweep = ", ".join(f"{workers}: {median:.1f}" for workers, median in medians.items())
    auto = statistics.median(changing)
    return (
        f"| {load.name} | {load.title} | {sweep} | {best} | {auto:.1f} ({min(changing):.1f}–{max(changing):.1f}) "
        f"| {', '.join(map(str, ends))} | {100 * auto / medians[best]:.1f} % |"
    )


def main(arguments: list[str] | None = None) -> int:
    about = "Compare a number of workers that changes with the best fixed one."
    options = record.options_of("bench.auto", about, REPEATS).parse_args(arguments)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    conditions = record.environment()
    scale, repeats = (0.05, 1) if options.short else (1.0, options.repeats)
    lines = [
        "# A changing number of workers",
        "",
        "Written by `python -m bench.auto --out docs/benchmarks`. Each load runs with fixed numbers of workers and",
        f"with `num_workers={START}, max_workers={MOST}`, in turn. Samples per second, medians of {repeats} runs; the",
        f"changing number has {SETTLING_S * scale:.1f} s to settle and is then measured for",
        f"{MEASURED_S * scale:.1f} s.",
        "",
        "| load | | fixed numbers of workers: samples/s | best | changing: samples/s | ends with | of the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for load in LOADS:
        lines.append(compare(load, scale, repeats))
        print(lines[-1], flush=True)
    record.finish(lines, conditions, options.out and options.out / "auto.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
