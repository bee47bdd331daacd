"""Mergeable histograms of durations, with a known relative error, in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._histogram_py import NBYTES, Histogram
else:
    from minato._core._histogram_c import NBYTES, Histogram

__all__ = ["NBYTES", "Histogram"]
