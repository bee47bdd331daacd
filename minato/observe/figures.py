"""The figures of a report as data: each with its unit, and how to read its extremes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


def _figure(unit: str, reading: str) -> Any:
    """A figure in ``s``, ``bytes``, ``share`` (0 to 1), ``per s``, ``bytes per s``, or things; how to read extremes."""
    return field(metadata={"unit": unit, "reading": reading})


@dataclass(frozen=True)
class Waiting:
    """How long the training loop waited inside ``next()``."""

    total_s: float = _figure(
        "s", "sum, with the start of the iterator; the time that an ideal loader would save"
    )
    share: float = _figure(
        "share", "below 5 %: training is the bottleneck; above 20 %: the loader costs you time"
    )
    p50_s: float = _figure("s", "of one next(); near 0: most batches were ready")
    p99_s: float = _figure("s", "far above P50: a few batches delay the loop")
    max_s: float = _figure("s", "the longest; often the first batch")
    start_s: float = _figure(
        "s", "in iter(), for each epoch; long: workers start slowly, see persistent_workers"
    )
    end_s: float = _figure(
        "s", "after each epoch, for the end of workers that do not persist: see persistent_workers"
    )
    first_batch_s: float = _figure(
        "s", "until each epoch's first batch; long: slow imports in workers, or expensive samples"
    )
    starved_s: float = _figure(
        "s", "the part of the sum in which no batch was ready; the rest is the transfer of batches"
    )
    pin_memory_s: float = _figure(
        "s", "copying to pinned memory, after next(); near the step's time: it is the bottleneck"
    )
    pinning_s: float = _figure(
        "s",
        "in next(), pinning the memory of batches in place, once for each part of it; 0 with SharedPool, whose ranks "
        "pin after that",
    )
    queueing_s: float = _figure(
        "s",
        "in next(), queueing copies to the device; large: the device's own queue is full; 0 with SharedPool, whose "
        "ranks copy after that",
    )
    ranks_s: float = _figure(
        "s",
        "for other ranks, with epoch_end=, and no part of the sum; large: another one is slower",
    )
    sampler_s: float = _figure(
        "s", "in iter() and next(), drawing indices; near the sum: the sampler is the bottleneck"
    )


@dataclass(frozen=True)
class Throughput:
    """Batches, samples and bytes, and their rates."""

    wall_s: float = _figure("s", "from iter() to the end of the epoch, with your own steps")
    batches: int = _figure("batches", "that next() returned, or whose error it raised")
    samples: int = _figure("samples", "in them, without those skipped")
    nbytes: int = _figure(
        "bytes", "of memory that they take; 0: they are objects whose size is not known"
    )
    batches_per_s: float = _figure("per s", "with the time of your own step")
    samples_per_s: float = _figure("per s", "with the time of your own step")
    bytes_per_s: float = _figure(
        "bytes per s", "near the bandwidth of memory or bus: samples are too large, not too slow"
    )
    step_p50_s: float = _figure(
        "s", "your own work between two next(); near 0: you measure the loader alone"
    )
    step_mean_s: float = _figure("s", "far above P50: some steps do more, such as validation")
    coverage: float = _figure(
        "share",
        "returned, of the samples requested so far; at the end of an epoch all but the skipped",
    )


@dataclass(frozen=True)
class Workers:
    """How the workers spent their time."""

    count: int = _figure(
        "workers", "active now; with num_workers=0 one, the training process itself"
    )
    fewest: int = _figure("workers", "active at a time, with num_workers='auto'")
    most: int = _figure("workers", "active at a time")
    busy_s: float = _figure("s", "of all together; divided by wall_s: workers busy at a time")
    busy_share: float = _figure(
        "share", "near 100 %: they are at their limit; low: the bottleneck is elsewhere"
    )
    busiest_share: float = _figure(
        "share",
        "of the time that the busiest one was busy; far above the share of all: uneven work",
    )
    no_work_share: float = _figure(
        "share", "idle while the loop waited too; high: slow start, or a prefetch window too small"
    )
    window_full_share: float = _figure(
        "share", "idle because enough batches were ready; high: fewer workers suffice"
    )
    on_core_share: float = _figure(
        "share", "on a core, or queued for one, when busy; low: they wait for a disk or a network"
    )
    cores_share: float = _figure(
        "share", "use of all cores by all processes; near 100 %: more workers cannot help"
    )
    deaths: int = _figure("workers", "that died and were replaced; above 0: see the warnings")


@dataclass(frozen=True)
class WindowFigures:
    """How far ahead the workers could work."""

    occupancy: float = _figure(
        "share", "ready batches in the window; near 0: workers are behind, near 100 %: ahead"
    )
    in_flight: float = _figure("batches", "open or ready, on average")
    limit: int = _figure("batches", "in flight at most; reached while you wait: too small a window")
    memory_bytes: int = _figure("bytes", "of the batches in flight, at most")
    budget_bytes: int = _figure("bytes", "memory_budget")
    held_by_budget: bool = _figure(
        "yes or no", "yes: the memory budget keeps the window from growing"
    )


@dataclass(frozen=True)
class Machine:
    """Disks, memory and GPUs; the use of the cores is among the workers' figures."""

    gpus: int = _figure(
        "GPUs",
        'monitored with Observe(stats="gpu"); 0: not requested, none found, or not supported',
    )
    disk_bytes_per_s: float = _figure(
        "bytes per s", "read from local disks; near their bandwidth: the disk is the bottleneck"
    )
    available_bytes: int = _figure(
        "bytes", "of memory, at the end; near 0: fewer workers, or a smaller memory_budget"
    )
    limit_bytes: int = _figure("bytes", "of memory in all, for this container")


