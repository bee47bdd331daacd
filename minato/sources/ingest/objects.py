"""Into objects of S3, GCS, Azure or a folder, one by one or as tar files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore

from minato.sources.ingest.store import Items, SourceStore
from minato.sources.objects import Objects
from minato.sources.settings import Env

__all__ = ["ObjectStore", "TarStore", "from_url"]

_AT_ONCE = 16
"""Objects of a chunk in flight at once."""


class ObjectStore(SourceStore):
    """An object for each sample, its key being the path.

    Args:
        url, settings: As for :class:`~minato.sources.objects.Objects`. A folder is made if there is none.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(Objects(url, **settings))

    def write(self, chunk: int, items: Items) -> None:
        """Write the objects of a chunk, several at once."""
        self._trying(items, lambda: self._write(items))

    def _write(self, items: Items) -> None:
        url = self.source.place.url
        if url.startswith("file://"):
            Path(unquote(urlsplit(url).path)).mkdir(parents=True, exist_ok=True)
        with self.source.stores.lease() as store, ThreadPoolExecutor(_AT_ONCE) as threads:
            for _ in threads.map(lambda item: obstore.put(store, *item), items):
                pass


class TarStore(ObjectStore):
    """A tar file for each chunk, ``shard-000000.tar`` and so on, whose members are the samples.

    :func:`~minato.sources.objects.tar_members` gives the keys to read them with.

    Args:
        url, settings: As for :class:`~minato.sources.objects.Objects`. A folder is made if there is none.
    """

    def write(self, chunk: int, items: Items) -> None:
        """Write a chunk as one object."""
        to = io.BytesIO()
        with tarfile.open(fileobj=to, mode="w") as archive:
            for key, value in items:
                info = tarfile.TarInfo(key)
                info.size = len(value)
                archive.addfile(info, io.BytesIO(value))
        super().write(chunk, [(_shard(chunk), to.getvalue())])

    def read(self, chunk: int, keys: Sequence[Any]) -> list[Any]:
        """The members of a chunk's tar file."""
        (data,) = super().read(chunk, [_shard(chunk)])
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            files = [archive.extractfile(key) for key in keys]
            return [b"" if file is None else file.read() for file in files]


def _shard(chunk: int) -> str:
    return f"shard-{chunk:06d}.tar"


def from_url(url: str, table: str, password: Env | None) -> Any:
    """The URL of a place for objects, with ``tar+`` before it for tar files; credentials from the environment."""
    return TarStore(url.removeprefix("tar+")) if url.startswith("tar+") else ObjectStore(url)
