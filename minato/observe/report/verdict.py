"""What limits a run, in words: the evidence, what to change, and what that brings by a simple model.

The model: batches come as fast as the slower of two allows, the training process (its step, and what it does for each
batch besides) and the workers (their time for a batch, divided by how many they are).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minato.observe.report.figures import Period, Setup, Stage

__all__ = ["Verdict", "judge"]

_FEWEST = 8
"""So few batches say nothing."""
_ENOUGH = 0.05
"""A loop that waits for no more than this part of its time is its own limit."""
_BUSY = 0.7
"""Workers that are busy for this part of their time are what the loop waits for."""
_ALL_CORES = 0.9
"""Use of the cores at which further workers only take them from each other …"""
_ON_CORE = 0.2
"""… if they need a core for this part of their time at least."""
_SPARE = 1.2
"""Times the workers that just suffice: costs vary."""
_CHEAPER = 0.5
"""What a stage that is to be made cheaper is supposed to cost then."""
_PER_CORE, _MOST = 8, 32
"""Workers that are advised at most, where they wait for a disk or a network."""


@dataclass(frozen=True)
class Verdict:
    """What limits a run.

    Attributes:
        limit: ``step`` (training itself), ``source``, ``transform``, ``assembly`` (collate and copy), ``transfer``,
            ``workers`` (too few), ``memory`` (too little), ``order``, ``start``, or ``unknown``.
        part: The stage that takes most of the workers' time, or "".
        summary: The limit in a sentence.
        evidence: The figures that show it, in words.
        advice: What to change, "" for nothing.
        change: The loader's arguments to change, as far as arguments do it.
        gain: How many times as fast the run would be then, by the model; 1: no faster.
    """

    limit: str
    part: str
    summary: str
    evidence: tuple[str, ...]
    advice: str = ""
    change: dict[str, Any] | None = None
    gain: float = 1.0


@dataclass(frozen=True)
class _Costs:
    """Seconds of one batch.

    Attributes:
        whole: From one to the next.
        own: The training step.
        pinned: Copying to page-locked memory.
        handed: What the training process does in ``next()`` besides sleeping.
        work: Of all workers together.
        source: The part of the workers' time that the dataset takes, 0 to 1.
        start: What starting the workers takes of it.
    """

    whole: float
    own: float
    pinned: float
    handed: float
    work: float
    source: float
    start: float

    @property
    def serial(self) -> float:
        """What only the training process does."""
        return self.own + self.pinned + self.handed

    def gain(self, workers: int, work: float | None = None, times: float = 1.0) -> float:
        """How many times as fast with so many workers and so much work, if that is so many times the workers of now."""
        busy = (self.work if work is None else work) / max(workers, 1)
        return max(self.whole / max(max(self.serial, busy) + times * self.start, 1e-9), 1.0)


def judge(setup: Setup, run: Period) -> Verdict:
    """The verdict over a run."""
    waiting, batches = run.waiting, run.batches.batches
    if batches < _FEWEST:
        return Verdict(
            "unknown", "", f"{batches} batches are too few to tell.", (), "Let it run for longer."
        )
    started_s = waiting.start_s * run.epochs
    inline = setup.num_workers == 0
    handed_s = 0.0 if inline else max(waiting.total_s - waiting.asleep_s - started_s, 0.0)
    own_s = max(run.batches.wall_s - waiting.total_s - waiting.pinned_s, 0.0)
    costs = _Costs(
        run.batches.wall_s / batches,
        own_s / batches,
        waiting.pinned_s / batches,
        handed_s / batches,
        run.workers.busy_s / batches,
        sum(stage.share for stage in run.stages if stage.kind == "source"),
        started_s / batches,
    )
    lost_s = waiting.total_s + waiting.pinned_s
    lost = (
        f"The loop waits {waiting.share:.0%} of its time: {_ms(waiting.total_s / batches)} of "
        f"{_ms(costs.whole)} for each batch; its own work takes {_ms(costs.own)}."
    )
    wall_s = run.batches.wall_s
    first_s = 0.0 if inline else (waiting.start_s + waiting.first_batch_s) * run.epochs
    steady_s = max(lost_s - first_s, 0.0)
    starts_often = run.epochs > 1 and not setup.persistent_workers
    started = f"Until the first batch of an epoch it waits {_ms(first_s / max(run.epochs, 1))}."
    if lost_s < _ENOUGH * wall_s or (steady_s < _ENOUGH * (wall_s - first_s) and not starts_often):
        evidence = (
            (lost,) if lost_s < _ENOUGH * wall_s else (lost, f"{started} Then it has enough.")
        )
        return Verdict(
            "step",
            "",
            "Your loader is not the bottleneck: the training step is.",
            evidence,
            gain=wall_s / max(wall_s - steady_s, 1e-9),
        )
    if starts_often and first_s >= lost_s / 2:
        later_s = first_s * (run.epochs - 1) / run.epochs
        return Verdict(
            "start",
            "",
            "Starting the workers anew for each epoch limits the run.",
            (lost, started),
            "Keep the workers: persistent_workers=True.",
            {"persistent_workers": True},
            wall_s / max(wall_s - later_s, 1e-9),
        )
    if max(waiting.pinned_s, handed_s) >= lost_s / 2:
        return _transfer(costs, lost, waiting.pinned_s >= handed_s)
    if inline or run.workers.busy_share >= _BUSY:
        return _too_slow(setup, run, costs, lost)
    return _held_up(setup, run, costs, lost)


def _transfer(costs: _Costs, lost: str, pins: bool) -> Verdict:
    if pins:
        evidence = f"Copying a batch to page-locked memory takes {_ms(costs.pinned)}."
        advice, change = (
            "Leave it out: pin_memory=False; or send smaller batches.",
            {"pin_memory": False},
        )
        saved = costs.pinned
    else:
        evidence = f"Taking a finished batch over takes the training process {_ms(costs.handed)}."
        advice, change = (
            "Let samples and collate_fn give tensors or NumPy arrays, which are not pickled.",
            None,
        )
        saved = costs.handed
    gain = max(costs.whole / max(costs.whole - saved, 1e-9), 1.0)
    summary = "The transfer of batches to the training process limits the run."
    return Verdict("transfer", "", summary, (lost, evidence), advice, change, gain)


def _too_slow(setup: Setup, run: Period, costs: _Costs, lost: str) -> Verdict:
    """The workers have more to do than they can."""
    workers = run.workers
    now = max(workers.count, 1)
    on_core = workers.on_core_share or 1.0
    own_share = workers.busy_s * on_core / max(run.batches.wall_s * setup.cores, 1e-9)
    elsewhere = setup.worker_method == "ray"
    all_used = max(workers.cores_share, own_share) >= _ALL_CORES and on_core >= _ON_CORE
    crowded = all_used and not elsewhere
    cap = max(int(setup.cores), min(int(_PER_CORE * setup.cores), _MOST))
    useful = min(max(int(setup.cores / on_core), 1), cap)
    wanted = math.ceil(_SPARE * costs.work / max(costs.serial, 1e-9))
    wanted = min(wanted, _MOST * now if elsewhere else useful)
    dearest = max(run.stages, key=lambda stage: stage.share, default=None)
    part = "" if dearest is None else dearest.name
    busy = (
        f"{workers.count} workers are busy {workers.busy_share:.0%} of their time, "
        f"{_ms(costs.work)} for each batch"
    )
    if setup.num_workers == 0:
        busy = f"The training process itself works {_ms(costs.work)} for each batch"
    evidence = [lost, f"{busy}; {_share_of(dearest)}."]
    concurrency = math.ceil(wanted / now)
    waits = on_core < 0.5 and costs.source >= 0.5
    if (
        waits
        and setup.may_fetch_more
        and setup.num_workers > 0
        and concurrency > setup.fetch_concurrency
    ):
        work = costs.work * (1 - costs.source + costs.source / concurrency)
        evidence.append(f"They are on a core {on_core:.0%} of it: they wait for what they read.")
        return Verdict(
            "source",
            "dataset",
            "Reading the source limits the run: its latency, not its rate.",
            tuple(evidence),
            f"Read several samples at once in each worker: fetch_concurrency={concurrency}.",
            {"fetch_concurrency": concurrency},
            costs.gain(now, work),
        )
    if not crowded and wanted > setup.num_workers and (wanted > now or setup.num_workers == 0):
        evidence.append(
            "They work in a cluster: more of them can, if it has room."
            if elsewhere
            else f"They need a core for {on_core:.0%} of that, and there are {setup.cores:g}: more of them can work."
        )
        return Verdict(
            "workers",
            part,
            "There are too few workers.",
            tuple(evidence),
            f"num_workers={wanted}.",
            {"num_workers": wanted},
            costs.gain(wanted, times=wanted / now),
        )
    if dearest is None:
        return Verdict("unknown", "", "The workers limit the run.", tuple(evidence))
    if not elsewhere:
        evidence.append(f"More workers would not help: {setup.cores:g} cores are in use.")
    what = {
        "source": "Reading the source limits the run.",
        "transform": f"The transform {part} limits the run.",
        "assembly": "Collating and copying batches limits the run.",
    }[dearest.kind]
    spared = (1 - _CHEAPER) * dearest.share * costs.work
    gain = costs.gain(now, costs.work - spared)
    if setup.num_workers == 0:
        gain = costs.whole / max(costs.whole - spared, 1e-9)
    return Verdict(
        dearest.kind,
        part,
        what,
        tuple(evidence),
        f"Make {part} cheaper, or do it once ahead of time; the gain is for half of its cost.",
        None,
        gain,
    )


def _held_up(setup: Setup, run: Period, costs: _Costs, lost: str) -> Verdict:
    """The workers pause although the loop waits."""
    workers, room = run.workers, run.room
    evidence = (
        lost,
        f"And yet {workers.count} workers are busy only {workers.busy_share:.0%} of their time, with "
        f"{room.in_flight:.1f} of {room.limit} batches in flight.",
    )
    gain = costs.gain(max(workers.count, 1))
    if room.held_by_budget:
        batch_bytes = room.memory_bytes / max(room.in_flight, 1.0)
        wanted = math.ceil(4 * max(workers.count, 1) * batch_bytes)
        return Verdict(
            "memory",
            "",
            "Too little memory for batches that are loaded ahead limits the run.",
            evidence,
            f"memory_budget={wanted}.",
            {"memory_budget": wanted},
            gain,
        )
    if setup.prefetch_factor is not None:
        return Verdict(
            "memory",
            "",
            "Too few batches loaded ahead limit the run.",
            evidence,
            f"Leave out prefetch_factor={setup.prefetch_factor}: the window then grows as needed.",
            {"prefetch_factor": None},
            gain,
        )
    if setup.order == "strict":
        return Verdict(
            "order",
            "",
            "Slow samples hold up the batches behind them.",
            evidence,
            "Let batches come when they are complete: order='batch', or 'arrival' if batches may mix.",
            {"order": "batch"},
            gain,
        )
    return Verdict("unknown", "", "The workers pause, and nothing shows why.", evidence)


def _share_of(stage: Stage | None) -> str:
    return "nothing of it is known" if stage is None else f"{stage.share:.0%} of it in {stage.name}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
