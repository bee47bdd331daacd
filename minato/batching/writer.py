"""The workers' side of a batch: each finished sample goes straight to its final place."""

from __future__ import annotations

import struct
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from torch.utils.data import default_collate

from minato._compat import ExceptionWrapper
from minato._core.clock import now_ns
from minato._core.codes import (
    END_BLOB,
    ERROR_BLOB,
    FIRST_COLLATED,
    MUST_COLLATE,
    SAMPLE_BLOB,
    SKIP_BLOB,
    STATE_BLOB,
    TEXT_BLOB,
)
from minato._core.copy import Packer
from minato._core.ledger import Ledger
from minato._core.segment import Segment
from minato._support.exceptions import not_the_end
from minato._support.pickling import Purpose
from minato.batching.layout import Layout
from minato.batching.page_locks import Slot
from minato.batching.serialization import DamagedError, Store, damaged, keys_of
from minato.errors import add_note
from minato.observe.trace.tracer import NULL_TRACER, Tracer
from minato.workers.current_sample import indices_of

__all__ = ["BatchWriter", "SampleError", "read_layout"]

_LAYOUT_HEAD = struct.Struct("<QQQ")
"""Offset of the fields, number of samples they are for, bytes of the layout that follows the checksums."""
_CHECKSUMS = struct.Struct("<II")
"""Of the head, and of the layout."""
_SHARED_WORK_BYTES = 8 << 20
"""From here on, several threads copy faster than one, even where they are not at hand at once."""
_NEVER = 1 << 62


class SampleError:
    """An exception on its way to the consumer, and the key of the sample that raised it.

    Args:
        error: The exception itself (workers in this process) or torch's wrapper of it.
        key: Dataset index, or None when the batch as a whole failed (its collation).
        state: Of the worker's dataset afterwards, if it has one, as :meth:`BatchReader.state` gives it.
    """

    def __init__(
        self, error: ExceptionWrapper | BaseException, key: Any = None, state: Any = None
    ) -> None:
        self.error = error
        self.key = key
        self.state = state

    def reraise(self) -> None:
        """Raise the exception, once, with torch's type and text, and a note that names the sample."""
        # A frame that held the exception whose traceback holds the frame would keep the loader's workers alive.
        error = self.error
        del self.error
        try:
            if isinstance(error, BaseException):
                raise error
            error.reraise()
        except BaseException as raised:
            if self.key is not None and not isinstance(raised, KeyboardInterrupt):
                add_note(raised, f"raised by the sample with index {self.key!r}")
            if raised is not error:
                traceback.clear_frames(raised.__traceback__)  # torch's own
            raise
        finally:
            del error


def read_layout(segment: Segment, offset: int, slot: Slot | None = None) -> tuple[int, int, Layout]:
    """``(fields, count, layout)`` of a batch whose layout is published at arena offset ``offset``.

    Args:
        slot: Where the fields must lie, if that is known.

    Raises:
        DamagedError: What lies there is not what was written there.
    """
    head = segment.read(offset, _LAYOUT_HEAD.size + _CHECKSUMS.size)
    # Only a size that is right bounds what is read next.
    if len(head) == _LAYOUT_HEAD.size + _CHECKSUMS.size:
        fields, count, nbytes = _LAYOUT_HEAD.unpack_from(head)
        of_head, of_data = _CHECKSUMS.unpack_from(head, _LAYOUT_HEAD.size)
        if crc32(head[: _LAYOUT_HEAD.size]) == of_head:
            data = segment.read(offset + len(head), nbytes)
            if crc32(data) == of_data:
                layout = Layout.from_bytes(data)
                end = fields + layout.fields_nbytes(count)
                if slot is None or slot.start <= fields <= end <= slot.end:
                    return fields, count, layout
    raise damaged("the layout of a batch")


def _layout_record(fields: int, count: int, data: bytes) -> bytes:
    head = _LAYOUT_HEAD.pack(fields, count, len(data))
    return head + _CHECKSUMS.pack(crc32(head), crc32(data)) + data


_State: TypeAlias = tuple[int, Callable[[], Any]]


class _Held:
    """Stands for a sample that cannot be sent to the worker that collates its batch.

    Args:
        error: What says so.
    """

    def __init__(self, error: SampleError) -> None:
        self.error = error


class _Packing(NamedTuple):
    """How samples get into a batch.

    Attributes:
        generation: Of the batch's record in the ledger.
        fields: Arena offset of its fields.
        num_samples: That they are for.
    """

    generation: int
    layout: Layout
    packer: Packer
    fields: int
    num_samples: int


