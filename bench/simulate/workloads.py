"""What samples cost: generators that reproduce the MinatoLoader paper's table 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quantiles:
    """A distribution by its quantile function: powers between knots.

    Args:
        shares: Where the knots are, from 0 to 1.
        values: What the quantile function is there.
        powers: Of each piece: above 1 it is flat at its left end, below -1 at its right end, 1 is a straight line.
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]
    powers: tuple[float, ...]

    def at(self, share: Array) -> Array:
        """The quantiles of these shares."""
        piece = np.clip(np.searchsorted(self.shares, share, "right") - 1, 0, len(self.powers) - 1)
        low, high = np.array(self.shares)[piece], np.array(self.shares)[piece + 1]
        inside = (share - low) / (high - low)
        power = np.array(self.powers)[piece]
        risen = np.where(power > 0, inside ** np.abs(power), 1.0 - (1.0 - inside) ** np.abs(power))
        below, above = np.array(self.values)[piece], np.array(self.values)[piece + 1]
        return np.asarray(below + (above - below) * risen)

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """So many values, evenly spread over the distribution and shuffled: even few have its figures."""
        return self.at(rng.permutation(np.linspace(0.0, 1.0, count)))


@dataclass(frozen=True)
class Figures:
    """A row of table 2, in seconds."""

    mean: float
    median: float
    p75: float
    p90: float
    min: float
    max: float
    std: float

    @classmethod
    def of(cls, costs_s: Array) -> Figures:
        p50, p75, p90 = np.quantile(costs_s, (0.5, 0.75, 0.9))
        return cls(*map(float, (
            costs_s.mean(), p50, p75, p90, costs_s.min(), costs_s.max(), costs_s.std()
        )))  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Samples, and how they are used.

    Args:
        name: What ``--workloads`` calls it.
        printed: The paper's figures, if it is one of its workloads.
        costs_s: ``(count, rng)`` to the time of each sample, in seconds.
        shares: The part of a sample's time that each transform takes.
        light_s: Where samples are light or heavy: the time of a light one; what is more, is the last transform's.
        batch_size: Samples in a batch.
        step_s: What the consumer takes for a batch.
    """

    name: str
    printed: Figures | None
    costs_s: Callable[[int, np.random.Generator], Array]
    shares: tuple[float, ...]
    batch_size: int
    step_s: float
    light_s: float | None = None

    def boundaries_s(self, costs_s: Array) -> Array:
        """When each transform of each sample ends, in seconds of work; the last column is the whole."""
        light_s = costs_s if self.light_s is None else np.minimum(costs_s, self.light_s)
        ends_s: Array = np.outer(light_s, np.cumsum(self.shares))
        return np.column_stack([ends_s, costs_s]) if self.light_s is not None else ends_s


# The powers are chosen so that mean and deviation are the printed ones; the knots are printed.
_DETECTION = Quantiles(
    (0.0, 0.5, 0.75, 0.9, 1.0), (0.011, 0.028, 0.030, 0.035, 0.176), (-2.9, 1.0, 1.0, 2.95)
)
_SEGMENTATION = Quantiles(
    (0.0, 0.5, 0.75, 0.9, 1.0), (0.010, 0.470, 0.630, 0.750, 2.230), (-3.1, 1.0, 1.0, 28.0)
)
_LIGHT = Quantiles((0.0, 0.62, 0.93, 1.0), (0.502, 0.508, 0.509, 0.511), (-4.0, 1.0, 1.0))


def _speech(heavy: Quantiles, periodic: bool) -> Callable[[int, np.random.Generator], Array]:
    def costs_s(count: int, rng: np.random.Generator) -> Array:
        number = np.arange(count) if periodic else rng.permutation(count)
        is_heavy = number % 5 == 4
        drawn = np.empty(count)
        drawn[is_heavy] = heavy.draw(int(is_heavy.sum()), rng)
        drawn[~is_heavy] = _LIGHT.draw(int((~is_heavy).sum()), rng)
        return drawn

    return costs_s


def _heavy(total_s: float, span_s: tuple[float, float]) -> Quantiles:
    return Quantiles(
        (0.0, 0.5, 1.0), (total_s - span_s[0], total_s, total_s + span_s[1]), (-2.0, 2.0)
    )


_SPEECH_SHARES = (0.002, 0.004, 0.006, 0.002, 0.002, 0.984)
"""Pad, SpecAugment, FilterBank, FrameSplicing, PermuteAudio, LightStep; the heavy ones have a HeavyStep after them."""

DETECTION = Workload(
    "detection",
    Figures(0.031, 0.028, 0.030, 0.035, 0.011, 0.176, 0.019),
    _DETECTION.draw,
    (0.6, 0.05, 0.25, 0.1),
    batch_size=48,
    step_s=0.125,
)
SEGMENTATION = Workload(
    "segmentation",
    Figures(0.500, 0.470, 0.630, 0.750, 0.010, 2.230, 0.197),
    _SEGMENTATION.draw,
    (0.676, 0.064, 0.1, 0.1, 0.06),
    batch_size=3,
    step_s=0.125,
)
SPEECH_3S = Workload(
    "speech-3s",
    Figures(0.998, 0.508, 0.509, 3.008, 0.502, 3.017, 0.992),
    _speech(_heavy(3.008, (0.008, 0.009)), periodic=True),
    _SPEECH_SHARES,
    batch_size=24,
    step_s=0.3,
    light_s=0.511,
)
SPEECH_10S = Workload(
    "speech-10s",
    Figures(2.351, 0.508, 0.509, 10.008, 0.502, 10.014, 3.757),
    _speech(_heavy(10.008, (0.008, 0.006)), periodic=True),
    _SPEECH_SHARES,
    batch_size=24,
    step_s=0.3,
    light_s=0.511,
)
SPEECH_3S_RANDOM = Workload(
    "speech-3s-random",
    None,
    _speech(_heavy(3.008, (0.008, 0.009)), periodic=False),
    _SPEECH_SHARES,
    batch_size=24,
    step_s=0.3,
    light_s=0.511,
)
SPEECH_3S_LITERAL = Workload(
    "speech-3s-literal",
    None,
    _speech(_heavy(3.508, (0.008, 0.009)), periodic=True),
    _SPEECH_SHARES,
    batch_size=24,
    step_s=0.3,
    light_s=0.511,
)
SEGMENTATION_GPU_BOUND = Workload(
    "segmentation-gpu-bound",
    None,
    _SEGMENTATION.draw,
    SEGMENTATION.shares,
    batch_size=3,
    step_s=0.25,
)

TABLE_2 = (DETECTION, SEGMENTATION, SPEECH_3S, SPEECH_10S)
ALL_WORKLOADS = (
    *TABLE_2,
    SPEECH_3S_RANDOM,
    SPEECH_3S_LITERAL,
    SEGMENTATION_GPU_BOUND,
)
