"""The parts of a report: figures, each with its unit, and how to read its extremes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Batches",
    "Bias",
    "Gpu",
    "Host",
    "Point",
    "Reads",
    "Room",
    "Setup",
    "SlowSample",
    "Slowness",
    "Stage",
    "Trouble",
    "Waiting",
    "Workers",
    "figure",
]


def figure(unit: str, reading: str) -> Any:
    """A field of a figure.

    Args:
        unit: ``s``, ``bytes``, ``share`` (0 to 1), ``per s``, ``bytes per s``, or what is counted.
        reading: How to read its extremes, in one line.
    """
    return field(metadata={"unit": unit, "reading": reading})


@dataclass(frozen=True)
class Waiting:
    """How long the training loop waited inside ``next()``."""

    total_s: float = figure(
        "s", "the sum, with the start of the iterator; what a perfect loader would save"
    )
    share: float = figure(
        "share", "below 5 %: training is the limit; above 20 %: the loader costs you time"
    )
    p50_s: float = figure("s", "of one next(); near 0: most batches lay ready")
    p99_s: float = figure("s", "far above P50: a few batches hold the loop up")
    max_s: float = figure("s", "the longest; often the first batch")
    start_s: float = figure(
        "s", "in iter(), for each epoch; long: workers are slow to start, see persistent_workers"
    )
    first_batch_s: float = figure(
        "s", "until each epoch's first batch; long: workers import much or samples are dear"
    )
    asleep_s: float = figure(
        "s", "the part of the sum in which nothing was ready; the rest is handing over"
    )
    pinned_s: float = figure(
        "s", "copying to page-locked memory, after next(); near the step's time: it is the limit"
    )


@dataclass(frozen=True)
class Batches:
    """What came, and how fast."""

    wall_s: float = figure("s", "from iter() to the last batch")
    batches: int = figure("batches", "that next() returned")
    samples: int = figure("samples", "in them; of a stream, what was asked for")
    nbytes: int = figure("bytes", "in them; 0: batches travel pickled")
    batches_per_s: float = figure("per s", "with the time of your own step")
    samples_per_s: float = figure("per s", "with the time of your own step")
    bytes_per_s: float = figure(
        "bytes per s", "near what memory or the bus can do: samples are too large, not too slow"
    )
    step_p50_s: float = figure(
        "s", "your own work between two next(); near 0: you measure the loader alone"
    )
    step_mean_s: float = figure("s", "far above P50: some steps do more, such as validation")
    coverage: float = figure(
        "share", "delivered of what the sampler gave; 100 % at the end of an epoch"
    )


@dataclass(frozen=True)
class Workers:
    """What the workers did with their time."""

    count: int = figure("workers", "that work now; 0: the training process itself")
    busy_s: float = figure("s", "of all together; divided by wall_s: how many work at a time")
    busy_share: float = figure(
        "share", "near 100 %: they cannot do more; low: something else is the limit"
    )
    work_share: float = figure(
        "share", "waiting for work while the loop waited too; high: the start, or too little room"
    )
    room_share: float = figure(
        "share", "waiting because enough lay ready; high: fewer workers would do"
    )
    on_core_share: float = figure(
        "share", "or waiting for one, of their busy time; low: they wait for a disk or a network"
    )
    cores_share: float = figure(
        "share", "use of the machine's cores by all; near 100 %: more workers cannot help"
    )
    deaths: int = figure("workers", "that died and were replaced; any: look at the warnings")


@dataclass(frozen=True)
class Room:
    """How far ahead the workers could work."""

    occupancy: float = figure(
        "share", "of the window that lay ready; near 0: workers are behind, near 100 %: ahead"
    )
    in_flight: float = figure("batches", "open or ready, on average")
    limit: int = figure(
        "batches", "that may be; equal to what is in flight while you wait: too little room"
    )
    memory_bytes: int = figure("bytes", "of the batches in flight, at most")
    budget_bytes: int = figure("bytes", "memory_budget")
    held_by_budget: bool = figure(
        "yes or no", "yes: the budget keeps further batches from being loaded ahead"
    )


@dataclass(frozen=True)
class Host:
    """What the machine did; use of its cores stands among the workers' figures."""

    gpus: int = figure(
        "GPUs",
        'that are watched, as stats="gpu" has it; 0: nobody asked, none was found, or its driver does not tell',
    )
    disk_bytes_per_s: float = figure(
        "bytes per s", "read from local disks; near what they can do: the disk is the limit"
    )
    available_bytes: int = figure(
        "bytes", "of memory, at the end; near 0: fewer workers, or a smaller memory_budget"
    )
    limit_bytes: int = figure("bytes", "of memory that there are, for this container")


@dataclass(frozen=True)
class Gpu:
    """What one GPU did, looked at ten times a second."""

    name: str = figure("name", "and its number")
    samples: int = figure("times", "it was looked at; few: the figures say little")
    idle_share: float = figure("share", "of the time without any work; high: it waits")
    busy_share: float = figure(
        "share", "of the time in which it computes, when it is not idle; low: its work is small"
    )
    memory_bytes: int = figure("bytes", "in use, by all programs, on average")
    total_bytes: int = figure("bytes", "that it has; much is left: a larger batch may fit")


