"""Worker threads against worker processes, on samples whose Python code holds the GIL, where there is one."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from bench.harness import report
from bench.harness.datasets import Counted, Sample, Work
from bench.harness.loaders import MINATO_THREADS, STANDARD, minato_as, named
from bench.harness.suite import Row, chosen, measure

STEPS = 30_000
WORDS, LINES = 4096, 60
HEAD = """\
# Worker threads without a GIL

Written by `python -m bench.threads` on a free-threaded Python, where threads run Python code at the same time. The
samples are mostly Python code that releases no GIL. *num_workers=0* is the main process alone; all others have two
workers. Everything else stays at its default. Loaders take turns; every sample is checked. Figures are medians of
{repeats} repeats, with the minimum and maximum in brackets. *Ideal*: the calls of `dataset[i]` alone, divided by the
workers.
"""


class Computed(Counted):
    """Samples all of which is work."""

    def content(self, index: int) -> Sample:
        return self[index]


class Numbers(Computed):
    """Python code that uses nothing but its own objects: steps of a generator of pseudorandom numbers; int64, ()."""

    def __getitem__(self, index: int) -> Sample:
        state = index + 1
        for _ in range(STEPS):
            state = (state * 48271) % 2147483647
        return torch.tensor(state), index


class Lines(Computed):
    """Lines split into words, which a dictionary maps to numbers, all shared by the threads; int64, (words,)."""

    def __init__(self, count: int) -> None:
        draw = random.Random(0)
        words = [f"w{number:x}" for number in range(WORDS)]
        self.numbers = {word: number for number, word in enumerate(words)}
        self.lines = [" ".join(draw.choices(words, k=50)) for _ in range(1024)]
        super().__init__(count)

    def __getitem__(self, index: int) -> Sample:
        found = []
        for line in range(index, index + LINES):
            for word in self.lines[line % len(self.lines)].split():
                found.append(self.numbers[word.lower()])
        return torch.tensor(found), index


class Patches(Computed):
    """Small images, changed patch by patch with small calls of NumPy; float32, (3, 96, 96)."""

    def __init__(self, count: int) -> None:
        self.images = np.random.default_rng(0).random((64, 3, 96, 96), np.float32)
        super().__init__(count)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index % len(self.images)].copy()
        for row in range(0, 96, 8):
            for column in range(0, 96, 8):
                patch = image[:, row : row + 8, column : column + 8]
                patch -= patch.mean()
                patch /= patch.std() + np.float32(1e-3)
        return torch.from_numpy(image), index


CONTENDERS = {
    **STANDARD,
    **named(MINATO_THREADS, minato_as("minato, num_workers=0", "minato-main", num_workers=0)),
}


def _row(name: str, title: str, make: Callable[[int], Work], samples: int) -> Row:
    return Row(
        name,
        f"{title}; batch 16, 2 workers",
        make,
        *(samples, 16, 2, 2),
        loaders=tuple(CONTENDERS),
        unit="samples/s",
    )


ROWS = {
    row.name: row
    for row in (
        _row("short", "arithmetic in Python, an epoch of 256 samples", Numbers, 256),
        _row("own", "arithmetic in Python", Numbers, 1024),
        _row("shared", "words looked up in a dictionary that all threads share", Lines, 2048),
        _row("patches", "small calls of NumPy", Patches, 1024),
    )
}


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("threads", __doc__, 5, rows=ROWS).parse_args(arguments)
    page = report.Page("threads", options.out)
    page.add(HEAD.format(repeats=options.repeats))
    page.add_rows(measure(chosen(ROWS, options), CONTENDERS, options.repeats, page.say), CONTENDERS)
    page.finish()


if __name__ == "__main__":
    report.program(main)
