"""The MNI152 brain volume that nilearn ships, cut into training windows and a held-out box.

The template is exactly symmetric between left and right, so holding out one hemisphere would test
on mirrored training data. The front of the head is held out instead; no training window reaches it.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset, Sampler

BACKGROUND, GREY, WHITE = 0, 1, 2
CLASS_NAMES = ("background", "grey", "white")

WINDOW = 64  # edge of a training window, voxels (1 mm each)
WINDOWS_PER_AXIS = (6, 5, 6)  # they overlap, as the cases of a real data set resemble each other
# Boxes that enclose the brain, in voxels: right-left, back-front, bottom-top.
TRAINING_BOX = ((24, 172), (28, 152), (0, 156))
HELD_OUT_BOX = ((24, 172), (152, 208), (0, 156))

_FILES = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"


class MissingData(Exception):
    """The volume cannot be read; the message is one line that names the remedy."""


class Sample(NamedTuple):
    """One training sample on its way through the chain; collated field by field.

    Attributes:
        key: The draw that was asked for (a tuple has an ``index`` of its own).
        image: float32, ``(D, H, W)``; before the last transform possibly a view of the volume.
        label: uint8, same shape, one of ``BACKGROUND``, ``GREY``, ``WHITE`` per voxel.
        cost_s: Processor time that the chain has spent on this sample so far, in seconds.
    """

    key: int
    image: np.ndarray
    label: np.ndarray
    cost_s: float


class Volume(NamedTuple):
    """A T1 image (float32, zero mean and unit deviation in the brain) and its labels (uint8)."""

    image: np.ndarray
    label: np.ndarray

    def crop(self, box: tuple[tuple[int, int], ...]) -> Volume:
        """A view of the given box; nothing is copied."""
        where = tuple(slice(start, stop) for start, stop in box)
        return Volume(self.image[where], self.label[where])


def _read(folder: Path, kind: str) -> np.ndarray:
    path = folder / _FILES.format(kind)
    if not path.is_file():
        raise MissingData(f"{path} is missing; the demo was written for nilearn 0.14")
    import nibabel  # optional: only the demo needs it

    return np.asanyarray(nibabel.load(path).dataobj)


def load_volume() -> Volume:
    """Read the T1 volume and label each voxel with the most probable tissue. About 0.5 s.

    Raises:
        MissingData: nilearn is not installed, or does not ship the files.
    """
    package = importlib.util.find_spec("nilearn")  # found, not imported: that alone takes seconds
    if package is None or not package.submodule_search_locations:
        raise MissingData("nilearn, which ships the volume, is missing: pip install nilearn")
    folder = Path(package.submodule_search_locations[0]) / "datasets" / "data"
    t1, grey, white = (_read(folder, kind) for kind in ("t1", "gm", "wm"))
    rest = 255 - np.minimum(255, grey.astype(np.int16) + white)
    label = np.argmax(np.stack([rest, grey, white]), axis=0).astype(np.uint8)
    inside = t1[label != BACKGROUND]
    image = (t1 - inside.mean()) / inside.std()
    return Volume(image.astype(np.float32), label)


class Windows(Dataset[Sample]):
    """Overlapping cubes of the training part, with the transforms applied.

    A sample is asked for by a draw, ``epoch * len(windows) + window``, and draws its random numbers from it: it is the
    same for every loader, whichever worker loads it, and in whichever order.

    Args:
        volume: The whole volume; the windows are views of it.
        transforms: Applied one after the other.
        seed: Of the random numbers.
        num_windows: Use only this many, evenly spread; all 180 when omitted.
    """

    def __init__(
        self,
        volume: Volume,
        transforms: Sequence[Callable[[Sample], Sample]] = (),
        seed: int = 0,
        num_windows: int | None = None,
    ) -> None:
        starts = [
            np.linspace(low, high - WINDOW, count).round().astype(int)
            for (low, high), count in zip(TRAINING_BOX, WINDOWS_PER_AXIS, strict=True)
        ]
        corners = [tuple(map(int, corner)) for corner in itertools.product(*starts)]
        if num_windows is not None:
            chosen = np.linspace(0, len(corners) - 1, num_windows).round().astype(int)
            corners = [corners[i] for i in chosen]
        self.volume = volume
        self.transforms = transforms
        self.seed = seed
        self.corners = corners

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, draw: int) -> Sample:
        random.seed(f"{self.seed} {draw}")
        np.random.seed(random.getrandbits(32))
        corner = self.corners[draw % len(self.corners)]
        image, label = self.volume.crop(tuple((start, start + WINDOW) for start in corner))
        sample = Sample(draw, image, label, 0.0)
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Draws(Sampler[int]):
    """Each epoch has every window once, shuffled by seed and epoch alone: the same order for every loader."""

    def __init__(self, num_windows: int, seed: int) -> None:
        self.num_windows = num_windows
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_windows

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        windows = list(range(self.num_windows))
        random.Random(f"{self.seed} {self.epoch}").shuffle(windows)
        return iter([self.epoch * self.num_windows + window for window in windows])
