"""What each mechanism gains on slow and on cheap samples, what "auto" workers find, and what measuring costs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bench.harness import record, report
from bench.harness.datasets import (
    Mapped,
    Pictures,
    SleepingTransforms,
    SleepingWork,
    SleepsShare,
    StoredRows,
    bimodal_costs_s,
    blur,
    compute,
    flip_at_random,
    lognormal_costs_s,
    shrink,
    straggler_costs_s,
    to_floats,
)
from bench.harness.environments import call
from bench.harness.loaders import (
    STANDARD,
    TORCH,
    TORCH_ANY_ORDER,
    Build,
    Contender,
    minato_as,
    named,
)
from bench.harness.suite import Row, RowResult, measure
from minato import AutoScale, Observe, StragglerPolicy

MOST = 16
HEAD = """\
# Ablation

Written by `python -m bench.ablation`. All loaders of a table get the same dataset object, transforms and number of
workers, unless their name says otherwise. All else stays at its default. Loaders take turns; every sample is checked.
Figures are medians of {repeats} runs, with the minimum and maximum in brackets; start of the workers
included. *Ideal*: all work divided by the workers, or the consumer's own time if that is longer.
"""
MECHANISMS = f"""\
## Mechanisms against slow samples

Each line of minato adds one mechanism to an earlier one.

* `prefetch_factor=2` prepares as many batches as torch does, in order, with single samples as the unit of work.
* *window in bytes*: as many batches ahead as the memory budget allows, which is the default.
* *early start*: a threshold, `stragglers=StragglerPolicy(after_s=...)`, above which a sample is slow. Later epochs
  start such samples early, still in order. In the lines above it no sample counts as slow.
* `in_order=False` has the threshold too. *without deferral*: transforms run behind `dataset[i]`, where no sample can be
  interrupted. With `transforms=` a worker defers a slow sample between two of them; the last column counts that, and
  the program fails where it is 0.
* `order='fast_first'` and *auto*, which may use up to {MOST} workers, defer as well.
"""
AUTO = f"""\
## Fixed and changing numbers of workers

`auto` begins with 2 workers and may use up to {MOST}. Each run has two epochs, and the second is measured: the changing
number has settled then.
"""
MEASURING = """\
## What measuring costs

Vectors of 16 numbers that are all there already, in batches of 32, with transforms that do nothing. What is left is the
loader itself, without its measurements (`observe=False`), with them, and with a trace.
"""
TENSORS = """\
## Fields of tensors

