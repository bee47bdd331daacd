"""What determinism promises, and what it costs: the same sequence under random delays, and throughput by order."""

from __future__ import annotations

import hashlib
import random
import time
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.macro.trial import WrongDeliveryError
from bench.macro.work import straggler_costs_s
from bench.papers.naps import Naps
from bench.papers.page import Section, Settings, prose
from bench.papers.trial import BATCH_ORDER, LOADERS, ROUND_ROBIN, build, check, timed

WORKERS, BATCH_SIZE = 12, 8
NAMES = (*LOADERS, ROUND_ROBIN, BATCH_ORDER)
RUNS, SHORT_RUNS = 5, 2
DELAYED, SHORT_DELAYED = 480, 48
DELAY_S = 0.004
SAMPLES, SHORT_SAMPLES = 1200, 96
MEAN_S = 0.010
USUAL_S, STRAGGLER_S, STRAGGLERS = 0.005, 0.105, 0.05
_SEQUENCE = """\
{runs} runs of {samples} samples with one seed, {workers} workers, batches of {batch}. Each read takes between 0
and {delay:g} ms, by chance that no seed governs, and each sample draws a random number. Number of different
results among the runs, by SHA-256: of the *sequence* (all batches in their order, with what was drawn), of the
*batches* (which samples are together, whatever the order), and of the *samples* (what each has drawn). A 1 in
italics is promised; the program fails if it is not kept. *As torch*: whether the first run's sequence is that
of torch in order.
"""
_THROUGHPUT = """\
*The price.* {samples} samples that sleep, {workers} workers, batches of {batch}. *Even*: {mean:g} ms each;
*uneven*: {usual:g} ms, {share:.0%} of them {straggler:g} ms, which is {mean:g} ms in the mean. The loop takes
batches at once, or (*balanced*) takes as long for a batch as the workers need for one in the mean, where order
matters most. Share of the bound, which is the work divided by workers; whole runs, start of the workers
included.
"""


class Digests(NamedTuple):
    """Hashes of what a run delivered.

    Attributes:
        sequence: All of it, in order.
        batches: Which samples are together.
        samples: What each of them has drawn.
    """

    sequence: str
    batches: str
    samples: str


PROMISED = {
    "torch": Digests._fields,
    "minato": Digests._fields,
    ROUND_ROBIN: Digests._fields,
    "torch, in_order=False": ("batches",),
    BATCH_ORDER: ("batches", "samples"),
    "minato, arrival": ("samples",),
}
"""What must be the same in each run."""
Batch = tuple[list[int], list[float]]
"""Indices, and what these samples have drawn."""


class Delayed(Dataset[tuple[int, torch.Tensor]]):
    """``(index, drawn)``; reading takes as long as chance will have it, and the draw is the loader's to govern."""

    def __init__(self, count: int, delay_s: float) -> None:
        self.count = count
        self.delay_s = delay_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        time.sleep(random.SystemRandom().uniform(0, self.delay_s))
        return index, torch.rand(())


def digests_of(batches: list[Batch]) -> Digests:
    """Hash what was delivered."""
    together = sorted(tuple(sorted(indices)) for indices, _ in batches)
    drawn = sorted(
        (index, value)
        for indices, values in batches
        for index, value in zip(indices, values, strict=True)
    )
    parts = (batches, together, drawn)
    return Digests(*(hashlib.sha256(repr(part).encode()).hexdigest() for part in parts))


def delivered(name: str, dataset: Delayed) -> Digests:
    """Run a loader once, with torch's seed fixed; each sample must come exactly once."""
    torch.manual_seed(0)
    order = torch.randperm(len(dataset)).tolist()
    batches: list[Batch] = []
    for index, drawn in build(name, dataset, [], order, batch_size=BATCH_SIZE, num_workers=WORKERS):
        batches.append((index.tolist(), drawn.tolist()))
    check(name, [index for indices, _ in batches for index in indices], order)
    return digests_of(batches)


def run(settings: Settings) -> Section:
    """Compare sequences, and time each order, in turn."""
    text = f"{sequences(settings)}\n{throughput(settings)}"
    return Section("Determinism and its price", text)


def sequences(settings: Settings) -> str:
    """The table of hashes."""
    runs, samples = (SHORT_RUNS, SHORT_DELAYED) if settings.short else (RUNS, DELAYED)
    dataset = Delayed(samples, DELAY_S)
    found = {name: [delivered(name, dataset) for _ in range(runs)] for name in NAMES}
    rows = []
    for name, results in found.items():
        counts = [str(count) for count in different(name, results)]
        promised = [field in PROMISED[name] for field in Digests._fields]
        marked = [f"*{n}*" if yes else n for n, yes in zip(counts, promised, strict=True)]
        same = results[0].sequence == found["torch"][0].sequence
        rows.append([name, *marked, "yes" if same else "no"])
    about = prose(
        _SEQUENCE,
        runs=runs,
        samples=samples,
        workers=WORKERS,
        batch=BATCH_SIZE,
        delay=1e3 * DELAY_S,
    )
    return f"{about}\n{table(['loader', *Digests._fields, 'as torch'], rows)}"


def different(name: str, results: list[Digests]) -> list[int]:
    """How many different hashes of each kind there are.

    Raises:
        WrongDeliveryError: The runs differ in what the loader promises.
    """
    counts = [len(set(each)) for each in zip(*results, strict=True)]
    for field, count in zip(Digests._fields, counts, strict=True):
        if count > 1 and field in PROMISED[name]:
            raise WrongDeliveryError(f"{name}: {count} different {field} in {len(results)} runs")
    return counts


def throughput(settings: Settings) -> str:
    """The table of times."""
    samples = SHORT_SAMPLES if settings.short else SAMPLES
    costs_s = {
        "even": [MEAN_S] * samples,
        "uneven": straggler_costs_s(samples, USUAL_S, STRAGGLER_S, STRAGGLERS),
    }
    step_s = MEAN_S * BATCH_SIZE / WORKERS
    loads = {
        f"{kind}{', balanced' if step else ''}": (Naps(costs), step)
        for kind, costs in costs_s.items()
        for step in (0.0, step_s)
    }
    found: dict[tuple[str, str], list[float]] = {}
    for repeat in range(settings.repeats):
        turn = repeat % len(NAMES)
        for name in NAMES[turn:] + NAMES[:turn]:
            for load, (naps, step) in loads.items():
                share = sum(naps.costs_s) / WORKERS / _whole_s(name, naps, step)
                found.setdefault((name, load), []).append(share)
    rows = [
        [name, *(spread_text(Spread.of(found[name, load]), 2) for load in loads)] for name in NAMES
    ]
    about = prose(
        _THROUGHPUT,
        samples=samples,
        workers=WORKERS,
        batch=BATCH_SIZE,
        mean=1e3 * MEAN_S,
        usual=1e3 * USUAL_S,
        share=STRAGGLERS,
        straggler=1e3 * STRAGGLER_S,
    )
    return f"{about}\n{table(['loader', *loads], rows)}"


def _whole_s(name: str, naps: Naps, step_s: float) -> float:
    order = range(len(naps))
    return timed(name, naps, [], order, step_s, batch_size=BATCH_SIZE, num_workers=WORKERS).whole_s