class _NothingLeftError(Exception):
    """All samples of a batch were skipped."""


class BatchWriter:
    """Writes samples, errors and collated batches of one worker.

    A sample that fits the batch's layout is copied to its place in the fields, once. Any other sample is kept as an
    object, and whoever completes the batch collates it by torch's rules.

    Args:
        worker: The worker's number.
        collate_fn: Called with the list of samples, or with the sample if ``auto_collation`` is off.
        describe_error: Turns an exception that is being handled into what the consumer raises.
        catches: What ``collate_fn`` may raise without ending the worker.
        in_line: The worker runs in the consumer's thread, with all of torch's threads at its service.
        tracer: Records copying and collation.
    """

    def __init__(
        self,
        worker: int,
        ledger: Ledger,
        segment: Segment,
        store: Store,
        collate_fn: Callable[[Any], Any],
        auto_collation: bool,
        describe_error: Callable[[BaseException], ExceptionWrapper | BaseException],
        catches: type[BaseException] = Exception,
        in_line: bool = False,
        *,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        self._worker = worker
        self._ledger = ledger
        self._segment = segment
        self._store = store
        self._collate_fn = collate_fn
        self._auto_collation = auto_collation
        self._describe_error = describe_error
        self._catches = catches
        self._in_line = in_line
        self._tracer = tracer
        self._lease = ledger.lease_words(worker)
        self.collates = collate_fn is not default_collate or not auto_collation
        """Whether batches are built by calling ``collate_fn`` rather than in fields."""
        self.holds = False
        """Whether a sample could not be sent to another worker, so that batches are best run as a whole."""
        self.run_again: Callable[[], Callable[[int], list[Any]] | None] = lambda: None
        """Gives what runs all samples of a batch in this worker; whoever uses the writer sets it."""
        self._open: dict[int, _Packing] = {}
        self._last: Layout | None = None

    def write_run(self, batch: int, k: int, place: int, samples: list[Any]) -> None:
        """Put samples at consecutive places, the first of which is number k of the batch.

        The caller fills the places afterwards.
        """
        begun_ns = self._tracer.now()
        try:
            packing = None if self.collates else self._packing(batch, samples[0])
        except (MemoryError, DamagedError) as error:  # the batch does not fit its slot
            self.write_error(batch, place, error, None)
        else:
            if packing is None:
                for i, sample in enumerate(samples):
                    self._attach(batch, place + i, sample, SAMPLE_BLOB)
            elif len(samples) == 1 or not self._pack_run(packing, k, samples):
                address = self._segment.address + packing.fields
                for i, sample in enumerate(samples):
                    texts = packing.packer.pack(sample, address, k + i)
                    if texts is None:
                        self._attach(batch, place + i, sample, SAMPLE_BLOB)
                    elif texts:
                        self._attach(batch, place + i, texts, TEXT_BLOB)
        self._tracer.slice("copy", begun_ns)

    def write_batch(self, batch: int, samples: list[Any], state: _State | None = None) -> None:
        """Build a whole batch that has one place, however many samples it holds; the caller fills the place.

        Args:
            state: As for ``write_collated``.
        """
        begun_ns, packed = self._tracer.now(), False
        if not self.collates:
            layout = self._infer(samples[0])
            with suppress(
                MemoryError
            ):  # then what is collated does not fit either, and becomes an error
                if layout is not None and self._pack_all(batch, layout, samples):
                    if state is not None:
                        self._write_state(batch, *state)
                    packed = True
        if not packed:
            self.write_collated(batch, samples, (), state, "a batch of the iterable dataset")
        self._tracer.slice("copy", begun_ns)

    def _pack_all(self, batch: int, layout: Layout, samples: list[Any]) -> bool:
        count = len(samples)
        fields = self._ledger.allocate(batch, layout.fields_nbytes(count))
        if not self._pack_run(_Packing(0, layout, layout.packer(count), fields, count), 0, samples):
            return False
        # Somebody who was interrupted here before may have offered other fields.
        return self._publish(batch, layout, fields, count)[0] == fields

    def _pack_run(self, packing: _Packing, k: int, samples: list[Any]) -> bool:
        """Copy samples to consecutive places; False if one is a misfit or holds texts."""
        _, layout, packer, fields, num_samples = packing
        kept_nbytes = _SHARED_WORK_BYTES // len(samples) if self._in_line else _NEVER
        tensors = packer.pack_run(samples, self._segment.address + fields, k, kept_nbytes)
        if tensors:
            layout.stack(self._segment.array, fields, num_samples, k, tensors, kept_nbytes)
        return tensors is not None

    def write_end(self, batch: int, place: int, state: Callable[[], Any] | None) -> None:
        """Say at a batch's one place that there is nothing more to come.

        Args:
            state: Gives the state of the worker's dataset, if it has one.
        """
        offset, nbytes = 0, 0
        if state is not None:
            offset, nbytes = self._put_state(batch, state, lambda state: state, END_BLOB)
        self._ledger.attach(place, offset | END_BLOB, nbytes)

    def write_error(
        self,
        batch: int,
        place: int,
        error: BaseException,
        key: Any,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Like ``write``, for a sample that raised."""
        if isinstance(error, StopIteration):
            source = "a batch" if key is None else f"the sample with index {key!r}"
            error = not_the_end(source, error)
        described = self._describe_error(error)
        if state is not None:
            with suppress(Exception):  # the error comes without it if it cannot be sent
                offset, nbytes = self._put_state(
                    batch, state, lambda state: SampleError(described, key, state), ERROR_BLOB
                )
                self._ledger.attach(place, offset | ERROR_BLOB, nbytes)
                return
        self._attach(batch, place, SampleError(described, key), ERROR_BLOB)

    def _write_state(self, batch: int, place: int, state: Callable[[], Any]) -> None:
        """Add the state of the worker's dataset after a batch of which nothing else lies at this place."""
        offset, nbytes = self._put_state(batch, state, lambda state: state, STATE_BLOB)
        self._ledger.attach(place, offset | (STATE_BLOB if offset else ERROR_BLOB), nbytes)

    def _put_state(
        self, batch: int, state: Callable[[], Any], message: Callable[[Any], Any], kind: int
    ) -> tuple[int, int]:
        """Keep a message that holds a state or, if that cannot be had or sent, the error."""
        try:
            return self._put(batch, message((self._worker, state())), kind)
        except Exception as error:
            failed = message((self._worker, self._describe_error(error)))
            return self._put_error(batch, failed, kind)

    def write_collated(
        self,
        batch: int,
        samples: list[Any],
        skipped: Sequence[int] = (),
        state: _State | None = None,
        named: str | None = None,
    ) -> None:
        """Collate a batch of which this worker holds all samples; the caller fills their places afterwards.

        What is collated is said to be there last. From then on the batch is complete, even if the worker dies.

        Args:
            skipped: Places of samples that were left out.
            state: A place at which nothing else lies, and what gives the state of the worker's dataset after the batch.
            named: The batch in messages; None: by its indices.
        """
        begun_ns = self._tracer.now()
        result = self._collated(batch, lambda: samples, named)
        if state is not None:
            self._write_state(batch, *state)
        self._set_result(batch, skipped, result)
        self._tracer.slice("collate", begun_ns)

    def write_nothing(self, batch: int, skipped: Sequence[int]) -> None:
        """Say that all samples of a batch are skipped; these are their places, which the caller fills afterwards."""
        self._set_result(batch, skipped, (SKIP_BLOB, 0))

    def _set_result(self, batch: int, skipped: Sequence[int], result: tuple[int, int]) -> None:
        for place in skipped:
            self._ledger.attach(place, SKIP_BLOB, 0)
        self._ledger.set_result(batch, *result)

    def finished(self, batch: int, outcome: int) -> None:
        """Act on the answer of ``Ledger.fill``."""
        if outcome == MUST_COLLATE:
            self.collate(batch)

    def collate(self, batch: int) -> None:
        """Collate a full batch from what its workers wrote and publish it."""
        begun_ns = self._tracer.now()
        offsets = [offset for _, offset, _ in self._ledger.blobs(batch)]
        self._ledger.set_ready(batch, *self._collated(batch, lambda: self._gathered(batch)))
        # Not before: whoever is interrupted collates them again.
        for offset in offsets:
            self._store.drop(offset)
        self._tracer.slice("collate", begun_ns)

    def _gathered(self, batch: int) -> list[Any]:
        """The samples of a full batch, from what its workers wrote; without those that were skipped."""
        _, layout_offset, _, _, count, _ = self._ledger.contents(batch)
        fields, layout = 0, None
        if layout_offset:
            fields, _, layout = read_layout(self._segment, layout_offset)
        samples = []
        for k, (kind, offset, nbytes) in enumerate(self._ledger.blobs(batch)):
            if kind == SKIP_BLOB and not offset:
                continue
            value = self._store.peek(offset, nbytes, kind) if kind or offset else []
            if kind != SAMPLE_BLOB:
                if layout is None or len(value) != layout.num_texts:
                    raise damaged("what belongs to a sample")
                value = layout.sample(self._segment.array, fields, count, k, value)
            samples.append(value)
        if not samples:
            raise _NothingLeftError
        held = next((sample for sample in samples if type(sample) is _Held), None)
        if held is None:
            return samples
        run_again = self.run_again()
        if run_again is None or not self._ledger.describe(batch)[3]:
            held.error.reraise()
            raise AssertionError(held)
        return run_again(batch)

    def _collated(
        self, batch: int, gather: Callable[[], list[Any]], named: str | None = None
    ) -> tuple[int, int]:
        # For whoever finds this process dead: which batch it was on, and no sample.
        lease = self._lease
        before = lease[0], lease[1], lease[2]
        lease[0], lease[1], lease[2] = 0, now_ns(), FIRST_COLLATED - batch
        try:
            samples = gather()
            result = self._collate_fn(samples if self._auto_collation else samples[0])
            offset, nbytes = self._put(batch, result, SAMPLE_BLOB, "result")
            return offset | SAMPLE_BLOB, nbytes
        except _NothingLeftError:
            return SKIP_BLOB, 0
        except self._catches as raised:
            error: BaseException = raised
            if isinstance(error, StopIteration):
                named = named or f"the batch of {indices_of(self._ledger, self._keys, batch)}"
                error = not_the_end(f"collate_fn, called for {named},", error)
            offset, nbytes = self._put_error(
                batch, SampleError(self._describe_error(error)), ERROR_BLOB
            )
            return offset | ERROR_BLOB, nbytes
        finally:
            lease[0], lease[1], lease[2] = before

    def _keys(self, batch: int, k: int, count: int) -> Sequence[Any]:
        return keys_of(self._ledger, self._store, batch, k, count)

    def _packing(self, batch: int, sample: Any) -> _Packing | None:
        """How samples get into the batch; None if this one cannot start it."""
        generation, offset, count = self._ledger.fields(batch)
        packing = self._open.get(batch)
        if packing is not None and packing.generation == generation:
            return packing
        if offset:
            fields, _, layout = read_layout(self._segment, offset)
        else:
            inferred = self._infer(sample)
            if inferred is None:
                return None
            fields = self._ledger.allocate(batch, inferred.fields_nbytes(count))
            fields, layout = self._publish(batch, inferred, fields, count)
        packing = _Packing(generation, layout, layout.packer(count), fields, count)
        self._open[batch] = packing
        return packing

    def _infer(self, sample: Any) -> Layout | None:
        layout = Layout.infer(sample, self._last)
        if layout is not None:
            self._last = layout
        return layout

    def _publish(self, batch: int, layout: Layout, fields: int, count: int) -> tuple[int, Layout]:
        """Offer a layout and its fields for the batch; returns those that hold: the first that were offered."""
        data = layout.to_bytes()
        data = _layout_record(fields, count, data)
        offset = self._ledger.allocate(batch, len(data))
        self._segment.write(offset, data)
        holding = self._ledger.publish_layout(batch, offset)
        if holding != offset:
            fields, _, layout = read_layout(self._segment, holding)
        return fields, layout

    def _attach(self, batch: int, place: int, value: Any, kind: int) -> None:
        try:
            offset, nbytes = self._put(batch, value, kind)
        except self._catches as error:
            # What cannot travel becomes the error that says so.
            failure: Any = SampleError(self._describe_error(error))
            if kind == SAMPLE_BLOB:
                failure, self.holds = _Held(failure), True
            else:
                kind = ERROR_BLOB
            offset, nbytes = self._put_error(batch, failure, kind)
            if not offset:
                kind = ERROR_BLOB
        self._ledger.attach(place, offset | kind, nbytes)

    def _put_error(self, batch: int, error: Any, kind: int) -> tuple[int, int]:
        """Keep an error; offset 0 if the slot has no room even for that, and the reader knows what to say."""
        try:
            return self._put(batch, error, kind)
        except MemoryError:
            return 0, 0

    def _put(
        self, batch: int, value: Any, kind: int, purpose: Purpose = "sample"
    ) -> tuple[int, int]:
        return self._store.put(
            lambda nbytes: self._ledger.allocate(batch, nbytes), value, purpose, kind
        )
