"""Runs every ``bench_NAME.py`` beside it and collects their tables.

A micro benchmark has ``--impl py|c|both`` and, for smoke runs, ``--short`` or ``--rounds``.
It prints one table: heads in the first line, then in each a label and figures in columns of 12.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import record

HERE = Path(__file__).resolve().parent
DEFAULT_OUT = record.ROOT / "docs" / "benchmarks"
SMOKE_FLAGS = (["--short"], ["--rounds", "1"])
USAGE_ERROR = 2
STUCK_AFTER_S = 300.0
COLUMN_WIDTH = 12
FORMS = {"c": "compiled", "py": "pure"}


@dataclass(frozen=True)
class Line:
    """One operation of one module: its label, and ns by the head of each column."""

    module: str
    label: str
    ns: dict[str, float]


def parse(module: str, text: str) -> list[Line]:
    """Read the table that a micro benchmark printed.

    Raises:
        ValueError: ``text`` holds no table of at least one line with one figure.
    """
    head, *rows = text.strip("\n").splitlines() or [""]
    columns = [(match.end(), match[1]) for match in re.finditer(r"\s{2,}(\S+)", head)]
    lines = []
    for row in rows:
        cells = {
            FORMS.get(name, name): float(cell.replace(",", ""))
            for end, name in columns
            if (cell := row[end - COLUMN_WIDTH : end].strip())
        }
        label = row[: columns[0][0] - COLUMN_WIDTH] if columns else row
        lines.append(Line(module, label.strip(), cells))
    if not any(line.ns for line in lines):
        raise ValueError(f"{module} printed no table:\n{text}")
    return lines


def run(path: Path, impl: str, short: bool) -> list[Line]:
    """Run one micro benchmark in a process of its own."""
    command = [sys.executable, "-m", f"bench.micro.{path.stem}", "--impl", impl]
    for flags in SMOKE_FLAGS if short else ([],):
        done = subprocess.run(
            [*command, *flags],
            cwd=record.ROOT,
            capture_output=True,
            text=True,
            timeout=STUCK_AFTER_S,
            check=False,
        )
        if done.returncode != USAGE_ERROR:
            break
    if done.returncode:
        raise RuntimeError(f"{path.name} failed:\n{done.stderr}")
    return parse(path.stem.removeprefix("bench_"), done.stdout)


def markdown(lines: Sequence[Line], conditions: dict[str, str]) -> str:
    """Lay out the collected table."""
    heads = list(dict.fromkeys(name for line in lines for name in line.ns))
    both = {"compiled", "pure"} <= set(heads)
    parts = [
        "# The compiled core against its pure twin\n",
        "Written by `python -m bench.micro`: ns per operation, the best of several rounds.\n",
        "## Conditions\n",
        _table(["", ""], [[name, value] for name, value in conditions.items()]),
        "## Figures\n",
    ]
    rows = []
    for line in lines:
        cells = [f"{line.ns[head]:,.0f}" if head in line.ns else "" for head in heads]
        if both and {"compiled", "pure"} <= set(line.ns):
            cells.append(f"{line.ns['pure'] / line.ns['compiled']:.1f}")
        elif both:
            cells.append("")
        rows.append([line.module, line.label, *cells])
    ratio = ["pure / compiled"] if both else []
    return "\n".join([*parts, _table(["module", "operation", *heads, *ratio], rows)])


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: list[str] | None = None) -> int:
    paths = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    parser = argparse.ArgumentParser(
        prog="python -m bench.micro",
        description="Time the operations of each core module, compiled and pure.",
    )
    parser.add_argument("modules", nargs="*", choices=[[], *paths], help="default: all")
    parser.add_argument("--impl", choices=["py", "c", "both"], default="both")
    parser.add_argument("--short", action="store_true", help="a smoke run: figures mean little")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="(a full run: docs/benchmarks; other: nowhere)"
    )
    options = parser.parse_args(arguments)
    conditions = record.environment()
    lines = []
    for name in options.modules or paths:
        lines += run(paths[name], options.impl, options.short)
        print(f"{name}: done", flush=True)
    text = markdown(lines, conditions)
    print(text)
    whole = not (options.short or options.modules or options.impl != "both")
    out: Path | None = options.out or (DEFAULT_OUT if whole else None)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "core.md").write_text(text)
        rows = [{"module": n.module, "operation": n.label, "ns": n.ns} for n in lines]
        document = {"conditions": conditions, "rows": rows}
        (out / "core.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {out}/core.md, core.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
