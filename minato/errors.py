"""What minato raises of its own. Everything else keeps the type that torch or the user's code gave it."""

from __future__ import annotations

from pickle import PicklingError

__all__ = ["CoverageError", "MinatoError", "NotPicklableError"]


class MinatoError(Exception):
    """Base of minato's own exceptions."""


class NotPicklableError(MinatoError, TypeError, AttributeError, PicklingError):
    """Something must be sent to workers that are not forked, and a part of it cannot be pickled.

    Its bases are what Python raises then, depending on what it is that cannot be pickled.
    """


class CoverageError(MinatoError, RuntimeError):
    """A pass has ended, and what it delivered is not what the sampler asked for."""
