"""What is done to one sample: its transforms, and the random numbers they draw."""

from __future__ import annotations

from minato.transforms.chain import Chain
from minato.transforms.rng import SampleRandomness, current, numpy_rng, python_rng, torch_rng

__all__ = ["Chain", "SampleRandomness", "current", "numpy_rng", "python_rng", "torch_rng"]
