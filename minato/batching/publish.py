"""How a batch is published: at once when its fields are full, or after its collation.

The worker that fills the last place of a batch publishes it. ``Ledger.fill`` and ``Ledger.fill_run`` do so by
themselves if all samples are in the fields, or if a collated result was set before. Otherwise they return
``MUST_COLLATE``, and :meth:`BatchPublisher.publish_collated` collates the samples and sets the batch ready.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import default_collate, default_convert

from minato._compat import collate_in_own_memory
from minato._core import WorkerLedger, now_ns
from minato._core.codes import ERROR_BLOB, FIRST_COLLATED, SAMPLE_BLOB, SKIP_BLOB
from minato._core.segment import Segment
from minato._fork_safety import end_copy
from minato.batching.blobs import BlobWriter, GetState, Unsendable, WriterSettings
from minato.batching.layout import read_layout
from minato.batching.sample_error import SampleError
from minato.batching.serialization import Store, damaged, stored_indices
from minato.errors import not_the_end
from minato.observe.tracer import NULL_TRACER, Tracer
from minato.workers.current_sample import describe_indices

__all__ = ["BatchPublisher", "Bind", "RunAgain"]

Bind = Callable[[int, int, Any, int], AbstractContextManager[None]]
"""Binds randomness to a batch, by seed, epoch, and index and occurrence of its first sample."""

RunAgain = Callable[[], Callable[[int, int, Any], list[Any]] | None]
"""Returns a function that runs a sample of a batch in this worker, by its position and index, and returns a list with
it, or an empty one if it is skipped; or None if the worker has ended."""


class _NothingLeftError(Exception):
    """All samples of a batch were skipped."""


class BatchPublisher:
    """Calls ``collate_fn`` on the samples of a batch, and publishes the result.

    Args:
        settings: Settings of the worker's writer.
        ledger: Holds the batches.
        segment: Memory of the arena.
        store: Holds samples that are not in the fields.
        blobs: Puts results and errors into the store.
        tracer: Records collations.
    """

    def __init__(
        self,
        settings: WriterSettings,
        *,
        ledger: WorkerLedger,
        segment: Segment,
        store: Store,
        blobs: BlobWriter,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._segment = segment
        self._store = store
        self._blobs = blobs
        self._tracer = tracer
        by_default = settings.collate_fn is default_collate
        self._collate_fn = collate_in_own_memory if by_default else settings.collate_fn
        self._draws = not (by_default or settings.collate_fn is default_convert)
        self._lease = ledger.lease
        self._owner = os.getpid()
        self.bind: Bind = lambda *_: nullcontext()
        self.run_again: RunAgain = lambda: None

    def set_collated(
        self,
        batch: int,
        samples: list[Any],
        *,
        skipped: Sequence[int] = (),
        state: tuple[int, GetState] | None = None,
        name: str | None = None,
    ) -> None:
        """Collate a batch of which this worker has all samples; the caller then fills its places.

        The result is set last. From then on the batch is complete, even if the worker dies.

        Args:
            skipped: Places of samples that are left out.
            state: A place without a sample, and the state of the dataset after the batch, to attach to it.
            name: Name of the batch in messages; None: its indices.
        """
        start_ns = self._tracer.now()
        result = self._collate(batch, lambda: samples, name)
        if state is not None:
            self._blobs.attach_state(batch, *state)
        self._set_result(batch, skipped, result)
        self._tracer.slice("collate", start_ns)

    def set_skipped(self, batch: int, skipped: Sequence[int]) -> None:
        """Set the result of a batch without samples; the caller then fills its places, ``skipped``."""
        self._set_result(batch, skipped, (SKIP_BLOB, 0))

    def _set_result(self, batch: int, skipped: Sequence[int], result: tuple[int, int]) -> None:
        for place in skipped:
            self._ledger.attach(place, SKIP_BLOB, 0)
        self._ledger.set_result(batch, *result)

    def publish_collated(self, batch: int) -> None:
        """Collate a full batch from the samples that its workers wrote, and publish it."""
        start_ns = self._tracer.now()
        offsets = [offset for _, offset, _ in self._ledger.blobs(batch)]
        self._ledger.set_ready(batch, *self._collate(batch, lambda: self._gather(batch)))
        # Not before: after an interruption the batch is collated again from the same samples.
        for offset in offsets:
            self._store.drop(offset)
        self._tracer.slice("collate", start_ns)

    def _gather(self, batch: int) -> list[Any]:
        """Return the samples of a full batch that were not skipped, from the fields and the store."""
        batch_record = self._ledger.describe(batch)
        at, count = batch_record.layout, batch_record.count
        record = read_layout(self._segment, at) if at else None
        samples: list[Any] = []
        for k, (kind, offset, nbytes) in enumerate(self._ledger.blobs(batch)):
            if kind == SKIP_BLOB and not offset:
                continue
            value = self._store.peek(offset, nbytes, kind) if kind or offset else []
            if kind != SAMPLE_BLOB:
                if record is None or len(value) != record.layout.num_texts:
                    raise damaged("what belongs to a sample")
                value = record.layout.sample(self._segment.array, record.fields, count, k, value)
            samples += self._run_again(batch, k, value) if type(value) is Unsendable else [value]
        if not samples:
            raise _NothingLeftError
        return samples

    def _run_again(self, batch: int, k: int, sample: Unsendable) -> list[Any]:
        """Run the sample at a place of a full batch in this worker, because it does not arrive here as it is."""
        run_again = self.run_again()
        if run_again is not None:
            return run_again(batch, self._ledger.occupants(batch)[k], sample.index)
        if sample.error is not None:
            sample.error.reraise()
        raise RuntimeError("the worker that could run a sample again has ended")

    def _collate(
        self, batch: int, gather: Callable[[], list[Any]], name: str | None = None
    ) -> tuple[int, int]:
        """Return the collated batch, its error, or nothing, as offset with kind and size."""
        # If this process dies now, the lease says that it collated this batch and ran no sample.
        lease = self._lease
        before = lease.state()
        lease.enter(FIRST_COLLATED - batch, now_ns())
        settings = self._settings
        try:
            samples = gather()
            given = samples if settings.auto_collation else samples[0]
            if self._draws:
                with self._bound(batch):
                    result = self._collate_fn(given)
            else:
                result = self._collate_fn(given)
            end_copy(self._owner, None)
            offset, nbytes = self._blobs.put(batch, result, SAMPLE_BLOB, "result")
            return offset | SAMPLE_BLOB, nbytes
        except _NothingLeftError:
            return SKIP_BLOB, 0
        except settings.catches() as raised:
            end_copy(self._owner, raised)
            error: BaseException = raised
            if isinstance(error, StopIteration):
                name = (
                    name or f"the batch of {describe_indices(self._ledger, self._indices, batch)}"
                )
                error = not_the_end(f"collate_fn, called for {name},", error)
            failure = SampleError(settings.describe_error(error))
            offset, nbytes = self._blobs.put_error(batch, failure, ERROR_BLOB)
            return offset | ERROR_BLOB, nbytes
        finally:
            if before.position is None:
                lease.enter(before.step, before.started_ns)
            else:
                lease.begin(before.position, before.started_ns, before.step)

    def _bound(self, batch: int) -> AbstractContextManager[None]:
        """Bind randomness to a batch: its content depends neither on its worker nor on what that has run before."""
        record = self._ledger.describe(batch)
        index = next(iter(self._indices(batch, 0, 1)), None)
        (occurrence,) = self._ledger.occurrences(record.first, 1) or (0,)
        return self.bind(record.seed, record.epoch, index, occurrence)

    def _indices(self, batch: int, k: int, count: int) -> Sequence[Any]:
        return stored_indices(self._ledger, self._store, batch, k, count)