@dataclass(frozen=True)
class Gpu:
    """One GPU, sampled ten times a second."""

    name: str = _figure("name", "and its number")
    samples: int = _figure("times", "sampled; few: the figures mean little")
    idle_share: float = _figure("share", "of the time without any work; high: it waits")
    busy_share: float = _figure("share", "utilization when it is not idle; low: its work is small")
    memory_bytes: int = _figure("bytes", "in use, by all processes, on average")
    total_bytes: int = _figure("bytes", "in all; much is free: a larger batch may fit")


@dataclass(frozen=True)
class Stragglers:
    """Slow samples: the threshold, and their effect on the order."""

    phase: str = _figure(
        "phase", "uniform: costs differ little, none is slow; warm-up: too few samples"
    )
    threshold_s: float = _figure("s", "samples above it are slow; 0: none is")
    percentile: float = _figure(
        "share", "in force; above StragglerPolicy.percentile: too many samples were slow"
    )
    slow_share: float = _figure(
        "share", "of the latest samples; far above 1 - percentile: costs are rising"
    )
    deferrals: int = _figure(
        "times", "a sample was deferred and resumed; 0 in strict and batch order"
    )
    deferred_p99_s: float = _figure(
        "s", "until it was resumed; long: the loop kept waiting for fast samples"
    )
    lag_p50: float = _figure("batches", "of the latest sample of a batch; 0 in strict order")
    lag_max: float = _figure("batches", "at max_lag: slow samples are deferred as long as possible")


@dataclass(frozen=True)
class Errors:
    """Samples that failed; counted where an ErrorPolicy handles them."""

    retries: int = _figure("times", "a sample was retried; many: the source is unreliable")
    recovered: int = _figure("samples", "that succeeded in a retry")
    skipped: int = _figure("samples", "skipped; each is missing in the epoch")
    substituted: int = _figure("samples", "replaced by on_error")
    raised: int = _figure(
        "samples", "whose error next() raised; 0 where errors= neither retries nor calls a function"
    )
    unrecorded: int = _figure("failures", "missing in ErrorPolicy.log; above 0: check the disk")


@dataclass(frozen=True)
class Reads:
    """Sources, concurrent reads and the cache, in all processes."""

    retries: int = _figure(
        "times", "a source retried a read; many: its network or its server is unreliable"
    )
    hedged: int = _figure("reads", "that were late and requested again, with FetchOptions")
    hedges_won: int = _figure("reads", "in which the second answer was first; few: do not hedge")
    cache_hits: int = _figure("samples", "found in the cache")
    cache_misses: int = _figure("samples", "not found, or incomplete; all in a first epoch")
    cache_hit_rate: float = _figure(
        "share", "low in a second epoch: the quota is too small, or a transform has changed"
    )
    cache_damaged: int = _figure("samples", "with corrupt entries; above 0: check the disk")
    cache_errors: int = _figure(
        "times", "the disk failed, and the dataset was read; above 0: full, read-only or broken"
    )
    cache_full: int = _figure("times", "a sample was not stored; above 0: raise quota_bytes")
    cache_stored_bytes: int = _figure("bytes", "added to the cache; 0 once it is complete")


@dataclass(frozen=True)
class Stage:
    """One stage of a sample."""

    name: str = _figure(
        "name", "dataset: dataset[i]; collate and copy: from finished samples to the batch"
    )
    kind: str = _figure("kind", "source, transform or collate")
    count: int = _figure(
        "samples",
        "that were timed: all expensive ones, one in 32 or 256 runs of cheap ones; a call of __getitems__ is one",
    )
    mean_s: float = _figure("s", "for one sample")
    p50_s: float = _figure("s", "half of the samples take less")
    p90_s: float = _figure("s", "far above P50: this stage makes samples slow")
    p99_s: float = _figure("s", "far above P90: few samples, but very slow ones")
    share: float = _figure("share", "of the workers' time; optimize the largest first")


