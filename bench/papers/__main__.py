"""Command line of the papers' experiments; see ``python -m bench.papers --help``."""

from __future__ import annotations

import faulthandler
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from bench import record
from bench.papers import (
    accuracy,
    autoorder,
    determinism,
    fading,
    grid,
    memory,
    pool,
    prefetch,
    scaling,
    size,
    speedy,
    stages,
    throughput,
    variability,
)
from bench.papers.page import Section, Settings, draw
from bench.papers.trial import FEW_CORES
from bench.workloads.packages import FOLDER

EXPERIMENTS: dict[str, Callable[[Settings], Section]] = {
    "variability": variability.run,
    "size": size.run,
    "autoorder": autoorder.run,
    "prefetch": prefetch.run,
    "throughput": throughput.run,
    "scaling": scaling.run,
    "memory": memory.run,
    "accuracy": accuracy.run,
    "speedy": speedy.run,
    "grid": grid.run,
    "pool": pool.run,
    "fading": fading.run,
    "stages": stages.run,
    "determinism": determinism.run,
}
STUCK_AFTER_S = 3600.0
"""If all takes longer, the program shows its stacks and ends."""
REPEATS = 3
_HEAD = """\
# The papers' experiments

Written by `python -m bench.papers --out docs/benchmarks`, with the data that `make data` fetches. The workloads are
the MinatoLoader paper's, in `bench/workloads`, on other data: volumes of the head, photographs and spoken phrases
that packages ship; a GPU is replaced by a loop that sleeps. After its experiments come those of SpeedyLoader and of
ConcurrentDataloader, scaled down as each section states. All loaders get the same dataset object, the same
transforms, workers and order; each sample must come exactly once, and in order where that is promised, or the
program fails. Times are medians of {repeats} runs, loaders in turn, with the least and the greatest in brackets.
`minato` is in strict order.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run experiments; returns the exit status."""
    about = "Repeat the experiments of papers about data loaders, without a GPU."
    parser = record.options_of("bench.papers", about, REPEATS)
    parser.add_argument(
        "--experiment", choices=EXPERIMENTS, action="append", help="only this one; may be repeated"
    )
    parser.add_argument("--data", type=Path, default=FOLDER, help="what 'make data' has filled")
    options = parser.parse_args(arguments)
    settings = Settings(options.short, 1 if options.short else options.repeats, options.data)
    warnings.filterwarnings("ignore", FEW_CORES)
    torch.set_num_threads(1)  # as in a worker; and threads would take the workers' cores
    conditions = record.environment()
    lines = [_HEAD.format(repeats=settings.repeats)]
    out: Path | None = options.out
    for name in options.experiment or EXPERIMENTS:
        begun_s = time.perf_counter()
        try:
            section = EXPERIMENTS[name](settings)
        except FileNotFoundError as error:
            print(f"bench.papers: {error}", file=sys.stderr)
            return 2
        lines.append(f"## {section.title}\n")
        if section.panels:
            lines.append(f"![{section.title}](papers-{name}.png)\n")
        lines.append(section.text)
        print(f"## {section.title}\n\n{section.text}", flush=True)
        print(f"{name}: {time.perf_counter() - begun_s:.0f} s", flush=True)
        if out is not None and section.panels:
            out.mkdir(parents=True, exist_ok=True)
            draw(section, out / f"papers-{name}.png")
    lines.append("## Conditions")
    record.finish(lines, conditions, out and out / "papers.md")
    return 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    sys.exit(main())
