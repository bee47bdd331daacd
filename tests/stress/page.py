"""The page of figures that the stress programs write together, each its own section."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PAGE", "write_section"]

PAGE = "docs/benchmarks/chaos.md"
TITLE = "# Chaos run\n\n"


def write_section(page: Path, section: str) -> None:
    """Replace the section with the same heading, or append it.

    Args:
        section: Begins with a line ``## heading``.
    """
    text = page.read_text() if page.exists() else TITLE
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    named = {one.split("\n", 1)[0]: one.strip() for one in sections}
    named[section.split("\n", 1)[0]] = section.strip()
    page.write_text("\n\n".join([head.strip(), *named.values()]) + "\n")