@dataclass(frozen=True)
class Slowness:
    """What counts as slow, and what was done about it."""

    phase: str = figure(
        "phase", "uniform: costs differ little, nothing is slow; warm-up: too few samples"
    )
    threshold_s: float = figure("s", "samples that take longer are slow; 0: none is")
    percentile: float = figure(
        "share", "in force; above StragglerPolicy.percentile: too many samples were slow"
    )
    slow_share: float = figure(
        "share", "of the latest samples; far above 1 - percentile: costs are rising"
    )
    deferrals: int = figure(
        "times", "a sample was deferred and resumed; 0 in strict and batch order"
    )
    deferred_p99_s: float = figure(
        "s", "until it was resumed; long: the loop kept waiting for quicker samples"
    )
    lag_p50: float = figure(
        "batches", "by which the latest sample of a batch was late; 0 in strict order"
    )
    lag_max: float = figure("batches", "at max_lag: slow samples wait as long as they may")


@dataclass(frozen=True)
class Bias:
    """Whether what comes late, or not at all, differs from the rest; of samples of all epochs, drawn at random."""

    samples: int = figure("samples", "that were looked at; 0: none can be late in this order")
    late_share: float = figure("share", "of them that came in a later batch than their own")
    batch_p50: float = figure("share", "of late samples in a batch; half of the batches have less")
    batch_p99: float = figure("share", "far above P50: late samples come in bunches")
    cost: float = figure(
        "correlation",
        "of lag and cost, by ranks; near 1: dear samples come late, as orders want it",
    )
    size: float | None = figure(
        "correlation", "of lag and bytes; none: all have the same layout, or a worker collated them"
    )
    label: float | None = figure(
        "correlation",
        "of lag and label, with report(labels=...); above 0.2: what comes early is not a fair part",
    )
    skipped_label: float | None = figure(
        "correlation",
        "of being skipped and label, with report(labels=...); above 0.2: some labels come too rarely",
    )


@dataclass(frozen=True)
class Trouble:
    """Samples that failed; counted where an ErrorPolicy handles them."""

    retries: int = figure("times", "a sample was tried again; many: the source is unreliable")
    recovered: int = figure("samples", "that a further try gave")
    skipped: int = figure("samples", "left out; each is missing in the epoch")
    substituted: int = figure("samples", "replaced by on_error")
    raised: int = figure("samples", "whose error came out of next()")
    unrecorded: int = figure(
        "failures", "that ErrorPolicy.log misses; any: its disk is full or broken"
    )


@dataclass(frozen=True)
class Reads:
    """What sources, several reads at once, and the cache did; in all processes."""

    retries: int = figure(
        "times", "a source tried a read again; many: its network or its server is unreliable"
    )
    hedged: int = figure("reads", "that were late and asked for a second time, with FetchOptions")
    hedges_won: int = figure(
        "reads", "of these whose second answer was first; few: asking again is no use"
    )
    cache_hits: int = figure("samples", "that the cache had")
    cache_misses: int = figure("samples", "that it had not, or not whole; all in a first epoch")
    cache_hit_rate: float = figure(
        "share", "low in a second epoch: its quota is too small, or a transform has changed"
    )
    cache_damaged: int = figure("samples", "that it had and could not use; any: its disk is bad")
    cache_errors: int = figure(
        "times", "its disk failed, and the dataset was read; any: full, read-only or broken"
    )
    cache_full: int = figure("times", "a sample was not kept; any: a larger quota_bytes would help")
    cache_stored_bytes: int = figure("bytes", "that were added to it; 0 once all is there")


@dataclass(frozen=True)
class Stage:
    """One stage of a sample's way."""

    name: str = figure(
        "name", "dataset: dataset[i]; collate and copy: what workers do with finished samples"
    )
    kind: str = figure("kind", "source, transform or assembly")
    count: int = figure(
        "samples", "that were timed: all dear ones, about one of 32 cheap ones' leases"
    )
    mean_s: float = figure("s", "for one sample")
    p50_s: float = figure("s", "half of the samples take less")
    p90_s: float = figure("s", "far above P50: this stage makes samples slow")
    p99_s: float = figure("s", "far above P90: few samples, but very slow ones")
    share: float = figure("share", "of the workers' time; the largest is worth your while")


@dataclass(frozen=True)
class SlowSample:
    """One of the samples that took longest."""

    index: int | str = figure("index", "what the dataset was asked for")
    cost_s: float = figure("s", "far above the others: look at this sample")
    epoch: int = figure("epoch", "in which it took that long")
    stage: str = figure(
        "name", "that took most of it; empty: cheap samples are not timed one by one"
    )
    stage_s: float = figure("s", "that stage alone")


@dataclass(frozen=True)
class Point:
    """How the loader stood at one moment."""

    at_s: float = figure("s", "since the epoch's begin")
    batches: int = figure("batches", "delivered so far")
    waited_s: float = figure("s", "in next() so far")
    workers: int = figure("workers", "that worked")
    in_flight: int = figure("batches", "open or ready")
    ready: int = figure("batches", "ready")
    limit: int = figure("batches", "that might be in flight")
    memory_bytes: int = figure("bytes", "of those in flight")


@dataclass(frozen=True)
class Setup:
    """The loader that was measured."""

    num_workers: int = figure("workers", "as the loader was made")
    worker_method: str = figure("name", "process, thread or ray")
    order: str = figure("name", "of the batches")
    batch_size: int | None = figure("samples", "none: of a batch_sampler, or single samples")
    fetch_concurrency: int = figure("samples", "that a worker reads at once")
    may_fetch_more: bool = figure("yes or no", "whether fetch_concurrency is possible")
    prefetch_factor: int | None = figure("batches", "for each worker, if it was given")
    persistent_workers: bool = figure("yes or no", "whether workers outlive an epoch")
    pin_memory: bool = figure("yes or no", "whether batches are copied to page-locked memory")
    cores: float = figure("cores", "that this process may use")
    name: str = figure("name", "of the loader")
