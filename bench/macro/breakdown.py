"""Where minato's time goes on cheap samples: one batch after the other, taken through by hand.

Each stage runs for a whole batch at a time, by the objects of a real loader and in the order in
which its worker runs them, with a clock reading in between. What the whole loader takes beyond the
sum of the stages is the worker's own loop. All in-line times are processor time of the one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

from bench.macro.loaders import CONTENDERS
from bench.macro.rows import TABULAR, Row
from bench.macro.trial import run_trial
from bench.macro.work import Work
from minato import DataLoader
from minato.chain.chain import Chain
from minato.chain.rng import SampleRandomness

DATASET = "dataset call"
BESIDES = "clock, randomness and histogram"
PACK = "pack into the batch"
LEDGER = "claim and finish"
DELIVERY = "open, deliver and recycle the batch"
STAGES = (DATASET, BESIDES, PACK, LEDGER, DELIVERY)
TRANSFORM = "one transform that does nothing (not in this row)"
BINDING = "seed the generators (only for samples that draw)"
LOOP = "the worker's own loop"
INLINE = "whole loader, in line"
PROCESSES = f"whole loader, {TABULAR.workers} worker processes"

Costs = dict[str, float]
"""Microseconds per sample, by stage."""


def measure(repeats: int, row: Row = TABULAR) -> Costs:
    """Return the least of ``repeats`` runs of one epoch, stage by stage: noise only adds."""
    work = row.make(row.samples)
    runs = [_one_run(row, work) for _ in range(repeats)]
    costs = {name: min(run[name] for run in runs) for name in runs[0]}
    costs[LOOP] = costs[INLINE] - sum(costs[stage] for stage in STAGES)
    return costs


def table(costs: Costs) -> str:
    """Lay the stages out, with their share of the time in line."""
    lines = ["| stage | µs per sample | share |\n| --- | --- | --- |\n"]
    for name in (*STAGES, LOOP, INLINE, PROCESSES, TRANSFORM, BINDING):
        share = f"{100 * costs[name] / costs[INLINE]:.0f} %" if name in (*STAGES, LOOP) else ""
        lines.append(f"| {name} | {costs[name]:.3f} | {share} |\n")
    return "".join(lines)


def _one_run(row: Row, work: Work) -> Costs:
    costs = _stages(row, work)
    costs[TRANSFORM] = _per_call(Chain.of([_unchanged]).run, [(work[0],)] * row.samples)
    bind = SampleRandomness(0).bind
    with SampleRandomness(0).saved():
        costs[BINDING] = _per_call(bind, [(0, key) for key in range(row.samples)])
    costs[INLINE] = _inline(row, work)
    trial = run_trial(CONTENDERS["minato"], row, work, seed=0)
    costs[PROCESSES] = 1e6 * trial.epoch_s(row.skips_first_epoch) / row.samples
    return costs


def _stages(row: Row, work: Work) -> Costs:
    """Run an epoch batch by batch, stage by stage."""
    loader: Any = DataLoader(work, batch_size=row.batch_size)
    for _ in loader:
        pass  # the next epoch gets this one's warm memory
    iterator = iter(loader)
    next(iterator)  # the worker gets to know its samples
    engine = iterator._source
    worker = engine._pool._worker
    ledger, sink, fetch = worker._ledger, worker._sink, worker._fetcher.one
    spent = dict.fromkeys(STAGES, 0.0)
    for _ in range(len(iterator) - 1):
        laps = [thread_time()]
        engine._dispatcher.refill()
        laps.append(thread_time())
        batch, k, count = ledger.claim(0, row.batch_size)
        _, first, *_ = ledger.describe(batch)
        keys = list(worker._read_keys(batch, k, count))
        laps.append(thread_time())
        for key in keys:
            fetch(key)
        laps.append(thread_time())
        samples, _ = worker._runner.run_steps(first, 0, keys, fetch, 0)
        laps.append(thread_time())
        sink.write_run(batch, 0, first, samples)
        laps.append(thread_time())
        sink.finished(batch, ledger.fill_run(0, batch, 0, count))
        ledger.end(0, count, 0, 0)
        laps.append(thread_time())
        next(iterator)
        laps.append(thread_time())
        order = (DELIVERY, LEDGER, DATASET, BESIDES, PACK, LEDGER, DELIVERY)
        for stage, begun, ended in zip(order, laps[:-1], laps[1:], strict=True):
            spent[stage] += ended - begun
    spent[BESIDES] -= spent[DATASET]  # the worker called the dataset once more
    samples_run = row.samples - row.batch_size
    return {stage: 1e6 * seconds / samples_run for stage, seconds in spent.items()}


def _inline(row: Row, work: Work) -> float:
    """Time of the second epoch of a loader without workers."""
    loader: Any = DataLoader(work, batch_size=row.batch_size)
    for _ in range(2):
        begun = thread_time()
        for _ in loader:
            pass
        spent = thread_time() - begun
    return 1e6 * spent / row.samples


def _per_call(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> float:
    begun = thread_time()
    for arguments in calls:
        function(*arguments)
    return 1e6 * (thread_time() - begun) / len(calls)


def _unchanged(sample: Any) -> Any:
    return sample
