"""A step in minato."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec.implementations.local
import numpy as np

import minato
from bench.ladder.work import EPOCHS, GROUP, STEPS, WORKERS, Epochs, FarFile, picture
from minato.caching import DiskCache
from minato.sources.parquet import Parquet

QUOTA_BYTES = 1 << 30


class FarFiles(fsspec.implementations.local.LocalFileSystem):
    """Local files, read as if they were far away."""

    def _open(self, path: str, mode: str = "rb", **given: Any) -> Any:
        return FarFile(super()._open(path, mode, **given))


def transformed(row: dict[str, Any]) -> dict[str, Any]:
    return {"label": row["label"], "image": picture(row["image"])}


def together(rows: list[Any]) -> list[Any]:
    return rows


VERSIONS = ("torch", "numpy", "pyarrow", "diskcache")


def run(path: Path, cache: Path, step: str) -> list[float]:
    """Seconds of each epoch."""
    pushes_down, cached = STEPS[step]
    given: dict[str, Any] = (
        {"transforms": [transformed]} if pushes_down else {"collate_fn": together}
    )
    if cached:
        given["cache"] = DiskCache(cache, QUOTA_BYTES, version="1")
    loader = minato.DataLoader(
        Parquet(str(path), filesystem=FarFiles()),
        GROUP,
        num_workers=WORKERS,
        persistent_workers=True,
        schedule="round_robin",  # a batch, and so a row group, is one worker's
        **given,
    )
    epochs = Epochs()
    for _ in range(EPOCHS):
        for batch in loader:
            if pushes_down:
                epochs.take(batch["label"], batch["image"])
            else:
                images = np.stack([picture(row["image"]) for row in batch])
                epochs.take([row["label"] for row in batch], images)
    return epochs.checked()
