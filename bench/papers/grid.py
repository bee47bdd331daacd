"""Workers by reads under way in each, on data that are far away: the ConcurrentDataloader paper's grid."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.far import ABOUT, Pictures, bound_per_s, far_store
from bench.papers.page import COLOURS, Section, Settings, prose
from bench.papers.trial import timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKERS, SHORT_WORKERS = (1, 2, 4, 8, 16), (1, 2)
READS, SHORT_READS = (1, 4, 16), (1, 4)
BATCH_SIZE = 8
RUN_S, SHORT_RUN_S = 1.5, 0.1
"""Each run has as many samples as the bound brings in this time."""
_TEXT = """\
{about}. Theirs (table 6): 40 batches of 64 from S3, up to 128 workers with up to 32 fetchers each; here batches
of {batch}, up to an eighth of the workers and half of the fetchers. *Reads* is minato's `fetch_concurrency`, in
strict order; torch reads one sample after the other in each worker. *Bound*: reads of all workers by the round
trip, or what the link passes. A run has as many samples as the bound brings in {run_s:g} s, but at least
{least} batches a worker; the start of the workers and of their connections counts.
"""


class Cell(NamedTuple):
    """One loader in one place of the grid."""

    workers: int
    name: str
    reads: int

    @property
    def bound_per_s(self) -> float:
        """Samples per second at most."""
        return bound_per_s(self.workers * self.reads)


def cells(settings: Settings) -> list[Cell]:
    """The grid."""
    found = []
    for workers in SHORT_WORKERS if settings.short else WORKERS:
        found += [Cell(workers, name, 1) for name in ("torch", "torch, in_order=False")]
        reads = SHORT_READS if settings.short else READS
        found += [Cell(workers, "minato", each) for each in reads]
    return found


def samples_of(in_flight: int, workers: int, run_s: float, least: int) -> int:
    """What the bound brings in a time, in whole batches, and at least so many of them for each worker."""
    batches = math.ceil(bound_per_s(in_flight) * run_s / BATCH_SIZE)
    return BATCH_SIZE * max(batches, least * workers)


def run(settings: Settings) -> Section:
    """Time each cell, in turn."""
    grid = cells(settings)
    run_s, least = (SHORT_RUN_S, 1) if settings.short else (RUN_S, 4)
    found: dict[Cell, list[float]] = {cell: [] for cell in grid}
    with far_store() as port:
        for repeat in range(settings.repeats):
            turn = repeat % len(grid)
            for cell in grid[turn:] + grid[:turn]:
                count = samples_of(cell.workers * cell.reads, cell.workers, run_s, least)
                found[cell].append(_per_s(cell, port, count))
    rows = [_row(cell, found[cell]) for cell in grid]
    head = ["workers", "loader", "reads", "bound, samples/s", "samples/s", "of the bound"]
    text = prose(_TEXT, about=ABOUT, batch=BATCH_SIZE, run_s=run_s, least=least)

    def draw(axes: Axes) -> None:
        for name in ("torch", "torch, in_order=False", "minato"):
            own = [cell for cell in grid if cell.name == name]
            under_way = [cell.workers * cell.reads for cell in own]
            rates = [statistics.median(found[cell]) for cell in own]
            axes.plot(under_way, rates, "o", color=COLOURS[name], label=name, markersize=4)
        under_way = sorted({cell.workers * cell.reads for cell in grid})
        axes.plot(under_way, [bound_per_s(each) for each in under_way], "k:", label="bound")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("reads under way in all workers")
        axes.set_ylabel("samples/s")
        axes.set_title("Workers × reads in each")
        axes.legend(fontsize=6, frameon=False)

    title = "Workers by fetchers (ConcurrentDataloader, figure 10)"
    return Section(title, f"{text}\n{table(head, rows)}", (draw,))


def _per_s(cell: Cell, port: int, count: int) -> float:
    options: dict[str, Any] = {"fetch_concurrency": cell.reads} if cell.reads > 1 else {}
    one = timed(
        cell.name,
        Pictures(port, count),
        [],
        range(count),
        0.0,
        batch_size=BATCH_SIZE,
        num_workers=cell.workers,
        **options,
    )
    return count / one.whole_s


def _row(cell: Cell, rates: list[float]) -> list[str]:
    spread = Spread.of(rates)
    share = 100 * spread.median / cell.bound_per_s
    numbers = [f"{cell.bound_per_s:.0f}", spread_text(spread, 0), f"{share:.0f} %"]
    return [f"{cell.workers}", cell.name, f"{cell.reads}", *numbers]
