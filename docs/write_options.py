"""Writes the tables of ``docs/reference/options.md`` from the fields in ``minato/options.py``."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from minato.options import GROUPS, WIDENED, Options

PAGE = Path(__file__).parent / "reference" / "options.md"
_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """The table of a group of options, or of arguments of torch that take more values: ``torch``."""
    group = {each.__name__: each for each in (*GROUPS, Options)}.get(name, Options)
    shown = [each for each in fields(group) if "meaning" in each.metadata]
    if group is Options:
        shown = [each for each in shown if (each.name in WIDENED) == (name == "torch")]
    title = "argument" if group is Options else "field"
    lines = [f"| {title} | values | default | meaning |", "|---|---|---|---|"]
    for each in shown:
        cells = (
            f"`{each.name}`",
            *(each.metadata[key] for key in ("values", "default", "meaning")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """The page with its tables as the fields are now."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]), text)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
