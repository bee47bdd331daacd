"""Volumes as packages ship them: NIfTI files, and InVesalius' projects."""

from __future__ import annotations

import plistlib
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from bench.workloads.segmentation import Array, Volume

_LEAST_VOXELS = 500_000
_FOREGROUND = 0.9
"""Brighter voxels than this share of all are the foreground: the packages hold no segmentation."""


def volumes(folder: Path) -> Iterator[tuple[str, Volume]]:
    """The volumes below a folder that are no thumbnails, with a name for each."""
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(".nii.gz"):
            image, spacing = _nifti(path)
        elif path.suffix == ".inv3":
            image, spacing = _invesalius(path)
        else:
            continue
        if image.ndim == 3 and image.size >= _LEAST_VOXELS:
            label = (image > np.quantile(image, _FOREGROUND)).astype(np.uint8)
            yield path.name.partition(".")[0], Volume(image, label, spacing)


def _nifti(path: Path) -> tuple[Array, tuple[float, float, float]]:
    stored: Any = nibabel.load(path)
    x, y, z = (float(each) or 1.0 for each in stored.header.get_zooms()[:3])
    return np.asarray(stored.dataobj, np.float32), (x, y, z)


def _invesalius(path: Path) -> tuple[Array, tuple[float, float, float]]:
    with tarfile.open(path) as archive:
        members = {Path(each.name).name: each for each in archive.getmembers()}

        def content(name: str) -> bytes:
            file = archive.extractfile(members[name])
            assert file is not None, f"{path} holds no file {name}"
            return file.read()

        about = plistlib.loads(content("main.plist"))
        matrix = about["matrix"]
        image = np.frombuffer(content(matrix["filename"]), matrix["dtype"]).reshape(matrix["shape"])
    x, y, z = map(float, about["spacing"])
    return image.astype(np.float32), (z, y, x)
