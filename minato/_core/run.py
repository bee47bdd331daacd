"""Running the samples of a lease one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._run_py import run_samples
else:
    from minato._core._run_c import run_samples

__all__ = ["run_samples"]
