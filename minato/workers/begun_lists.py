"""Several batches in flight in each worker, of a dataset with ``__beginitems__``: their reads, and the worker."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from minato._core import now_ns
from minato.workers.concurrent import ConcurrentWorker
from minato.workers.fetch import Fetcher
from minato.workers.reads import Begin, FinishedReads, Read
from minato.workers.worker import WHOLE_BATCH

__all__ = ["LEAST_LISTS", "BegunLists", "BegunListsWorker"]

LEAST_LISTS = 2
"""While the worker completes one batch, another is read."""
_MOST_IN_FLIGHT = 128
"""Samples of the batches that a worker reads at once, unless two batches have more."""
_NEWEST = 0.25
"""Weight of the newest time between two batches in their mean."""


class BegunLists(FinishedReads):
    """``dataset.__beginitems__(indices, done)``: a read is that of a whole batch.

    The limit follows what is measured: as many batches as the worker takes in the time of the fastest read, and one
    more. So it grows while the worker waits for a distant store, and stays low where the store or the processor is the
    limit, since reads that only queue for them are not the fastest.

    Nothing runs in a thread of ours: a read that cannot begin counts as finished, and has nothing ``complete``.
    """

    def __init__(self, begin: Begin) -> None:
        super().__init__(1)  # until one could begin: a worker does the others one after the other
        self._begin = begin
        self._fastest_ns = self._taken_ns = 0
        self._pace_ns = 0.0

    def submit(self, read: Read) -> None:
        """Start a read; the caller keeps to the limit."""
        if not self.outstanding:  # nothing delays this read: the store may have become slower
            self._fastest_ns = self._taken_ns = 0
        self.outstanding += 1
        read.started_ns = now_ns()
        try:
            begun = self._begin(read.key, functools.partial(self._arrive, read))
        except Exception:  # of which __getitems__ tells, or which it overcomes
            begun = False
        if not begun:
            self._finish(read)

    def _arrive(self, read: Read, complete: Callable[[], Any] | None) -> None:
        read.complete = complete
        self._finish(read)

    def finished(self) -> Read | None:
        """Return the next read that has finished, in the order in which they finish; None if there is none."""
        read = super().finished()
        if read is not None and read.complete is not None:
            self.adapt(read.duration_ns, now_ns(), len(read.key))
        elif read is not None:
            self.limit = 1
        return read

    def adapt(self, duration_ns: int, taken_ns: int, samples: int) -> None:
        """Set the limit after a read.

        Args:
            taken_ns: When the worker took it.
            samples: Samples of the batch.
        """
        self._fastest_ns = min(duration_ns, self._fastest_ns or duration_ns)
        if self._taken_ns:
            since_ns = max(taken_ns - self._taken_ns, 1)
            self._pace_ns += (since_ns - self._pace_ns) * (_NEWEST if self._pace_ns else 1)
        self._taken_ns = taken_ns
        wanted = 1 + math.ceil(self._fastest_ns / self._pace_ns) if self._pace_ns else LEAST_LISTS
        self.limit = min(wanted, max(_MOST_IN_FLIGHT // samples, LEAST_LISTS))

    def close(self) -> None:
        """What the library still reads is dropped with its connections."""


class BegunListsWorker(ConcurrentWorker):
    """Reads whole batches, several at once; a batch that cannot be read so runs as in any other worker."""

    def _claim_run(self, free: int, whole: bool) -> tuple[int, int, int] | None:
        if self._in_flight and not self._fair_share():
            return None  # the other workers could not begin a batch, too
        return self._ledger.claim(self._number, WHOLE_BATCH)

    def _enter(self, claimed: tuple[int, int, int], whole: bool) -> None:
        batch, k, count = claimed
        _, first, size, bound, epoch, *_ = self._ledger.describe(batch)
        given = self._read_indices(batch, k, count)
        if bound and count == size and len(given):
            self._queue(Read(given, epoch, None, claimed), first)
        else:
            self._run_lease(claimed)
        self._show_oldest()

    def _finish(self, read: Read, position: int) -> int:
        """Make the samples of a batch from what has arrived, and write them; returns their number."""
        count: int
        batch, _, count = read.tag
        fetcher, complete = self._fetcher, read.complete
        assert isinstance(fetcher, Fetcher)
        _, _, _, _, epoch, seed, *_ = self._ledger.describe(batch)
        self._runner.enter(seed)

        def fetch(indices: Any) -> Any:
            return fetcher.many(indices) if complete is None else fetcher.transformed(complete())

        if complete is not None:
            self._runner.ahead_ns = read.duration_ns
        self._run_list(fetcher, fetch, batch, position, count, epoch, read.key)
        return count
