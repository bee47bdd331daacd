"""Command line of the macro benchmark; see ``python -m bench.macro --help``."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path

from bench import record
from bench.macro import chart, report
from bench.macro.loaders import CONTENDERS
from bench.macro.rows import ALL_ROWS, Row
from bench.macro.suite import measure

STUCK_AFTER_S = 300.0
"""One run of one loader that takes longer shows all stacks and ends the benchmark."""
DEFAULT_OUT = record.ROOT / "docs" / "benchmarks"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    repeats = options.repeats or (1 if options.short else 5)
    if options.breakdown:
        print(_stages(repeats)[0])
        return 0
    by_name = {row.name: row for row in ALL_ROWS}
    rows: list[Row] = [by_name[name] for name in options.rows or by_name]
    if options.short:
        rows = [row.short() for row in rows]
    faulthandler.enable()
    conditions = record.environment()
    _say(f"{len(rows)} rows, {repeats} repeats")
    results = measure(rows, options.loaders, repeats, say=_say)
    whole = not (options.short or options.rows or options.loaders)
    stages, costs = _stages(repeats) if whole else (None, None)
    faulthandler.cancel_dump_traceback_later()
    conditions["load average after"] = record.load_average()
    text = report.markdown(results, conditions, repeats, stages)
    print(text)
    out: Path | None = options.out or (DEFAULT_OUT if whole else None)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "engine.md").write_text(text)
        (out / "engine.json").write_text(report.json_text(results, conditions, repeats, costs))
        chart.draw(results, conditions, out / "engine.png")
        print(f"written: {out}/engine.md, engine.json, engine.png")
    return 0


def _stages(repeats: int) -> tuple[str, dict[str, float]]:
    from bench.macro import breakdown  # late: it needs minato, and torch's rows do not

    costs = breakdown.measure(repeats)
    return breakdown.table(costs), costs


def _say(line: str) -> None:
    faulthandler.dump_traceback_later(STUCK_AFTER_S, exit=True)
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.macro",
        description="Compare minato with torch's DataLoader on work whose cost is known.",
    )
    parser.add_argument("--short", action="store_true", help="small rows, once: a smoke run")
    parser.add_argument(
        "--rows",
        type=_names({row.name for row in ALL_ROWS}),
        metavar="NAME,...",
        help=f"only these rows: {', '.join(row.name for row in ALL_ROWS)}",
    )
    parser.add_argument(
        "--loaders",
        type=_names(set(CONTENDERS)),
        metavar="NAME,...",
        help=f"only these loaders: {', '.join(CONTENDERS)}",
    )
    parser.add_argument(
        "--repeats", type=_positive, metavar="N", help="runs of each loader (5; 1 with --short)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where the report goes (a full run: docs/benchmarks; any other: nowhere)",
    )
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="instead: where minato's time goes, stage by stage, on the tabular row",
    )
    return parser


def _names(known: set[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {sorted(known)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
