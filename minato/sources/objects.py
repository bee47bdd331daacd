"""Objects of S3, GCS, Azure, HTTP servers or directories, through obstore (extra ``objects``)."""

from __future__ import annotations

import base64
import os
import pickle
import sys
import tarfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import obstore
from obstore.exceptions import GenericError
from obstore.store import from_url

from minato.sources.base import KeyedSource, TruncatedObject
from minato.sources.connections import Connections
from minato.sources.retry import Retry
from minato.sources.settings import Env, Place, Settings

__all__ = ["Objects", "Part", "tar_members"]

T = TypeVar("T")

_HEADERS_BYTES = 64 << 10
"""Read-ahead in a tar file."""


class Part(NamedTuple):
    """A range of an object as a key: the bytes from ``start`` up to but not including ``end``.

    Any other sequence of the three is a key too, for instance the list that JSON makes of it.
    """

    path: str
    start: int
    end: int


class Objects(KeyedSource):
    """Objects by their paths, or ranges of them by :class:`Part`, as ``bytes``.

    With ``fetch_concurrency`` the reads of a worker are coroutines on one event loop.

    After a process has read an object, workers that it forks cannot read: obstore's threads do not survive a fork, and
    the worker raises an error. Listing the keys is no read in this sense. So read nothing before the workers are
    forked, or start them with ``multiprocessing_context="forkserver"``, or use ``workers="thread"``.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``https://`` or ``file:///``; paths are relative to it. It
            may be an :class:`~minato.sources.settings.Env`.
        keys, retry: See :class:`KeyedSource`. Without ``keys``, all objects below ``url`` in the order of their paths;
            an HTTP server has no such list.
        decode: Called with the object's ``bytes``.
        client_options: Those of obstore (``allow_http``, ``timeout``, ``default_headers`` …), each of them a value or
            an :class:`~minato.sources.settings.Env`.
        settings: Further configuration of obstore's store (``access_key_id``, ``secret_access_key``, ``endpoint`` …),
            each of them a value or an :class:`~minato.sources.settings.Env`; settings that are missing come from
            the environment variables of the service (``AWS_ACCESS_KEY_ID`` …).
    """

    transient = (GenericError, ConnectionError, TimeoutError)

    def __init__(
        self,
        url: str | Env,
        *,
        keys: Sequence[Any] | None = None,
        decode: Callable[[bytes], Any] | None = None,
        retry: Retry | None = None,
        client_options: dict[str, Any] | None = None,
        **settings: object,
    ) -> None:
        super().__init__(keys, decode, retry)
        self.place = Place(url)
        self._client_options = Settings(client_options or {})
        self._settings = Settings(settings)
        self.stores: Connections[Any] = Connections(self._open, _forget, shared=True)

    def __repr__(self) -> str:
        return f"Objects({self.place!r})"

    def _open(self) -> Any:
        _check_runtime()
        url, options = _with_header(self.place.url, self._client_options.values())
        return from_url(
            url,
            client_options=cast(Any, options or None),
            # ``retry`` counts and limits the attempts; obstore must not repeat them.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
            **self._settings.values(),
        )

    def _describe(self, error: Exception) -> str:
        # The rest is a dump of Rust structures, dozens of lines.
        return super()._describe(error).partition("\n\nDebug source")[0]

    def close(self) -> None:
        """Forget the store and its connections; the next read makes a new one."""
        self.stores.close()

    def _fetch(self, key: Any) -> bytes:
        with self.stores.lease() as store:
            try:
                if not isinstance(key, str):
                    key = Part(*key)
                    part = obstore.get_range(store, key.path, start=key.start, end=key.end)
                    return _whole(key, bytes(part), key.end - key.start)
                found = obstore.get(store, key)
                return _whole(key, bytes(found.bytes()), found.meta["size"])
            except FileNotFoundError as error:  # obstore's own error is one
                raise LookupError(key) from error

    async def __aget__(self, index: int) -> Any:
        """``source[index]`` as a coroutine."""
        key = self.keys[index]
        value = await self.attempt_async(f"key {key!r}", lambda: self._fetch_later(key))
        return self._decoded(key, value)

    async def _fetch_later(self, key: Any) -> bytes:
        with self.stores.lease() as store:
            try:
                if not isinstance(key, str):
                    key = Part(*key)
                    part = await obstore.get_range_async(
                        store, key.path, start=key.start, end=key.end
                    )
                    return _whole(key, bytes(part), key.end - key.start)
                found = await obstore.get_async(store, key)
                return _whole(key, bytes(await found.bytes_async()), found.meta["size"])
            except FileNotFoundError as error:  # obstore's own error is one
                raise LookupError(key) from error

    def _list(self) -> Sequence[str]:
        return _in_a_fork(self._list_here)

    def _list_here(self) -> Sequence[str]:
        with self.stores.lease() as store:
            return sorted(meta["path"] for chunk in obstore.list(store) for meta in chunk)


