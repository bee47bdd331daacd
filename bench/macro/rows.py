"""The rows of the benchmark: which work, in what batches, which loaders, and what is aimed at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bench.macro.work import (
    SleepingWork,
    StoredRows,
    StoredTensors,
    Work,
    bimodal_costs_s,
    lognormal_costs_s,
    straggler_costs_s,
)

MAPPED_ORDERS = ("torch", "torch-any-order", "minato", "minato-any-order")
AND_BARE = ("bare", *MAPPED_ORDERS)
SEEDED_TOO = (*AND_BARE, "minato-seed")
INLINE = ("torch", "minato")

Quantity = Literal["share of the bound", "ratio to torch", "first batch ms", "own us/sample"]
Unit = Literal["s/epoch", "GB/s", "us/sample"]


@dataclass(frozen=True)
class Goal:
    """A limit that one loader's median is held to.

    Args:
        loader: whose figure; a name from ``bench.macro.loaders``.
        quantity: which figure.
        limit: the value to reach: a lower limit of shares and ratios, an upper limit of times.
    """

    loader: str
    quantity: Quantity
    limit: float

    def holds(self, value: float) -> bool:
        is_time = self.quantity in ("first batch ms", "own us/sample")
        return value <= self.limit if is_time else value >= self.limit

    def __str__(self) -> str:
        sign = "≤" if self.quantity in ("first batch ms", "own us/sample") else "≥"
        return f"{self.quantity} {sign} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One workload, the same for every loader.

    Args:
        name: what ``--rows`` calls it.
        title: what it is, for the report.
        make: builds the dataset of a given length.
        samples: samples in one epoch.
        short_samples: the same in a smoke run.
        batch_size: samples in one batch.
        workers: worker processes; 0 means in line.
        epochs: epochs that one run iterates over with one loader.
        loaders: names of the loaders that take part.
        unit: how the report gives the time.
        shuffle: whether the order is drawn anew in every epoch.
        persistent: whether workers live from one epoch to the next.
        pause_s: how long the consumer sleeps on each batch, in seconds.
        reads: whether the consumer reads every byte; otherwise it reads the labels only.
        skips_first_epoch: whether the figure is taken from the epochs after the first.
        goals: what minato is held to.
    """

    name: str
    title: str
    make: Callable[[int], Work]
    samples: int
    short_samples: int
    batch_size: int
    workers: int
    epochs: int
    loaders: tuple[str, ...] = MAPPED_ORDERS
    unit: Unit = "s/epoch"
    shuffle: bool = False
    persistent: bool = False
    pause_s: float = 0.0
    reads: bool = False
    skips_first_epoch: bool = False
    goals: tuple[Goal, ...] = ()

    def short(self) -> Row:
        """Return this row in its smoke-test size, without goals: it is too short to judge by."""
        epochs = min(self.epochs, 2)
        return replace(self, samples=self.short_samples, epochs=epochs, goals=())


def _stragglers(count: int) -> Work:
    return SleepingWork(straggler_costs_s(count, usual_s=0.001, straggler_s=0.201, share=0.01))


def _lognormal(count: int) -> Work:
    return SleepingWork(lognormal_costs_s(count, mean_s=0.010, relative_deviation=0.39))


def _bimodal(heavy_s: float) -> Callable[[int], Work]:
    return lambda count: SleepingWork(bimodal_costs_s(count, 0.005, heavy_s, every=5))


def _images(count: int) -> Work:
    return StoredTensors((3, 224, 224), pool_size=128, length=count)


def _patches(count: int) -> Work:
    return StoredTensors((3, 64, 64), pool_size=1024, length=count)


def _table(count: int) -> Work:
    return StoredRows(width=16, length=count, as_floats=True)


def _vectors(count: int) -> Work:
    return StoredRows(width=16, length=count, as_floats=False)


