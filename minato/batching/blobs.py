"""Objects of a batch that have no place in its fields: samples of another structure, strings, errors, states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from minato._core import WorkerLedger
from minato._core.codes import END_BLOB, ERROR_BLOB, SAMPLE_BLOB, STATE_BLOB
from minato._support.pickling import Purpose
from minato._support.text import text_of
from minato.batching.sample_error import ErrorTransport, SampleError
from minato.batching.serialization import Store
from minato.errors import not_the_end

__all__ = ["BlobWriter", "GetState", "Unsendable"]

GetState = Callable[[], Any]
"""Returns the state of the worker's dataset."""


class Unsendable:
    """Takes the place of a sample that no other worker can get as it is; the one that collates its batch runs it again.

    Args:
        error: The exception of its pickling; None if its copy might differ.
    """

    def __init__(self, index: object, error: SampleError | None = None) -> None:
        self.index = index
        self.error = error


class BlobWriter:
    """Puts objects of a batch into the store, and attaches them to the batch's places in the ledger."""

    def __init__(self, ledger: WorkerLedger, store: Store, errors: ErrorTransport) -> None:
        self.errors = errors
        self._ledger = ledger
        self._store = store

    def attach(self, batch: int, place: int, value: object, kind: int) -> None:
        """Attach an object to a place; if it cannot be pickled, the error that says so."""
        try:
            offset, nbytes = self.put(batch, value, kind)
        except self.errors.kinds as error:
            told = value.error if isinstance(value, SampleError) else self.errors.wrap(error)
            offset, nbytes = self.put_error(batch, SampleError(told), ERROR_BLOB)
            kind = ERROR_BLOB
        self._ledger.attach(place, offset | kind, nbytes)

    def attach_sample(
        self, batch: int, place: int, sample: object, index: object, sends: bool
    ) -> bool:
        """Attach a sample to a place, or what has it run again by the worker that collates its batch.

        Args:
            sends: Whether the sample may be sent to that worker.

        Returns:
            Whether it is sent: it may be, and can be pickled.
        """
        failure: SampleError | None = None
        if sends:
            try:
                offset, nbytes = self.put(batch, sample, SAMPLE_BLOB)
                self._ledger.attach(place, offset | SAMPLE_BLOB, nbytes)
                return True
            except self.errors.kinds as error:
                failure = SampleError(self.errors.wrap(error))
        offset, nbytes = self.put_error(batch, Unsendable(index, failure), SAMPLE_BLOB)
        self._ledger.attach(place, offset | (SAMPLE_BLOB if offset else ERROR_BLOB), nbytes)
        return False

    def attach_error(
        self, batch: int, place: int, error: BaseException, index: object, state: GetState | None
    ) -> None:
        """Attach the exception of a sample, with the state of the dataset after it if there is one."""
        if isinstance(error, StopIteration):
            source = "a batch" if index is None else f"the sample with index {text_of(index)}"
            error = not_the_end(source, error)
        described = self.errors.wrap(error)
        if state is not None:
            with suppress(Exception):  # without the state if it cannot be pickled
                offset, nbytes = self._put_state(
                    batch, state, lambda state: SampleError(described, index, state), ERROR_BLOB
                )
                self._ledger.attach(place, offset | ERROR_BLOB, nbytes)
                return
        self.attach(batch, place, SampleError(described, index), ERROR_BLOB)

    def attach_state(self, batch: int, place: int, state: GetState) -> None:
        """Attach the state of the dataset after a batch to a place of the batch that has no sample."""
        offset, nbytes = self._put_state(batch, state, lambda state: state, STATE_BLOB)
        self._ledger.attach(place, offset | (STATE_BLOB if offset else ERROR_BLOB), nbytes)

    def attach_end(self, batch: int, place: int, state: GetState | None) -> None:
        """Attach the end of the worker's data, with the state of the dataset if there is one."""
        offset, nbytes = 0, 0
        if state is not None:
            offset, nbytes = self._put_state(batch, state, lambda state: state, END_BLOB)
        self._ledger.attach(place, offset | END_BLOB, nbytes)

    def put(
        self, batch: int, value: object, kind: int, purpose: Purpose = "sample"
    ) -> tuple[int, int]:
        """Put an object into the store; returns its offset and size (see :meth:`Store.put`)."""
        return self._store.put(
            lambda nbytes: self._ledger.allocate(batch, nbytes), value, purpose, kind
        )

    def put_error(self, batch: int, error: object, kind: int) -> tuple[int, int]:
        """Put an error into the store; offset 0 if the slot has no room for it, which the reader then reports."""
        try:
            return self.put(batch, error, kind)
        except MemoryError:
            return 0, 0

    def _put_state(
        self, batch: int, state: GetState, wrap: Callable[[object], object], kind: int
    ) -> tuple[int, int]:
        """Put a message with the worker's number and the state, or the exception that the state raised."""
        try:
            return self.put(batch, wrap((self._ledger.number, state())), kind)
        except Exception as error:
            failed = wrap((self._ledger.number, self.errors.wrap(error)))
            return self.put_error(batch, failed, kind)
