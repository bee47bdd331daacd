"""What the comparison with other loaders found, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bench.macro.loaders import Contender
from bench.macro.report import share_text, spread_text, table
from bench.macro.suite import RowResult
from bench.peers.adapters import PEERS, adapter

HEAD = """\
# Other loaders

Written by `make bench-peers`; `bench/peers/adapters` has one small file for each loader, with the setting that its
own documentation gives for a dataset like this. Each runs in an environment and a process of its own, with as many
workers (processes or threads) as the others; rows, bounds, clocks and checks are those of the [engine
benchmark](engine.md), and here too every sample must come exactly once and unchanged. Within a repeat the loaders run
one after the other, each time starting with a different one. Figures are medians of {repeats} repeats, with the least
and the greatest in brackets.

The samples of the first rows sleep, as if they waited for a network. That releases the interpreter's lock, so threads
are as good as processes there, and start at once; on work that holds the lock they would wait for each other. In
`image` and `vector` there is next to no work, and what is seen is the loader itself: threads need not move
anything from one process to another. That they start at once is most of what loaders with threads gain over minato's
processes: twelve forks take about 70 ms here, also where the processes are bare (see the engine benchmark). minato
has threads as well, and takes processes by default, as torch does, because most transforms hold the lock.

WebDataset and LitData read formats of their own through the worker processes of torch's `DataLoader` and schedule as
it does: for a map-style dataset there is nothing of theirs to measure. `shards` is WebDataset's format, tar files
that it reads from front to back; the others ask for single samples of the same files, so that they can shuffle them.
LitData's format nobody else reads, so it would be measured on other files. Ray Data takes part in one row only,
because it starts a process for each worker that imports everything anew, which takes minutes on two cores.
"""


def contenders() -> dict[str, Contender]:
    """All of them by name, in the order of the tables."""
    return {one.name: one for peer in PEERS for one in adapter(peer).CONTENDERS}


def markdown(
    results: Sequence[RowResult],
    conditions: Mapping[str, str],
    versions: Mapping[str, str],
    notes: Mapping[str, str],
    repeats: int,
) -> str:
    """Lay out the report; ``notes`` says of each loader that failed where and why."""
    known = contenders()
    present = [name for name in known if any(name in result.trials for result in results)]
    parts = [HEAD.format(repeats=repeats), "## Conditions\n"]
    told = {**conditions, **{f"version of {name}": it for name, it in sorted(versions.items())}}
    parts.append(table(["", ""], [[name, value] for name, value in told.items()]))
    parts.append("## Share of the bound\n")
    lines = [
        [known[name].label]
        + [
            share_text(result.figures(name).share.median) if name in result.trials else ""
            for result in results
        ]
        for name in present
    ]
    parts.append(table(["loader", *(result.row.name for result in results)], lines))
    parts += ["## Where another loader is faster\n", _losses(results, known)]
    if notes:
        parts.append("## What did not run\n")
        parts.append("".join(f"* {who}: {why}\n" for who, why in notes.items()))
    parts.append("## Every figure\n")
    for result in results:
        title = result.row.title
        parts += [f"### {result.row.name}\n", f"{title[:1].upper()}{title[1:]}.\n"]
        parts.append(_details(result, known))
    return "\n".join(parts)


def _losses(results: Sequence[RowResult], known: Mapping[str, Contender]) -> str:
    """List every median above the best of minato's with the same promise about order."""
    ours = {one.name for one in adapter("minato").CONTENDERS}
    lines = []
    for result in results:
        shares = {name: result.figures(name).share.median for name in result.trials}
        for name, share in shares.items():
            rivals = [
                one
                for one in ours & shares.keys()
                if known[one].keeps_order == known[name].keeps_order
            ]
            best = max(rivals, key=shares.__getitem__, default=None)
            if name not in ours and best is not None and share > shares[best]:
                lines.append(
                    f"* `{result.row.name}`: {known[name].label} {share_text(share)} of the bound, "
                    f"{known[best].label} {share_text(shares[best])}.\n"
                )
    return "".join(lines) or "On no row of this run, where both promise the same order.\n"


def json_text(
    results: Sequence[RowResult],
    conditions: Mapping[str, str],
    versions: Mapping[str, str],
    notes: Mapping[str, str],
) -> str:
    """Figures and bounds as JSON; times in seconds unless named."""
    rows = [
        {
            "name": result.row.name,
            "bounds": [asdict(bound) for bound in result.bounds],
            "figures": [asdict(result.figures(name)) for name in result.trials],
        }
        for result in results
    ]
    document = {
        "conditions": dict(conditions),
        "versions": dict(versions),
        "notes": dict(notes),
        "rows": rows,
    }
    return json.dumps(document, indent=1) + "\n"


def _details(result: RowResult, known: Mapping[str, Contender]) -> str:
    head = ["loader", "share of the bound", "× torch in order", "first batch, ms", "waiting"]
    lines = []
    for name in known:
        if name in result.trials:
            figures = result.figures(name)
            lines.append(
                [
                    known[name].label,
                    spread_text(figures.share, 2),
                    spread_text(figures.ratio, 2) if figures.ratio else "",
                    spread_text(figures.first_batch_ms, 0),
                    f"{100 * figures.waiting.median:.0f} %",
                ]
            )
    return table(head, lines)
