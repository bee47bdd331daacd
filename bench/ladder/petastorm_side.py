"""A step in Petastorm; its environment has neither torch nor minato."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from petastorm import TransformSpec, make_batch_reader
from pyarrow.filesystem import LocalFileSystem

from bench.ladder.work import EPOCHS, SIDE, STEPS, WORKERS, Epochs, FarFile, picture

QUOTA_BYTES = 1 << 30
ROW_BYTES = 1 << 16


def transformed(rows: Any) -> Any:
    """Petastorm gives its transforms a pandas frame."""
    rows["image"] = rows["image"].map(picture)
    return rows


class FarFiles(LocalFileSystem):
    """Local files as if they were far away, in the form of pyarrow's that Petastorm still uses."""

    def open(self, path: str, mode: str = "rb") -> Any:
        return FarFile(super().open(path, mode))


VERSIONS = ("petastorm", "numpy", "pyarrow", "diskcache")


def run(path: Path, cache: Path, step: str) -> list[float]:
    """Seconds of each epoch."""
    warnings.simplefilter("ignore")
    pushes_down, cached = STEPS[step]
    given: dict[str, Any] = {}
    if pushes_down:
        field = ("image", np.float32, (3, SIDE, SIDE), False)
        given["transform_spec"] = TransformSpec(transformed, edit_fields=[field])
        given["convert_early_to_numpy"] = True
    if cached:
        given.update(
            cache_type="local-disk",
            cache_location=str(cache),
            cache_size_limit=QUOTA_BYTES,
            cache_row_size_estimate=ROW_BYTES,
        )
    epochs = Epochs()
    with make_batch_reader(
        f"file://{path}",
        reader_pool_type="thread",
        workers_count=WORKERS,
        shuffle_row_groups=False,
        num_epochs=EPOCHS,
        filesystem=FarFiles(),
        **given,
    ) as reader:
        for batch in reader:
            images = batch.image
            if not pushes_down:
                images = np.stack([picture(data) for data in images])
            epochs.take(batch.label, images)
    return epochs.checked()
