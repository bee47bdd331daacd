"""The report of the ladder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from bench import record
from bench.ladder.work import BANDWIDTH, GROUP, ROWS, RTT_S, WORKERS

_TEXT = """# The ladder of Petastorm

Where an epoch over Parquet files spends its time, found by removing one cost after the other: transforms in the
training process and nothing kept (`none`); raw rows kept on a local disk; transforms pushed down into the workers,
right behind the reading; and both, the cache then holding what the transforms made. Petastorm itself takes the same
steps beside minato, in an environment of its own, with the options that its paper is about
(`cache_type="local-disk"`, `convert_early_to_numpy=True`).

{rows} rows in row groups of {group}; every read of the file sleeps for {rtt:.0f} ms and for its bytes at
{bandwidth:.0f} MB/s. The transform normalises and sharpens a small image. {workers} workers: processes for minato, with
`schedule="round_robin"`; threads for Petastorm, whose process pool cannot carry arrays that were converted early.
Batches are row groups, the order is the file's, two epochs follow each other in one run, each run has an empty cache at
first and a process of its own, runs take turns. Seconds of an epoch: median (lowest to highest) of {repeats} runs.

`{command}`

| step | loader | first epoch | second epoch | second against `none` | against the step before |
|---|---|---|---|---|---|
{lines}
{notes}
## Conditions

| | |
|---|---|
{conditions}
"""

Runs = Mapping[str, list[list[float]]]
"""By step: seconds of the epochs of each run."""


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _lines(side: str, runs: Runs) -> list[str]:
    lines = []
    none = before = None
    for step, epochs in runs.items():
        first, second = (list(times) for times in zip(*epochs, strict=True))
        middle = statistics.median(second)
        none, before = none or middle, before or middle
        gains = f"{none / middle:.1f} × | {before / middle:.1f} ×"
        lines.append(f"| {step} | {side} | {_range(first)} | {_range(second)} | {gains} |")
        before = middle
    return lines


def markdown(
    found: Mapping[str, Runs],
    versions: Mapping[str, Mapping[str, str]],
    notes: Mapping[str, str],
    conditions: Mapping[str, object],
    command: str,
    repeats: int,
) -> str:
    """The whole report."""
    lines = [line for side, runs in found.items() for line in _lines(side, runs)]
    rows = dict(conditions)
    for side, packages in versions.items():
        rows[f"beside {side}"] = ", ".join(f"{name} {number}" for name, number in packages.items())
    rows["load average after"] = record.load_average()
    return _TEXT.format(
        rows=ROWS,
        group=GROUP,
        rtt=RTT_S * 1e3,
        bandwidth=BANDWIDTH / 1e6,
        workers=WORKERS,
        repeats=repeats,
        command=command,
        lines="\n".join(lines),
        notes="".join(f"\n{side}: {note}\n" for side, note in notes.items()),
        conditions="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )
