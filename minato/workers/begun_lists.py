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
"""While the worker completes one batch, another is read; and as many are read at once if that is useful."""
_MOST_IN_FLIGHT = 128
"""Samples of the batches that a worker reads at once, unless two batches have more."""
_NEWEST = 0.25
"""Weight of the newest time between two batches in their mean."""
_WORTH_HIDING = 1 / 3
"""The least share of the time between two batches; a further batch in flight costs about an eighth of that time."""
_MEASURED_EVERY_NS = 100_000_000


class BegunLists(FinishedReads):
    """``dataset.__beginitems__(indices, done)``: a read is that of a whole batch.

    One read is in flight while the worker completes the batch before. More hide the time in which nothing could be done
    for a read on this machine: as many as the worker takes in that time. So the limit grows while the worker waits for
    a distant store. It stays at one where the processors are the limit: further batches in flight would only cost
    memory and processor time. A read that was alone in flight is measured, at most every tenth of a second.

    Nothing runs in a thread of ours: a read that cannot begin counts as finished, and has nothing ``complete``.

    Args:
        busy_ns: Returns how long the threads of the worker have run, or were ready to run; None if that is not known.
    """

    def __init__(self, begin: Begin, busy_ns: Callable[[], int] | None = None) -> None:
        # 1 as long as none could begin, too: then a worker reads one batch after the other.
        super().__init__(1)
        self._begin = begin
        self._busy_ns = busy_ns or (lambda: 0)
        self._alone: Read | None = None
        self._busy_before_ns = self._measured_ns = 0
        self._waited_ns = self._taken_ns = 0
        self._pace_ns = 0.0

    def submit(self, read: Read) -> None:
        """Start a read; the caller keeps to the limit."""
        read.started_ns = now_ns()
        if not self.outstanding and read.started_ns - self._measured_ns > _MEASURED_EVERY_NS:
            self._alone, self._measured_ns = read, read.started_ns
            self._busy_before_ns = self._busy_ns()
        self.outstanding += 1
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
            waited_ns = None
            if read is self._alone:
                self._alone = None
                waited_ns = read.duration_ns - (self._busy_ns() - self._busy_before_ns)
            self.adapt(read.started_ns, read.duration_ns, waited_ns, now_ns(), len(read.key))
        elif read is not None:
            self.limit = 1
        return read

    def adapt(
        self, started_ns: int, duration_ns: int, waited_ns: int | None, taken_ns: int, samples: int
    ) -> None:
        """Set the limit after a read.

        Args:
            waited_ns: How long nothing could be done for it on this machine, if it was measured.
            taken_ns: When the worker took it.
            samples: Samples of the batch.
        """
        if waited_ns is not None:
            before_ns, waited_ns = self._waited_ns, max(waited_ns, 0)
            if 0 < before_ns < waited_ns:  # a pause of the store comes and goes
                waited_ns = (waited_ns + before_ns) // 2
            self._waited_ns = waited_ns
        self._waited_ns = min(self._waited_ns, duration_ns)
        since_ns = max(taken_ns - max(self._taken_ns, started_ns), 1)
        self._pace_ns += (since_ns - self._pace_ns) * (_NEWEST if self._pace_ns else 1)
        self._taken_ns = taken_ns
        hidden = self._waited_ns / self._pace_ns
        wanted = 1 + math.ceil(hidden) if hidden > _WORTH_HIDING else 1
        self.limit = min(wanted, max(_MOST_IN_FLIGHT // samples, LEAST_LISTS))

    def close(self) -> None:
        """What the library still reads is dropped with its connections."""


class BegunListsWorker(ConcurrentWorker):
    """Reads whole batches, several at once; a batch that cannot be read so runs as in any other worker."""

    def _claim_run(self, free: int, whole: bool) -> tuple[int, int, int] | None:
        if self._flight.positions and not self._fair_share():
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
