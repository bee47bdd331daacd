"""Files of any fsspec file system (extra ``fsspec``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from minato.sources.base import KeyedSource, Retry, SourceError
from minato.sources.connections import Env, Place, Settings, check_settings

__all__ = ["Files"]

_FIND = ((AbstractFileSystem, "find"), (AsyncFileSystem, "_find"))
"""The methods that list all files below a directory, unless a file system has one of its own, as object stores do."""


class Files(KeyedSource):
    """Files below a directory of any fsspec file system, as ``bytes``; for those without support in :class:`Objects`.

    Args:
        url: The directory, with fsspec's protocol: ``sftp://user@host/data``, ``hf://…``, ``/local/directory``. It may
            be an :class:`~minato.sources.connections.Env`.
        keys, retry: See :class:`KeyedSource`. Without ``keys``, all files below the directory, by their relative paths.
        decode: Called with the file's ``bytes``.
        settings: fsspec's storage options, each of them a value or an :class:`~minato.sources.connections.Env`.
    """

    def __init__(
        self,
        url: str | Env,
        *,
        keys: Sequence[str] | None = None,
        decode: Callable[[bytes], object] | None = None,
        retry: Retry | None = None,
        **settings: object,
    ) -> None:
        super().__init__(keys, decode, retry)
        check_settings([url], settings, Files)
        self.place = Place(url)
        self.settings = Settings(settings)

    def __repr__(self) -> str:
        return f"Files({self.place!r})"

    def open_connection(self) -> Any:
        # Otherwise a forked worker would get the instance and the event loop of its parent.
        system, directory = fsspec.core.url_to_fs(
            self.place.url, skip_instance_cache=True, **self.settings.values()
        )
        return system, directory.rstrip("/")

    def read_value(self, key: str) -> bytes:
        # Some file systems decode paths like URLs.
        if "\0" in key or ".." in unquote(key).replace("\\", "/").split("/"):
            raise SourceError(f"key {key!r} leads out of the directory {self.place!r}")
        with self.connections.lease() as (system, directory):
            try:
                value: bytes = system.cat_file(f"{directory}/{key}")
            except FileNotFoundError as error:
                raise LookupError(key) from error
        return value

    def list_keys(self) -> Sequence[str]:
        with self.connections.lease() as (system, directory):
            found = [path.removeprefix(directory) for path in _below(system, directory)]
            if not found and not system.exists(directory):
                raise FileNotFoundError(directory)
        return sorted({path.removeprefix("/") for path in found})


def _below(system: AbstractFileSystem, directory: str) -> Iterator[str]:
    """All files below a directory; the ``find`` of most file systems leaves out directories that cannot be listed."""
    kind = type(system)
    if any(getattr(kind, name, None) not in (None, getattr(base, name)) for base, name in _FIND):
        yield from system.find(directory)
        return
    for each in system.ls(directory, detail=True):
        path = each["name"].rstrip("/")
        if each["type"] == "directory" and path != directory:
            yield from _below(system, path)
        elif each["type"] == "file" or not system.isdir(path):  # else a link, maybe to one above it
            yield each["name"]
