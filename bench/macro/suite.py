"""Runs rows and loaders in turn, and condenses the clock readings into figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.macro.bounds import Bound, bound_of
from bench.macro.loaders import CONTENDERS
from bench.macro.rows import Row
from bench.macro.trial import Trial, run_trial
from bench.macro.work import StoredTensors, Work

BASELINE = "torch"


@dataclass(frozen=True)
class Spread:
    """Least, middle and greatest value over the repeats."""

    least: float
    median: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Figures:
    """What the report says about one loader on one row.

    Args:
        loader: name of the loader.
        share: share of the bound, 1 being the bound itself.
        later_share: the same for the epochs after the first alone; None if there are none.
        ratio: how many times as fast as torch in order, repeat by repeat; None without torch.
        speed: in the row's unit: seconds per epoch, GB/s or microseconds per sample.
        whole_s: whole run including start-up, in seconds.
        first_batch_ms: time from ``iter()`` to the first batch with cold workers.
        waiting: share of the whole run that the consumer spent waiting for batches.
        wait_p50_ms: median wait for one batch.
        wait_p99_ms: 99th percentile of the waits.
        own_us: time per sample less the bound of ``dataset[i]``; None where that is not the cost.
    """

    loader: str
    share: Spread
    later_share: Spread | None
    ratio: Spread | None
    speed: Spread
    whole_s: Spread
    first_batch_ms: Spread
    waiting: Spread
    wait_p50_ms: Spread
    wait_p99_ms: Spread
    own_us: Spread | None


@dataclass
class RowResult:
    """Everything measured on one row: one bound and one trial of each loader per repeat.

    Args:
        row: the row.
        epoch_bytes: payload of one epoch of tensors; 0 for other work.
        bounds: the bound, in each repeat.
        trials: by loader, its run in each repeat.
    """

    row: Row
    epoch_bytes: int
    bounds: list[Bound] = field(default_factory=list)
    trials: dict[str, list[Trial]] = field(default_factory=dict)

    def figures(self, loader: str) -> Figures:
        trials, row = self.trials[loader], self.row
        epochs_s = [trial.epoch_s(row.skips_first_epoch) for trial in trials]
        bounds_s = [bound.epoch_s for bound in self.bounds]
        speeds = [self._speed(epoch_s) for epoch_s in epochs_s]
        return Figures(
            loader=loader,
            share=Spread.of([b / e for b, e in zip(bounds_s, epochs_s, strict=True)]),
            later_share=self._later_share(trials),
            ratio=self._ratio(epochs_s),
            speed=Spread.of(speeds),
            whole_s=Spread.of([trial.whole_s for trial in trials]),
            first_batch_ms=Spread.of([1e3 * trial.first_batch_s for trial in trials]),
            waiting=Spread.of([sum(trial.waits_s) / trial.whole_s for trial in trials]),
            wait_p50_ms=Spread.of([1e3 * statistics.median(trial.waits_s) for trial in trials]),
            wait_p99_ms=Spread.of([1e3 * _percentile(trial.waits_s, 0.99) for trial in trials]),
            own_us=self._own_us(epochs_s),
        )

    def _later_share(self, trials: list[Trial]) -> Spread | None:
        if self.row.epochs == 1:
            return None
        later_s = [trial.epoch_s(skips_first_epoch=True) for trial in trials]
        return Spread.of([b.epoch_s / e for b, e in zip(self.bounds, later_s, strict=True)])

    def _ratio(self, epochs_s: list[float]) -> Spread | None:
        if BASELINE not in self.trials:
            return None
        baseline = [t.epoch_s(self.row.skips_first_epoch) for t in self.trials[BASELINE]]
        return Spread.of([b / e for b, e in zip(baseline, epochs_s, strict=True)])

    def _own_us(self, epochs_s: list[float]) -> Spread | None:
        if any(bound.call_s is None for bound in self.bounds):
            return None
        pairs = zip(epochs_s, self.bounds, strict=True)
        return Spread.of([1e6 * (e - bound.epoch_s) / self.row.samples for e, bound in pairs])

    def _speed(self, epoch_s: float) -> float:
        if self.row.unit == "GB/s":
            return self.epoch_bytes / epoch_s / 1e9
        if self.row.unit == "us/sample":
            return 1e6 * epoch_s / self.row.samples
        return epoch_s

    @property
    def bound_speed(self) -> Spread:
        """The bound in the row's unit."""
        return Spread.of([self._speed(bound.epoch_s) for bound in self.bounds])


def measure(
    rows: Sequence[Row],
    loaders: Sequence[str] | None,
    repeats: int,
    say: Callable[[str], None],
) -> list[RowResult]:
    """Measure every row: in each repeat all its loaders in turn, starting with a different one.

    Args:
        rows: the rows, in the order to measure them.
        loaders: names to restrict every row to, or None for all that a row names.
        repeats: how often each loader runs on each row.
        say: is told each result as it comes.

    Raises:
        WrongDeliveryError: a loader did not deliver every sample exactly once.
    """
    results = []
    for row in rows:
        names = [name for name in row.loaders if loaders is None or name in loaders]
        if names:
            results.append(_measure_row(row, names, repeats, say))
    return results


def _measure_row(row: Row, names: list[str], repeats: int, say: Callable[[str], None]) -> RowResult:
    work = row.make(row.samples)
    result = RowResult(row, _epoch_bytes(work), trials={name: [] for name in names})
    for repeat in range(repeats):
        bound = bound_of(row, work)
        result.bounds.append(bound)
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            trial = run_trial(CONTENDERS[name], row, work, seed=repeat)
            result.trials[name].append(trial)
            epoch_s = trial.epoch_s(row.skips_first_epoch)
            say(
                f"{row.name} {repeat + 1}/{repeats} {name}: {bound.epoch_s / epoch_s:.3f} of the "
                f"bound, {epoch_s:.3f} s/epoch, first batch {1e3 * trial.first_batch_s:.0f} ms"
            )
    return result


def _epoch_bytes(work: Work) -> int:
    return work.sample_bytes * len(work) if isinstance(work, StoredTensors) else 0


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
