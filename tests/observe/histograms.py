"""Histograms for tests."""

from __future__ import annotations

from minato._core import Histogram

__all__ = ["histogram"]


def histogram(*values: int) -> Histogram:
    recorded = Histogram()
    for value in values:
        recorded.record(value)
    return recorded
