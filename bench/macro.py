"""Whole loaders in one run, on work of known cost: how close does each come to the ideal?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.harness import chart, report
from bench.harness.datasets import (
    SleepingWork,
    StoredRows,
    StoredTensors,
    bimodal_costs_s,
    lognormal_costs_s,
    straggler_costs_s,
)
from bench.harness.loaders import BARE, MINATO_SEED, STANDARD, named
from bench.harness.suite import Row, Spread, chosen, measure

CONTENDERS = named(BARE, *STANDARD.values(), MINATO_SEED)
AND_BARE = (BARE.name, *STANDARD)
SEEDED_TOO = (*AND_BARE, MINATO_SEED.name)
ALT = "Efficiency of each loader on uneven samples, and speed relative to torch on cheap samples"
HEAD = """\
# Engine benchmark

Written by `python -m bench.macro`; `bench/README.md` states the question of each row.

{images}
Every loader gets the same dataset object, number of workers, `persistent_workers` and shuffles, and every other
argument at its default. Within one repeat the loaders of a row run one after the other, each time starting with a
different one. Every run is checked: each sample exactly once, in order where promised. Figures are medians of {repeats}
repeats, with the minimum and maximum in brackets. A ratio compares runs of the same repeat.

* *Ideal* of sleeping work: all sleep split evenly over the workers, or the consumer's own time if that is longer. Of
  tensors: copying every sample once, warm, by one process, into one recycled batch; two workers can in principle beat
  it. Of table rows: the calls of `dataset[i]` alone, split over the workers. *Efficiency*: ideal time over measured
  time.
* *Bare processes* are forked and connected by two pipes, and promise neither order nor content
  (`bench/harness/bare.py`). Their loss is what this machine takes from every loader: sleeps that last too long, forks,
  wake-ups.
* *Time of sleeping work* is the whole run, from before the loader is built to the end of the last epoch. *Time of
  tensors and rows* is that of the epochs after the first.
