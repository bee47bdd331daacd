"""Where minato's time goes on cheap samples: one batch after the other, taken through by hand.

Each stage runs for a whole batch at a time, by the objects of a real loader and in the order in
which its worker runs them, with a clock reading in between. What the whole loader takes beyond the
sum of the stages is the worker's own loop. All in-line times are processor time of the one thread.
"""

from __future__ import annotations

import statistics
from time import thread_time
from typing import Any

from bench.macro.loaders import CONTENDERS
from bench.macro.rows import TABULAR, Row
from bench.macro.trial import run_trial
from bench.macro.work import Work

DATASET = "dataset call"
RANDOMNESS = "bind randomness to the sample"
RECORDS = "clock, lease and histogram"
PACK = "pack into the batch"
LEDGER = "claim and finish"
DELIVERY = "open, deliver and recycle the batch"
STAGES = (DATASET, RANDOMNESS, RECORDS, PACK, LEDGER, DELIVERY)
TRANSFORM = "one transform that does nothing (not in this row)"
LOOP = "the worker's own loop"
INLINE = "whole loader, in line"
PROCESSES = f"whole loader, {TABULAR.workers} worker processes"

Costs = dict[str, float]
"""Microseconds per sample, by stage."""


def measure(repeats: int, row: Row = TABULAR) -> Costs:
    """Return the medians over ``repeats`` runs of one epoch of the tabular row."""
    work = row.make(row.samples)
    runs = [_one_run(row, work) for _ in range(repeats)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def table(costs: Costs) -> str:
    """Lay the stages out, with their share of the time in line."""
    lines = ["| stage | µs per sample | share |\n| --- | --- | --- |\n"]
    for name in (*STAGES, LOOP, INLINE, PROCESSES, TRANSFORM):
        share = f"{100 * costs[name] / costs[INLINE]:.0f} %" if name in (*STAGES, LOOP) else ""
        lines.append(f"| {name} | {costs[name]:.3f} | {share} |\n")
    return "".join(lines)


def _one_run(row: Row, work: Work) -> Costs:
    costs = _stages(row, work)
    costs[TRANSFORM] = _transform(row, work)
    costs[INLINE] = _inline(row, work)
    trial = run_trial(CONTENDERS["minato"], row, work, seed=0)
    costs[PROCESSES] = 1e6 * trial.epoch_s(row.skips_first_epoch) / row.samples
    costs[LOOP] = costs[INLINE] - sum(costs[stage] for stage in STAGES)
    return costs


def _stages(row: Row, work: Work) -> Costs:
    """Run one epoch batch by batch, stage by stage."""
    from minato import DataLoader
    from minato._core.clock import now_ns

    loader: Any = DataLoader(work, batch_size=row.batch_size)
    iterator = iter(loader)
    engine = iterator._source
    worker = engine._pool._worker
    ledger, sink, times = worker._ledger, worker._sink, worker._times
    fetch, bind = worker._fetcher.one, worker._make_randomness(0).bind
    spent = dict.fromkeys(STAGES, 0.0)
    for _ in range(len(iterator)):
        laps = [thread_time()]
        engine._dispatcher.refill()
        laps.append(thread_time())
        batch, k, count = ledger.claim(0, row.batch_size)
        _, first, *_ = ledger.describe(batch)
        keys = worker._read_keys(batch, k, count)
        laps.append(thread_time())
        samples = [fetch(key) for key in keys]
        laps.append(thread_time())
        for key in keys:
            bind(0, key)
        laps.append(thread_time())
        for position in range(first, first + count):
            started_ns = now_ns()
            ledger.begin(0, position, started_ns)
            times.record(now_ns() - started_ns)
        laps.append(thread_time())
        for place, sample in enumerate(samples):
            sink.write(batch, place, first + place, sample)
        laps.append(thread_time())
        sink.finished(batch, ledger.fill_run(0, batch, 0, count))
        ledger.end(0, count, 0, 0)
        laps.append(thread_time())
        next(iterator)
        laps.append(thread_time())
        order = (DELIVERY, LEDGER, DATASET, RANDOMNESS, RECORDS, PACK, LEDGER, DELIVERY)
        for stage, begun, ended in zip(order, laps, laps[1:], strict=False):
            spent[stage] += ended - begun
    return {stage: 1e6 * seconds / row.samples for stage, seconds in spent.items()}


def _inline(row: Row, work: Work) -> float:
    """Time of the second epoch of a loader without workers."""
    from minato import DataLoader

    loader: Any = DataLoader(work, batch_size=row.batch_size)
    for _ in range(2):
        begun = thread_time()
        for _ in loader:
            pass
        spent = thread_time() - begun
    return 1e6 * spent / row.samples


def _transform(row: Row, work: Work) -> float:
    """Cost of a chain of one transform that returns its argument, call included."""
    from minato.chain.chain import Chain

    run = Chain.of([_unchanged]).run
    sample = work[0]
    begun = thread_time()
    for _ in range(row.samples):
        run(sample)
    return 1e6 * (thread_time() - begun) / row.samples


def _unchanged(sample: Any) -> Any:
    return sample
