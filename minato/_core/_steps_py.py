"""Running the transforms of one sample, with a stop between two of them when time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["run_steps"]


def run_steps(
    steps: tuple[Callable[[Any], Any], ...],
    value: object,
    index: int,
    deadline_ns: int,
    laps: Buffer | None = None,
    cursor: Buffer | None = None,
) -> tuple[Any, int]:
    """Apply ``steps[index:]`` to ``value``, stopping after a step that ends past the deadline.

    At least one step runs if one is left. A step that ran is never run again: the returned index
    is that of the next one. A sample whose last step ends late is complete.

    Args:
        steps: The transforms, each a callable of one argument.
        value: The sample, or the partial result of an earlier call.
        index: The first step to apply, 0 to ``len(steps)``.
        deadline_ns: On the clock of :func:`minato._core.now_ns`; 0 or less for none.
        laps: Writable int64 memory of ``len(steps)`` words; word *i* receives the duration of
            step *i* in ns once it has run.
        cursor: Writable int64 memory of one word or more; its first word always holds the index
            of the step being run (after an exception: of the one that raised), at the end the
            returned index.

    Returns:
        The value, and the index of the next step: ``len(steps)`` when the sample is complete.

    Raises:
        IndexError: ``index`` is out of range.
        ValueError: ``laps`` or ``cursor`` is too small.
        Exception: Whatever a step raises, unchanged.
    """
    if not isinstance(steps, tuple):
        raise TypeError(f"steps must be a tuple, not {type(steps).__name__}")
    length = len(steps)
    if not 0 <= index <= length:
        raise IndexError(f"index must be between 0 and {length}, not {index}")
    lap_words = None if laps is None else _int64_words(laps, length, "laps")
    cursor_words = None if cursor is None else _int64_words(cursor, 1, "cursor")
    now_ns = before_ns = time.monotonic_ns()
    while index < length:
        if cursor_words is not None:
            cursor_words[0] = index
        value = steps[index](value)
        if deadline_ns > 0 or lap_words is not None:
            now_ns = time.monotonic_ns()
        if lap_words is not None:
            lap_words[index] = now_ns - before_ns
            before_ns = now_ns
        index += 1
        if 0 < deadline_ns <= now_ns:
            break
    if cursor_words is not None:
        cursor_words[0] = index
    return value, index


def _int64_words(buffer: Buffer, words: int, name: str) -> memoryview:
    view = memoryview(buffer)
    if view.readonly:
        raise BufferError("Object is not writable.")
    if view.nbytes < 8 * words:
        raise ValueError(f"{name} needs {8 * words} bytes, this buffer has {view.nbytes}")
    return view.cast("B").cast("q")