Tensors of 16 numbers and a label, in batches of 256. The compiled core finds the fields of a tensor in its memory
instead of asking torch for four attributes; *without* asks torch. Each figure comes from a process of its own.
"""


def _behind(build: Build) -> Build:
    """The transforms behind ``dataset[i]``, where no sample can be deferred between two of them."""

    def made(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        transforms = arguments.get("transforms", [])
        return build(Mapped(work, transforms), {**arguments, "transforms": []}, seed)

    return made


def _deferred(loader: Any) -> int:
    found: int = loader.report().run.stragglers.deferrals
    return found


def steps(after_s: float) -> dict[str, Contender]:
    """The loaders of a load whose samples are slow after this time."""
    slow: dict[str, Any] = {"stragglers": StragglerPolicy(after_s=after_s)}
    free: dict[str, Any] = {"in_order": False, **slow}

    behind = minato_as("minato, in_order=False, without deferral", **free)

    def defers(label: str, **own: Any) -> Contender:
        return replace(minato_as(label, **own), deferred=_deferred)

    return named(
        TORCH,
        TORCH_ANY_ORDER,
        minato_as("minato, prefetch_factor=2", prefetch_factor=2, **NONE_SLOW),
        minato_as("minato, window in bytes", **NONE_SLOW),
        minato_as("minato, early start", **slow),
        replace(behind, build=_behind(behind.build)),
        defers(DEFERS, **free),
        defers("minato, order='fast_first'", order="fast_first", **slow),
        defers("minato, in_order=False, auto", num_workers=AutoScale(max=MOST), **free),
    )


NONE_SLOW: dict[str, Any] = {"stragglers": StragglerPolicy(after_s=3600.0)}
DEFERS = "minato, in_order=False, deferral"
FIXED = {
    workers: minato_as(f"minato, {workers} workers", num_workers=workers)
    for workers in (1, 2, 4, 8, 12, 16)
}
CHANGING = minato_as("minato, auto", num_workers=AutoScale(start=2, max=MOST))
UNMEASURED = minato_as("minato, observe=False", observe=False)
TRACED = "minato, trace"


class Computing(SleepingWork):
    """Samples that need a core for their time."""

    def __getitem__(self, index: int) -> tuple[float, int]:
        compute(self.costs_s[index])
        return self.costs_s[index], index


def unchanged(sample: Any) -> Any:
    return sample


def _load(
    name: str,
    title: str,
    make: Callable[[int], Any],
    shape: tuple[int, int, int, int],
    after_s: float,
    **more: Any,
) -> tuple[Row, float]:
    """A row, and from when on its samples are slow; ``shape`` is samples, batch size, workers and epochs."""
    samples, batch_size, workers, epochs = shape
    row = Row(
        name,
        f"{title}; batch {batch_size}, {workers} workers, {epochs} epochs; slow after {1e3 * after_s:g} ms",
        make,
        *(samples, batch_size, workers, epochs),
        loaders=tuple(steps(after_s)),
        shuffle=True,
        persistent=True,
        **{"transforms": (SleepsShare(1 / 4),) * 4, **more},
    )
    return row, after_s


def _bimodal(count: int) -> SleepingTransforms:
    return SleepingTransforms(bimodal_costs_s(count, 0.005, 0.055, 5))


LOADS = (
    _load(
        "stragglers",
        "1000 samples of 2 ms, 2 % of them 150 ms",
        lambda count: SleepingTransforms(straggler_costs_s(count, 0.002, 0.150, 0.02)),
        (1000, 16, 4, 3),
        after_s=0.020,
    ),
    _load(
        "rare",
        "4000 samples of 1 ms, 1 % of them 201 ms",
        lambda count: SleepingTransforms(straggler_costs_s(count, 0.001, 0.201, 0.01)),
        (4000, 32, 4, 2),
        after_s=0.020,
    ),
    _load("bimodal", "600 samples of 5 ms, every fifth 55 ms", _bimodal, (600, 8, 8, 3), 0.010),
    _load(
        "balanced",
        "the same, and a consumer exactly as fast as the workers",
        _bimodal,
        (600, 8, 8, 3),
        after_s=0.010,
        pause_s=0.015 * 8 / 8,
    ),
    _load(
        "short-epochs",
        "96 log-normal samples, mean 20 ms, deviation 15 ms",
        lambda count: SleepingTransforms(lognormal_costs_s(count, 0.020, 0.75)),
        (96, 4, 8, 6),
        after_s=0.030,
    ),
    _load(
        "pictures",
        "400 images, a tenth of them 12 times as large; filter, flip, shrink",
        Pictures,
        (400, 8, 2, 3),
        after_s=0.010,
        transforms=(to_floats, blur, flip_at_random, shrink),
    ),
)


def _workers(
    name: str,
    title: str,
    make: Callable[[int], Any],
    shape: tuple[int, int, int, int],
    fixed: Sequence[int],
    pause_s: float = 0.0,
) -> Row:
    return Row(
        *(name, title, make, *shape),
        loaders=(TORCH.name, TORCH_ANY_ORDER.name, *(FIXED[n].name for n in fixed), CHANGING.name),
        persistent=True,
        pause_s=pause_s,
        skips_first_epoch=True,
    )


NUMBERS = (
    _workers(
        "sleeping",
        "samples sleep 40 ms, and the consumer takes what 12 workers make",
        lambda count: SleepingWork([0.040] * count),
        *((1200, 8, 12, 2), (2, 4, 8, 12, 16), 0.040 * 8 / 12),
    ),
    _workers(
        "computing",
        "samples need a core for 5 ms",
        lambda count: Computing([0.005] * count),
        *((1200, 8, record.usable_cores(), 2), (1, 2, 4, 8)),
    ),
    _workers(
        "consumer",
        "samples sleep 5 ms, and the consumer takes 80 ms for a batch",
        lambda count: SleepingWork([0.005] * count),
        *((400, 8, 1, 2), (1, 2, 4), 0.080),
    ),
)


def _measuring(name: str, workers: int) -> Row:
    return Row(
        name,
        f"16 numbers and a label, three transforms; batch 32, {workers} workers",
        StoredRows,
        *(64_000, 32, workers, 3),
        loaders=(TORCH.name, TORCH_ANY_ORDER.name, UNMEASURED.name, "minato", TRACED),
        unit="us/sample",
        persistent=bool(workers),
        skips_first_epoch=True,
        transforms=(unchanged,) * 3,
    )


OVERHEADS = (_measuring("measuring", 2), _measuring("measuring-inline", 0))
CONTENDERS = {**STANDARD, **named(*FIXED.values(), CHANGING, UNMEASURED)}


def tensor_table(samples: int, repeats: int, page: report.Page) -> str:
    lines = []
    for workers in (0, 2):
        found = page.turns(
            f"tensors, {workers} workers",
            ["with", "without"],
            repeats,
            lambda how, _, workers=workers: call(  # type: ignore[misc]
                "bench.workloads.tensors:tensor_us", how == "with", workers, samples
            ),
            "{:.2f} µs".format,
        )
        cells = [report.spread_text(each, 2) for each in found.values()]
        lines.append([str(workers), *cells, report.ratio_text(found["without"], found["with"])])
    head = ["workers", "with, µs per sample", "without, µs per sample", "without / with"]
    return report.table(head, lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns 1 where a load deferred no sample."""
    slow_s = {row.name: after_s for row, after_s in LOADS}
    groups = {MECHANISMS: [row for row, _ in LOADS], AUTO: NUMBERS, MEASURING: OVERHEADS}
    names = [*(row.name for rows in groups.values() for row in rows), "tensors"]
    options = report.Parser("ablation", __doc__, 3, rows=names).parse_args(arguments)
    repeats = options.repeats
    page = report.Page("ablation", options.out)
    page.add(HEAD.format(repeats=repeats))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tracing = minato_as(TRACED, observe=Observe(trace=f"{folder}/run.json"))
        others = {**CONTENDERS, **named(tracing)}
        for about, rows in groups.items():
            chosen = [row for row in rows if row.name in options.rows]
            if chosen:
                page.add(about)
            for row in chosen:
                contenders = steps(slow_s[row.name]) if row.name in slow_s else others
                sized = row.short() if options.short else row
                results += measure([sized], contenders, repeats, page.say)
                page.add(report.details(results[-1], contenders))
    if "tensors" in options.rows:
        samples = 2048 if options.short else 65536
        page.add(TENSORS, tensor_table(samples, repeats, page))
    page.finish()
    idle = [result.row.name for result in results if _defers_nothing(result)]
    if idle and not options.short:  # a smoke run is too short to judge by
        print(f"bench.ablation: no sample was deferred in {', '.join(idle)}", file=sys.stderr)
        return 1
    return 0


def _defers_nothing(result: RowResult) -> bool:
    return not all(trial.deferred for trial in result.trials.get(DEFERS, ()))


if __name__ == "__main__":
    report.program(main)