* *Efficiency, later epochs* leaves the first epoch out, and with it the start of workers that persist.
* *minato, seed=* begins the next epoch early, with workers that persist (`persistent_workers="next_epoch"`).
* *First batch* is the time from `iter()` to the first batch, workers cold.
* *Waiting* is the share of the run that the consumer spends waiting for batches.
"""
NOTE = """\
Without workers both loaders copy each byte once. torch's speed then depends on the C library. Where that gives the
memory of dropped batches back to the system, each batch needs fresh pages, which the kernel must clear. The variable
`MALLOC_MMAP_THRESHOLD_=65536` shows that. minato recycles its own memory. Its bookkeeping costs the same for a batch of
any size, and counts where batches are small.
"""
SLEEPING = {
    "stragglers": "1 % stragglers\n1 ms / 201 ms",
    "lognormal": "log-normal\nabout 10 ms",
    "balanced": "the same, and a\nconsumer as fast",
    "bimodal-35": "every fifth slow\n5 ms / 35 ms",
    "bimodal-105": "every fifth slow\n5 ms / 105 ms",
}
COPYING = {
    "image": "images\n602 kB",
    "patch": "patches\n49 kB",
    "tabular": "rows of 16\nPython floats",
}


def _bimodal(heavy_s: float) -> Callable[[int], SleepingWork]:
    return lambda count: SleepingWork(bimodal_costs_s(count, 0.005, heavy_s, every=5))


STRAGGLERS = Row(
    "stragglers",
    "4000 samples of 1 ms, 1 % of them 201 ms; batch 32, 4 workers",
    lambda count: SleepingWork(straggler_costs_s(count, 0.001, 0.201, share=0.01)),
    *(4000, 32, 4, 1),
    loaders=AND_BARE,
)
LOGNORMAL = Row(
    "lognormal",
    "168 log-normal samples, mean 10 ms, deviation 3.9 ms; batch 3, 12 workers, 10 epochs",
    lambda count: SleepingWork(lognormal_costs_s(count, 0.010, relative_deviation=0.39)),
    *(168, 3, 12, 10),
    loaders=SEEDED_TOO,
    shuffle=True,
    persistent=True,
)
BALANCED = replace(
    LOGNORMAL,
    name="balanced",
    title="the same, and a consumer exactly as fast as the workers",
    pause_s=0.010 * 3 / 12,
)
BIMODAL_35 = Row(
    "bimodal-35",
    "5 ms, every fifth sample 35 ms; batch 24, 12 workers, 2 epochs",
    _bimodal(0.035),
    *(2400, 24, 12, 2),
    loaders=AND_BARE,
)
BIMODAL_105 = replace(
    BIMODAL_35,
    name="bimodal-105",
    title="5 ms, every fifth sample 105 ms; batch 24, 12 workers, 2 epochs",
    make=_bimodal(0.105),
    samples=1200,
)
IMAGE = Row(
    "image",
    "float32 (3, 224, 224) from memory; batch 32, 2 workers",
    lambda count: StoredTensors((3, 224, 224), pool_size=128, count=count),
    *(1024, 32, 2, 4),
    unit="GB/s",
    persistent=True,
    skips_first_epoch=True,
)
IMAGE_READ = replace(
    IMAGE, name="image-read", title="the same, and a consumer that reads every byte", reads=True
)
PATCH = replace(
    IMAGE,
    name="patch",
    title="float32 (3, 64, 64) from memory; batch 64, 2 workers",
    make=lambda count: StoredTensors((3, 64, 64), pool_size=1024, count=count),
    samples=8192,
    batch_size=64,
)
TABULAR = replace(
    IMAGE,
    name="tabular",
    title="16 Python floats and a label; batch 256, 2 workers",
    make=lambda count: StoredRows(count, as_floats=True),
    samples=65536,
    batch_size=256,
    unit="us/sample",
)
VECTOR = replace(
    TABULAR,
    name="vector",
    title="a NumPy vector of 16 floats and a label; batch 256, 2 workers",
    make=StoredRows,
)


def _inline(row: Row) -> Row:
    return replace(
        row,
        name=f"{row.name}-inline",
        title=row.title.replace("2 workers", "in the main process (num_workers=0)"),
        workers=0,
        persistent=False,
        loaders=("torch", "minato"),
    )


SMALL = replace(
    _inline(VECTOR),
    name="small-inline",
    title="a NumPy vector of 16 floats and a label; batch 8, in the main process (num_workers=0)",
    samples=16384,
    batch_size=8,
)
ROWS = {
    row.name: row
    for row in (
        *(STRAGGLERS, LOGNORMAL, BALANCED, BIMODAL_35, BIMODAL_105),
        *(IMAGE, IMAGE_READ, PATCH, TABULAR, VECTOR),
        *map(_inline, (IMAGE, PATCH, TABULAR, VECTOR)),
        SMALL,
    )
}


def draw(page: Path) -> None:
    tables = chart.tables_of(page)

    def share(row: str, loader: str) -> Spread | None:
        found = chart.spread_in(tables, row, loader, "efficiency")
        return found and found.scaled(100)

    def speed(row: str, loader: str) -> Spread | None:
        return chart.spread_in(tables, row, loader, "× torch")

    panels = (
        chart.Bars(
            "Uneven samples: share of the ideal speed, %", SLEEPING, share, "{:.0f}".format, 100
        ),
        chart.Bars("Cheap samples: speed, torch = 1", COPYING, speed, chart.times),
    )
    chart.bars(panels, len(panels), page, "bars are medians, lines the minimum and maximum")


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("macro", __doc__, 5, publishes=True, rows=ROWS, loaders=CONTENDERS)
    options = parser.parse_args(arguments)
    contenders = {name: CONTENDERS[name] for name in options.loaders}
    page = report.Page("engine", options.out)
    page.say(f"{len(options.rows)} rows, {options.repeats} repeats")
    results = measure(chosen(ROWS, options), contenders, options.repeats, page.say)
    page.add(HEAD.format(repeats=options.repeats, images=chart.images("engine", ALT)))
    faster = report.losses(results, contenders)
    page.add_rows(results, contenders, "## Where torch is faster\n", faster, NOTE)
    page.finish(draw)


if __name__ == "__main__":
    report.program(main)
