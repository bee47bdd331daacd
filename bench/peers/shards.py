"""Tensors in tar files: the format of loaders that read one of their own, indexed for those that ask for samples."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from bench.macro.work import Sample
from bench.record import ROOT

FOLDER = ROOT / "build" / "shards"
COUNT = 16
_SHAPE = (3, 64, 64)


class Shards(Dataset[Sample]):
    """``(array, index)`` from tar files whose members are ``000001.npy`` and ``000001.cls``.

    The files are written where they are not there yet.

    Args:
        length: Samples, a multiple of ``COUNT``.
        folder: Where folders of files are.

    Attributes:
        paths: The files; each holds as many samples as any other, in the order of their indices.
    """

    def __init__(self, length: int, folder: Path = FOLDER) -> None:
        self.length = length
        home = folder / str(length)
        self.paths = [home / f"{number:02}.tar" for number in range(COUNT)]
        if not home.exists():
            _write(home, self.paths, length // COUNT)
        self._places = [place for path in self.paths for place in _places(path)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        path, offset, nbytes = self._places[index]
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return np.load(io.BytesIO(file.read(nbytes))), index

    def content(self, index: int) -> Sample:
        """Return ``self[index]`` without reading it."""
        return _array(index), index


def _array(index: int) -> Any:
    return np.random.default_rng(index).random(_SHAPE, np.float32)


def _write(home: Path, paths: list[Path], each: int) -> None:
    partial = home.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number, path in enumerate(paths):
        with tarfile.open(partial / path.name, "w") as file:
            for index in range(number * each, (number + 1) * each):
                stored = io.BytesIO()
                np.save(stored, _array(index))
                _add(file, f"{index:06}.npy", stored.getvalue())
                _add(file, f"{index:06}.cls", str(index).encode())
    partial.rename(home)


def _add(file: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    file.addfile(member, io.BytesIO(content))


def _places(path: Path) -> list[tuple[Path, int, int]]:
    with tarfile.open(path) as file:
        members = [member for member in file if member.name.endswith(".npy")]
    return [(path, member.offset_data, member.size) for member in members]
