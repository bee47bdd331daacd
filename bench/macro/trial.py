"""One loader over one row: clock readings, and the proof that every sample came exactly once."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils.data import default_collate

from bench.macro.loaders import Contender, shared_arguments
from bench.macro.rows import Row
from bench.macro.work import Work


class WrongDeliveryError(AssertionError):
    """A loader lost, repeated, reordered or changed samples: its times mean nothing."""


@dataclass(frozen=True)
class Trial:
    """Clock readings of one run, in seconds.

    Args:
        loader: name of the loader.
        whole_s: from before the loader was built to the end of the last epoch.
        first_batch_s: from ``iter()`` of the first epoch to its first batch, workers cold.
        epochs_s: each epoch, from ``iter()`` to its end.
        waits_s: time that the consumer waited for each batch, over all epochs.
    """

    loader: str
    whole_s: float
    first_batch_s: float
    epochs_s: tuple[float, ...]
    waits_s: tuple[float, ...]

    def epoch_s(self, skips_first_epoch: bool) -> float:
        """Time for one epoch: the mean over the whole run, or over all epochs but the first."""
        if skips_first_epoch and len(self.epochs_s) > 1:
            return sum(self.epochs_s[1:]) / (len(self.epochs_s) - 1)
        return self.whole_s / len(self.epochs_s)


def run_trial(contender: Contender, row: Row, work: Work, seed: int) -> Trial:
    """Build the loader, consume all epochs of ``row``, check what was delivered, tear down.

    Raises:
        WrongDeliveryError: the loader did not deliver every sample once, in order and unchanged.
    """
    torch.manual_seed(seed)  # the same shuffles for every loader that draws from torch
    gc.collect()
    delivered: list[list[int]] = []
    epochs_s: list[float] = []
    waits_s: list[float] = []
    totals: list[float] = []
    batch: Any = None
    begun = perf_counter()
    loader = contender.build(work, shared_arguments(row), seed)
    for _ in range(row.epochs):
        labels: list[int] = []
        total = 0.0
        epoch_begun = asked = perf_counter()
        iterator = _iterate(loader)
        while (following := next(iterator, None)) is not None:
            waits_s.append(perf_counter() - asked)
            batch = following
            labels.extend(batch[1].tolist())
            if row.reads:
                total += float(batch[0].sum())
            if row.pause_s:
                sleep(row.pause_s)
            asked = perf_counter()
        del iterator
        epochs_s.append(perf_counter() - epoch_begun)
        delivered.append(labels)
        totals.append(total)
    whole_s = perf_counter() - begun
    for number, labels in enumerate(delivered):
        who = f"{contender.name} on {row.name}, epoch {number}"
        check_labels(labels, len(work), in_order=contender.keeps_order and not row.shuffle, who=who)
        if row.reads:
            check_total(totals[number], work, who=who)
    check_content(batch, work, who=f"{contender.name} on {row.name}")
    per_epoch = len(waits_s) // row.epochs
    if len(waits_s) != per_epoch * row.epochs:
        raise WrongDeliveryError(f"{contender.name} on {row.name}: epochs differ in batches")
    return Trial(contender.name, whole_s, waits_s[0], tuple(epochs_s), tuple(waits_s))


def _iterate(loader: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return iter(loader)


def check_labels(labels: list[int], count: int, *, in_order: bool, who: str) -> None:
    """Raise unless ``labels`` holds each of 0 … ``count - 1`` once, ascending if ``in_order``."""
    if in_order and labels == list(range(count)):
        return
    times = Counter(labels)
    lost = [index for index in range(count) if index not in times]
    repeated = [index for index, number in times.items() if number > 1]
    foreign = [index for index in times if not 0 <= index < count]
    if lost or repeated or foreign:
        raise WrongDeliveryError(
            f"{who}: {len(lost)} samples lost {lost[:5]}, "
            f"{len(repeated)} repeated {repeated[:5]}, {len(foreign)} foreign {foreign[:5]}"
        )
    if in_order:
        raise WrongDeliveryError(f"{who}: complete, but not in the sampler's order")


def check_content(batch: Any, work: Work, *, who: str) -> None:
    """Raise unless ``batch`` is what torch makes of the samples that its labels name."""
    expected = default_collate([work.content(label) for label in batch[1].tolist()])
    if not _same(batch, expected):
        raise WrongDeliveryError(f"{who}: a batch is not what torch makes of its samples")


def _same(batch: Any, expected: Any) -> bool:
    if type(batch) is not type(expected):
        return False
    if isinstance(batch, list):
        return len(batch) == len(expected) and all(map(_same, batch, expected))
    return batch.dtype == expected.dtype and torch.equal(batch, expected)


def check_total(total: float, work: Work, *, who: str) -> None:
    """Raise unless the sum of all delivered values is the dataset's, to float32 accuracy."""
    expected = sum(float(work.content(index)[0].sum()) for index in range(len(work)))
    if abs(total - expected) > 1e-4 * abs(expected):
        raise WrongDeliveryError(f"{who}: values add up to {total}, not to {expected}")
