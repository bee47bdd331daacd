"""What each mechanism against slow samples gains, what "auto" workers find, and what measuring costs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness import record, report
from bench.harness.datasets import (
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
from bench.harness.loaders import (
    STANDARD,
    TORCH,
    TORCH_ANY_ORDER,
    Build,
    Contender,
    minato_loader,
    named,
)
from bench.harness.suite import Row, measure
from bench.workloads.mapped import Mapped
from minato import AutoScale

MOST = 16
PHOTOGRAPHS, TIMES, SIDE = "photographs", 2, 480
HEAD = """\
# Ablation

Written by `python -m bench.ablation`. All loaders of a table get the same dataset object, transforms and, unless their
name says otherwise, number of workers; everything else stays at its default. Loaders take turns; every sample is
checked. Figures are medians of {repeats} runs, with the minimum and maximum in brackets; start of the workers
included. *Ideal*: all work divided by the workers, or the consumer's own time if that is longer.
"""
MECHANISMS = """\
## Mechanisms against slow samples

`minato` alone is the default: strict order, as many batches ahead as the memory budget allows; `prefetch_factor=2`
limits it to as many as torch prepares. Deferral needs `transforms=`: without it they run behind `dataset[i]`.
"""
AUTO = """\
## Fixed and changing numbers of workers

`auto` begins with 2 workers and may use up to {most}. Each run has two epochs, and the second is measured: the changing
number has settled then.
"""
MEASURING = """\
## What measuring costs

Vectors of 16 numbers that are all there already, in batches of 32, with transforms that do nothing: what is left is the
loader itself, without its measurements (`stats=False`), with them, and with `trace=`.
"""


def _behind(**own: Any) -> Build:
    """minato with the transforms behind ``dataset[i]``, where no sample can be deferred between two of them."""
    build = minato_loader(**own)

    def made(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        transforms = arguments.get("transforms", [])
        return build(Mapped(work, transforms), {**arguments, "transforms": []}, seed)

    return made


def _minato(label: str, keeps_order: bool, build: Build) -> Contender:
    return Contender(label, label, build, keeps_order)


ARRIVAL: dict[str, Any] = {"in_order": False}
STEPS = named(
    TORCH,
    TORCH_ANY_ORDER,
    _minato("minato, prefetch_factor=2", True, minato_loader(prefetch_factor=2)),
    STANDARD["minato"],
    _minato("minato, in_order=False, without deferral", False, _behind(**ARRIVAL)),
    STANDARD["minato-any-order"],
    _minato("minato, order='fast_first'", False, minato_loader(order="fast_first")),
    _minato(
        "minato, in_order=False, auto",
        False,
        minato_loader(**ARRIVAL, num_workers=AutoScale(max=MOST)),
    ),
)
FIXED = {
    workers: _minato(f"minato, {workers} workers", True, minato_loader(num_workers=workers))
    for workers in (1, 2, 4, 8, 12, 16)
}
CHANGING = _minato("minato, auto", True, minato_loader(num_workers=AutoScale(start=2, max=MOST)))
UNMEASURED = _minato("minato, stats=False", True, minato_loader(stats=False))
TRACED = "minato, trace="


class Computing(SleepingWork):
    """Samples that need a core for their time."""

    def __getitem__(self, index: int) -> tuple[float, int]:
        compute(self.costs_s[index])
        return self.costs_s[index], index


class Corner:
    """Cuts a picture's corner off, so that all are of one size, and gives its key beside it."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, picture: Any) -> Any:
        return picture.image[:, : self.side, : self.side].clone(), picture.key


def unchanged(sample: Any) -> Any:
    """A transform that does nothing."""
    return sample


def _load(
    name: str,
    title: str,
    make: Callable[[int], Any],
    shape: tuple[int, int, int, int],
    **more: Any,
) -> Row:
    """A row of mechanisms; ``shape`` is samples, batch size, workers and epochs."""
    samples, batch_size, workers, epochs = shape
    more = {"transforms": (SleepsShare(1 / 4),) * 4, **more}
    return Row(
        name=name,
        title=f"{title}; batch {batch_size}, {workers} workers, {epochs} epochs",
        make=make,
        samples=samples,
        short_samples=samples // 10,
        batch_size=batch_size,
        workers=workers,
        epochs=epochs,
        loaders=tuple(STEPS),
        shuffle=True,
        persistent=True,
        **more,
    )


def _bimodal(count: int) -> SleepingTransforms:
    return SleepingTransforms(bimodal_costs_s(count, 0.005, 0.055, 5))


