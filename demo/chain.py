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

from demo.data import BACKGROUND, Sample

PATCH = 32  # edge of a training patch, voxels

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


class RandomBalancedCrop:
    """Cut one patch; with probability ``oversampling`` around a connected piece of one tissue."""

    def __init__(self, patch: int = PATCH, oversampling: float = 0.4) -> None:
        self.patch = patch
        self.oversampling = oversampling

    def __call__(self, sample: Sample) -> Sample:
        shape = sample.image.shape
        low, high = [0, 0, 0], [size - self.patch for size in shape]
        if random.random() < self.oversampling:
            low, high = self._around_foreground(sample.label, low, high)
        corner = [random.randint(a, b) for a, b in zip(low, high, strict=True)]
        where = tuple(slice(start, start + self.patch) for start in corner)
        return sample._replace(image=sample.image[where], label=sample.label[where])

    def _around_foreground(
        self, label: np.ndarray, low: list[int], high: list[int]
    ) -> tuple[list[int], list[int]]:
        """Narrow the corner's range to patches that meet one of the two largest pieces."""
        present = [int(tissue) for tissue in np.unique(label) if tissue != BACKGROUND]
        if not present:
            return low, high
        pieces, count = ndimage.label(label == random.choice(present))
        largest = np.argsort(np.bincount(pieces.ravel())[1:])[-2:] + 1
        box = ndimage.find_objects(pieces, max_label=count)[random.choice(list(largest)) - 1]
        middle = [(edge.start + edge.stop) // 2 for edge in box]
        return (
            [min(max(m - self.patch + 1, a), b) for m, a, b in zip(middle, low, high, strict=True)],
            [max(min(m, b), a) for m, a, b in zip(middle, low, high, strict=True)],
        )


class RandomFlip:
    """Mirror each axis on its own with the given probability."""

    def __init__(self, probability: float = 1 / 3) -> None:
        self.probability = probability

    def __call__(self, sample: Sample) -> Sample:
        axes = tuple(axis for axis in range(3) if random.random() < self.probability)
        if not axes:
            return sample
        return sample._replace(image=np.flip(sample.image, axes), label=np.flip(sample.label, axes))


class RandomBrightness:
    """Multiply the intensities by a factor from ``1 - factor`` to ``1 + factor``."""

    def __init__(self, factor: float = 0.3, probability: float = 0.1) -> None:
        self.factor = factor
        self.probability = probability

    def __call__(self, sample: Sample) -> Sample:
        if random.random() >= self.probability:
            return sample
        gain = np.float32(random.uniform(1 - self.factor, 1 + self.factor))
        return sample._replace(image=sample.image * gain)


class GaussianNoise:
    """Add normal noise whose deviation is drawn from 0 to ``deviation``."""

    def __init__(self, deviation: float = 0.1, probability: float = 0.1) -> None:
        self.deviation = deviation
        self.probability = probability

    def __call__(self, sample: Sample) -> Sample:
        if random.random() >= self.probability:
            return sample
        noise = np.random.normal(0, random.uniform(0, self.deviation), sample.image.shape)
        return sample._replace(image=sample.image + noise.astype(np.float32))


class Cast:
    """Contiguous float32 image and uint8 label, no longer views of the volume."""

    def __call__(self, sample: Sample) -> Sample:
        return sample._replace(
            image=np.array(sample.image, np.float32, order="C"),
            label=np.array(sample.label, np.uint8, order="C"),
        )


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
        RandomBalancedCrop(),
        RandomFlip(),
        RandomBrightness(),
        GaussianNoise(),
        Cast(),
    )
    return [Timed(transform) for transform in transforms]