def _with_header(url: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Move name and password of a URL to a header: obstore shows URLs in its errors."""
    parts = urlsplit(url)
    if parts.password is None:
        return url, options
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
    headers = {
        **options.get("default_headers", {}),
        "authorization": f"Basic {base64.b64encode(pair.encode()).decode()}",
    }
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return bare, {**options, "default_headers": headers}


def tar_members(source: Objects, path: str, suffix: str = "") -> dict[str, Part]:
    """The ranges of the members of a tar file, as keys to read them with.

    Only the headers are read; the result can be kept (``json``, ``save_splits``) as the shard's index.

    Args:
        suffix: Only members whose names end with it.

    Returns:
        The name of each plain file in the archive, and its range, in the archive's order.
    """
    return _in_a_fork(lambda: _members(source, path, suffix))


def _members(source: Objects, path: str, suffix: str) -> dict[str, Part]:
    with source.stores.lease() as store:
        reader = _Reader(obstore.open_reader(store, path, buffer_size=_HEADERS_BYTES))
        with tarfile.open(fileobj=cast(Any, reader), mode="r:") as archive:
            return {
                member.name: Part(path, member.offset_data, member.offset_data + member.size)
                for member in archive
                if member.isfile() and member.name.endswith(suffix)
            }


class _Reader:
    """obstore's file for tarfile, which needs ``bytes`` instead of buffers."""

    def __init__(self, file: obstore.ReadableFile) -> None:
        self._file = file
        self.seek = file.seek
        self.tell = file.tell

    def read(self, nbytes: int) -> bytes:
        return bytes(self._file.read(nbytes))


def _whole(key: str | Part, value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise TruncatedObject(f"key {key!r} has {size} bytes, and {len(value)} arrived")
    return value


def _forget(store: object) -> None:
    """Nothing to do: a store closes its connections when it is collected."""


# ---- obstore's threads, one runtime for the whole process, do not survive a fork ---------------

_used = False
_parent_used = False


def _check_runtime() -> None:
    """Record that this process reads with obstore.

    Raises:
        RuntimeError: It was forked from a process that did, so that the call would hang.
    """
    global _used
    if _parent_used:
        raise RuntimeError(
            "this process was forked from one that had read objects already, and obstore's threads do not come along: "
            "give the loader multiprocessing_context='forkserver' or workers='thread', or read nothing before "
            "its workers start"
        )
    _used = True


def _after_fork() -> None:
    global _parent_used
    _parent_used = _used


os.register_at_fork(after_in_child=_after_fork)


def _in_a_fork(call: Callable[[], T]) -> T:
    """Call a function in a child process, so that this process can still be forked for workers.

    If this process already reads with obstore, it calls the function itself. The result or exception is pickled.
    """
    if _used or _parent_used or sys.platform != "linux" or _runtime_runs():
        return call()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(_outcome(call), pipe)
        finally:
            os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            outcome: tuple[T, BaseException | None] = pickle.load(pipe)
    finally:
        os.waitpid(child, 0)
    result, error = outcome
    if error is not None:
        raise error
    return result


def _runtime_runs() -> bool:
    """Whether this process has threads of such a runtime, from any library."""
    names = Path("/proc/self/task").glob("*/comm")
    return any(name.read_text(errors="replace").startswith("tokio") for name in names)


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # obstore's own classes may not be picklable
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return None, error
