"""Draw the charts of the pages again, from the tables that are published there: ``python -m bench.charts``."""

from __future__ import annotations

from bench import growth, macro
from bench.harness import record

if __name__ == "__main__":
    macro.draw(record.PAGES / "engine.md")
    growth.draw(record.PAGES / "growth.md")
