"""Running the transforms of one sample, with a stop between two of them when time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minato._core import USE_EXTENSIONS

if TYPE_CHECKING or not USE_EXTENSIONS:
    from minato._core._steps_py import run_steps
else:
    from minato._core._steps_c import run_steps

__all__ = ["run_steps"]
