"""The report of a run as Markdown for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bench.macro.loaders import CONTENDERS
from bench.macro.rows import Goal
from bench.macro.suite import Figures, RowResult, Spread

HEAD = """\
# Engine benchmark

Written by `python -m bench.macro`; `bench/README.md` tells what each row is for.

![Share of the bound reached by each loader](engine.png)

Every loader gets the same dataset object, number of workers, `persistent_workers` and shuffles, and
every other argument at its default. Within one repeat the loaders of a row run one after the other,
each time starting with a different one. Every run is checked: each sample exactly once, in order
where promised. Figures are medians of {repeats} repeats, with the least and the greatest in
brackets. A ratio compares runs of the same repeat.

* *Bound* of sleeping work: all sleep split evenly over the workers, or the consumer's own time if
  that is longer. Of tensors: copying every sample once, warm, by one process, into one recycled
  batch; two workers can in principle beat it. Of table rows: the calls of `dataset[i]` alone, split
  over the workers.
* *Bare processes* are forked, fed and heard through two pipes, and promise neither order nor content
  (`bench/macro/bare.py`). What they lose is what this machine takes from every loader: sleeps that
  last too long, forks, wake-ups.
* *Time of sleeping work* is the whole run, from before the loader is built to the end of the last
  epoch, start of the workers included. *Time of tensors and rows* is that of the epochs after the
  first.
* *Share, later epochs* leaves the first epoch out, and with it the start of workers that persist.
* *First batch* is the time from `iter()` to the first batch, workers cold.
* *Waiting* is the share of the run that the consumer spends waiting for batches.
"""


BREAKDOWN = """\
One worker in line, 16 Python floats and a label a sample, batch 256, row `tabular`; processor time,
the least of the repeats. The same by itself: `python -m bench.macro --breakdown`.
"""


def markdown(
    results: Sequence[RowResult],
    conditions: Mapping[str, str],
    repeats: int,
    breakdown: str | None = None,
) -> str:
    """Lay out the whole report; ``breakdown`` is the table of stages, if it was measured."""
    parts = [HEAD.format(repeats=repeats), "## Conditions\n", _conditions(conditions)]
    parts += ["## Share of the bound\n", _overview(results)]
    if goals := _goals(results):
        parts += ["## Goals\n", goals]
    parts += ["## Where minato is slower than torch\n", _losses(results)]
    if breakdown:
        parts += ["## Where the time of cheap samples goes\n", BREAKDOWN, breakdown]
    parts.append("## Every figure\n")
    for result in results:
        parts += [f"### {result.row.name}\n", f"{_capital(result.row.title)}.\n", _details(result)]
    return "\n".join(parts)


def json_text(
    results: Sequence[RowResult],
    conditions: Mapping[str, str],
    repeats: int,
    breakdown: Mapping[str, float] | None = None,
) -> str:
    """Return figures, bounds and raw clock readings as JSON; times in seconds unless named."""
    rows = [
        {
            "name": result.row.name,
            "title": result.row.title,
            "samples": result.row.samples,
            "batch_size": result.row.batch_size,
            "workers": result.row.workers,
            "epochs": result.row.epochs,
            "shuffle": result.row.shuffle,
            "persistent_workers": result.row.persistent,
            "unit": result.row.unit,
            "bounds": [asdict(bound) for bound in result.bounds],
            "figures": [asdict(result.figures(loader)) for loader in result.trials],
            "trials": {
                loader: [
                    {
                        "whole_s": trial.whole_s,
                        "first_batch_s": trial.first_batch_s,
                        "epochs_s": trial.epochs_s,
                    }
                    for trial in trials
                ]
                for loader, trials in result.trials.items()
            },
        }
        for result in results
    ]
    document = {
        "conditions": dict(conditions),
        "repeats": repeats,
        "rows": rows,
        "breakdown_us_per_sample": dict(breakdown or {}),
    }
    return json.dumps(document, indent=1) + "\n"


def _conditions(conditions: Mapping[str, str]) -> str:
    return table(["", ""], [[name, value] for name, value in conditions.items()])


def _overview(results: Sequence[RowResult]) -> str:
    present = [name for name in CONTENDERS if any(name in result.trials for result in results)]
    lines = []
    for result in results:
        shares = {name: result.figures(name).share.median for name in result.trials}
        cells = [share_text(shares[name]) if name in shares else "" for name in present]
        lines.append([result.row.name, result.row.title, *cells])
    labels = [CONTENDERS[name].label for name in present]
    return table(["row", "work", *labels], lines)


def _goals(results: Sequence[RowResult]) -> str:
    lines = []
    for result in results:
        for goal in result.row.goals:
            if goal.loader in result.trials:
                value = _value(result.figures(goal.loader), goal)
                if value is not None:
                    verdict = "reached" if goal.holds(value) else "**missed**"
                    label = CONTENDERS[goal.loader].label
                    line = [result.row.name, label, str(goal), f"{value:.2f}", verdict]
                    lines.append([*line, _bare_value(result, goal)])
    head = ["row", "loader", "goal", "measured", "", "bare processes"]
    return table(head, lines) if lines else ""


def _bare_value(result: RowResult, goal: Goal) -> str:
    value = _value(result.figures("bare"), goal) if "bare" in result.trials else None
    return "" if value is None else f"{value:.2f}"


def _value(figures: Figures, goal: Goal) -> float | None:
    spread: Spread | None = {
        "share of the bound": figures.share,
        "ratio to torch": figures.ratio,
        "first batch ms": figures.first_batch_ms,
        "own us/sample": figures.own_us,
    }[goal.quantity]
    return None if spread is None else spread.median


def _losses(results: Sequence[RowResult]) -> str:
    """List every median that is below torch's with the same promise about order."""
    losses = []
    for result in results:
        for name in result.trials:
            if not name.startswith("minato"):
                continue
            rival = "torch" if CONTENDERS[name].keeps_order else "torch-any-order"
            if rival not in result.trials:
                continue
            ours, theirs = (result.figures(who).share.median for who in (name, rival))
            if ours < theirs:
                losses.append(
                    f"* `{result.row.name}`: {CONTENDERS[name].label} {ours:.2f} of the bound, "
                    f"{CONTENDERS[rival].label} {theirs:.2f}.\n"
                )
    return "".join(losses) or "On no row of this run.\n"


