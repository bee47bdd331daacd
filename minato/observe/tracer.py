"""What components record their work with, and ranges in torch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torch.autograd import profiler

from minato._compat import is_profiling

SAMPLE = "sample"
"""Name of the slice in which a sample became complete: one for each returned sample."""
REPEATED = "sample (repeated)"  # name of the slice of a sample whose result was not used

Args: TypeAlias = Mapping[str, Any]
"""Shown with an event: integers, bools and short strings; the ``repr`` of anything else."""


class Tracer:
    """Records what one thread does, if ``enabled``. Times are in ns, on the clock of :func:`minato._core.now_ns`.

    This one records nothing, and is what components have without a trace.
    """

    enabled = False

    def now(self) -> int:
        """The time; 0 if events are not recorded."""
        return 0

    def slice(
        self, name: str, begin_ns: int, end_ns: int | None = None, args: Args | None = None
    ) -> None:
        """Record work that has ended. Two slices of a thread overlap only if one contains the other."""

    def sample(self, position: int, name: str, begin_ns: int, args: Args) -> None:
        """Record a sample that ends now, as a slice; one that runs twice in a lease is ``REPEATED`` the first time."""

    def span(self, name: str, begin_ns: int, end_ns: int, args: Args | None = None) -> None:
        """Record work that is not the thread's own, and may overlap with other slices."""

    def instant(self, name: str) -> None:
        """Record that something happens now."""

    def flush(self) -> None:
        """Write the recorded events."""


NULL_TRACER = Tracer()

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def in_profile(name: str) -> AbstractContextManager[object]:
    """A range of this name in the records of ``torch.profiler``, if it is active."""
    # The range itself takes some microseconds even without a profiler.
    return profiler.record_function(name) if is_profiling() else _NO_RANGE
