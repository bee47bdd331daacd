"""What is done to one sample: its transforms, and the random numbers they draw."""

from __future__ import annotations

from minato.transforms.compose import Transforms
from minato.transforms.rng import SampleRandomness, current, numpy_rng, python_rng, torch_rng

__all__ = ["SampleRandomness", "Transforms", "current", "numpy_rng", "python_rng", "torch_rng"]
