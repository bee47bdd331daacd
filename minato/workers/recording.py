"""The slices of samples in a trace, where one is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minato.observe.trace.tracer import REPEATED, SAMPLE, Tracer
from minato.workers.deferral import DeferredSample

__all__ = ["recorded", "recorded_batch"]

Fetch = Callable[[Any], Any]


def recorded(
    fetch: Fetch, tracer: Tracer, lease: Any, epoch: int, *, repeats: bool = False
) -> Fetch:
    """Return a function like ``fetch`` that also records each sample.

    Args:
        fetch: Runs the sample of an index, or resumes a deferred one.
        lease: The worker's lease words.
        repeats: The samples have run before, and the earlier results count.
    """

    def fetched(key: Any) -> Any:
        begin_ns, position = tracer.now(), lease[0]
        args = {"index": key.key if type(key) is DeferredSample else key, "epoch": epoch}
        try:
            sample = fetch(key)
        except BaseException as error:
            args["error"] = type(error).__name__
            tracer.sample(position, f"{SAMPLE} (failed)", begin_ns, args)
            raise
        name = REPEATED if repeats else SAMPLE
        if type(sample) is DeferredSample:
            name = f"{SAMPLE} (deferred)"
        tracer.sample(position, name, begin_ns, args)
        return sample

    return fetched


def recorded_batch(fetch: Fetch, tracer: Tracer, batch_size: int, epoch: int) -> Fetch:
    """Return a function like ``fetch``, which loads a whole batch, that also records it."""

    def fetched(key: Any) -> Any:
        begin_ns = tracer.now()
        samples = fetch(key)
        count = len(samples) if isinstance(samples, list) else batch_size
        tracer.slice(f"{SAMPLE}s", begin_ns, args={"count": count, "epoch": epoch})
        return samples

    return fetched
