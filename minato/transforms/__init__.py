"""The transforms of a sample, and its random numbers."""

from __future__ import annotations

from minato.transforms.compose import Transforms
from minato.transforms.rng import SampleRandomness, current, numpy_rng, python_rng, torch_rng

__all__ = ["SampleRandomness", "Transforms", "current", "numpy_rng", "python_rng", "torch_rng"]
