"""The pages of the documentation, and the blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("bench", "minato")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: what follows the opening fence, the text, and the number of the line of that fence."""

    info: str
    source: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the built documentation name it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
