"""Running samples one after the other, and the transforms of one of them, while the lease says which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar, final

from minato._core.codes import LeaseState

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LEASE_NBYTES", "Lease", "run_samples", "run_steps"]

K = TypeVar("K")

LEASE_NBYTES = 24
"""Bytes of a lease: position + 1 (0: no sample), the time it was begun, and its step, all 64 bits wide."""


@final
class Lease:
    """What one worker runs, in shared memory: supervision reads it, also after the worker's death.

    ``begin``, ``enter`` and ``step`` are its only writers, besides the loops of this module and the ledger, which says
    that the worker is between two runs. The words are not written at once: a second reading confirms the first.

    Args:
        buffer: Writable memory, which stays mapped for the lease's life; None: memory of its own.
        offset: Where its ``LEASE_NBYTES`` start; a multiple of 8.
    """

    def __init__(self, buffer: Buffer | None = None, offset: int = 0) -> None:
        memory = memoryview(bytearray(LEASE_NBYTES) if buffer is None else buffer)
        if memory.readonly:
            raise BufferError("a lease needs memory that can be written")
        if offset < 0 or offset % 8 or offset + LEASE_NBYTES > memory.nbytes:
            raise ValueError(f"offset {offset} is no place for a lease in {memory.nbytes} bytes")
        self._words = memory.cast("B")[offset : offset + LEASE_NBYTES].cast("q")

    @property
    def position(self) -> int | None:
        """Position of the sample that runs; None: none does."""
        word = self._words[0]
        return word - 1 if word else None

    @property
    def started_ns(self) -> int:
        """When the sample, or what else the worker is on, was begun; on ``now_ns``."""
        return self._words[1]

    @property
    def step(self) -> int:
        """Index of the transform that runs; -1: the dataset itself; below: READING, or what ``enter`` says."""
        return self._words[2]

    @step.setter
    def step(self, value: int) -> None:
        self._words[2] = value

    def state(self) -> LeaseState:
        """The three words as a ``LeaseState``."""
        return LeaseState(self.position, self.started_ns, self.step)

    def begin(self, position: int, started_ns: int, step: int = -1) -> None:
        """Say that the worker runs the sample at this position."""
        self._words[1], self._words[2], self._words[0] = started_ns, step, position + 1

    def enter(self, step: int, started_ns: int) -> None:
        """Say that the worker runs no sample.

        Args:
            step: STARTING, FIRST_COLLATED - the batch that it collates, or -1: nothing.
        """
        self._words[1], self._words[2], self._words[0] = started_ns, step, 0


def run_samples(
    fetch: Callable[[K], object],
    keys: Sequence[K],
    position: int,
    lease: Lease,
    durations: Buffer,
    bind: Callable[[int, K], None] | None,
    epoch: int,
    catches: type[BaseException] | tuple[type[BaseException], ...],
) -> tuple[list[Any], BaseException | None]:
    """Call ``fetch(key)`` for each key, until one raises.

    Args:
        keys: The samples' keys; a list.
        position: Position of the first; the others follow it.
        lease: Says which of them runs, since when, and that the dataset runs.
        durations: Writable int64 memory of ``len(keys)`` words at least; receives each sample's time in ns:
            in the compiled core, up to 16 neighbors that take less than 2 µs get their mean.
        bind: Called with ``(epoch, key)`` before each sample; None for nothing.
        catches: What a sample may raise; anything else propagates.

    Returns:
        The samples, and what the first one after them raised, or None.

    Raises:
        ValueError: ``durations`` is too small.
    """
    laps = _int64_words(durations, len(keys), "durations")
    samples: list[Any] = []
    started = monotonic_ns()
    for i, key in enumerate(keys):
        lease.begin(position + i, started)
        try:
            if bind is not None:
                bind(epoch, key)
            samples.append(fetch(key))
        except catches as error:
            laps[i] = monotonic_ns() - started
            return samples, error
        now = monotonic_ns()
        laps[i] = now - started
        started = now
    return samples, None


def run_steps(
    steps: tuple[Callable[[Any], object], ...],
    value: object,
    index: int,
    deadline_ns: int,
    laps: Buffer | None = None,
    lease: Lease | None = None,
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
        lease: Its step is always that of the step being run (after an exception: of the one that
            raised), at the end the returned index.

    Returns:
        The value, and the index of the next step: ``len(steps)`` when the sample is complete.

    Raises:
        IndexError: ``index`` is out of range.
        ValueError: ``laps`` is too small.
        Exception: Whatever a step raises, unchanged.
    """
    if not isinstance(steps, tuple):
        raise TypeError(f"steps must be a tuple, not {type(steps).__name__}")
    length = len(steps)
    if not 0 <= index <= length:
        raise IndexError(f"index must be between 0 and {length}, not {index}")
    words = None if laps is None else _int64_words(laps, length, "laps")
    now_ns = before_ns = monotonic_ns()
    while index < length:
        if lease is not None:
            lease.step = index
        value = steps[index](value)
        if deadline_ns > 0 or words is not None:
            now_ns = monotonic_ns()
        if words is not None:
            words[index] = now_ns - before_ns
            before_ns = now_ns
        index += 1
        if 0 < deadline_ns <= now_ns:
            break
    if lease is not None:
        lease.step = index
    return value, index


def _int64_words(buffer: Buffer, words: int, name: str) -> memoryview:
    view = memoryview(buffer)
    if view.readonly:
        raise BufferError("Object is not writable.")
    if view.nbytes < 8 * words:
        raise ValueError(f"{name} needs {8 * words} bytes, this buffer has {view.nbytes}")
    return view.cast("B").cast("q")
