"""Object detection: photographs of any size with boxes, resized as Mask R-CNN takes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from bench.harness.datasets import Stored

SHORTEST, LONGEST = 800, 1333
"""Sides to which Mask R-CNN resizes, in pixels."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's colours, from 0 to 1."""
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
_SMALLEST = 64
_MOST_BOXES = 8


class Picture(NamedTuple):
    """One training sample on its way through the chain.

    Attributes:
        key: The index that was asked for (a tuple has an ``index`` of its own).
        image: A ``PIL.Image.Image`` in RGB; from ``ToTensor`` on a float32 tensor, ``(3, H, W)``.
        boxes: float32, ``(n, 4)``: left, top, right, bottom, in pixels of ``image``.
    """

    key: int
    image: Any
    boxes: npt.NDArray[np.float32]

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.image.size
        return width, height


class Resize:
    """Scale the shorter side to ``shortest``, but the longer one to ``longest`` at most; boxes with them."""

    def __init__(self, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        self.shortest = shortest
        self.longest = longest

    def scale(self, picture: Picture) -> float:
        return min(self.shortest / min(picture.size), self.longest / max(picture.size))

    def __call__(self, picture: Picture) -> Picture:
        width, height = picture.size
        scale = self.scale(picture)
        new_width, new_height = max(1, round(scale * width)), max(1, round(scale * height))
        image = picture.image.resize((new_width, new_height), Image.Resampling.BILINEAR)
        factors = np.array([new_width / width, new_height / height] * 2, np.float32)
        return picture._replace(image=image, boxes=picture.boxes * factors)


class RandomHorizontalFlip:
    """Mirror left and right with the given probability, boxes too."""

    def __init__(self, probability: float = 0.5) -> None:
        self.probability = probability

    def __call__(self, picture: Picture) -> Picture:
        if random.random() >= self.probability:
            return picture
        image = picture.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        boxes = picture.boxes.copy()
        boxes[:, [0, 2]] = picture.size[0] - picture.boxes[:, [2, 0]]
        return picture._replace(image=image, boxes=boxes)


class ToTensor:
    """Colours from 0 to 1 as a float32 tensor, channels first."""

    def __call__(self, picture: Picture) -> Picture:
        pixels = torch.from_numpy(np.array(picture.image))
        return picture._replace(image=pixels.permute(2, 0, 1).float().div_(255))


class Normalize:
    """Subtract each colour's mean and divide by its deviation."""

    mean, deviation = (torch.tensor(each)[:, None, None] for each in (MEAN, DEVIATION))

    def __call__(self, picture: Picture) -> Picture:
        return picture._replace(image=(picture.image - self.mean) / self.deviation)


def detection_chain(
    shortest: int = SHORTEST, longest: int = LONGEST
) -> list[Callable[[Picture], Picture]]:
    """The transforms of a training sample, in the paper's order."""
    return [Resize(shortest, longest), RandomHorizontalFlip(), ToTensor(), Normalize()]


class Photographs(Stored):
    """The pictures below a folder, decoded for each sample.

    Photographs of packages have no boxes: each gets a few, drawn by its index, so that there is something to follow
    what happens to the pixels.
    """

    def __init__(self, folder: Path, count: int | None = None) -> None:
        found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
        paths = (path for path in found if path.is_file() and _is_photograph(path))
        super().__init__(paths, f"no photographs below {folder}", count)

    def __getitem__(self, index: int) -> Picture:
        with Image.open(self.path_of(index)) as stored:
            image = stored.convert("RGB")
        return Picture(index, image, drawn_boxes(index, image.size))


def _is_photograph(path: Path) -> bool:
    """Whether it is a picture in colours, and no icon."""
    with Image.open(path) as picture:
        return picture.mode == "RGB" and min(picture.size) >= _SMALLEST


def drawn_boxes(index: int, size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """From one to eight boxes inside a picture of this width and height, the same for the same index."""
    rng = np.random.default_rng(index)
    corners = rng.random((int(rng.integers(1, _MOST_BOXES + 1)), 2, 2)) * size
    return np.concatenate([corners.min(1), corners.max(1)], 1).astype(np.float32)


def padded_pictures(
    pictures: Sequence[Picture],
) -> tuple[torch.Tensor, torch.Tensor, list[npt.NDArray[np.float32]]]:
    """A ``collate_fn``: keys, ``(n,)``; images, ``(n, 3, H, W)``, filled with 0 up to the largest; and boxes."""
    height = max(picture.image.shape[1] for picture in pictures)
    width = max(picture.image.shape[2] for picture in pictures)
    images = torch.zeros(len(pictures), 3, height, width)
    for row, picture in zip(images, pictures, strict=True):
        row[:, : picture.image.shape[1], : picture.image.shape[2]] = picture.image
    keys = torch.tensor([each.key for each in pictures])
    return keys, images, [each.boxes for each in pictures]
