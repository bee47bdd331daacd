"""The most common job: decode JPEGs, crop, flip, normalize, with two workers and nothing else to do."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.harness import report
from bench.harness.datasets import Counted, Sample
from bench.harness.loaders import MINATO_THREADS, STANDARD, Contender, named
from bench.harness.suite import Row, RowResult, chosen, measure

SIDES = (224, 640)
"""Width and height of a photograph, in pixels: between these, as downloaded photographs differ in size."""
QUALITY = 90
CROP = 224
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Area and aspect ratio of the crop, relative to the photograph: those of torchvision's RandomResizedCrop."""
MEAN = np.array((0.485, 0.456, 0.406), np.float32)
DEVIATION = np.array((0.229, 0.224, 0.225), np.float32)
FILES = 256


class Photographs(Counted):
    """JPEGs in memory, used in turn: cut-outs of two photographs. What is drawn for a sample follows from its index."""

    decodes = True
    """A sample is work for a core."""

    def __init__(self, count: int, files: Sequence[bytes] = ()) -> None:
        super().__init__(count)
        self.files = files or _cut_outs(min(count, FILES))

    def __getitem__(self, index: int) -> Sample:
        draw = random.Random(index)
        pixels = self.cropped(self.files[index % len(self.files)], draw)
        return self.tensor(pixels, draw.random() < 0.5), index

    def cropped(self, file: bytes, draw: random.Random) -> Any:
        image = Image.open(io.BytesIO(file)).convert("RGB")
        return image.resize((CROP, CROP), Image.Resampling.BILINEAR, _crop(image.size, draw))

    def tensor(self, image: Any, flipped: bool) -> torch.Tensor:
        if flipped:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, np.float32) / 255 - MEAN) / DEVIATION
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def content(self, index: int) -> Sample:
        return self[index]


class Draft(Photographs):
    """PIL decodes no more pixels than the crop needs: at half, a quarter or an eighth of the size."""

    def cropped(self, file: bytes, draw: random.Random) -> Any:
        image = Image.open(io.BytesIO(file))
        width, height = image.size
        box = _crop(image.size, draw)
        image.draft("RGB", _needed(width, height, box))
        scale = image.size[0] / width
        part = tuple(scale * side for side in box)
        return image.convert("RGB").resize((CROP, CROP), Image.Resampling.BILINEAR, part)


class Simplejpeg(Photographs):
    """simplejpeg (libjpeg-turbo) decodes at the scale that the crop needs, OpenCV resizes and flips."""

    def cropped(self, file: bytes, draw: random.Random) -> Any:
        import cv2
        import simplejpeg

        height, width, _, _ = simplejpeg.decode_jpeg_header(file)
        box = _crop((width, height), draw)
        least_width, least_height = _needed(width, height, box)
        pixels = simplejpeg.decode_jpeg(file, min_width=least_width, min_height=least_height)
        scale = pixels.shape[1] / width
        left, top = (int(scale * side) for side in box[:2])
        right, bottom = (math.ceil(scale * side) for side in box[2:])
        return cv2.resize(pixels[top:bottom, left:right], (CROP, CROP))

    def of_pixels(self, pixels: Any, index: int) -> Sample:
        """The sample of a photograph that another decoder has decoded as a whole."""
        import cv2

        draw = random.Random(index)
        left, top, right, bottom = _crop((pixels.shape[1], pixels.shape[0]), draw)
        image = cv2.resize(pixels[top:bottom, left:right], (CROP, CROP))
        return self.tensor(image, draw.random() < 0.5), index

    def tensor(self, image: Any, flipped: bool) -> torch.Tensor:
        import cv2

        if flipped:
            image = cv2.flip(image, 1)
        sample = np.empty((3, CROP, CROP), np.float32)
        for plane, color, mean, deviation in zip(
            sample, cv2.split(image), MEAN, DEVIATION, strict=True
        ):
            np.multiply(color, 1 / (255 * deviation), out=plane)
            plane -= mean / deviation
        return torch.from_numpy(sample)


class Bytes(Simplejpeg):
    """The same, left as bytes with the colors last; the training step normalizes on its device."""

    def tensor(self, image: Any, flipped: bool) -> torch.Tensor:
        import cv2

        return torch.from_numpy(cv2.flip(image, 1) if flipped else image)


def photographs() -> list[Image.Image]:
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(each) for each in load_sample_images().images]


def _cut_outs(count: int) -> list[bytes]:
    draw = random.Random(0)
    found = photographs()
    return [_cut_out(draw.choice(found), draw) for _ in range(count)]


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


def _needed(width: int, height: int, box: tuple[int, int, int, int]) -> tuple[int, int]:
    """The smallest width and height at which the crop still has 224 pixels; no more than the photograph has."""
    left, top, right, bottom = box
    return (
        min(width, math.ceil(width * CROP / (right - left))),
        min(height, math.ceil(height * CROP / (bottom - top))),
    )


def _row(name: str, title: str, make: type[Photographs], *more: Contender) -> Row:
    return Row(
        name,
        f"{title}; batch 32, 2 workers",
        make,
        *(2048, 32, 2, 2),
        loaders=(*STANDARD, *(each.name for each in more)),
        unit="samples/s",
    )


CONTENDERS = {**STANDARD, **named(MINATO_THREADS)}
ROWS = {
    row.name: row
    for row in (
        _row("pil", "PIL decodes and resizes, float32", Photographs),
        _row("draft", "the same with Image.draft before decoding", Draft),
        _row(
            "simplejpeg", "simplejpeg decodes, OpenCV resizes, float32", Simplejpeg, MINATO_THREADS
        ),
        _row("uint8", "the same as uint8, colors last", Bytes, MINATO_THREADS),
    )
}
HEAD = """\
# JPEGs: the most common job

Written by `python -m bench.jpegs`: JPEGs are decoded, cropped, flipped and normalized, with two workers and nothing
else to do. The JPEGs are cut-outs of two real photographs, 224 to 640 pixels on a side, in memory; a random crop is
resized to 224 × 224. Each table decodes in another way; [Photographs](../how-to/photos.md) shows the code. All loaders
get the same dataset object; everything else stays at its default. Loaders take turns; every sample is checked. Figures
are medians of {repeats} repeats, with the minimum and maximum in brackets. *Ideal*: the calls of `dataset[i]` alone,
divided by the workers.
"""


def overview(results: Sequence[RowResult]) -> str:
    lines = []
    for result in results:
        found = {name: result.figures(name).speed.median for name in result.trials}
        cells = [f"{found[name]:.0f}" if name in found else "" for name in CONTENDERS]
        title = result.row.title.partition(";")[0]
        lines.append([title, f"{result.ideal_speed.median:.0f}", *cells])
    return report.table(
        ["images/s", "*ideal*", *(each.label for each in CONTENDERS.values())], lines
    )


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("jpegs", __doc__, 5, rows=ROWS).parse_args(arguments)
    page = report.Page("jpegs", options.out)
    page.add(HEAD.format(repeats=options.repeats))
    results = measure(chosen(ROWS, options), CONTENDERS, options.repeats, page.say)
    page.add("## Images per second\n", overview(results))
    page.add("## All figures\n", *(report.details(result, CONTENDERS) for result in results))
    page.finish()


if __name__ == "__main__":
    report.program(main)
