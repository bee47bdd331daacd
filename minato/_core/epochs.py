"""Seeds of epochs that are numbered in another way."""

from __future__ import annotations

__all__ = ["seed_of_epoch"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)
"""Of the avalanche in ``mix_seed``: a shift, which is xored, and a factor."""


def seed_of_epoch(seed: int, drawn_epoch: int, epoch: int) -> int:
    """Return the seed that gives in ``epoch`` the samples that ``seed`` gives in ``drawn_epoch``.

    So epochs can be numbered for the user in one way and for the random numbers in another one. The result is an int64.
    """
    if drawn_epoch == epoch:
        return seed
    # mix_seed begins with avalanche(seed + golden) ^ epoch, and the avalanche is a bijection.
    word = (seed + _GOLDEN) & _MASK
    for shift, factor in _STEPS:
        word = (word ^ word >> shift) * factor & _MASK
    word ^= (drawn_epoch ^ epoch) & _MASK
    for shift, factor in reversed(_STEPS):
        word = word * pow(factor, -1, 1 << 64) & _MASK
        word ^= word >> shift ^ word >> 2 * shift
    word = (word - _GOLDEN) & _MASK
    return word - (word >> 63 << 64)
