"""Files of any file system that fsspec knows (extra ``fsspec``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import fsspec

from minato.sources.base import KeyedSource, SourceError
from minato.sources.connections import Connections
from minato.sources.retry import Retry
from minato.sources.settings import Env, Place, Settings

__all__ = ["Files"]


class Files(KeyedSource):
    """Files below a folder of any fsspec file system, as ``bytes``; for those that :class:`Objects` does not know.

    Args:
        url: The folder, with fsspec's protocol: ``sftp://user@host/data``, ``hf://…``, ``/local/folder``. It may be an
            :class:`~minato.sources.settings.Env`.
        keys, retry: See :class:`KeyedSource`. Without ``keys``, all files below the folder, by their relative paths.
        decode: Called with the file's ``bytes``.
        settings: fsspec's storage options, each of them a value or an :class:`~minato.sources.settings.Env`.
    """

    transient = (ConnectionError, TimeoutError)

    def __init__(
        self,
        url: str | Env,
        *,
        keys: Sequence[str] | None = None,
        decode: Callable[[bytes], Any] | None = None,
        retry: Retry | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(keys, decode, retry)
        self.place = Place(url)
        self._settings = Settings(settings)
        self._systems: Connections[Any] = Connections(self._open, _forget, shared=True)

    def __repr__(self) -> str:
        return f"Files({self.place!r})"

    def _open(self) -> Any:
        # fsspec would otherwise give a forked worker the instance, and the event loop, of its parent.
        system, folder = fsspec.core.url_to_fs(
            self.place.url, skip_instance_cache=True, **self._settings.values()
        )
        return system, folder.rstrip("/")

    def close(self) -> None:
        """Forget the file system; the next read makes a new one."""
        self._systems.close()

    def _fetch(self, key: str) -> bytes:
        # Some file systems take the parts of a path as those of a URL.
        if "\0" in key or ".." in unquote(key).replace("\\", "/").split("/"):
            raise SourceError(f"key {key!r} leads out of the folder {self.place!r}")
        with self._systems.lease() as (system, folder):
            try:
                value: bytes = system.cat_file(f"{folder}/{key}")
            except FileNotFoundError as error:
                raise LookupError(key) from error
        return value

    def _list(self) -> Sequence[str]:
        with self._systems.lease() as (system, folder):
            return sorted(path[len(folder) + 1 :] for path in system.find(folder))


def _forget(system: Any) -> None:
    """File systems close their connections by themselves."""
