"""The results of a worker's samples: into their places, or as whole batches; the writer as a worker sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from minato._core import WorkerLedger
from minato.sampling.resume import DatasetState
from minato.workers.error_policy import SKIP
from minato.workers.fetch import Fetcher, Rows, StreamEnd, StreamFetcher

__all__ = ["ResultWriter", "Sink"]


class Sink(Protocol):
    """The writer of a worker's results, as the worker sees it; ``minato.batching.writer`` implements it.

    ``state`` is the state of the worker's copy of the dataset after these samples, if it has one.
    """

    collates: bool
    handover_ns: float
    bind: Callable[[int, int, Any, int], AbstractContextManager[None]]
    run_again: Callable[[], Callable[[int, int, Any], list[Any]] | None]

    @property
    def keeps_batches(self) -> bool:
        """Whether the worker that runs the samples of a batch must collate them."""

    def note_types(self, samples: list[Any]) -> None:
        """Find out from the samples of a whole batch whether others may be handed over."""

    def write_run(
        self,
        batch: int,
        k: int,
        place: int,
        samples: list[Any],
        indices: Sequence[Any] = (),
        whole: bool = False,
    ) -> None:
        """Write samples to consecutive places, the first of which belongs to sample k of the batch, or a whole one."""

    def write_rows(self, batch: int, k: int, rows: Rows) -> bool:
        """Copy rows to consecutive places from sample k of the batch on; False if they do not fit."""

    def write_batch(
        self, batch: int, samples: list[Any], state: tuple[int, Callable[[], Any]] | None = None
    ) -> None:
        """Build a whole batch that has one place, of any number of samples."""

    def write_error(
        self,
        batch: int,
        place: int,
        error: BaseException,
        index: Any,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Write the error of a sample to its place."""

    def write_end(self, batch: int, place: int, state: Callable[[], Any] | None) -> None:
        """Write that the worker's stream has ended."""

    def write_collated(
        self,
        batch: int,
        samples: list[Any],
        skipped: Sequence[int] = (),
        state: tuple[int, Callable[[], Any]] | None = None,
    ) -> None:
        """Collate the samples of a batch, without the skipped ones."""

    def write_skipped(self, batch: int, skipped: Sequence[int]) -> None:
        """Write that all samples of a batch are skipped."""

    def publish_if_full(self, batch: int, outcome: int) -> None:
        """Complete a batch if the ledger's ``outcome`` of filling a place says that it is full."""

    def publish_collated(self, batch: int) -> None:
        """Collate a full batch whose worker died."""


