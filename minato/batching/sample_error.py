"""An exception of a sample or of a collation, on its way from the worker to the training loop."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeAlias

from minato._compat import ExceptionWrapper
from minato._core.limits import slot_overflow
from minato._support.text import message_of, text_of, type_name
from minato.batching.arena import Slot
from minato.batching.serialization import damaged
from minato.errors import add_note

__all__ = [
    "AS_RAISED",
    "ErrorTransport",
    "Kinds",
    "SampleError",
    "exception_of",
    "raise_sample_error",
    "slot_overflow_error",
    "wrapped",
]

Kinds: TypeAlias = tuple[type[BaseException], ...]
"""Exceptions, by their classes."""


class ErrorTransport(NamedTuple):
    """How the exceptions of a worker get to the training loop.

    Attributes:
        kinds: The exceptions of samples and ``collate_fn`` that do not end the worker.
        wrap: Returns the exception that ``next()`` raises for one that is being handled, or torch's wrapper of it.
    """

    kinds: Kinds = (Exception,)
    wrap: Callable[[BaseException], ExceptionWrapper | BaseException] = lambda error: error


AS_RAISED = ErrorTransport()
"""Exceptions stay what they are, and all but Exception end the worker."""


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
    """An exception, and the index of the sample that raised it.

    Args:
        error: The exception itself (workers in this process), or torch's wrapper of it.
        index: Index in the dataset; None if the collation of the batch raised.
        state: State of the worker's dataset afterwards, as :meth:`BatchReader.state` returns it; None without one.
    """

    _is_noted = False

    def __init__(
        self, error: ExceptionWrapper | BaseException, index: object = None, state: object = None
    ) -> None:
        self.error = error
        self.index = index
        self.state = state

    def exception(self) -> BaseException:
        """Return the exception, with torch's type and text, and a note that names the sample."""
        error = self.error if isinstance(self.error, BaseException) else _unwrapped(self.error)
        if self.index is not None and not (self._is_noted or isinstance(error, KeyboardInterrupt)):
            self._is_noted = True
            add_note(error, f"raised by the sample with index {text_of(self.index)}")
        return error


def _unwrapped(wrapper: ExceptionWrapper) -> BaseException:
    """Return the exception that torch's wrapper raises."""
    try:
        wrapper.reraise()
    except BaseException as raised:
        if not isinstance(raised, (Exception, wrapper.exc_type)):
            raise  # the handler of a signal has raised it
        traceback.clear_frames(raised.__traceback__)  # torch's own frames
        return raised.with_traceback(None)
    raise AssertionError(wrapper)


def exception_of(error: object) -> BaseException:
    """Return the exception in an object that was read as an error.

    Raises:
        DamagedError: The object is no :class:`SampleError`.
    """
    if not isinstance(error, SampleError):
        raise damaged("the error of a sample")
    return error.exception()


def raise_sample_error(error: object) -> NoReturn:
    """Raise the exception in an object that was read as an error.

    Raises:
        DamagedError: The object is no :class:`SampleError`.
    """
    raised = exception_of(error)
    try:
        raise raised
    finally:
        # The exception, its traceback and this frame would form a cycle that keeps the workers.
        del raised, error


def slot_overflow_error(slot: Slot) -> SampleError:
    """Return the error of a batch whose slot has no room left, not even for an error."""
    return SampleError(MemoryError(slot_overflow(slot.end - slot.start)))


def wrapped(worker: str, in_process: bool = False) -> Callable[[BaseException], ExceptionWrapper]:
    """Return a function that puts an exception into torch's wrapper, so that text and traceback read as torch's.

    Args:
        worker: Kind and number of the worker, in torch's words: ``worker process 3``.
        in_process: The worker is a process of its own. Then a Ctrl-C ends it instead of travelling.
    """

    def wrap(error: BaseException) -> ExceptionWrapper:
        if in_process and isinstance(error, KeyboardInterrupt):
            raise error
        if in_process and not isinstance(error, Exception):
            # Raised in the training loop it would end the program, a generator or a task, and not report a bad sample.
            ended = RuntimeError(f"{type(error).__name__} was raised, as if to end the worker")
            ended.__cause__, error = error, ended
        where = f"in DataLoader {worker}"
        try:
            return _Travelling((type(error), error, error.__traceback__), where=where)  # type: ignore[no-untyped-call]  # torch's class
        except Exception:  # by an attribute of its class, which the traceback's text needs
            described = RuntimeError(f"{type_name(error, module=True)}: {message_of(error)}")
            return _Travelling((RuntimeError, described, None), where=where)  # type: ignore[no-untyped-call]

    return wrap