STRAGGLERS = Row(
    name="stragglers",
    title="4000 samples of 1 ms, 1 % of them 201 ms; batch 32, 4 workers",
    make=_stragglers,
    samples=4000,
    short_samples=400,
    batch_size=32,
    workers=4,
    epochs=1,
    loaders=AND_BARE,
    goals=(
        Goal("minato", "share of the bound", 0.90),
        Goal("minato-any-order", "share of the bound", 0.95),
    ),
)
LOGNORMAL = Row(
    name="lognormal",
    title="168 log-normal samples, mean 10 ms, deviation 3.9 ms; batch 3, 12 workers, 10 epochs",
    make=_lognormal,
    samples=168,
    short_samples=168,
    batch_size=3,
    workers=12,
    epochs=10,
    loaders=SEEDED_TOO,
    shuffle=True,
    persistent=True,
    goals=(Goal("minato-seed", "share of the bound", 0.93),),
)
BALANCED = replace(
    LOGNORMAL,
    name="balanced",
    title="the same, and a consumer exactly as fast as the workers",
    pause_s=0.010 * 3 / 12,
    goals=(Goal("minato-seed", "share of the bound", 0.92),),
)
BIMODAL_35 = Row(
    name="bimodal-35",
    title="5 ms, every fifth sample 35 ms; batch 24, 12 workers, 2 epochs",
    make=_bimodal(0.035),
    samples=2400,
    short_samples=240,
    batch_size=24,
    workers=12,
    epochs=2,
    loaders=AND_BARE,
    goals=(
        Goal("minato", "share of the bound", 0.95),
        Goal("minato", "first batch ms", 60),
        Goal("minato-any-order", "share of the bound", 0.95),
        Goal("minato-any-order", "first batch ms", 60),
    ),
)
BIMODAL_105 = replace(
    BIMODAL_35,
    name="bimodal-105",
    title="5 ms, every fifth sample 105 ms; batch 24, 12 workers, 2 epochs",
    make=_bimodal(0.105),
    samples=1200,
    short_samples=120,
    goals=(
        Goal("minato", "share of the bound", 0.95),
        Goal("minato", "first batch ms", 150),
        Goal("minato-any-order", "share of the bound", 0.95),
        Goal("minato-any-order", "first batch ms", 150),
    ),
)
IMAGE = Row(
    name="image",
    title="float32 (3, 224, 224) from memory; batch 32, 2 workers",
    make=_images,
    samples=1024,
    short_samples=128,
    batch_size=32,
    workers=2,
    epochs=4,
    unit="GB/s",
    persistent=True,
    skips_first_epoch=True,
    goals=(
        Goal("minato", "ratio to torch", 6.0),
        Goal("minato", "share of the bound", 0.5),
    ),
)
IMAGE_READ = replace(
    IMAGE,
    name="image-read",
    title="the same, and a consumer that reads every byte",
    reads=True,
    goals=(),
)
PATCH = replace(
    IMAGE,
    name="patch",
    title="float32 (3, 64, 64) from memory; batch 64, 2 workers",
    make=_patches,
    samples=8192,
    short_samples=1024,
    batch_size=64,
    goals=(Goal("minato", "ratio to torch", 6.0),),
)
TABULAR = replace(
    IMAGE,
    name="tabular",
    title="16 Python floats and a label; batch 256, 2 workers",
    make=_table,
    samples=65536,
    short_samples=4096,
    batch_size=256,
    unit="us/sample",
    goals=(
        Goal("minato", "ratio to torch", 6.0),
        Goal("minato", "own us/sample", 2.0),
    ),
)
VECTOR = replace(
    TABULAR,
    name="vector",
    title="a NumPy vector of 16 floats and a label; batch 256, 2 workers",
    make=_vectors,
    goals=(),
)


def _inline(row: Row) -> Row:
    return replace(
        row,
        name=f"{row.name}-inline",
        title=row.title.replace("2 workers", "in line (num_workers=0)"),
        workers=0,
        persistent=False,
        loaders=INLINE,
        goals=(Goal("minato", "ratio to torch", 1.5),),
    )


ALL_ROWS = (
    STRAGGLERS,
    LOGNORMAL,
    BALANCED,
    BIMODAL_35,
    BIMODAL_105,
    IMAGE,
    IMAGE_READ,
    PATCH,
    TABULAR,
    VECTOR,
    _inline(IMAGE),
    _inline(PATCH),
    _inline(TABULAR),
    _inline(VECTOR),
)
