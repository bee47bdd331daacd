"""Collation: ``collate_fn`` is called on the samples of a batch; one that pads samples of different lengths."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from minato._compat import collate_in_own_memory
from minato._core import WorkerLedger, now_ns
from minato._core.codes import ERROR_BLOB, FIRST_COLLATED, SAMPLE_BLOB, SKIP_BLOB
from minato._fork_safety import end_copy
from minato.batching.blobs import BlobWriter, Unsendable
from minato.batching.layout import read_layout
from minato.batching.sample_error import SampleError, raise_sample_error
from minato.batching.serialization import Store, StoredIndices, damaged
from minato.errors import not_the_end

__all__ = ["BatchCollator", "Bind", "Collate", "PadCollate", "RunAgain", "pad_stack"]

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
        store: Holds samples that are not in the fields.
        run_again: Runs samples that do not arrive here as they are; None: this process runs no samples.
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

    def collate(
        self, batch: int, gather: Callable[[], object], name: str | None = None
    ) -> tuple[int, int]:
        """Collate the samples of a batch, or what one call of the dataset has returned in their place.

        Args:
            gather: Returns them; see ``gather``.
            name: Name of the batch in messages; None: its indices.

        Returns:
            Offset with kind, and size in bytes, of the collated batch, or of its error; a skip where all are skipped.
        """
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

    def gather(self, batch: int) -> list[Any]:
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
            raise_sample_error(sample.error)
        raise RuntimeError("the worker that could run a sample again has ended")

    def _bound(self, batch: int) -> AbstractContextManager[None]:
        """Bind randomness to a batch: its content depends neither on its worker nor on what that has run before."""
        bind = self._collate_fn.bind
        if bind is None:
            return nullcontext()
        record = self._ledger.describe(batch)
        (occurrence,) = self._ledger.occurrences(record.first, 1) or (0,)
        return bind(record.seed, record.epoch, self.indices.first(batch), occurrence)


# ---- samples of different lengths ----


def pad_stack(
    arrays: Sequence[torch.Tensor | np.ndarray], value: float = 0, multiple_of: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack tensors or arrays of shape (length, …), padded to the longest.

    Args:
        arrays: They may differ in length and in dtype.
        value: Padding value.
        multiple_of: The common length is rounded up to a multiple of this.

    Returns:
        The stack, shape (number, longest, …), of the dtype to which torch promotes those of all; and the lengths,
        shape (number,), int64.

    Raises:
        ValueError: They differ in another dimension, or hold integers among which the padding value is not.
    """
    tensors = [torch.as_tensor(each) for each in arrays]
    shapes = {tuple(each.shape[1:]) for each in tensors}
    if len(shapes) != 1 or any(each.ndim == 0 for each in tensors):
        raise ValueError(
            f"only the first dimension is padded, and samples have the shapes "
            f"{sorted({tuple(each.shape) for each in tensors})}"
        )
    lengths = torch.tensor([len(each) for each in tensors])
    longest = -(-int(lengths.max()) // multiple_of) * multiple_of
    dtype = functools.reduce(torch.promote_types, {each.dtype for each in tensors})
    shape = (len(tensors), longest, *shapes.pop())
    stack = tensors[0].new_full(shape, value, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        held = stack.new_full((), value).item()
        if held != value:
            raise ValueError(
                f"the padding value {value!r} is none of {dtype}, of which the samples are: it would become {held!r}"
            )
    for row, each in zip(stack, tensors, strict=True):
        row[: len(each)] = each
    return stack, lengths


@dataclass(frozen=True)
class PadCollate:
    """A ``collate_fn`` that pads tensors and arrays to the longest of the batch, along their first dimension.

    The structure of batches is that of torch's ``default_collate``, which collates all other values.

    Attributes:
        value: Padding value; or a dictionary from names of fields to theirs, with 0 for other fields.
        multiple_of: Lengths are rounded up to a multiple of this.
        masks: For samples that are dictionaries: from the name of a new field to the name of a padded one. The new
            field is True at content, and False at padding: bool, shape (samples, longest).

    Raises:
        ValueError: Samples differ in another dimension than the first.
        KeyError: A field in ``masks`` does not exist.
    """

    value: float | Mapping[str, float] = 0
    multiple_of: int = 1
    masks: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, samples: list[object]) -> Any:
        """Return the batch."""
        return self._collated(samples, None)

    def _collated(self, samples: Any, name: Any) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            batch = {key: self._collated([each[key] for each in samples], key) for key in first}
            if name is None:
                for mask, of in self.masks.items():
                    lengths = torch.tensor([len(each[of]) for each in samples])
                    batch[mask] = torch.arange(batch[of].shape[1]) < lengths[:, None]
            return batch
        if isinstance(first, (list, tuple)):
            parts = [self._collated(part, name) for part in zip(*samples, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else parts
        if isinstance(first, (torch.Tensor, np.ndarray)) and first.ndim:
            value = self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value
            return pad_stack(samples, value, self.multiple_of)[0]
        return collate_in_own_memory(samples)