def _photographs() -> tuple[Row, ...]:
    """Real photographs; nothing while ``make data`` has not fetched them."""
    folder = record.ROOT / "build" / "data" / PHOTOGRAPHS
    if not folder.is_dir():
        print(f"no {PHOTOGRAPHS}: 'make data' fetches them", file=sys.stderr)
        return ()
    from bench.workloads.detection import Photographs, detection_chain  # needs Pillow

    count = len(Photographs(folder))
    return (
        _load(
            PHOTOGRAPHS,
            f"{count} photographs, each {TIMES} times: decode, resize for Mask R-CNN, flip, to tensor, normalize, cut",
            lambda samples: Photographs(folder, samples),
            (TIMES * count, 4, 2, 2),
            transforms=(*detection_chain(), Corner(SIDE)),
        ),
    )


LOADS = (
    _load(
        "stragglers",
        "1000 samples of 2 ms, 2 % of them 150 ms",
        lambda count: SleepingTransforms(straggler_costs_s(count, 0.002, 0.150, 0.02)),
        (1000, 16, 4, 3),
    ),
    _load(
        "rare",
        "4000 samples of 1 ms, 1 % of them 201 ms",
        lambda count: SleepingTransforms(straggler_costs_s(count, 0.001, 0.201, 0.01)),
        (4000, 32, 4, 2),
    ),
    _load("bimodal", "600 samples of 5 ms, every fifth 55 ms", _bimodal, (600, 8, 8, 3)),
    _load(
        "balanced",
        "the same, and a consumer exactly as fast as the workers",
        _bimodal,
        (600, 8, 8, 3),
        pause_s=0.015 * 8 / 8,
    ),
    _load(
        "short-epochs",
        "96 log-normal samples, mean 20 ms, deviation 15 ms",
        lambda count: SleepingTransforms(lognormal_costs_s(count, 0.020, 0.75)),
        (96, 4, 8, 6),
    ),
    _load(
        "pictures",
        "400 images, a tenth of them 12 times as large; filter, flip, shrink",
        Pictures,
        (400, 8, 2, 3),
        transforms=(to_floats, blur, flip_at_random, shrink),
    ),
)


def _workers(
    name: str, make: Callable[[int], Any], samples: int, fixed: Sequence[int], **more: Any
) -> Row:
    return Row(
        name=name,
        make=make,
        samples=samples,
        short_samples=samples // 20,
        batch_size=8,
        epochs=2,
        loaders=(TORCH.name, TORCH_ANY_ORDER.name, *(FIXED[n].name for n in fixed), CHANGING.name),
        persistent=True,
        skips_first_epoch=True,
        **more,
    )


NUMBERS = (
    _workers(
        "sleeping",
        lambda count: SleepingWork([0.040] * count),
        1200,
        (2, 4, 8, 12, 16),
        title="samples sleep 40 ms, and the consumer takes what 12 workers make",
        workers=12,
        pause_s=0.040 * 8 / 12,
    ),
    _workers(
        "computing",
        lambda count: Computing([0.005] * count),
        1200,
        (1, 2, 4, 8),
        title="samples need a core for 5 ms",
        workers=record.usable_cores(),
    ),
    _workers(
        "consumer",
        lambda count: SleepingWork([0.005] * count),
        400,
        (1, 2, 4),
        title="samples sleep 5 ms, and the consumer takes 80 ms for a batch",
        workers=1,
        pause_s=0.080,
    ),
)


def _measuring(name: str, workers: int) -> Row:
    return Row(
        name=name,
        title=f"16 numbers and a label, three transforms; batch 32, {workers} workers",
        make=lambda count: StoredRows(width=16, length=count, as_floats=False),
        samples=64_000,
        short_samples=640,
        batch_size=32,
        workers=workers,
        epochs=3,
        loaders=(TORCH.name, TORCH_ANY_ORDER.name, UNMEASURED.name, "minato", TRACED),
        unit="us/sample",
        persistent=bool(workers),
        skips_first_epoch=True,
        transforms=(unchanged,) * 3,
    )


OVERHEADS = (_measuring("measuring", 2), _measuring("measuring-inline", 0))
CONTENDERS = {**STEPS, **named(*FIXED.values(), CHANGING, UNMEASURED)}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    groups = {MECHANISMS: (*LOADS, *_photographs()), AUTO: NUMBERS, MEASURING: OVERHEADS}
    names = [row.name for rows in groups.values() for row in rows]
    options = report.parser("bench.ablation", __doc__ or "", 3, names).parse_args(arguments)
    repeats = report.repeats_of(options)
    page = report.Page("ablation", options.out)
    page.add(HEAD.format(repeats=repeats))
    with tempfile.TemporaryDirectory() as folder:
        tracing = _minato(TRACED, True, minato_loader(trace=f"{folder}/run.json"))
        contenders = {**CONTENDERS, **named(tracing)}
        for about, rows in groups.items():
            chosen = [row for row in rows if row.name in options.rows]
            chosen = [row.short() if options.short else row for row in chosen]
            if chosen:
                page.add(about.format(most=MOST))
                results = measure(chosen, contenders, repeats, page.say)
                page.add(*(report.details(result, contenders) for result in results))
    page.finish()
    return 0


if __name__ == "__main__":
    report.program(main)
