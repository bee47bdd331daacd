"""The interface of all worker pools: processes, threads, actors, and the main process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Protocol

from minato.scheduling.protocols import Pool
from minato.workers.cpu_time import CpuUsage

__all__ = ["WorkerPool"]


class WorkerPool(Pool, Protocol):
    """The workers, as the engine sees them."""

    @property
    def processes(self) -> Sequence[BaseProcess]:
        """The workers that are processes of this machine."""

    @property
    def shut_down(self) -> Callable[[], bool]:
        """Ends all workers; returns whether all have ended. Refers neither to the loader nor to an object that does."""

    def start(self, enough: Callable[[], object] | None = None) -> None:
        """Start the workers.

        Args:
            enough: Called between slow starts; once it holds, the other workers may start later. None: all start now.
        """

    def check_early(self) -> None:
        """Replace dead workers before the loop waits, where a start takes time."""

    def grow(self, count: int) -> None:
        """Start those of the first ``count`` workers that have not been started."""

    def usage(self) -> CpuUsage:
        """Processor time of all workers."""
