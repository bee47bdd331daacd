"""What components record their work with: a track of a trace, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

__all__ = ["NULL_TRACER", "REPEATED", "SAMPLE", "Args", "NullTracer", "Tracer"]

SAMPLE = "sample"
"""Name of the slice in which a sample became complete: there is one for each that is delivered."""
REPEATED = "sample (repeated)"
"""Of one whose result was not used."""

Args: TypeAlias = Mapping[str, Any]
"""Shown with an event: integers, bools and short strings; the ``repr`` of anything else."""


class Tracer(Protocol):
    """Records what one thread does. Times are in ns, on the clock of :func:`minato._core.clock.now_ns`.

    Attributes:
        enabled: Whether anything is recorded; asked where even putting an event together would cost too much.
    """

    enabled: bool

    def now(self) -> int:
        """The time; 0 if nothing is recorded."""

    def slice(
        self, name: str, begin_ns: int, end_ns: int | None = None, args: Args | None = None
    ) -> None:
        """Record work that has ended. Two slices of a thread overlap only if one contains the other.

        Args:
            end_ns: None: it ends now.
        """

    def sample(self, position: int, name: str, begin_ns: int, args: Args) -> None:
        """Record a sample that ends now, as a slice.

        Args:
            position: Its position in the ledger. A sample that runs twice in a lease is ``REPEATED`` the first time.
        """

    def span(self, name: str, begin_ns: int, end_ns: int, args: Args | None = None) -> None:
        """Record what went on beside the work of the thread, and may overlap with anything."""

    def instant(self, name: str) -> None:
        """Record that something happens now."""

    def flush(self) -> None:
        """Write what was recorded."""


class NullTracer:
    """Records nothing."""

    enabled = False

    def now(self) -> int:
        """0."""
        return 0

    def slice(
        self, name: str, begin_ns: int, end_ns: int | None = None, args: Args | None = None
    ) -> None:
        """Nothing."""

    def sample(self, position: int, name: str, begin_ns: int, args: Args) -> None:
        """Nothing."""

    def span(self, name: str, begin_ns: int, end_ns: int, args: Args | None = None) -> None:
        """Nothing."""

    def instant(self, name: str) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


NULL_TRACER = NullTracer()
