"""What is ingested: samples by number, or one after the other, in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Folder", "chunks_of"]


class Folder:
    """The files below a folder, by their relative paths; hidden ones are left out.

    Args:
        with_labels: Whether a sample is a dict of ``data``, the file's bytes, and ``label``, the folder that it lies
            in; otherwise the bytes.

    Raises:
        ValueError: A file is a link that leads out of the folder.
    """

    def __init__(self, path: str | Path, with_labels: bool) -> None:
        self._path = Path(path).absolute()
        self._with_labels = with_labels
        found = (file.relative_to(self._path) for file in self._path.rglob("*") if file.is_file())
        self.keys = sorted(
            file.as_posix()
            for file in found
            if not any(part.startswith(".") for part in file.parts)
        )
        home = self._path.resolve()
        for key in self.keys:
            file = self._path / key
            if file.is_symlink() and not file.resolve().is_relative_to(home):
                raise ValueError(
                    f"{str(file)!r} is a link out of the folder, to {str(file.resolve())!r}: copy what is to be "
                    "ingested into the folder, or name the folder that holds it"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        file = self._path / self.keys[index]
        data = file.read_bytes()
        if not self._with_labels:
            return data
        return {"data": data, "label": file.parent.relative_to(self._path).as_posix()}


def chunks_of(samples: Iterable[Any], chunk_samples: int) -> Iterator[tuple[int, list[Any]]]:
    """The samples of an iterable in chunks, with their numbers."""
    them = iter(samples)
    for chunk in itertools.count():
        some = list(itertools.islice(them, chunk_samples))
        if not some:
            return
        yield chunk, some
