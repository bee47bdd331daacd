"""One loader in front of one consumer: clock readings, and the proof that every sample came exactly once."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import default_collate

from bench.harness.datasets import Work
from bench.harness.loaders import FEW_CORES, Contender


class WrongDeliveryError(AssertionError):
    """A loader lost, repeated, reordered or changed samples: its times mean nothing."""


@dataclass(frozen=True)
class Trial:
    """Clock readings of one run, in seconds.

    Args:
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
    deferred: int | None = None

    def epoch_s(self, skips_first_epoch: bool) -> float:
        """Time for one epoch: the mean over the whole run, or over all epochs but the first."""
        if skips_first_epoch and len(self.epochs_s) > 1:
            return sum(self.epochs_s[1:]) / (len(self.epochs_s) - 1)
        return self.whole_s / len(self.epochs_s)


first, second = itemgetter(0), itemgetter(1)
"""The labels of batches that begin with them, or are pairs of payloads and indices."""


@dataclass(frozen=True)
class Consumer:
    """What takes the batches; ``labels`` finds the indices of a batch's samples, ``orders`` are those of epochs."""

    step: Callable[[Any], None] | None = None
    labels: Callable[[Any], Any] = second
    orders: Sequence[Sequence[int]] | None = None


class Run:
    """A loader that a consumer takes batches from. The clock starts before it is built; all draw the same shuffles."""

    def __init__(
        self,
        contender: Contender,
        work: Work,
        arguments: dict[str, Any],
        consumer: Consumer | None = None,
        seed: int = 0,
    ) -> None:
        self._contender, self._work = contender, work
        self._consumer = consumer or Consumer()
        self._in_order = contender.keeps_order and not arguments.get("shuffle")
        self._delivered: list[list[torch.Tensor]] = []
        self._epochs_s: list[float] = []
        self._waits_s: list[float] = []
        self._last: Any = None
        torch.manual_seed(seed)
        gc.collect()
        self._begun = perf_counter()
        self._whole_s = 0.0
        with unwarned():
            self.loader = contender.build(work, arguments, seed)

    def epoch(self) -> float:
        """Go through one epoch; return its seconds."""
        step, labels_of, waits_s = self._consumer.step, self._consumer.labels, self._waits_s
        labels: list[torch.Tensor] = []
        batch = None
        begun = asked = perf_counter()
        with unwarned():
            iterator = iter(self.loader)
        while (following := next(iterator, None)) is not None:
            waits_s.append(perf_counter() - asked)
            batch = following
            labels.append(labels_of(batch).clone())  # a view would keep the whole batch
            if step is not None:
                step(batch)
            asked = perf_counter()
        del iterator
        ended = perf_counter()
        self._epochs_s.append(ended - begun)
        self._whole_s = ended - self._begun
        self._delivered.append(labels)
        self._last = batch
        return ended - begun

    def finish(self, who: str = "") -> Trial:
        """Check that each epoch had every sample once, unchanged and in the promised order; return the readings."""
        who = f"{self._contender.name}{who and f' on {who}'}"
        orders = self._consumer.orders or [range(len(self._work))]
        for number, parts in enumerate(self._delivered):
            labels = torch.cat(parts).tolist() if parts else []
            order = orders[number % len(orders)]
            check_labels(labels, order, in_order=self._in_order, who=f"{who}, epoch {number}")
        if hasattr(self._work, "content") and self._last is not None:
            if self._contender.content == "same":
                check_content(self._last, self._work, who=who)
            elif self._contender.content == "alike":
                check_alike(self._last, self._work, who=who)
        if len(self._waits_s) % len(self._epochs_s):
            raise WrongDeliveryError(f"{who}: epochs differ in their number of batches")
        deferred = self._contender.deferred
        return Trial(
            self._contender.name,
            self._whole_s,
            self._waits_s[0],
            tuple(self._epochs_s),
            tuple(self._waits_s),
            None if deferred is None else deferred(self.loader),
        )


@contextmanager
def unwarned() -> Iterator[None]:
    """Without torch's warning about more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=FEW_CORES)
        yield


def check_labels(labels: Sequence[int], order: Sequence[int], *, in_order: bool, who: str) -> None:
    """Raise unless ``labels`` holds each index of ``order`` once, and in this order if ``in_order``."""
    if list(labels) == list(order):
        return
    times, expected = Counter(labels), set(order)
    lost = [index for index in order if index not in times]
    repeated = [index for index, number in times.items() if number > 1]
    foreign = [index for index in times if index not in expected]
    if lost or repeated or foreign:
        raise WrongDeliveryError(
            f"{who}: {len(lost)} samples lost {lost[:5]}, "
            f"{len(repeated)} repeated {repeated[:5]}, {len(foreign)} foreign {foreign[:5]}"
        )
    if in_order:
        raise WrongDeliveryError(f"{who}: complete, but not in the sampler's order")


def check_content(batch: Any, work: Any, *, who: str) -> None:
    """Raise unless ``batch`` equals torch's collation of the samples that its labels name."""
    expected = default_collate([work.content(label) for label in batch[1].tolist()])
    if not same(batch, expected):
        raise WrongDeliveryError(f"{who}: a batch differs from torch's collation of its samples")


def check_alike(batch: Any, work: Any, *, who: str) -> None:
    """Raise unless ``batch`` has type, shape and about the colors of torch's collation, whose crops are others."""
    expected = default_collate([work.content(label) for label in batch[1].tolist()])[0]
    found = batch[0]
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise WrongDeliveryError(f"{who}: {found.dtype} {tuple(found.shape)} came")
    others = [axis for axis in range(4) if expected.shape[axis] != 3]
    apart = (found.double().mean(others) - expected.double().mean(others)).abs().max()
    if not apart < 0.3 * expected.double().std():
        raise WrongDeliveryError(f"{who}: the colors of a batch are {float(apart):.3g} apart")


def same(found: Any, expected: Any) -> bool:
    """Whether two batches have the same structure, types and values."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)
