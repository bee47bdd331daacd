"""Image segmentation: what is done once to a volume, and the chain for each training sample.

After MLPerf's 3D U-Net on KiTS19, with its parameters as defaults. The chain takes any named tuple with ``image`` and
``label``. Random decisions come from ``random`` and ``numpy.random``, as in most training code; which of them are
taken decides what a sample costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from bench.harness.datasets import Stored

Array = npt.NDArray[Any]
Shape = tuple[int, int, int]

PATCH: Shape = (128, 128, 128)
SPACING = (1.6, 1.2, 1.2)
BACKGROUND = 0
RARE = 0.1


class Volume(NamedTuple):
    """A volume as it was stored: intensities, classes with 0 for the background, and mm between voxels."""

    image: Array
    label: Array
    spacing: tuple[float, float, float]


class Scan(NamedTuple):
    """One training sample on its way through the chain.

    Attributes:
        key: The index that was asked for (a tuple has an ``index`` of its own).
        image: float32, ``(D, H, W)``; a 3D U-Net adds the channel itself.
        label: uint8, same shape.
    """

    key: int
    image: Array
    label: Array


def resample(volume: Volume) -> Volume:
    """Bring a volume to one spacing: linear interpolation of the image, nearest label."""
    factors = [old / new for old, new in zip(volume.spacing, SPACING, strict=True)]
    image = ndimage.zoom(volume.image.astype(np.float32), factors, order=1)
    return Volume(image, ndimage.zoom(volume.label, factors, order=0), SPACING)


def padded(volume: Volume, shape: Shape) -> Volume:
    """Extend a volume evenly on both sides, by its edge, to at least a shape."""
    missing = [max(0, want - have) for want, have in zip(shape, volume.image.shape, strict=True)]
    widths = [(each // 2, each - each // 2) for each in missing]
    image, label = (np.pad(each, widths, mode="edge") for each in volume[:2])
    return volume._replace(image=image, label=label)


class ClipNormalise:
    """Clip intensities, subtract a mean and divide by a deviation; the defaults are KiTS19's, in Hounsfield units."""

    def __init__(
        self, low: float = -79.0, high: float = 304.0, mean: float = 101.0, deviation: float = 76.9
    ) -> None:
        self.low, self.high = low, high
        self.mean, self.deviation = mean, deviation

    @classmethod
    def fitted(cls, image: Array) -> ClipNormalise:
        """For images without a unit, such as MRI: from the 0.5th to the 99.5th percentile of one."""
        low, high = np.percentile(image, (0.5, 99.5))
        inside = np.clip(image, low, high)
        return cls(float(low), float(high), float(inside.mean()), float(inside.std()) or 1.0)

    def __call__(self, volume: Volume) -> Volume:
        image = (np.clip(volume.image, self.low, self.high) - self.mean) / self.deviation
        return volume._replace(image=image.astype(np.float32))


def prepared(volume: Volume, shape: Shape = PATCH) -> Volume:
    """The offline part: resample, pad, clip and normalise by the volume's own intensities."""
    volume = padded(resample(volume), shape)
    return ClipNormalise.fitted(volume.image)(volume)


class RandomBalancedCrop:
    """Cut one patch; with probability ``oversampling`` around a connected piece of one class.

    Finding that piece takes many times as long as cutting the patch.
    """

    def __init__(self, shape: Shape = PATCH, oversampling: float = 0.4) -> None:
        self.shape = shape
        self.oversampling = oversampling

    def __call__(self, scan: Any) -> Any:
        low = [0, 0, 0]
        high = [have - cut for have, cut in zip(scan.image.shape, self.shape, strict=True)]
        if random.random() < self.oversampling:
            low, high = self._around_foreground(scan.label, low, high)
        corner = [random.randint(a, b) for a, b in zip(low, high, strict=True)]
        where = tuple(
            slice(start, start + cut) for start, cut in zip(corner, self.shape, strict=True)
        )
        return scan._replace(image=scan.image[where], label=scan.label[where])

    def _around_foreground(
        self, label: Array, low: list[int], high: list[int]
    ) -> tuple[list[int], list[int]]:
        """Narrow the corner's range to patches that meet one of the two largest pieces."""
        present = [int(each) for each in np.unique(label) if each != BACKGROUND]
        if not present:
            return low, high
        pieces, count = ndimage.label(label == random.choice(present))
        largest = np.argsort(np.bincount(pieces.ravel())[1:])[-2:] + 1
        box = ndimage.find_objects(pieces, max_label=count)[random.choice(list(largest)) - 1]
        middle = [(edge.start + edge.stop) // 2 for edge in box]
        ends = list(zip(middle, self.shape, low, high, strict=True))
        return (
            [min(max(centre - cut + 1, first), last) for centre, cut, first, last in ends],
            [max(min(centre, last), first) for centre, cut, first, last in ends],
        )


class RandomFlip:
    """Mirror each axis on its own with the given probability."""

    def __init__(self, probability: float = 1 / 3) -> None:
        self.probability = probability

    def __call__(self, scan: Any) -> Any:
        axes = tuple(axis for axis in range(3) if random.random() < self.probability)
        if not axes:
            return scan
        return scan._replace(image=np.flip(scan.image, axes), label=np.flip(scan.label, axes))


class RandomBrightness:
    """Multiply the intensities of one sample in ten by 0.7 to 1.3."""

    def __call__(self, scan: Any) -> Any:
        if random.random() >= RARE:
            return scan
        return scan._replace(image=scan.image * np.float32(random.uniform(0.7, 1.3)))


class GaussianNoise:
    """Add normal noise to one sample in ten, whose deviation is drawn from 0 to 0.1."""

    def __call__(self, scan: Any) -> Any:
        if random.random() >= RARE:
            return scan
        noise = np.random.normal(0, random.uniform(0, 0.1), scan.image.shape)
        return scan._replace(image=scan.image + noise.astype(np.float32))


class Cast:
    """Contiguous float32 image and uint8 label, no longer views of the volume."""

    def __call__(self, scan: Any) -> Any:
        return scan._replace(
            image=np.array(scan.image, np.float32, order="C"),
            label=np.array(scan.label, np.uint8, order="C"),
        )


def segmentation_chain(shape: Shape = PATCH) -> list[Callable[[Any], Any]]:
    """The transforms of a training sample, in the paper's order."""
    return [RandomBalancedCrop(shape), RandomFlip(), RandomBrightness(), GaussianNoise(), Cast()]


class Scans(Stored):
    """Prepared volumes in a folder, read whole for each sample."""

    def __init__(self, folder: Path, count: int | None = None) -> None:
        paths = sorted(folder.glob("*_x.npy"))
        super().__init__(paths, f"no prepared volumes in {folder}", count)

    def __getitem__(self, index: int) -> Scan:
        path = self.path_of(index)
        label = np.load(path.with_name(path.name.replace("_x.npy", "_y.npy")))
        return Scan(index, np.load(path), label)


def store(volumes: Iterable[tuple[str, Volume]], folder: Path, shape: Shape = PATCH) -> int:
    """Prepare named volumes and write them where ``Scans`` reads them; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name, volume in volumes:
        ready = prepared(volume, shape)
        np.save(folder / f"{name}_x.npy", ready.image)
        np.save(folder / f"{name}_y.npy", ready.label)
        count += 1
    return count
