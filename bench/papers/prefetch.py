"""Whether preparing more batches ahead helps torch's loader: figure 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.naps import SCALED, Scaled
from bench.papers.page import Section, Settings
from bench.papers.trial import timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACTORS = (2, 4, 8, 16)
WORKERS = 12
_TEXT = """\
Seconds of an epoch, start of the {workers} workers included, of samples that sleep as long as the paper's table 2
has it, scaled down; the loop sleeps for each batch, too. All loaders get the samples in the same shuffled order.
minato prepares as many batches as its budget of memory allows, whatever the factor; in batches of 3 samples of 10
MB, as the paper's segmentation has them, torch's factor of 16 means {held:.1f} GB.
"""
Found = dict[str, dict[str, Spread]]


def run(settings: Settings) -> Section:
    """Time torch with each factor, and minato, in turn."""
    contenders: dict[str, tuple[str, dict[str, int]]] = {
        **{f"torch, {factor}": ("torch", {"prefetch_factor": factor}) for factor in FACTORS},
        "torch, in_order=False": ("torch, in_order=False", {}),
        "minato": ("minato", {}),
    }
    labels = [*contenders]
    found: Found = {}
    rows = []
    for scaled in SCALED:
        naps = scaled.naps(scaled.samples // 8 if settings.short else None)
        order = np.random.default_rng(0).permutation(len(naps)).tolist()
        taken: dict[str, list[float]] = {}
        for repeat in range(settings.repeats):
            turn = repeat % len(labels)
            for label in labels[turn:] + labels[:turn]:
                name, options = contenders[label]
                one = timed(
                    name,
                    naps,
                    [],
                    order,
                    scaled.step_s,
                    batch_size=scaled.workload.batch_size,
                    num_workers=WORKERS,
                    **options,
                )
                taken.setdefault(label, []).append(one.whole_s)
        found[scaled.workload.name] = {label: Spread.of(taken[label]) for label in labels}
        rows.append(_row(scaled, scaled.bound_s(naps, WORKERS), found[scaled.workload.name]))
    text = _TEXT.format(workers=WORKERS, held=WORKERS * 16 * 3 * 10 / 1000)
    lines = table(["workload", "bound", *labels], rows)

    def draw(axes: Axes) -> None:
        for scaled in SCALED:
            by_name = found[scaled.workload.name]
            seconds = [by_name[f"torch, {factor}"].median for factor in FACTORS]
            (line,) = axes.plot(
                FACTORS, seconds, marker="o", label=f"torch, {scaled.workload.name}"
            )
            axes.axhline(
                by_name["minato"].median, linestyle="--", color=line.get_color(), linewidth=1
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(FACTORS, [str(factor) for factor in FACTORS])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("prefetch_factor")
        axes.set_ylabel("s per epoch")
        axes.set_title("Prefetching; dashed: minato")
        axes.legend(fontsize=6, frameon=False)

    return Section("Prefetch depth (figure 4)", f"{text}\n{lines}", (draw,))


def _row(scaled: Scaled, bound_s: float, by_name: dict[str, Spread]) -> list[str]:
    cells = [spread_text(spread, 2) for spread in by_name.values()]
    return [f"{scaled.workload.name}, × {scaled.scale:g}", f"{bound_s:.2f}", *cells]
