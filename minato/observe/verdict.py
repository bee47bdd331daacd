"""The bottleneck of a run: the evidence, the change to make, and the estimated speed-up.

The model: batches come as fast as the slower of two allows. One is the training process (its step, and its own work
for each batch). The other is the workers (their time for a batch, divided by their number).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch.utils.data import Dataset

from minato._distribution import documentation
from minato._support.objects import Search, attribute
from minato._support.values import seconds
from minato._system import has_gil
from minato.observe.figures import Period, Setup, Stage, Verdict
from minato.options import Arrival, FastFirst

_MIN_BATCHES = 8  # fewer batches are no evidence
_ENOUGH = 0.05  # a loop that waits for at most this share of its time is its own bottleneck
_BUSY = 0.7  # workers that are busy for this share of their time are the bottleneck
_ALL_CORES = 0.9  # from this use of the cores on, further workers only compete for them …
_ON_CORE = 0.2  # … if they need a core for at least this share of their time
_MARGIN = 1.2  # factor on the number of workers that just suffices: costs vary
_FROM_WORKER_S = 1e-4
"""About what it takes the training process to get a batch from a worker: cheaper batches are faster without."""
_WITHOUT = 0.8
"""The time without workers, relative to the present one, from which on they are not worth it."""
_CHEAPER = 0.5  # the cost of an optimized stage, relative to the present one
_CHEAPER_READING = "Make its iterator cheaper: what transforms= does, all workers do."
_PER_CORE, _MOST = 8, 32
"""Limits of the advised number of workers, where they wait for a disk or a network."""

_FIRST_WINDOW = 2
"""Batches per worker from which a prefetch window grows where ``prefetch_factor`` is omitted."""


@dataclass(frozen=True)
class _Costs:
    """Seconds per batch; ``work`` is of all workers together.

    Attributes:
        whole: From one batch to the next.
        transfer: ``next()`` in the training process, without sleeping and ``sampling``; a device takes ``pinning`` and
            ``queueing``.
        source: The share of the workers' time that the dataset takes, 0 to 1.
        reading: Of each reader, where the dataset has a fixed number of them: no further worker makes it less.
    """

    whole: float
    step: float
    pinned: float
    ranks: float
    transfer: float
    pinning: float
    queueing: float
    sampling: float
    work: float
    source: float
    reading: float
    start: float

    @property
    def serial(self) -> float:
        """The part that only the training process can do."""
        return self.step + self.pinned + self.ranks + self.transfer + self.sampling

    def speedup(self, workers: int, work: float | None = None, start_factor: float = 1.0) -> float:
        """Estimated speed-up by a number of workers, and a change of their ``work``.

        ``start_factor`` is their number after the change, relative to the present one: their start takes longer.
        """
        busy = (self.work if work is None else work) / max(workers, 1)
        least = max(self.serial, self.reading, busy)
        return max(self.whole / max(least + start_factor * self.start, 1e-9), 1.0)


def _costs_of(setup: Setup, run: Period) -> _Costs:
    waiting, batches = run.waiting, run.throughput.batches
    started_s = (waiting.start_s + waiting.end_s) * run.epochs
    awake_s = waiting.total_s - waiting.starved_s - started_s
    transfer_s = max(awake_s - waiting.sampler_s, 0.0)
    if setup.num_workers == 0:
        transfer_s = waiting.pinning_s + waiting.queueing_s
    step_s = run.throughput.wall_s - waiting.total_s - waiting.pin_memory_s - waiting.ranks_s
    work = run.workers.busy_s / batches
    source = sum(stage.share for stage in run.stages if stage.kind == "source")
    return _Costs(
        whole=run.throughput.wall_s / batches,
        step=max(step_s, 0.0) / batches,
        pinned=waiting.pin_memory_s / batches,
        ranks=waiting.ranks_s / batches,
        transfer=transfer_s / batches,
        pinning=waiting.pinning_s / batches,
        queueing=waiting.queueing_s / batches,
        sampling=waiting.sampler_s / batches,
        work=work,
        source=source,
        reading=work * source / setup.readers if setup.readers else 0.0,
        start=started_s / batches,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def judge(setup: Setup, run: Period) -> Verdict:
    """The verdict on a run."""
    waiting, batches = run.waiting, run.throughput.batches
    if batches < _MIN_BATCHES:
        summary = f"Too few batches for a verdict: {batches}."
        return Verdict("unknown", summary, advice="Run it for longer.")
    in_main_process = setup.num_workers == 0
    costs = _costs_of(setup, run)
    lost_s = waiting.total_s + waiting.pin_memory_s
    wall_s = run.throughput.wall_s
    begin_s = 0.0 if in_main_process else waiting.start_s + waiting.first_batch_s
    first_s = (begin_s + waiting.end_s) * run.epochs
    steady_s = max(lost_s - first_s, 0.0)
    starts_often = run.epochs > 1 and not setup.persistent_workers
    ended = f", and {seconds(waiting.end_s)} for the end of its workers" if waiting.end_s else ""
    started = f"It waits {seconds(begin_s)} for the first batch of an epoch{ended}."
    if lost_s < _ENOUGH * wall_s or (steady_s < _ENOUGH * (wall_s - first_s) and not starts_often):
        evidence: tuple[str, ...] = ()
        if lost_s >= _ENOUGH * wall_s:
            evidence = (f"{started} After it, batches are ready in time.",)
        if costs.ranks > costs.step:
            evidence += (f"It waits {seconds(costs.ranks)} per batch for them.",)
            summary = "Your loader is not the bottleneck: other ranks are."
            return Verdict("ranks", summary, evidence, "Look at the report of the slowest rank.")
        summary = "Your loader is not the bottleneck: the training step is."
        return Verdict("step", summary, evidence, speedup=wall_s / max(wall_s - steady_s, 1e-9))
    if waiting.sampler_s >= lost_s / 2:
        evidence = (f"To draw the indices of a batch takes {seconds(costs.sampling)}.",)
        summary = "The bottleneck is the sampler, in the training process."
        advice = "Make it cheaper, or compute its batches in advance; the estimate assumes half of its cost."
        speedup = costs.whole / max(costs.whole - (1 - _CHEAPER) * costs.sampling, 1e-9)
        return Verdict("sampler", summary, evidence, advice, speedup=speedup)
    if starts_often and first_s >= lost_s / 2:
        later_s = first_s * (run.epochs - 1) / run.epochs
        summary = "The bottleneck is the start of the workers in each epoch."
        advice, changes = "Keep the workers: persistent_workers=True.", {"persistent_workers": True}
        speedup = wall_s / max(wall_s - later_s, 1e-9)
        return Verdict("start", summary, (started,), advice, changes, speedup)
    if (found := _without_workers(setup, costs, (wall_s - first_s) / batches)) is not None:
        return found
    if max(costs.pinned, costs.transfer) >= lost_s / batches / 2:
        return _transfer(run, costs)
    if not in_main_process and costs.reading >= _BUSY * costs.whole:
        return _reading(setup, run, costs)
    if in_main_process or run.workers.busy_share >= _BUSY:
        return _workers_busy(setup, run, costs)
    return _workers_idle(setup, run, costs)


def _without_workers(setup: Setup, costs: _Costs, steady_s: float) -> Verdict | None:
    """Batches that the training process would load sooner than it gets them; ``steady_s``: from one to the next."""
    alone_s = costs.serial + costs.work - costs.transfer + costs.pinning + costs.queueing
    needed = setup.worker_method == "ray" or setup.ranks > 1 or setup.reads_here
    needed = needed or setup.needs_workers
    if setup.num_workers == 0 or needed or setup.fetch_concurrency > 1:
        return None
    if alone_s >= _WITHOUT * steady_s:
        return None
    summary = "The bottleneck is the transfer of batches to the training process."
    evidence = f"To load a batch takes {seconds(costs.work)}, less than to get it from a worker."
    changes: dict[str, Any] = {"prefetch_factor": None, "persistent_workers": False}
    # torch refuses both without workers.
    changes = {name: value for name, value in changes.items() if getattr(setup, name)}
    others = f", without {' and '.join(changes)}" if changes else ""
    advice = f"Load in the training process: num_workers=0{others}."
    changes["num_workers"] = 0
    speedup = costs.whole / max(alone_s, 1e-9)
    return Verdict("transfer", summary, (evidence,), advice, changes, speedup)


def _transfer(run: Period, costs: _Costs) -> Verdict:
    if max(costs.pinning, costs.queueing) >= max(costs.pinned, costs.transfer / 2):
        return _to_device(costs)
    changes: dict[str, Any] | None = None
    if costs.pinned >= costs.transfer:
        evidence = f"Copying a batch to pinned memory takes {seconds(costs.pinned)}."
        advice = "Omit it: pin_memory=False; or use smaller batches."
        changes = {"pin_memory": False}
    else:
        evidence = (
            f"The training process needs {seconds(costs.transfer)} to receive a finished batch."
        )
        advice = (
            "Return tensors or NumPy arrays from the dataset and collate_fn: they are not pickled. If these do, use "
            "larger batches."
        )
        if run.throughput.nbytes and run.workers.cores_share >= _ALL_CORES:
            evidence += (
                f" All cores are in use ({_percent(run.workers.cores_share)}), so it waits for one."
            )
            advice = (
                "Leave it a core: fewer workers, fewer threads of the training step (torch.set_num_threads), or fewer "
                "other programs."
            )
    left = costs.whole - max(costs.pinned, costs.transfer)
    speedup = max(costs.whole / max(left, 1e-9), 1.0)
    summary = "The bottleneck is the transfer of batches to the training process."
    return Verdict("transfer", summary, (evidence,), advice, changes, speedup)


def _to_device(costs: _Costs) -> Verdict:
    summary = "The bottleneck is the transfer of batches to the device."
    if costs.queueing > costs.pinning:
        evidence = (
            f"The training process needs {seconds(costs.queueing)} to queue the copies of a batch."
        )
        advice = (
            "If the device is busy, it takes no more, and no loader makes it faster: loader.headroom() measures "
            "that."
        )
        return Verdict("transfer", summary, (evidence,), advice)
    evidence = f"Pinning memory takes {seconds(costs.pinning)} per batch."
    advice = (
        "A longer run is faster: each part of the memory is pinned once. Batches that the loop keeps take new "
        "parts."
    )
    speedup = costs.whole / max(costs.whole - costs.pinning, 1e-9)
    return Verdict("transfer", summary, (evidence,), advice, None, speedup)


def _reading(setup: Setup, run: Period, costs: _Costs) -> Verdict:
    """All readers read all the time, and other workers cannot."""
    readers = setup.readers or 1
    wanted = math.ceil(_MARGIN * costs.reading * readers / max(costs.serial, 1e-9))
    wanted = min(wanted, _most_workers(setup, run))
    some = "Its reader reads" if readers == 1 else f"Its {readers} readers read"
    evidence = (
        f"{some} for {_percent(costs.reading / costs.whole)} of the time, and other workers cannot."
    )
    summary = "The bottleneck is reading the iterable dataset."
    if wanted <= readers:
        saved = (1 - _CHEAPER) * costs.reading
        advice = _CHEAPER_READING
        speedup = costs.whole / max(costs.whole - saved, 1e-9)
        return Verdict("source", summary, (evidence,), advice, None, speedup, "dataset")
    changes = {"readers": wanted * setup.reader_ranks}
    given = f"readers={changes['readers']}"
    if setup.reader_ranks > 1:
        given += f" of {setup.reader_ranks} ranks together"
    if wanted > setup.num_workers:
        changes["num_workers"] = wanted
        given += f", num_workers={wanted}"
    shared = dataclasses.replace(costs, reading=costs.reading * readers / wanted)
    advice = (
        f"{given}, if the dataset divides itself by get_worker_info(); else move work from its iterator to "
        "transforms=."
    )
    speedup = shared.speedup(max(wanted, setup.num_workers))
    return Verdict("source", summary, (evidence,), advice, changes, speedup, "dataset")


def _most_workers(setup: Setup, run: Period) -> int:
    """The number of workers that this machine can run at a time."""
    cap = max(int(setup.cores), min(int(_PER_CORE * setup.cores), _MOST))
    return min(max(int(setup.cores / (run.workers.on_core_share or 1.0)), 1), cap)


def _workers_busy(setup: Setup, run: Period, costs: _Costs) -> Verdict:
    workers = run.workers
    now = max(workers.count, 1)
    if setup.num_workers == 0:
        costs = dataclasses.replace(costs, transfer=costs.transfer + _FROM_WORKER_S)
    on_core = workers.on_core_share or 1.0
    own_share = workers.busy_s * on_core / max(run.throughput.wall_s * setup.cores, 1e-9)
    in_cluster = setup.worker_method == "ray"
    all_used = max(workers.cores_share, own_share) >= _ALL_CORES and on_core >= _ON_CORE
    crowded = all_used and not in_cluster
    if setup.worker_method == "thread" and has_gil() and min(now, setup.cores) > 1:
        in_all = own_share * setup.cores
        if _BUSY <= in_all <= 1 / _BUSY:
            summary = "The worker threads take turns: all of them together use one core."
            advice = "If samples run Python code, omit workers='thread': the GIL lets one thread at a time run it."
            speedup = costs.speedup(min(now, int(setup.cores)), costs.work * on_core)
            return Verdict("workers", summary, (), advice, {"workers": "process"}, speedup)
    wanted = math.ceil(_MARGIN * costs.work / max(costs.serial, costs.reading, 1e-9))
    wanted = min(wanted, _MOST * now if in_cluster else _most_workers(setup, run))
    concurrency = math.ceil(wanted / now)
    may_fetch_more = setup.may_fetch_more and concurrency > setup.fetch_concurrency
    waits = on_core < 0.5 and costs.source >= 0.5 and setup.num_workers > 0
    if waits and may_fetch_more:
        work = costs.work * (1 - costs.source + costs.source / concurrency)
        summary = "The bottleneck is the source: its latency, not its bandwidth."
        evidence = f"Busy workers use a core for {_percent(on_core)} of their time: they wait for their reads."
        advice = (
            f"Read several samples concurrently in each worker: fetch_concurrency={concurrency}."
        )
        changes = {"fetch_concurrency": concurrency}
        speedup = costs.speedup(now, work)
        return Verdict("source", summary, (evidence,), advice, changes, speedup, "dataset")
    wanted = wanted if setup.most_workers is None else min(wanted, setup.most_workers)
    # Without workers there is none to start, and what iter() takes stays.
    speedup = costs.speedup(wanted, start_factor=wanted / now if setup.num_workers else 1.0)
    helps = wanted > max(setup.num_workers, now) if setup.num_workers else speedup > 1 + _ENOUGH
    if not crowded and helps and wanted > 0:
        told: tuple[str, ...] = ()
        if in_cluster:
            told = ("Workers run in a cluster, which can run more of them if it has free cores.",)
        elif workers.on_core_share:  # else it is not known
            told = (
                f"Busy workers use a core for {_percent(on_core)} of their time; there are {setup.cores:g}: "
                "more can run.",
            )
        largest, per_rank = _largest(run), math.ceil(wanted / setup.ranks)
        summary, advice = "There are too few workers.", f"num_workers={per_rank}"
        if setup.is_stream and setup.readers is None:  # each worker reads, as with torch
            advice += (
                ", if the dataset divides itself by get_worker_info(); else readers=1, too, and move work from its "
                "iterator to transforms="
            )
        changes, stage = {"num_workers": per_rank}, "" if largest is None else largest.name
        return Verdict("workers", summary, told, f"{advice}.", changes, speedup, stage)
    return _dearest_stage(setup, run, costs, crowded)


def _largest(run: Period) -> Stage | None:
    return max(run.stages, key=lambda stage: stage.share, default=None)


def _dearest_stage(setup: Setup, run: Period, costs: _Costs, crowded: bool) -> Verdict:
    """More workers would not help: the stage that takes most of their time would."""
    largest = _largest(run)
    if largest is None:
        return Verdict("unknown", "The workers are the bottleneck.")
    stage = largest.name
    evidence: tuple[str, ...] = ()
    if crowded:
        evidence = (f"More workers would not help: {setup.cores:g} cores are in use.",)
    source = "reading the iterable dataset" if setup.is_stream else "the work of dataset[i]"
    summary = {
        "source": f"The bottleneck is {source}.",
        "transform": f"The bottleneck is the transform {stage}.",
        "collate": "The bottleneck is collating and copying batches.",
    }[largest.kind]
    saved = (1 - _CHEAPER) * largest.share * costs.work
    speedup = costs.speedup(max(run.workers.count, 1), costs.work - saved)
    if setup.num_workers == 0:
        speedup = costs.whole / max(costs.whole - saved, 1e-9)
    advice = f"Optimize {stage}, or precompute it; the estimate assumes half of its cost."
    if largest.kind == "source" and not any(each.kind == "transform" for each in run.stages):
        advice += (
            " Transforms inside of it are timed one by one if the loader has them (transforms=)."
        )
    in_samples = sum(each.share for each in run.stages if each.kind != "collate")
    if setup.uses_pil and (largest.kind != "collate" or in_samples >= 0.5):
        advice = (
            "Photographs: have PIL decode fewer pixels (Image.draft), or decode with libjpeg-turbo, resize with OpenCV "
            f"and return uint8: {documentation('how-to/photos')} has the code. The estimate assumes half of the cost."
        )
    return Verdict(largest.kind, summary, evidence, advice, None, speedup, stage)


def _workers_idle(setup: Setup, run: Period, costs: _Costs) -> Verdict:
    workers, window = run.workers, run.prefetch_window
    speedup = costs.speedup(max(workers.count, 1))
    if window.held_by_budget:
        batch_bytes = run.throughput.nbytes / run.throughput.batches
        wanted = math.ceil(max(4 * max(workers.count, 1) * batch_bytes, 2 * window.budget_bytes))
        wanted = math.ceil(wanted / setup.ranks)
        summary = "The bottleneck is the memory for batches that are prefetched."
        advice = f"memory_budget={wanted}."
        return Verdict("memory", summary, (), advice, {"memory_budget": wanted}, speedup)
    if setup.reads_here:
        summary = "The bottleneck is the reader, a thread of the training process."
        told = ("The workers wait for its items.",)
        advice = f"{_CHEAPER_READING} The estimate assumes half of its cost."
        return Verdict("source", summary, told, advice, None, min(speedup, 1 / _CHEAPER), "dataset")
    if setup.is_stream and workers.busiest_share >= _BUSY:
        return _uneven_readers(setup, run)
    steps, is_full = run.throughput, workers.window_full_share > workers.no_work_share
    long_ones = costs.step > costs.whole / 4 and steps.step_mean_s > 2 * steps.step_p50_s
    may_overtake = setup.in_order and workers.count > 1 and run.stragglers.phase != "uniform"
    if is_full and (long_ones or not may_overtake):
        summary = "Uneven steps: the prefetch window is full in a long one, and empty after it."
        return _more_batches(setup, run, summary, speedup)
    if setup.prefetch_factor is not None and setup.prefetch_factor <= _FIRST_WINDOW:
        summary = "Too few batches are prefetched."
        if not setup.window_grows:
            return _more_batches(setup, run, summary, speedup)
        advice = f"Omit prefetch_factor={setup.prefetch_factor}: the prefetch window then grows as needed."
        return Verdict("memory", summary, (), advice, {"prefetch_factor": None}, speedup)
    if may_overtake:
        summary = "Slow samples delay the batches behind them."
        advice = (
            "Take batches when they are complete: order='batch', or 'arrival' if batches may mix."
        )
        return Verdict("order", summary, (), advice, {"order": "batch"}, speedup)
    return Verdict("unknown", "The workers are idle for an unknown reason.")


def _uneven_readers(setup: Setup, run: Period) -> Verdict:
    workers = run.workers
    most, mean = workers.busiest_share, workers.busy_share
    summary = "One reader of the iterable dataset is slower than the others, or has a larger part."
    evidence = f"Its worker is busy for {_percent(most)} of the time, all of them for {_percent(mean)} on average."
    advice = "Divide the dataset evenly, such as into more and smaller shards."
    if setup.in_order:
        advice += " If it has no end, order='batch' takes batches of the other readers meanwhile."
    speedup = most / max(mean, 1e-9)
    return Verdict("source", summary, (evidence,), advice, None, speedup, "dataset")


def _more_batches(setup: Setup, run: Period, summary: str, speedup: float) -> Verdict:
    workers = max(run.workers.count, 1)
    factor = 4 * math.ceil(run.prefetch_window.limit / workers)
    changes: dict[str, Any] = {"prefetch_factor": factor}
    advice = f"Prefetch more batches: prefetch_factor={factor}"
    if setup.max_lag is not None and setup.max_lag < factor * workers:
        kind = Arrival if setup.order == "arrival" else FastFirst
        changes["order"] = kind(factor * workers)
        advice += f", order={changes['order']}"
    return Verdict("memory", summary, (), f"{advice}.", changes, speedup)


# ---- photographs ----------------------------------------------------------------------------


def uses_pil(objects: Iterable[object]) -> bool:
    """Whether the code of a dataset or transform, or of what a dataset holds, refers to PIL, as far as modules show."""
    roots = {f"{number}": each for number, each in enumerate(objects)}
    modules = [attribute(each, "__module__") for each in roots.values()]

    def note(kind: type) -> tuple[()]:
        modules.append(attribute(kind, "__module__"))
        return ()

    search = Search(
        lambda kind: False, of_class=note, opens=lambda kind: issubclass(kind.kind, Dataset)
    )
    search.run(roots)
    return any(map(_refers_to_pil, modules))


def _refers_to_pil(name: object) -> bool:
    module = sys.modules.get(name) if type(name) is str else None
    values = () if type(module) is not ModuleType else list(vars(module).values())
    origins = [attribute(value, each) for value in values for each in ("__module__", "__name__")]
    return any(type(origin) is str and origin.partition(".")[0] == "PIL" for origin in origins)
