"""The bottleneck of a run: the evidence, the change to make, and the estimated speed-up.

The model: batches come as fast as the slower of two allows. One is the training process (its step, and its own work
for each batch). The other is the workers (their time for a batch, divided by their number).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch.utils.data import Dataset

from minato._distribution import documentation
from minato._support.objects import Search, attribute
from minato._support.text import seconds
from minato.observe.figures import Period, Setup, Stage, Verdict

__all__ = ["judge", "uses_pil"]

_MIN_BATCHES = 8
"""Fewer batches are no evidence."""
_ENOUGH = 0.05
"""A loop that waits for at most this share of its time is its own bottleneck."""
_BUSY = 0.7
"""Workers that are busy for this share of their time are the bottleneck."""
_ALL_CORES = 0.9
"""From this use of the cores on, further workers only compete for them …"""
_ON_CORE = 0.2
"""… if they need a core for at least this share of their time."""
_MARGIN = 1.2
"""Factor on the number of workers that just suffices: costs vary."""
_CHEAPER = 0.5
"""The cost of an optimized stage, relative to the present one."""
_PER_CORE, _MOST = 8, 32
"""Limits of the advised number of workers, where they wait for a disk or a network."""


@dataclass(frozen=True)
class _Costs:
    """Seconds per batch.

    Attributes:
        whole: From one batch to the next.
        transfer: ``next()`` in the training process, without sleeping.
        work: Of all workers together.
        source: The share of the workers' time that the dataset takes, 0 to 1.
    """

    whole: float
    step: float
    pinned: float
    transfer: float
    work: float
    source: float
    start: float

    @property
    def serial(self) -> float:
        """The part that only the training process can do."""
        return self.step + self.pinned + self.transfer

    def speedup(self, workers: int, work: float | None = None, start_factor: float = 1.0) -> float:
        """Estimated speed-up.

        Args:
            work: Seconds of all workers together for a batch after the change; by default unchanged.
            start_factor: Number of workers after the change, relative to the present one: their start takes longer.
        """
        busy = (self.work if work is None else work) / max(workers, 1)
        return max(self.whole / max(max(self.serial, busy) + start_factor * self.start, 1e-9), 1.0)


def _costs_of(setup: Setup, run: Period) -> _Costs:
    waiting, batches = run.waiting, run.throughput.batches
    started_s = waiting.start_s * run.epochs
    transfer_s = max(waiting.total_s - waiting.starved_s - started_s, 0.0)
    step_s = max(run.throughput.wall_s - waiting.total_s - waiting.pin_memory_s, 0.0)
    return _Costs(
        whole=run.throughput.wall_s / batches,
        step=step_s / batches,
        pinned=waiting.pin_memory_s / batches,
        transfer=transfer_s / batches if setup.num_workers > 0 else 0.0,
        work=run.workers.busy_s / batches,
        source=sum(stage.share for stage in run.stages if stage.kind == "source"),
        start=started_s / batches,
    )


def judge(setup: Setup, run: Period) -> Verdict:
    """The verdict on a run."""
    waiting, batches = run.waiting, run.throughput.batches
    if batches < _MIN_BATCHES:
        summary = f"{batches} batches are too few for a verdict."
        return Verdict("unknown", summary, advice="Run it for longer.")
    in_main_process = setup.num_workers == 0
    costs = _costs_of(setup, run)
    lost_s = waiting.total_s + waiting.pin_memory_s
    wall_s = run.throughput.wall_s
    first_s = 0.0 if in_main_process else (waiting.start_s + waiting.first_batch_s) * run.epochs
    steady_s = max(lost_s - first_s, 0.0)
    starts_often = run.epochs > 1 and not setup.persistent_workers
    started = f"It waits {seconds(first_s / max(run.epochs, 1))} for the first batch of an epoch."
    if lost_s < _ENOUGH * wall_s or (steady_s < _ENOUGH * (wall_s - first_s) and not starts_often):
        evidence: tuple[str, ...] = ()
        if lost_s >= _ENOUGH * wall_s:
            evidence = (f"{started} After it, batches are ready in time.",)
        summary = "Your loader is not the bottleneck: the training step is."
        return Verdict("step", summary, evidence, speedup=wall_s / max(wall_s - steady_s, 1e-9))
    if starts_often and first_s >= lost_s / 2:
        later_s = first_s * (run.epochs - 1) / run.epochs
        return Verdict(
            "start",
            "The bottleneck is the start of the workers in each epoch.",
            (started,),
            "Keep the workers: persistent_workers=True.",
            {"persistent_workers": True},
            wall_s / max(wall_s - later_s, 1e-9),
        )
    if max(costs.pinned, costs.transfer) >= lost_s / batches / 2:
        return _transfer(run, costs)
    if in_main_process or run.workers.busy_share >= _BUSY:
        return _workers_busy(setup, run, costs)
    return _workers_idle(setup, run, costs)


def _transfer(run: Period, costs: _Costs) -> Verdict:
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
            "Return tensors or NumPy arrays from the dataset and collate_fn: they are not pickled."
        )
        if run.throughput.nbytes and run.workers.cores_share >= _ALL_CORES:
            evidence += (
                f" All cores are in use ({run.workers.cores_share:.0%}), so it waits for one."
            )
            advice = (
                "Leave it a core: fewer workers, fewer threads of the training step (torch.set_num_threads), or fewer "
                "other programs."
            )
    left = costs.whole - max(costs.pinned, costs.transfer)
    speedup = max(costs.whole / max(left, 1e-9), 1.0)
    summary = "The bottleneck is the transfer of batches to the training process."
    return Verdict("transfer", summary, (evidence,), advice, changes, speedup)


def _workers_busy(setup: Setup, run: Period, costs: _Costs) -> Verdict:
    workers = run.workers
    now = max(workers.count, 1)
    on_core = workers.on_core_share or 1.0
    own_share = workers.busy_s * on_core / max(run.throughput.wall_s * setup.cores, 1e-9)
    in_cluster = setup.worker_method == "ray"
    all_used = max(workers.cores_share, own_share) >= _ALL_CORES and on_core >= _ON_CORE
    crowded = all_used and not in_cluster
    cap = max(int(setup.cores), min(int(_PER_CORE * setup.cores), _MOST))
    useful = min(max(int(setup.cores / on_core), 1), cap)
    wanted = math.ceil(_MARGIN * costs.work / max(costs.serial, 1e-9))
    wanted = min(wanted, _MOST * now if in_cluster else useful)
    concurrency = math.ceil(wanted / now)
    may_fetch_more = setup.may_fetch_more and concurrency > setup.fetch_concurrency
    waits = on_core < 0.5 and costs.source >= 0.5 and setup.num_workers > 0
    if waits and may_fetch_more:
        work = costs.work * (1 - costs.source + costs.source / concurrency)
        return Verdict(
            "source",
            "The bottleneck is the source: its latency, not its bandwidth.",
            (
                f"Busy workers use a core for {on_core:.0%} of their time: they wait for their reads.",
            ),
            f"Read several samples concurrently in each worker: fetch_concurrency={concurrency}.",
            {"fetch_concurrency": concurrency},
            costs.speedup(now, work),
            "dataset",
        )
    if not crowded and wanted > setup.num_workers and (wanted > now or setup.num_workers == 0):
        evidence = f"Busy workers use a core for {on_core:.0%} of their time; there are {setup.cores:g}: more can run."
        if in_cluster:
            evidence = "Workers run in a cluster, which can run more of them if it has free cores."
        largest = _largest(run)
        return Verdict(
            "workers",
            "There are too few workers.",
            (evidence,),
            f"num_workers={wanted}.",
            {"num_workers": wanted},
            costs.speedup(wanted, start_factor=wanted / now),
            "" if largest is None else largest.name,
        )
    return _dearest_stage(setup, run, costs)


def _largest(run: Period) -> Stage | None:
    return max(run.stages, key=lambda stage: stage.share, default=None)


def _dearest_stage(setup: Setup, run: Period, costs: _Costs) -> Verdict:
    """More workers would not help: the stage that takes most of their time would."""
    largest = _largest(run)
    if largest is None:
        return Verdict("unknown", "The workers are the bottleneck.")
    stage = largest.name
    evidence: tuple[str, ...] = ()
    if setup.worker_method != "ray":
        evidence = (f"More workers would not help: {setup.cores:g} cores are in use.",)
    summary = {
        "source": "The bottleneck is the work of dataset[i].",
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
        batch_bytes = window.memory_bytes / max(window.in_flight, 1.0)
        wanted = math.ceil(4 * max(workers.count, 1) * batch_bytes)
        summary = "The bottleneck is the memory for batches that are prefetched."
        advice = f"memory_budget={wanted}."
        return Verdict("memory", summary, (), advice, {"memory_budget": wanted}, speedup)
    if setup.prefetch_factor is not None:
        summary = "Too few batches are prefetched."
        advice = f"Omit prefetch_factor={setup.prefetch_factor}: the prefetch window then grows as needed."
        return Verdict("memory", summary, (), advice, {"prefetch_factor": None}, speedup)
    if setup.in_order:
        summary = "Slow samples delay the batches behind them."
        advice = (
            "Take batches when they are complete: order='batch', or 'arrival' if batches may mix."
        )
        return Verdict("order", summary, (), advice, {"order": "batch"}, speedup)
    return Verdict("unknown", "The workers are idle for an unknown reason.")


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
