"""Writes the tables of ``docs/reference/options.md`` from the docstrings of ``DataLoader`` and the groups of options.

The fields in ``minato/options.py`` say which values are possible, and which words are links.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from minato.loader import DataLoader
from minato.options import GROUPS, WIDENED, Options

DOCS = Path(__file__).parent
PAGE = DOCS / "reference" / "options.md"
_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


class Documented(NamedTuple):
    """What a docstring says of a field, in Markdown."""

    meaning: str
    default: str


def documented(group: type) -> dict[str, Documented]:
    """The fields of a group, by the section of its docstring; of ``Options``, the arguments of ``DataLoader``."""
    text = inspect.getdoc(DataLoader if group is Options else group) or ""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    found = {}
    for name, said in re.findall(
        r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.DOTALL | re.MULTILINE
    ):
        words = " ".join(said.split()).replace("``", "`")
        meaning, _, default = words.removesuffix(".").rpartition(" Default: ")
        found[name] = Documented(meaning, default)
    return found


def meaning(said: Documented, links: dict[str, str]) -> str:
    """The meaning of a field with its links."""
    text = said.meaning
    for words, target in links.items():
        if words not in text:
            raise ValueError(f"{text!r} has not the words {words!r}, which are to be a link")
        text = text.replace(words, f"[{words}]({target})", 1)
    return text


def table(name: str) -> str:
    """The table of a group of options, or of arguments of torch that take more values: ``torch``."""
    group = {each.__name__: each for each in (*GROUPS, Options)}.get(name, Options)
    shown = [each for each in fields(group) if "values" in each.metadata]
    if group is Options:
        shown = [each for each in shown if (each.name in WIDENED) == (name == "torch")]
    title = "argument" if group is Options else "field"
    lines = [f"| {title} | values | default | meaning |", "|---|---|---|---|"]
    said = documented(group)
    for each in shown:
        text = meaning(said[each.name], each.metadata["links"])
        values = each.metadata["values"]
        lines.append(f"| `{each.name}` | {values} | {said[each.name].default} | {text} |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """The page with its tables as the fields are now."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]), text)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
