"""Random decisions of transforms that can be drawn before the sample is there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minato._core.seeding import mix
from minato.chain.rng import draws_of, sample_word

__all__ = ["Obeying", "Planned", "planner"]

_REMEMBERED = 8192
"""Samples whose plans are kept between the time when they are published and when they are delivered."""


@runtime_checkable
class Planned(Protocol):
    """A transform whose random decisions can be drawn before it runs.

    ``transform(sample)`` must do the same as planning and applying, with draws of its own.
    """

    def __call__(self, sample: Any) -> Any:
        """Transform the sample."""

    def plan(self, rng: np.random.Generator, meta: Any) -> Any:
        """Draw all decisions about one sample; called in the training process too, so it should be quick.

        Args:
            rng: The only source of randomness it may use, and not after it has returned.
            meta: The sample's index in the dataset.
        """

    def apply(self, sample: Any, plan: Any) -> Any:
        """Transform the sample as it was planned, without drawing anything."""


class Obeying:
    """A planned transform as a step of a chain: it does what was planned for the sample in hand.

    The plan is a function of the sample's seed, epoch, index and occurrence and of the step's number. So it need not be
    sent: whoever draws it, in whichever process, draws the same. Samples that are not bound to a seed are transformed
    by ``transform(sample)``.

    Args:
        transform: What the user gave.
        number: Of the step in its chain.
    """

    def __init__(self, transform: Planned, number: int) -> None:
        self.transform = transform
        self.number = number

    def __call__(self, sample: Any) -> Any:
        """Transform the sample."""
        binding = draws_of()
        if binding is None:
            return self.transform(sample)
        return self.transform.apply(sample, self.plan(*binding))

    def plan(self, seed: int, epoch: int, key: Any, occurrence: int = 0) -> Any:
        """What it decides about a sample."""
        word = mix(seed, epoch, sample_word(key, occurrence))
        return self.transform.plan(_generator(mix(word, self.number, 1)), key)


class _Own(threading.local):
    """A thread's generator: setting the state of one takes a tenth of the time that making one does."""

    def __init__(self) -> None:
        self.bits = np.random.PCG64(0)
        self.generator = np.random.Generator(self.bits)


_own = _Own()


def _generator(seed: int) -> np.random.Generator:
    """A generator in a state that follows from a seed of 64 bits; it is this thread's only one."""
    words = [mix(seed, number, 2) for number in range(3)]
    _own.bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": words[0] << 64 | words[1], "inc": words[2] << 1 | 1},
        "has_uint32": 0,
        "uinteger": 0,
    }
    return _own.generator


def planner(
    steps: Sequence[Callable[[Any], Any]],
) -> Callable[[int, int, Any, int], Sequence[Any]] | None:
    """What draws the plans of a chain before its samples run.

    Returns:
        ``(seed, epoch, key, occurrence) -> plans``, one for each step and None for those that do not plan; no plans if
        one of them raises, which is for the worker to report. None if no step plans.
    """
    planned = [step if isinstance(step, Obeying) else None for step in steps]
    if not any(planned):
        return None

    @functools.lru_cache(_REMEMBERED)
    def plans_of(seed: int, epoch: int, key: Any, occurrence: int = 0) -> Sequence[Any]:
        try:
            return [step and step.plan(seed, epoch, key, occurrence) for step in planned]
        except Exception:
            return ()

    return plans_of
