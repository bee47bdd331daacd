"""Rows of a benchmark, measured with all loaders in turn and condensed into figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from bench.harness.datasets import Ideal, Mapped, Work, measured_ideal
from bench.harness.loaders import STANDARD, Contender
from bench.harness.record import usable_cores
from bench.harness.trial import Consumer, Run, Trial, WrongDeliveryError, second

T = TypeVar("T")
BASELINE = "torch"
Unit = Literal["s/epoch", "GB/s", "us/sample", "samples/s"]
SHORT_BATCHES, SHORT_EPOCHS = 4, 2
"""Of a smoke run, at the most."""


@dataclass(frozen=True)
class Row:
    """One workload, the same for every loader.

    Args:
        make: builds the dataset of a given length.
        samples, batch_size, workers, epochs: written ``*(1024, 32, 2, 4)``.
        loaders: names of the loaders that take part.
        pause_s: time that the consumer sleeps for each batch.
        reads: whether the consumer reads every byte; otherwise it reads the labels only.
        skips_first_epoch: whether the figure is taken from the epochs after the first.
        transforms: applied to each sample; torch's loaders apply them behind ``dataset[i]``.
    """

    name: str
    title: str
    make: Callable[[int], Work]
    samples: int
    batch_size: int
    workers: int
    epochs: int
    loaders: tuple[str, ...] = tuple(STANDARD)
    unit: Unit = "s/epoch"
    shuffle: bool = False
    persistent: bool = False
    pause_s: float = 0.0
    reads: bool = False
    skips_first_epoch: bool = False
    transforms: tuple[Callable[[Any], Any], ...] = ()

    def short(self) -> Row:
        """Return this row in its smoke-test size: too short to judge by."""
        samples = min(self.samples, SHORT_BATCHES * self.batch_size)
        return replace(self, samples=samples, epochs=min(self.epochs, SHORT_EPOCHS))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every loader; everything else stays at its default."""
        return {
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "num_workers": self.workers,
            "persistent_workers": self.persistent,
            **({"transforms": list(self.transforms)} if self.transforms else {}),
        }


@dataclass(frozen=True)
class Spread:
    """Least, middle and greatest value over the repeats."""

    least: float
    median: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))

    def scaled(self, factor: float) -> Spread:
        return Spread(factor * self.least, factor * self.median, factor * self.greatest)


@dataclass(frozen=True)
class Figures:
    """The figures of one loader on one row.

    Args:
        efficiency: ideal time divided by the measured one; 1 is the ideal itself.
        later_efficiency: the same for the epochs after the first alone.
        ratio: speed relative to torch in order, repeat by repeat.
        first_batch_ms: time from ``iter()`` to the first batch with cold workers.
        waiting: share of the whole run that the consumer spent waiting for batches.
        own_us: time per sample less the ideal of ``dataset[i]``.
    """

    efficiency: Spread
    later_efficiency: Spread | None
    ratio: Spread | None
    speed: Spread
    whole_s: Spread
    first_batch_ms: Spread
    waiting: Spread
    wait_p50_ms: Spread
    wait_p99_ms: Spread
    own_us: Spread | None
    deferred: Spread | None


