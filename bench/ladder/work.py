"""The file, the place where it lies, and the transform; Petastorm's environment has neither torch nor minato."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, GROUP = 4000, 100
RTT_S, BANDWIDTH = 0.02, 25e6
"""Of the place where the file lies."""
SHAPE = (3, 32, 32)
SIDE = 64
BLURS = 16
"""Of a transform: what it costs, next to what a row costs to read."""
WORKERS = 2
EPOCHS = 2
STEPS: dict[str, tuple[bool, bool]] = {
    "none": (False, False),
    "cache of raw rows": (False, True),
    "push-down": (True, False),
    "push-down and cache": (True, True),
}
"""Whether the workers transform, and whether there is a cache."""


class FarFile:
    """A file whose every read takes a round trip and the time of its bytes on the link, which it has for itself."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, nbytes: int = -1) -> bytes:
        data: bytes = self._file.read(nbytes)
        time.sleep(RTT_S + len(data) / BANDWIDTH)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def write(path: Path) -> None:
    """A file with an image and a label in each row."""
    random = np.random.default_rng(3)
    table = {
        "label": np.arange(ROWS, dtype=np.int64),
        "image": [random.bytes(int(np.prod(SHAPE))) for _ in range(ROWS)],
    }
    pq.write_table(pa.table(table), path, row_group_size=GROUP)


def picture(data: bytes) -> Any:
    """The transform: an image normalised, and sharpened at twice its size."""
    image = np.frombuffer(data, np.uint8).astype(np.float32).reshape(SHAPE)
    image = (image - image.mean()) / (image.std() + 1e-6)
    large = image.repeat(2, 1).repeat(2, 2)
    blurred = large
    for axis in (1, 2) * BLURS:
        blurred = (np.roll(blurred, 1, axis) + blurred + np.roll(blurred, -1, axis)) / 3
    return large + 0.5 * (large - blurred)


class Epochs:
    """Tells how long each epoch took: a loader may begin with the next one before it has delivered the last of this."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []
        self._came = np.zeros(ROWS, int)
        self._began = time.perf_counter()

    def take(self, labels: Any, images: Any) -> None:
        """Some rows of a batch."""
        assert images.shape[1:] == (SHAPE[0], SIDE, SIDE), images.shape
        np.add.at(self._came, np.asarray(labels), 1)
        if self._came.sum() >= ROWS * (len(self.taken_s) + 1):
            now = time.perf_counter()
            self.taken_s.append(now - self._began)
            self._began = now

    def checked(self) -> list[float]:
        """Seconds of each epoch, if each row came once in each."""
        if not (self._came == EPOCHS).all() or len(self.taken_s) != EPOCHS:
            raise AssertionError("a row is missing, or came twice")
        return self.taken_s
