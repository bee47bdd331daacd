"""Training with several consumers: figure 9, with processes here and in virtual time at the paper's size."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.in_step import run_ranks, wait_for_all
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.naps import SCALED, Naps
from bench.papers.page import COLOURS, Section, Settings
from bench.papers.trial import LOADERS, build, check
from bench.simulate.trials import CONTENDERS, run_trial
from bench.simulate.workloads import TABLE_2

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS = (1, 2, 4)
WORKERS = 6
"""Of each rank."""
SHARED = "minato, one loader for all"
VIRTUAL_RANKS = (1, 2, 4, 8)
VIRTUAL_WORKERS = 12
_VIRTUAL_STEPS, _SHORT_STEPS = 240, 48
_SIMULATED = ("torch", "torch, in_order=False", "minato strict", "minato arrival")
_TEXT = """\
*Here*: one training process for each rank, {workers} workers each, which sleep as in the segmentation workload
scaled by {scale:g}; the ranks share the samples and wait for each other before each step, as data-parallel training
does. *One loader for all* is `loader.consumers(n)`: threads of one process that share all workers and take batches
as they come, without that wait. Seconds of the whole run. Ideal is the first bound divided by the number of ranks.
"""
_VIRTUAL = """\
*In virtual time* (simulated, nothing was measured): {workers} workers for each rank, costs and steps unscaled;
seconds for {steps} steps of one rank, shared by the ranks.
"""


def run(settings: Settings) -> Section:
    """Time the ranks here, and simulate more of them."""
    scaled = SCALED[0]
    naps = scaled.naps(scaled.samples // 4 if settings.short else scaled.samples * 3 // 2)
    found: dict[tuple[str, int], list[float]] = {}
    names = [*LOADERS, SHARED]
    for repeat in range(settings.repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            for ranks in RANKS:
                time_of = shared_s if name == SHARED else ranks_s
                taken_s = time_of(name, naps, ranks, scaled.step_s, scaled.workload.batch_size)
                found.setdefault((name, ranks), []).append(taken_s)
    rows = [["*bound*", *(f"{scaled.bound_s(naps, WORKERS) / ranks:.2f}" for ranks in RANKS)]]
    rows += [[n, *(spread_text(Spread.of(found[n, r]), 2) for r in RANKS)] for n in names]
    head = ["loader", *(f"{ranks} ranks" if ranks > 1 else "1 rank" for ranks in RANKS)]
    text = _TEXT.format(workers=WORKERS, scale=scaled.scale)
    parts = [text, table(head, rows), virtual(settings.short)]

    def draw(axes: Axes) -> None:
        for name in LOADERS:
            medians = [statistics.median(found[name, ranks]) for ranks in RANKS]
            axes.plot(RANKS, medians, marker="o", color=COLOURS[name], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("ranks (processes on this machine)")
        axes.set_ylabel("s")
        axes.set_title(f"{scaled.workload.name}: time of training")
        axes.legend(fontsize=6, frameon=False)

    return Section("Scaling over consumers (figure 9)", "\n".join(parts), (draw,))


def ranks_s(name: str, naps: Naps, ranks: int, step_s: float, batch_size: int) -> float:
    """Seconds that a training of so many processes takes; each sample must come once, in one of them."""
    order = np.random.default_rng(0).permutation(len(naps)).tolist()
    shares = [order[rank::ranks] for rank in range(ranks)]
    found = run_ranks(_rank, [(share, name, naps, step_s, batch_size) for share in shares])
    for share, (came, _) in zip(shares, found, strict=True):
        check(name, came, share)
    return max(taken_s for _, taken_s in found)


def _rank(
    share: list[int], name: str, naps: Naps, step_s: float, batch_size: int
) -> tuple[list[int], float]:
    wait_for_all()
    begun_s = time.perf_counter()
    came: list[int] = []
    for batch in build(name, naps, [], share, batch_size=batch_size, num_workers=WORKERS):
        came += batch[0].tolist()
        wait_for_all()
        time.sleep(step_s)
    return came, time.perf_counter() - begun_s


def shared_s(name: str, naps: Naps, ranks: int, step_s: float, batch_size: int) -> float:
    """The same with one loader whose batches several threads take."""
    order = np.random.default_rng(0).permutation(len(naps)).tolist()
    begun_s = time.perf_counter()
    loader = build("minato", naps, [], order, batch_size=batch_size, num_workers=WORKERS * ranks)
    came: list[int] = []

    def consume(consumer: Any) -> None:
        for batch in consumer:
            came.extend(batch[0].tolist())
            time.sleep(step_s)

    threads = [threading.Thread(target=consume, args=(each,)) for each in loader.consumers(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check("", came, order)
    return time.perf_counter() - begun_s


def virtual(short: bool) -> str:
    """The table of the simulation."""
    steps = _SHORT_STEPS if short else _VIRTUAL_STEPS
    rows = []
    for workload in TABLE_2:
        for name in _SIMULATED:
            seconds = [
                run_trial(
                    CONTENDERS[name], workload, VIRTUAL_WORKERS, steps // ranks, ranks=ranks
                ).duration_s
                for ranks in VIRTUAL_RANKS
            ]
            rows.append([workload.name, name, *(f"{each:.1f}" for each in seconds)])
    head = ["workload", "loader", *(f"{ranks}" for ranks in VIRTUAL_RANKS)]
    return f"{_VIRTUAL.format(workers=VIRTUAL_WORKERS, steps=steps)}\n{table(head, rows)}"
