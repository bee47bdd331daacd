"""Collation: ``collate_fn`` is called on the samples of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import default_collate, default_convert

from minato._compat import collate_in_own_memory
from minato._core import WorkerLedger, now_ns
from minato._core.codes import ERROR_BLOB, FIRST_COLLATED, SAMPLE_BLOB, SKIP_BLOB
from minato._fork_safety import end_copy
from minato.batching.blobs import BlobWriter, Unsendable
from minato.batching.indices import StoredIndices
from minato.batching.layout import read_layout
from minato.batching.sample_error import SampleError
from minato.batching.serialization import Store, damaged
from minato.errors import not_the_end

__all__ = ["BatchCollator", "Bind", "Collate", "RunAgain"]

Bind = Callable[[int, int, Any, int], AbstractContextManager[None]]
"""Binds randomness to a batch, by seed, epoch, and index and occurrence of its first sample."""

RunAgain = Callable[[int, int, Any], list[Any]]
"""Runs a sample of a batch in this worker, by its position and index; the list is empty if it is skipped."""


class Collate:
    """The loader's ``collate_fn``, called as torch calls it.

    Args:
        collate_fn: Called with the list of samples, or with the sample if ``batched`` is false.
        batched: Whether the loader has a batch size.
        bind: Binds randomness to a batch while a worker collates it; None: it is not bound, or the caller does so.

    Attributes:
        is_own: Whether batches are built by calling ``collate_fn`` instead of in fields.
        draws: Whether ``collate_fn`` is the program's own, which may draw random numbers.
        bind: As given; None too if it does not draw.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], batched: bool, bind: Bind | None = None
    ) -> None:
        by_default = collate_fn is default_collate
        self.is_own = not (by_default and batched)
        self.draws = not (by_default or collate_fn is default_convert)
        self.bind = bind if self.draws else None
        self._batched = batched
        self._collate_fn = collate_in_own_memory if by_default else collate_fn

    def __call__(self, samples: Any) -> Any:
        """The batch of these samples, or of one call's result in their place."""
        return self._collate_fn(samples if self._batched else samples[0])


class _NothingLeftError(Exception):
    """All samples of a batch were skipped."""


class BatchCollator:
    """Collates the batches of one worker, from samples of its own or of others.

    Args:
        collate: The loader's ``collate_fn``.
        ledger: The worker's end.
        store: Holds samples that are not in the fields.
        blobs: Puts results and errors into the store.
        run_again: Runs samples that do not arrive here as they are; None: this process runs no samples.

    Attributes:
        indices: The indices of the batches.
    """

    def __init__(
        self,
        collate: Collate,
        ledger: WorkerLedger,
        store: Store,
        blobs: BlobWriter,
        run_again: RunAgain | None = None,
    ) -> None:
        self._collate_fn = collate
        self._ledger = ledger
        self._store = store
        self._blobs = blobs
        self.indices = StoredIndices(ledger, store)
        self._lease = ledger.lease
        self._owner = os.getpid()
        self._run_again = run_again

    def collate(self, batch: int, samples: object, name: str | None = None) -> tuple[int, int]:
        """Collate the samples of a batch, or what one call of the dataset has returned in their place.

        Args:
            name: Name of the batch in messages; None: its indices.

        Returns:
            Offset with kind, and size in bytes, of the collated batch, or of its error.
        """
        return self._collate(batch, lambda: samples, name)

    def collate_full(self, batch: int) -> tuple[int, int]:
        """Collate a full batch from the samples that its workers wrote; returns a skip where all are skipped."""
        return self._collate(batch, lambda: self._gather(batch))

    def _collate(
        self, batch: int, gather: Callable[[], object], name: str | None = None
    ) -> tuple[int, int]:
        # If this process dies now, the lease says that it collated this batch and ran no sample.
        lease = self._lease
        before = lease.state()
        lease.enter(FIRST_COLLATED - batch, now_ns())
        try:
            samples = gather()
            with self._bound(batch):
                result = self._collate_fn(samples)
            end_copy(self._owner, None)
            offset, nbytes = self._blobs.put(batch, result, SAMPLE_BLOB, "result")
            return offset | SAMPLE_BLOB, nbytes
        except _NothingLeftError:
            return SKIP_BLOB, 0
        except self._blobs.errors.kinds as raised:
            end_copy(self._owner, raised)
            error: BaseException = raised
            if isinstance(error, StopIteration):
                name = name or f"the batch of {self.indices.describe(batch)}"
                error = not_the_end(f"collate_fn, called for {name},", error)
            failure = SampleError(self._blobs.errors.wrap(error))
            offset, nbytes = self._blobs.put_error(batch, failure, ERROR_BLOB)
            return offset | ERROR_BLOB, nbytes
        finally:
            if before.position is None:
                lease.enter(before.step, before.started_ns)
            else:
                lease.begin(before.position, before.started_ns, before.step)

    def _gather(self, batch: int) -> list[Any]:
        """Return the samples of a full batch that were not skipped, from the fields and the store."""
        segment, batch_record = self._store.segment, self._ledger.describe(batch)
        at, count = batch_record.layout, batch_record.count
        record = read_layout(segment, at) if at else None
        samples: list[Any] = []
        for k, (kind, offset, nbytes) in enumerate(self._ledger.blobs(batch)):
            if kind == SKIP_BLOB and not offset:
                continue
            value = self._store.peek(offset, nbytes, kind) if kind or offset else []
            if kind != SAMPLE_BLOB:
                if record is None or len(value) != record.layout.num_texts:
                    raise damaged("what belongs to a sample")
                value = record.layout.sample(segment.array, record.fields, count, k, value)
            samples += self._rerun(batch, k, value) if type(value) is Unsendable else [value]
        if not samples:
            raise _NothingLeftError
        return samples

    def _rerun(self, batch: int, k: int, sample: Unsendable) -> list[Any]:
        """Run the sample at a place of a full batch in this worker, because it does not arrive here as it is."""
        if self._run_again is not None:
            return self._run_again(batch, self._ledger.occupants(batch)[k], sample.index)
        if sample.error is not None:
            sample.error.reraise()
        raise RuntimeError("the worker that could run a sample again has ended")

    def _bound(self, batch: int) -> AbstractContextManager[None]:
        """Bind randomness to a batch: its content depends neither on its worker nor on what that has run before."""
        bind = self._collate_fn.bind
        if bind is None:
            return nullcontext()
        record = self._ledger.describe(batch)
        (occurrence,) = self._ledger.occurrences(record.first, 1) or (0,)
        return bind(record.seed, record.epoch, self.indices.first(batch), occurrence)
