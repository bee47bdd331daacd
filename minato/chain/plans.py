"""Random decisions of transforms that can be drawn before the sample is there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minato._core.seeding import mix
from minato.chain.rng import key_word
from minato.source.prediction import Planned

__all__ = ["draw_plans", "obeying"]


def draw_plans(
    steps: Sequence[Callable[[Any], Any]], seed: int, epoch: int, key: Any, meta: Any = None
) -> list[Any]:
    """What each transform decides about a sample, None for those that do not plan.

    A function of the arguments alone: whoever draws them, in whichever process, draws the same, so that plans need
    not be sent to the worker that obeys them.

    Args:
        seed: Of the pass, as for the sample's own randomness.
        key: The sample's index in the dataset.
        meta: What is known of the sample in advance.
    """
    word = key if type(key) is int else key_word(key)
    return [
        step.plan(np.random.default_rng((mix(seed, epoch, word), number)), meta)
        if isinstance(step, Planned)
        else None
        for number, step in enumerate(steps)
    ]


def obeying(
    steps: Sequence[Callable[[Any], Any]], plans: Sequence[Any]
) -> tuple[Callable[[Any], Any], ...]:
    """The transforms as functions of a sample that do what was planned."""
    return tuple(
        functools.partial(_apply, step, plan) if isinstance(step, Planned) else step
        for step, plan in zip(steps, plans, strict=True)
    )


def _apply(step: Planned, plan: Any, sample: Any) -> Any:
    return step.apply(sample, plan)