@dataclass(frozen=True)
class SlowSample:
    """One of the slowest samples."""

    index: int | str = _figure(
        "index", "in the dataset; of an iterable one, the item and its reader"
    )
    cost_s: float = _figure("s", "far above the others: inspect this sample")
    epoch: int = _figure("epoch", "in which it took that long")
    stage: str = _figure("name", "its slowest stage; empty: cheap samples are not timed one by one")
    stage_s: float = _figure("s", "that stage alone")


@dataclass(frozen=True)
class Setup:
    """The loader's arguments, as far as a verdict needs them."""

    num_workers: int = _figure(
        "workers", "as the loader was constructed, of all ranks that share them"
    )
    worker_method: Literal["process", "thread", "ray"] = _figure("name", "of the workers")
    order: str = _figure("name", "of the batches")
    in_order: bool = _figure("yes or no", "whether batches come in the order of the sampler")
    batch_size: int | None = _figure("samples", "none: of a batch_sampler, or single samples")
    fetch_concurrency: int = _figure("samples", "that a worker reads concurrently")
    may_fetch_more: bool = _figure("yes or no", "whether fetch_concurrency is possible")
    prefetch_factor: int | None = _figure("batches", "for each worker, if it was given")
    persistent_workers: bool = _figure("yes or no", "whether workers outlive an epoch")
    pin_memory: bool = _figure("yes or no", "whether batches are copied to pinned memory")
    readers: int | None = _figure(
        "readers", "of an iterable dataset that this process has, if their number was given"
    )
    reads_here: bool = _figure("yes or no", "whether a thread of the training process reads")
    cores: float = _figure("cores", "available to this process")
    name: str = _figure("name", "of the loader")
    uses_pil: bool = _figure("yes or no", "whether the dataset or a transform decodes with PIL")
    ranks: int = _figure(
        "ranks", "that share the workers; num_workers= and memory_budget= are per rank"
    )
    reader_ranks: int = _figure(
        "ranks", "among which the readers are dealt; the number given to readers= is of all of them"
    )
    is_stream: bool = _figure("yes or no", "whether the dataset is iterable")
    needs_workers: bool = _figure("yes or no", "whether other arguments are only for workers")
    most_workers: int | None = _figure("workers", "that other arguments allow; none: any number")
    max_lag: int | None = _figure(
        "batches", "of which no more are in flight; none: samples stay in theirs"
    )
    window_grows: bool = _figure("yes or no", "whether the window grows without prefetch_factor")


@dataclass(frozen=True)
class Origin:
    """The program that a report is about."""

    script: str = _figure("name", "of the script; -c or empty: it has no file")
    time: str = _figure("time", "of the report, by the clock of the machine, in ISO 8601")
    machine: str = _figure("name", "of the machine, its system and processor type")
    versions: str = _figure("name", "of minato, torch and Python")


@dataclass(frozen=True)
class Verdict:
    """The bottleneck of a run.

    Attributes:
        bottleneck: ``step`` (training itself), ``source``, ``transform``, ``collate`` (collate and copy),
            ``transfer``, ``workers`` (too few), ``memory`` (too few batches in flight), ``order``, ``start``,
            ``sampler``, ``ranks`` (others are slower), or ``unknown``.
        summary: The bottleneck in a sentence.
        evidence: What shows it beyond the six figures of the text, in sentences.
        advice: The change to make, "" for none.
        changes: The loader's arguments to change, as far as arguments suffice.
        speedup: Estimated speed-up by the change; 1: no faster.
        stage: The stage that takes most of the workers' time, or "".
    """

    bottleneck: str
    summary: str
    evidence: tuple[str, ...] = ()
    advice: str = ""
    changes: dict[str, Any] | None = None
    speedup: float = 1.0
    stage: str = ""


@dataclass(frozen=True)
class Period:
    """All figures of an epoch, or of the whole run.

    Attributes:
        name: ``run``, or the epoch.
        epochs: The number of epochs in it.
        finished: Whether it ended regularly.
        gpus: Those that this process may use.
        stages: The dataset, each transform, and collate and copy.
        waited: At most two hundred pairs of time since the start of the epoch and time waited until then, in s; none
            for the run.
    """

    name: str
    epochs: int
    finished: bool
    waiting: Waiting
    throughput: Throughput
    workers: Workers
    prefetch_window: WindowFigures
    stragglers: Stragglers
    errors: Errors
    reads: Reads
    machine: Machine
    gpus: tuple[Gpu, ...]
    stages: tuple[Stage, ...]
    waited: tuple[tuple[float, float], ...] = ()


def legend() -> dict[str, dict[str, dict[str, str]]]:
    """Unit and reading of each figure, by class and name."""
    parts = (
        *(Waiting, Throughput, Workers, WindowFigures, Machine, Gpu, Stragglers, Errors, Reads),
        *(Stage, SlowSample, Setup, Origin),
    )
    return {
        part.__name__: {each.name: dict(each.metadata) for each in dataclasses.fields(part)}
        for part in parts
    }
