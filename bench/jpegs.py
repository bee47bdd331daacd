"""The commonest job: decode JPEGs, crop, flip, normalise, with two worker processes and nothing else to do.

``python -m bench.jpegs [--samples N] [--repeats N] [--out FOLDER]``
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import Dataset

from bench import record
from bench.macro.loaders import CONTENDERS
from bench.macro.report import spread_text, table
from bench.macro.rows import Row
from bench.macro.suite import RowResult, measure
from bench.macro.work import Sample

SIDES = (224, 640)
"""Width and height of a photograph, in pixels: between these, as downloaded photographs differ in size."""
QUALITY = 90
CROP = 224
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Area and aspect ratio of the crop, relative to the photograph: those of torchvision's RandomResizedCrop."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ORDERS = ("torch", "torch-any-order", "minato", "minato-any-order")


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


def row(samples: int) -> Row:
    """The workload, as the macro benchmark's harness takes it."""
    title = "JPEGs decoded, cropped, flipped and normalised, batch 32, 2 workers"
    return Row("jpegs", title, Photographs, samples, 64, 32, 2, 2, ORDERS)


def markdown(result: RowResult, conditions: dict[str, str], repeats: int) -> str:
    """The page: median, least and greatest of each figure."""
    lines = [["ideal", "", "", spread_text(result.bound_speed, 2), ""]]
    for name in result.trials:
        figures = result.figures(name)
        assert figures.ratio is not None
        lines.append(
            [
                CONTENDERS[name].label,
                spread_text(figures.ratio, 2),
                spread_text(figures.share, 2),
                spread_text(figures.speed, 2),
                spread_text(figures.first_batch_ms, 0),
            ]
        )
    head = ["loader", "speed, torch = 1", "share of the ideal", "s/epoch", "first batch, ms"]
    where = "; ".join(f"{name}: {value}" for name, value in conditions.items())
    return (
        f"{table(head, lines)}\n{result.row.samples} samples an epoch, {result.row.epochs} epochs, {repeats} repeats: "
        f"median (least … greatest).\nIdeal: the calls of `dataset[i]` alone, divided by the workers. {where}\n"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.jpegs", description=__doc__)
    parser.add_argument("--samples", type=int, default=2048, help="of an epoch (default 2048)")
    parser.add_argument("--repeats", type=int, default=5, help="of each loader (default 5)")
    parser.add_argument("--out", type=Path, help="folder for jpegs.md")
    options = parser.parse_args(arguments)
    conditions = record.environment()
    result = measure([row(options.samples)], None, options.repeats, say=print)[0]
    conditions["load average after"] = record.load_average()
    text = markdown(result, conditions, options.repeats)
    print(text)
    if options.out is not None:
        (options.out / "jpegs.md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
