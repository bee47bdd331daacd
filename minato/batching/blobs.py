"""Objects of a batch outside its fields: samples of another structure, strings, states; exceptions on their way."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeAlias

from minato._compat import ExceptionWrapper
from minato._core import WorkerLedger
from minato._core.codes import ERROR_BLOB, SAMPLE_BLOB, STATE_BLOB
from minato._core.limits import slot_overflow
from minato._support.items import name_of
from minato._support.pickling import Purpose
from minato._support.values import message_of, type_name
from minato.batching.arena import Slot
from minato.batching.serialization import Store, damaged
from minato.errors import add_note, not_the_end, outside

Kinds: TypeAlias = tuple[type[BaseException], ...]

BEFORE_SAMPLES = "before the first sample of this worker"
"""Ends the note on what ``worker_init_fn`` has raised, which is the error of each sample, and of none."""


def noted(error: BaseException, explanation: str = "") -> BaseException:
    """Add an explanation to an exception, if there is one, and return it."""
    if explanation:
        add_note(error, explanation)
    return error


class ErrorTransport(NamedTuple):
    """How the exceptions of a worker get to the training loop; those of ``kinds`` do not end the worker.

    ``wrap`` returns the exception that ``next()`` raises for one that is being handled, or torch's wrapper of it. A
    second argument is an explanation, in lines that are indented as those of a traceback.
    """

    kinds: Kinds = (Exception,)
    wrap: Callable[..., ExceptionWrapper | BaseException] = noted


AS_RAISED = ErrorTransport()  # exceptions stay what they are, and all but Exception end the worker


class _Travelling(ExceptionWrapper):
    """Arrives as torch's wrapper; of a class that does not arrive only the text does, in a RuntimeError."""

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            kind = pickle.dumps(self.exc_type)
        except Exception:
            kind = b""
        return _arrived, (kind, {**self.__dict__, "exc_type": RuntimeError})


def _arrived(kind: bytes, fields: dict[str, object]) -> ExceptionWrapper:
    wrapper = ExceptionWrapper.__new__(ExceptionWrapper)
    wrapper.__dict__.update(fields)
    with suppress(Exception):  # this process cannot import it
        wrapper.exc_type = pickle.loads(kind)
    return wrapper


class SampleError:
    """An exception, itself or in torch's wrapper of it, and the index of the sample that raised it.

    The index is None if the collation of the batch raised; ``state`` is that of the worker's dataset afterwards, as
    :meth:`BatchReader.state` returns it, or None without one.
    """

    _is_noted = False

    def __init__(
        self, error: ExceptionWrapper | BaseException, index: object = None, state: object = None
    ) -> None:
        self.error, self.index, self.state = error, index, state

    def exception(self) -> BaseException:
        """Return the exception, with torch's type and text, and a note that names the sample."""
        error = self.error if isinstance(self.error, BaseException) else _unwrapped(self.error)
        BaseException.with_traceback(error, outside(error.__traceback__))
        if self.index is not None and not (self._is_noted or isinstance(error, KeyboardInterrupt)):
            self._is_noted = True
            add_note(error, f"raised by {name_of(self.index)}")
        return error


def _unwrapped(wrapper: ExceptionWrapper) -> BaseException:
    try:
        wrapper.reraise()
    except BaseException as raised:
        if not isinstance(raised, (Exception, wrapper.exc_type)):
            raise  # the handler of a signal has raised it
        if not isinstance(raised, (RuntimeError, wrapper.exc_type)):
            # torch passes message= to a class that has one, such as ExceptionGroup, whatever its constructor takes.
            wrapper.exc_type = RuntimeError
            return _unwrapped(wrapper)
        traceback.clear_frames(raised.__traceback__)  # torch's own frames
        return BaseException.with_traceback(raised, None)
    raise AssertionError(wrapper)


def exception_of(error: object) -> BaseException:
    """Return the exception in an object that was read as an error; DamagedError: it is no :class:`SampleError`."""
    if not isinstance(error, SampleError):
        raise damaged("the error of a sample")
    return error.exception()


def raise_sample_error(error: object) -> NoReturn:
    """Raise the exception in an object that was read as an error; DamagedError: it is no :class:`SampleError`."""
    raised = exception_of(error)
    try:
        raise raised
    finally:
        # The exception, its traceback and this frame would form a cycle that keeps the workers.
        del raised, error


def slot_overflow_error(slot: Slot) -> SampleError:
    """Return the error of a batch whose slot has no room left, not even for an error."""
    return SampleError(MemoryError(slot_overflow(slot.end - slot.start)))


def reported(error: BaseException) -> Exception:
    """An exception of user code; one that would end the program, a generator or a task becomes a RuntimeError."""
    if isinstance(error, Exception):
        return error
    ended = RuntimeError(f"{type(error).__name__} was raised, as if to end the worker")
    ended.__cause__ = error
    return ended


def wrapped(worker: str, in_process: bool = False) -> Callable[..., ExceptionWrapper]:
    """Return a function that puts an exception into torch's wrapper, so that text and traceback read as torch's.

    ``worker`` is in torch's words: ``worker process 3``. A Ctrl-C ends a worker process instead of travelling.
    """

    def wrap(error: BaseException, explanation: str = "") -> ExceptionWrapper:
        if in_process and isinstance(error, KeyboardInterrupt):
            raise error
        if in_process:
            error = reported(error)
        where = f"in DataLoader {worker}"
        if explanation:  # before the traceback; torch adds the last full stop
            where += f".\n{explanation.removesuffix('.')}"
        # torch's text begins with a traceback in any case.
        trace = outside(error.__traceback__) or _innermost(error.__traceback__)
        try:
            return _Travelling((type(error), error, trace), where=where)  # type: ignore[no-untyped-call]  # torch's class
        except Exception:  # by an attribute of its class, which the traceback's text needs
            described = RuntimeError(f"{type_name(error, module=True)}: {message_of(error)}")
            return _Travelling((RuntimeError, described, None), where=where)  # type: ignore[no-untyped-call]

    return wrap


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


# ---- in the store ----

GetState = Callable[[], Any]


class Unsendable:
    """In place of a sample that cannot be sent as it is: it runs again where its batch is collated.

    Its ``error`` is that of its pickling; None if its copy might differ.
    """

    def __init__(self, index: object, error: SampleError | None = None) -> None:
        self.index, self.error = index, error


class BlobWriter:
    """Puts objects of a batch into the store, and attaches them to the batch's places in the ledger."""

    def __init__(self, ledger: WorkerLedger, store: Store, errors: ErrorTransport) -> None:
        self.errors, self._ledger, self._store = errors, ledger, store

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

        Returns whether it is sent: ``sends`` says that it may be, and it can be pickled.
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
        with suppress(Exception):  # of a class that has notes of its own
            if any(note.endswith(BEFORE_SAMPLES) for note in getattr(error, "__notes__", ())):
                index = None
        if isinstance(error, StopIteration):
            error = not_the_end("a batch" if index is None else name_of(index), error)
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