@dataclass
class RowResult:
    """Everything measured on one row: one ideal and one trial of each loader per repeat."""

    row: Row
    epoch_bytes: int = 0
    ideals: list[Ideal] = field(default_factory=list)
    trials: dict[str, list[Trial]] = field(default_factory=dict)

    def figures(self, loader: str) -> Figures:
        trials, row = self.trials[loader], self.row
        counts = [trial.deferred for trial in trials if trial.deferred is not None]
        epochs_s = [trial.epoch_s(row.skips_first_epoch) for trial in trials]
        return Figures(
            efficiency=Spread.of(ratios([ideal.epoch_s for ideal in self.ideals], epochs_s)),
            later_efficiency=self._later(trials),
            ratio=self._ratio(epochs_s),
            speed=Spread.of([self._speed(epoch_s) for epoch_s in epochs_s]),
            whole_s=Spread.of([trial.whole_s for trial in trials]),
            first_batch_ms=Spread.of([1e3 * trial.first_batch_s for trial in trials]),
            waiting=Spread.of([sum(trial.waits_s) / trial.whole_s for trial in trials]),
            wait_p50_ms=Spread.of([1e3 * statistics.median(trial.waits_s) for trial in trials]),
            wait_p99_ms=Spread.of([1e3 * percentile(trial.waits_s, 0.99) for trial in trials]),
            own_us=self._own_us(epochs_s),
            deferred=Spread.of(counts) if counts else None,
        )

    def _later(self, trials: list[Trial]) -> Spread | None:
        if self.row.epochs == 1:
            return None
        later_s = [trial.epoch_s(skips_first_epoch=True) for trial in trials]
        return Spread.of(ratios([ideal.epoch_s for ideal in self.ideals], later_s))

    def _ratio(self, epochs_s: list[float]) -> Spread | None:
        if BASELINE not in self.trials:
            return None
        baseline = [t.epoch_s(self.row.skips_first_epoch) for t in self.trials[BASELINE]]
        return Spread.of(ratios(baseline, epochs_s))

    def _own_us(self, epochs_s: list[float]) -> Spread | None:
        if any(ideal.call_s is None for ideal in self.ideals):
            return None
        pairs = zip(epochs_s, self.ideals, strict=True)
        return Spread.of([1e6 * (e - ideal.epoch_s) / self.row.samples for e, ideal in pairs])

    def _speed(self, epoch_s: float) -> float:
        if self.row.unit == "GB/s":
            return self.epoch_bytes / epoch_s / 1e9
        if self.row.unit == "us/sample":
            return 1e6 * epoch_s / self.row.samples
        if self.row.unit == "samples/s":
            return self.row.samples / epoch_s
        return epoch_s

    @property
    def rates(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Samples per second by loader: from before it is built to the end of the first epoch; in later epochs."""
        count, runs = self.row.samples, self.trials.items()
        first = {k: [count / (one.whole_s - sum(one.epochs_s[1:])) for one in v] for k, v in runs}
        return first, {
            k: [count / one.epoch_s(skips_first_epoch=True) for one in v] for k, v in runs
        }

    @property
    def ideal_speed(self) -> Spread:
        """The ideal in the row's unit."""
        return Spread.of([self._speed(ideal.epoch_s) for ideal in self.ideals])


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Repeat by repeat."""
    return [a / b for a, b in zip(above, below, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as ``share`` of all values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def in_turn(things: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """``(repeat, thing)``: all of them in each repeat, each time starting with a different one."""
    for repeat in range(repeats):
        turn = repeat % len(things)
        for thing in (*things[turn:], *things[:turn]):
            yield repeat, thing


def ideal_of(row: Row, work: Any) -> Ideal:
    """The ideal of ``row`` on this machine, now; the consumer's own time if that is longer."""
    if hasattr(work, "ideal"):
        found: Ideal = work.ideal(row.batch_size, row.workers)
    else:
        run = Mapped(work, list(row.transforms)).__getitem__
        found = measured_ideal(run, range(len(work)), row.workers, usable_cores())
    batches = -(-len(work) // row.batch_size)
    return replace(found, epoch_s=max(found.epoch_s, row.pause_s * batches))


def run_trial(contender: Contender, row: Row, work: Any, seed: int) -> Trial:
    """Build the loader, consume and check all epochs of ``row``, tear down."""
    total = 0.0

    def read(batch: Any) -> None:
        nonlocal total
        total += float(batch[0].sum())

    step = read if row.reads else (lambda _: time.sleep(row.pause_s)) if row.pause_s else None
    consumer = Consumer(step, getattr(work, "labels", second))
    run = Run(contender, work, row.arguments, consumer, seed)
    for _ in range(row.epochs):
        run.epoch()
    trial = run.finish(row.name)
    if row.reads:
        expected = row.epochs * sum(float(work.content(i)[0].sum()) for i in range(len(work)))
        if abs(total - expected) > 1e-4 * abs(expected):
            raise WrongDeliveryError(f"{contender.name} on {row.name}: values differ in their sum")
    return trial


def chosen(rows: Mapping[str, Row], options: Any) -> list[Row]:
    """The rows that the command line names, in their smoke-test size if it says so."""
    found = [rows[name] for name in options.rows]
    return [row.short() for row in found] if options.short else found


def measure(
    rows: Sequence[Row],
    contenders: Mapping[str, Contender],
    repeats: int,
    say: Callable[[str], None],
) -> list[RowResult]:
    """Measure every row with those of its loaders that are among ``contenders``, in turn; ``say`` each run."""
    results = []
    for row in rows:
        names = [name for name in row.loaders if name in contenders]
        if not names:
            continue
        work: Any = row.make(row.samples)
        bytes_of_epoch = getattr(work, "epoch_bytes", 0)
        result = RowResult(row, bytes_of_epoch, trials={name: [] for name in names})
        for repeat, name in in_turn(names, repeats):
            if len(result.ideals) == repeat:
                result.ideals.append(ideal_of(row, work))
            trial = run_trial(contenders[name], row, work, seed=repeat)
            result.trials[name].append(trial)
            epoch_s = trial.epoch_s(row.skips_first_epoch)
            share = result.ideals[repeat].epoch_s / epoch_s
            say(
                f"{row.name} {repeat + 1}/{repeats} {name}: {share:.3f} of the ideal, "
                f"{epoch_s:.3f} s/epoch, first batch {1e3 * trial.first_batch_s:.0f} ms"
            )
        results.append(result)
    return results
