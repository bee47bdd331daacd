"""What each of Petastorm's steps gains: a cache of raw rows, push-down, and both."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fsspec.implementations.local
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import minato
from minato.caching import DiskCache
from minato.sources.parquet import Parquet

ROWS, GROUP, COLUMNS = 4000, 100, 60
RTT_S, BANDWIDTH = 0.02, 25e6
"""Of the place where the file lies."""
IMAGE = 3 * 32 * 32
WANTED = 0.5
"""Rows with a smaller label are wanted; the file is sorted by label."""
BATCH_SIZE, WORKERS = 50, 2
QUOTA_BYTES = 1 << 30


class _FarFile:
    """A file whose every read takes a round trip and the time of its bytes on the link."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, nbytes: int = -1) -> bytes:
        data: bytes = self._file.read(nbytes)
        time.sleep(RTT_S + len(data) / BANDWIDTH)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _FarFiles(fsspec.implementations.local.LocalFileSystem):
    """Local files, read as if they were far away; each reader has the whole link."""

    def _open(self, path: str, mode: str = "rb", **given: Any) -> Any:
        return _FarFile(super()._open(path, mode, **given))


def write(path: Path) -> None:
    """A file with an image, a label and many further columns."""
    random = np.random.default_rng(3)
    table = {
        "label": np.arange(ROWS) / ROWS,
        "image": [random.bytes(IMAGE) for _ in range(ROWS)],
        **{f"extra_{i}": [random.bytes(200) for _ in range(ROWS)] for i in range(COLUMNS)},
    }
    pq.write_table(pa.table(table), path, row_group_size=GROUP)


def picked(row: dict[str, Any]) -> dict[str, Any]:
    """The transform: image and label, normalised and upsampled."""
    image = np.frombuffer(row["image"], np.uint8).astype(np.float32).reshape(3, 32, 32)
    image = (image - image.mean()) / (image.std() + 1e-6)
    return {"image": image.repeat(2, 1).repeat(2, 2), "label": np.float32(row["label"])}


def step(path: Path, folder: Path, pushes_down: bool, after: int | None) -> tuple[float, float]:
    """Seconds of the first epoch and of the second one.

    Args:
        after: Transforms before the cache; None: no cache.
    """
    sampler: Any = range(int(WANTED * ROWS))
    if pushes_down:
        columns, where = ["image", "label"], ds.field("label") < WANTED
        dataset = Parquet(str(path), columns=columns, where=where, filesystem=_FarFiles())
    else:
        dataset = Parquet(str(path), filesystem=_FarFiles())
    cache = None if after is None else DiskCache(folder, QUOTA_BYTES, after, version="1")
    loader = minato.DataLoader(
        dataset,
        BATCH_SIZE,
        sampler=sampler,
        num_workers=WORKERS,
        transforms=[picked],
        cache=cache,
    )
    taken_s = []
    for _ in range(2):
        started = time.perf_counter()
        labels = [value for batch in loader for value in batch["label"].tolist()]
        taken_s.append(time.perf_counter() - started)
        if not np.allclose(labels, np.arange(len(sampler)) / ROWS):
            raise AssertionError("the wrong rows, or in another order")
    if cache is not None:
        cache.close()
    return taken_s[0], taken_s[1]


STEPS: dict[str, tuple[bool, int | None]] = {
    "none": (False, None),
    "cache of raw rows": (False, 0),
    "push-down": (True, None),
    "push-down and cache of samples": (True, 1),
}


def climb(folder: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """All steps in turn, several times, each time with empty caches."""
    path = folder / "rows.parquet"
    write(path)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STEPS}
    for repeat in range(repeats):
        for name, (pushes_down, after) in STEPS.items():
            place = folder / f"{repeat} {name}"
            found[name].append(step(path, place, pushes_down, after))
    return found
