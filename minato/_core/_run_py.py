"""Running the samples of a claimed run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns as now_ns
from typing import Any

__all__ = ["run_samples"]


def run_samples(
    fetch: Callable[[Any], Any],
    keys: Sequence[Any],
    position: int,
    lease: Any,
    durations: Any,
    bind: Callable[[int, Any], None] | None,
    epoch: int,
    catches: type[BaseException] | tuple[type[BaseException], ...],
) -> tuple[list[Any], BaseException | None]:
    """Call ``fetch(key)`` for each key, until one raises.

    Args:
        keys: The samples' keys; a list.
        position: Position of the first; the others follow it.
        lease: Writable int64 memory of three words; they always hold the position + 1 of the sample that is running,
            when it started (ns on ``now_ns``) and -1 for the dataset. A watchdog reads them.
        durations: Writable int64 memory of ``len(keys)`` words at least; receives each sample's time in ns.
        bind: Called with ``(epoch, key)`` before each sample; None for nothing.
        catches: What a sample may raise; anything else propagates.

    Returns:
        The samples, and what the first one after them raised, or None.
    """
    samples: list[Any] = []
    started = now_ns()
    for i, key in enumerate(keys):
        lease[0], lease[1], lease[2] = position + i + 1, started, -1
        try:
            if bind is not None:
                bind(epoch, key)
            samples.append(fetch(key))
        except catches as error:
            durations[i] = now_ns() - started
            return samples, error
        now = now_ns()
        durations[i] = now - started
        started = now
    return samples, None
