"""The chain: an elastic deformation, then the MinatoLoader paper's transforms for segmentation.

The deformation acts on the whole window before the patch is cut, as TorchIO applies it, so that the
patch has no invented border. It is rare and costs many times the rest: hence the uneven cost.
Random decisions come from ``random`` and ``numpy.random``, as in most training code.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
from scipy import ndimage

from bench.workloads.segmentation import (
    Cast,
    GaussianNoise,
    RandomBalancedCrop,
    RandomBrightness,
    RandomFlip,
    Shape,
)
from demo.data import Sample

PATCH: Shape = (32, 32, 32)  # of a training patch, voxels

Transform = Callable[[Sample], Sample]


class ElasticDeformation:
    """Bend the window by a smooth random displacement field (cubic interpolation).

    Args:
        probability: Share of the samples that are deformed.
        max_displacement: Largest shift along an axis, voxels.
        smoothness: Standard deviation of the Gaussian that smooths the field, voxels.
    """

    def __init__(
        self, probability: float = 0.15, max_displacement: float = 4.0, smoothness: float = 6.0
    ) -> None:
        self.probability = probability
        self.max_displacement = max_displacement
        self.smoothness = smoothness

    def __call__(self, sample: Sample) -> Sample:
        if random.random() >= self.probability:
            return sample
        shape = sample.image.shape
        coordinates = np.indices(shape, dtype=np.float32)
        for axis in range(3):
            noise = np.random.uniform(-1, 1, shape).astype(np.float32)
            # Wrapped: extended edges would let the corners dominate and leave the inside unmoved.
            shift = ndimage.gaussian_filter(noise, self.smoothness, mode="wrap")
            scale = random.uniform(0.3, 1.0) * self.max_displacement / np.abs(shift).max()
            coordinates[axis] += scale * shift
        image = ndimage.map_coordinates(sample.image, coordinates, order=3, mode="nearest")
        label = ndimage.map_coordinates(sample.label, coordinates, order=0, mode="nearest")
        return sample._replace(image=image, label=label)


class Timed:
    """A transform that adds its processor time to the sample: the same clock for every loader."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, sample: Sample) -> Sample:
        start_s = time.thread_time()
        sample = self.transform(sample)
        return sample._replace(cost_s=sample.cost_s + time.thread_time() - start_s)


def segmentation_chain() -> list[Transform]:
    """The transforms in the order in which they are applied, each with its clock."""
    transforms: tuple[Transform, ...] = (
        ElasticDeformation(),
        RandomBalancedCrop(PATCH),
        RandomFlip(),
        RandomBrightness(),
        GaussianNoise(),
        Cast(),
    )
    return [Timed(transform) for transform in transforms]
