"""The most common job: decode JPEGs, crop, flip, normalise, with two worker processes and nothing else to do."""

from __future__ import annotations

import io
import random

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import Dataset

from bench.harness import report
from bench.harness.datasets import Sample
from bench.harness.loaders import STANDARD
from bench.harness.suite import Row, measure

SIDES = (224, 640)
"""Width and height of a photograph, in pixels: between these, as downloaded photographs differ in size."""
QUALITY = 90
CROP = 224
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Area and aspect ratio of the crop, relative to the photograph: those of torchvision's RandomResizedCrop."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photographs(Dataset[Sample]):
    """JPEGs in memory: cut-outs of two real photographs. What is drawn for a sample follows from its index.

    Args:
        count: Number of samples; 256 cut-outs are used in turn.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        draw = random.Random(0)
        photographs = [Image.fromarray(each) for each in load_sample_images().images]
        self.files = [_cut_out(draw.choice(photographs), draw) for _ in range(min(count, 256))]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        draw = random.Random(index)
        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB")
        image = image.resize((CROP, CROP), Image.Resampling.BILINEAR, _crop(image.size, draw))
        if draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.asarray(image, np.float32) / 255
        pixels = (pixels - np.float32(MEAN)) / np.float32(DEVIATION)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), index

    def content(self, index: int) -> Sample:
        """The same: all of it is work."""
        return self[index]


def _cut_out(photograph: Image.Image, draw: random.Random) -> bytes:
    sides = [min(draw.randint(*SIDES), have) for have in photograph.size]
    left, top = (draw.randint(0, have - cut) for have, cut in zip(photograph.size, sides))  # noqa: B905
    file = io.BytesIO()
    part = photograph.crop((left, top, left + sides[0], top + sides[1]))
    part.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _crop(size: tuple[int, int], draw: random.Random) -> tuple[int, int, int, int]:
    area, ratio = size[0] * size[1] * draw.uniform(*SCALES), draw.uniform(*RATIOS)
    width = max(1, min(size[0], round((area * ratio) ** 0.5)))
    height = max(1, min(size[1], round((area / ratio) ** 0.5)))
    left, top = draw.randint(0, size[0] - width), draw.randint(0, size[1] - height)
    return left, top, left + width, top + height


ROW = Row(
    name="jpegs",
    title="JPEGs decoded, cropped, flipped and normalised, batch 32, 2 workers",
    make=Photographs,
    samples=2048,
    short_samples=64,
    batch_size=32,
    workers=2,
    epochs=2,
)
HEAD = """\
# JPEGs: the most common job

Written by `python -m bench.jpegs`: JPEGs are decoded, cropped, flipped and normalised, with two worker processes and
nothing else to do. All loaders get the same dataset object; everything else stays at its default. Loaders take turns;
every sample is checked. Figures are medians of {repeats} repeats, with the minimum and maximum in brackets. *Ideal*:
the calls of `dataset[i]` alone, divided by the workers.

## Result
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = report.parser("bench.jpegs", __doc__ or "", 5).parse_args(arguments)
    repeats = report.repeats_of(options)
    page = report.Page("jpegs", options.out)
    page.add(HEAD.format(repeats=repeats))
    row = ROW.short() if options.short else ROW
    page.add(report.details(measure([row], STANDARD, repeats, page.say)[0], STANDARD))
    page.finish()
    return 0


if __name__ == "__main__":
    report.program(main)