def _details(result: RowResult) -> str:
    unit = {"s/epoch": "s per epoch", "GB/s": "GB/s", "us/sample": "µs per sample"}[result.row.unit]
    own = any(bound.call_s is not None for bound in result.bounds)
    head = ["loader", unit, "share of the bound", "share, later epochs", "× torch"]
    head += ["first batch, ms", "whole run, s", "waiting", "wait p50, ms", "wait p99, ms"]
    lines = [["*bound*", spread_text(result.bound_speed, 3), *[""] * 8]]
    if own:
        head.append("own, µs per sample")
        lines[0].append("")
    for name in result.trials:
        figures = result.figures(name)
        line = [
            CONTENDERS[name].label,
            spread_text(figures.speed, 3),
            spread_text(figures.share, 2),
            spread_text(figures.later_share, 2) if figures.later_share else "",
            spread_text(figures.ratio, 2) if figures.ratio else "",
            spread_text(figures.first_batch_ms, 0),
            spread_text(figures.whole_s, 2),
            f"{100 * figures.waiting.median:.0f} %",
            f"{figures.wait_p50_ms.median:.2f}",
            f"{figures.wait_p99_ms.median:.1f}",
        ]
        if own:
            line.append(spread_text(figures.own_us, 2) if figures.own_us else "")
        lines.append(line)
    return table(head, lines)


def share_text(share: float) -> str:
    return f"{share:.2f}" if share >= 0.1 else f"{share:.3f}"


def spread_text(spread: Spread, digits: int) -> str:
    low, middle, high = (
        f"{value:.{digits}f}" for value in (spread.least, spread.median, spread.greatest)
    )
    return middle if low == high else f"{middle} ({low}–{high})"


def table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
