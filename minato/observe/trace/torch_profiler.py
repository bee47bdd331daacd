"""Ranges in torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from minato._compat import is_profiling

__all__ = ["in_profile"]

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def in_profile(name: str) -> AbstractContextManager[object]:
    """A range of this name in what ``torch.profiler`` records, if somebody is profiling."""
    # The range itself takes some microseconds even when nobody is.
    return profiler.record_function(name) if is_profiling() else _NO_RANGE
