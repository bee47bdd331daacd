"""Writes what documents the options from their fields in ``minato/options.py``.

That is the tables of ``docs/reference/options.md``, and the docstrings of ``DataLoader`` and of the groups of options,
which editors show.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from pathlib import Path

from minato.options import GROUPS, WIDENED, Options

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "options.md"
SOURCES = {
    DOCS.parent / "minato" / "loader.py": [("DataLoader", "Args", Options)],
    DOCS.parent / "minato" / "options.py": [(each.__name__, "Attributes", each) for each in GROUPS],
}
"""Modules with docstrings that are written: class, section, and the class whose fields it documents."""
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


def section(title: str, group: type) -> str:
    """The fields of a group as a section of a docstring."""
    lines = [f"    {title}:"]
    for each in fields(group):
        if "meaning" in each.metadata:
            meaning = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", each.metadata["meaning"])
            text = f"{each.name}: {meaning} Default: {each.metadata['default']}.".replace("`", "``")
            lines += textwrap.wrap(
                text,
                120,
                initial_indent=" " * 8,
                subsequent_indent=" " * 12,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


def documented(source: str, name: str, title: str, group: type) -> str:
    """A module's source with the section of a class's docstring as the fields are now."""
    of_class = re.compile(
        rf'(^class {name}\b.*?"""(?:(?!""").)*?)(?:    {title}:\n(?:(?!""").)*?\n\n)?(?=    Raises:)',
        re.DOTALL | re.MULTILINE,
    )
    return of_class.sub(lambda found: f"{found[1]}{section(title, group)}\n\n", source, count=1)


def all_documented(path: Path) -> str:
    """A module's source with all docstrings as the fields are now."""
    text = path.read_text(encoding="utf-8")
    for name, title, group in SOURCES[path]:
        text = documented(text, name, title, group)
    return text


def rewritten(text: str) -> str:
    """The page with its tables as the fields are now."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]), text)


if __name__ == "__main__":
    for path in SOURCES:
        path.write_text(all_documented(path), encoding="utf-8")
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