class ResultWriter:
    """Writes results, fills their places in the ledger, and collates the batches that are complete.

    Args:
        ledger: The worker's end.
        fetcher: Its state, if it keeps one, is sent with the batches.
        may_skip: Whether samples may be skipped.
        slow_to_newest: Slow samples go to the newest batch, where they have no place of their own.
    """

    def __init__(
        self,
        *,
        ledger: WorkerLedger,
        sink: Sink,
        fetcher: Fetcher | StreamFetcher,
        may_skip: bool,
        slow_to_newest: bool,
    ) -> None:
        self._ledger = ledger
        self._sink = sink
        self._fetcher = fetcher
        self._may_skip = may_skip
        self._slow_to_newest = slow_to_newest

    def bound(
        self,
        batch: int,
        position: int,
        k: int,
        indices: list[Any],
        samples: list[Any],
        error: BaseException | None,
        whole: bool,
    ) -> None:
        """Put samples in their own places and fill these."""
        sink, ledger = self._sink, self._ledger
        if error is not None:
            # The batch is lost, as with torch, which does not run the samples after a bad one either. The place of the
            # error is filled before the others, which then need no data.
            failed, state = len(samples), self._state_after_error()
            sink.write_error(batch, position + failed, error, indices[failed], state)
            sink.publish_if_full(batch, ledger.fill_run(batch, k + failed, 1))
            self._fill(batch, position, k, samples)
            rest = len(indices) - failed - 1
            if rest:
                sink.publish_if_full(batch, ledger.fill_run(batch, k + failed + 1, rest))
            return
        has_skipped = self._may_skip and any(map(_is_skipped, samples))
        in_one = whole and (sink.collates or has_skipped or self._fetcher.sends_state)
        if whole and sink.collates:
            sink.note_types([sample for sample in samples if sample is not SKIP])
        if in_one:
            self._collated(batch, position, samples, has_skipped)
        if has_skipped:
            self._fill(batch, position, k, samples, None if in_one else indices)
            return
        if not in_one:
            sink.write_run(batch, k, position, samples, indices, whole)
        sink.publish_if_full(batch, ledger.fill_run(batch, k, len(indices)))

    def rows(self, batch: int, k: int, rows: Rows) -> bool:
        """Copy rows into their own places and fill these; False if they must be loaded one by one."""
        if not self._sink.write_rows(batch, k, rows):
            return False
        outcome = self._ledger.fill_run(batch, k, rows.size)
        self._sink.publish_if_full(batch, outcome)
        return True

    def _collated(self, batch: int, position: int, samples: list[Any], has_skipped: bool) -> None:
        """Write the result of a whole batch, without the samples that were skipped."""
        places: list[int] = []
        kept = samples
        if has_skipped:
            places = [position + i for i, sample in enumerate(samples) if sample is SKIP]
            kept = [sample for sample in samples if sample is not SKIP]
        if not kept:
            self._sink.write_skipped(batch, places)
        elif self._fetcher.sends_state:
            first = next(i for i, sample in enumerate(samples) if sample is not SKIP)
            self._sink.write_collated(batch, kept, places, (position + first, self._fetcher.state))
        else:
            self._sink.write_collated(batch, kept, places)

    def _fill(
        self,
        batch: int,
        position: int,
        k: int,
        samples: list[Any],
        indices: list[Any] | None = None,
    ) -> None:
        """Fill the places of samples some of which are skipped, after writing the others unless ``indices`` is None."""
        sink, ledger = self._sink, self._ledger
        first = 0
        for skipped, piece in itertools.groupby(samples, _is_skipped):
            run = list(piece)
            end = first + len(run)
            if not skipped:
                if indices is not None:
                    sink.write_run(batch, k + first, position + first, run, indices[first:end])
                sink.publish_if_full(batch, ledger.fill_run(batch, k + first, len(run)))
            for i in range(first, end) if skipped else ():
                sink.publish_if_full(*ledger.skip(position + i))
            first = end

    def listed(
        self,
        batch: int,
        first: int,
        indices: Sequence[Any],
        count: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        """Write a whole batch that one call of the dataset returned, which may be any object."""
        sink = self._sink
        if error is not None:
            sink.write_error(batch, first, error, indices, self._state_after_error())
        elif self._fetcher.sends_state:
            sink.write_collated(batch, result, (), (first, self._fetcher.state))
        elif sink.collates or type(result) is not list or len(result) != count:
            if type(result) is list:
                sink.note_types(result)
            sink.write_collated(batch, result)
        else:
            sink.write_run(batch, 0, first, result, whole=True)
        sink.publish_if_full(batch, self._ledger.fill_run(batch, 0, count))

    def streamed(
        self,
        stream: StreamFetcher,
        batch: int,
        place: int,
        samples: list[Any],
        error: BaseException | None,
    ) -> None:
        """Write a batch of a stream, or its end."""
        sink = self._sink
        if error is None:
            sends = stream.sends_state
            sink.write_batch(batch, samples, (place, stream.state) if sends else None)
            if sends:
                stream.state_sent()
        elif isinstance(error, StreamEnd):
            sink.write_end(batch, place, stream.state if stream.sends_last_state else None)
        else:
            sink.write_error(batch, place, error, None, self._state_after_error())
        sink.publish_if_full(batch, self._ledger.fill_run(batch, 0, 1))

    def free(
        self,
        position: int,
        index: object,
        sample: object,
        error: BaseException | None,
        cost_ns: int,
    ) -> None:
        """Write a sample, or the error that it raised, into a free place."""
        ledger, sink = self._ledger, self._sink
        if sample is SKIP:
            sink.publish_if_full(*ledger.skip(position))
            return
        slow = self._slow_to_newest and cost_ns > ledger.slow_ns > 0
        place, batch, k = ledger.reserve(position, slow)
        if error is None:
            sink.write_run(batch, k, place, [sample], [index])
        else:
            sink.write_error(batch, place, error, index)
        sink.publish_if_full(batch, ledger.fill(position, place))

    def _state_after_error(self) -> Callable[[], DatasetState] | None:
        return self._fetcher.state if self._fetcher.sends_state else None


def _is_skipped(sample: object) -> bool:
    return sample is SKIP
