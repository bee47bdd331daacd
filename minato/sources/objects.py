"""Objects of S3, GCS, Azure, HTTP servers or directories, through obstore (extra ``objects``)."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import re
import signal
import sys
import tarfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlsplit, urlunsplit

from minato.errors import missing

try:
    import obstore
    from obstore.exceptions import GenericError
    from obstore.store import from_url
except ModuleNotFoundError:
    raise missing("minato.sources.objects", "obstore", "objects") from None

from minato.sources.base import KeyedSource, Retry, TruncatedObject
from minato.sources.connections import Env, Place, Settings, check_settings
from minato.sources.tars import StrictHeader, check_end

__all__ = ["Objects", "Part", "tar_members"]

T = TypeVar("T")

_HEADERS_BYTES = 64 << 10  # read-ahead in a tar file
_REFUSED = re.compile(
    r"status code: 4(?!08|25|29)\d\d|os error (1|2|13|20|21|22|27|28|30|36|40|122)\)|builder error"
    r"|canonicalize"  # a directory that does not exist
    r"|Generic URL error|Operation not supported|Content-Length Header missing|Error parsing Path"
)
"""In the text of an error: the server, the file system or the client refused the request, and would do so again."""
_REMEDIES = {
    "http://.*builder error": "an address without TLS needs client_options={'allow_http': True}",
    "without a base": "write a directory as 'file:///directory'",
    "config prefix": "options of the connection belong to client_options, as {'allow_http': True}",
    "Content-Length Header missing": "so a part of it would count as the whole; minato.sources.files.Files reads it "
    "all the same",
    "Range request not supported": "parts of objects, such as members of tar files, need a server that gives ranges",
}
"""What the error of a store says, as a pattern, and the remedy."""
_SILENCE_S = 300.0
"""How long a child process that lists keys may say nothing; obstore's own time limit of a request is 30 seconds."""


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
            may be an :class:`~minato.sources.connections.Env`.
        keys, retry: See :class:`KeyedSource`. Without ``keys``, all objects below ``url`` in the order of their paths,
            but for the empty ones that mark a folder; an HTTP server has no such list.
        decode: Called with the object's ``bytes``.
        client_options: Those of obstore (``allow_http``, ``timeout``, ``default_headers`` …), each of them a value or
            an :class:`~minato.sources.connections.Env`.
        settings: Further configuration of obstore's store (``access_key_id``, ``secret_access_key``, ``endpoint`` …),
            each of them a value or an :class:`~minato.sources.connections.Env`; settings that are missing come from
            the environment variables of the service (``AWS_ACCESS_KEY_ID`` …).
    """

    transient = (GenericError, OSError)

    def __init__(
        self,
        url: str | Env,
        *,
        keys: Sequence[object] | None = None,
        decode: Callable[[bytes], object] | None = None,
        retry: Retry | None = None,
        client_options: Mapping[str, object] | None = None,
        **settings: object,
    ) -> None:
        super().__init__(keys, decode, retry)
        check_settings([url], settings, Objects)
        self.place = Place(url)
        self.client_options = Settings(client_options or {})
        self.settings = Settings(settings)

    def __repr__(self) -> str:
        return f"Objects({self.place!r})"

    def open_connection(self) -> Any:
        _check_runtime()
        url, options = _with_header(self.place.url, self.client_options.values())
        return from_url(
            url,
            client_options=cast(Any, options or None),
            # ``retry`` counts and limits the attempts; obstore must not repeat them.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
            **self.settings.values(),
        )

    def is_transient(self, error: Exception) -> bool:
        text = str(error)
        refused = _REFUSED.search(text) and "RequestTimeout" not in text  # which S3 gives as 400
        return super().is_transient(error) and not refused

    def describe_error(self, error: Exception) -> str:
        # The rest is a dump of Rust structures, dozens of lines.
        text = super().describe_error(error).partition("\n\nDebug source")[0]
        for said, remedy in _REMEDIES.items():
            text += f": {remedy}" if re.search(said, text) else ""
        return text

    def read_value(self, key: Any) -> bytes:
        part = _part_of(key)
        with self.reading() as store:
            if part is None:
                found = obstore.get(store, key)
                return _whole(key, bytes(found.bytes()), found.meta["size"])
            path, start, end = part
            if start == end:  # of an empty member, for which servers have no range
                return b""
            value = obstore.get_range(store, path, start=start, end=end)
            return _whole(part, bytes(value), end - start)

    async def __aget__(self, index: int) -> Any:
        """``source[index]`` as a coroutine."""
        key: Any = self.key_at(index)
        value = await self.attempt_async(f"key {key!r}", lambda: self._read_later(key))
        return self.decoded(key, value)

    async def _read_later(self, key: Any) -> bytes:
        part = _part_of(key)
        with self.reading() as store:
            if part is None:
                found = await obstore.get_async(store, key)
                return _whole(key, bytes(await found.bytes_async()), found.meta["size"])
            path, start, end = part
            if start == end:
                return b""
            value = await obstore.get_range_async(store, path, start=start, end=end)
            return _whole(part, bytes(value), end - start)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """A store; its error for a missing object becomes a LookupError."""
        with _panics(), self.connections.lease() as store:
            try:
                yield store
            except FileNotFoundError as error:  # obstore's own error is one
                raise LookupError(*error.args) from error

    def list_keys(self) -> Sequence[str]:
        sizes = dict(pair for pairs in _in_a_fork(self._pages) for pair in pairs)
        paths = sorted(sizes)

        def is_folder(path: str) -> bool:
            """Whether it is the empty object that marks a folder; obstore hides the slash at the end of its name."""
            at = bisect_left(paths, f"{path}/")
            return not path or (at < len(paths) and paths[at].startswith(f"{path}/"))

        return [path for path in paths if sizes[path] or not is_folder(path)]

    def _pages(self) -> Iterator[list[tuple[str, int]]]:
        with self.connections.lease() as store:
            for chunk in obstore.list(store):
                yield [(meta["path"], meta["size"]) for meta in chunk]


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
        The name of each file in the archive, and its range, in the archive's order. A hard link has the range of its
        file.

    Raises:
        SourceError: The archive is damaged, cut off, or cannot be read; reads are repeated like those of samples.
        ValueError: A member has no range: it is a sparse file, a symbolic link, a device, or a link to nothing; or two
            members have one name. The message names it.
    """
    found: dict[str, Part] = {}
    refused: dict[str, str] = {}
    members = source.attempt(_tar(path), lambda: _in_a_fork(lambda: _members(source, path)))
    for name, linked, start, size, fault in members:
        if linked and linked not in found:
            fault = f"is a link to {linked!r}, which is not before it in the archive"
        elif name in found or name in refused:
            fault = "comes twice"
        if fault:
            refused[name] = fault
        else:
            found[name] = found[linked] if linked else Part(path, start, start + size)
    for name, fault in refused.items():
        if name.endswith(suffix):
            raise ValueError(
                f"{path!r}: the member {name!r} {fault}: write it as a plain file under a name of its own, or leave it "
                "out by suffix="
            )
    return {name: part for name, part in found.items() if name.endswith(suffix)}


_Member = tuple[str, str, int, int, str]
"""Name, target of a hard link, first byte, number of bytes, and why it cannot be read."""


def _members(source: Objects, path: str) -> Iterator[_Member]:
    reader = cast(Any, _Reader(source, path))
    with tarfile.open(fileobj=reader, mode="r:", tarinfo=StrictHeader) as archive:
        for member in archive:
            if member.isdir():
                continue
            plain = member.isfile() or member.islnk()
            fault = "" if plain else "is a symbolic link or a device"
            if member.issparse():
                fault = "is a sparse file, whose bytes are not in one piece"
            linked = member.linkname if member.islnk() else ""
            yield member.name, linked, member.offset_data, member.size, fault
        check_end(archive)


class _Reader:
    """A file for tarfile, whose reads are repeated after transient errors."""

    def __init__(self, source: Objects, path: str) -> None:
        self._source, self._path = source, path
        self._file: obstore.ReadableFile | None = None
        self._at = self._file_at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, nbytes: int) -> bytes:
        found: bytes = self._source.attempt(_tar(self._path), lambda: self._read(nbytes))
        self._at += len(found)
        return found

    def _read(self, nbytes: int) -> bytes:
        file, self._file = self._file, None  # one that has failed is not used again
        with self._source.reading() as store:
            if file is None:
                file = obstore.open_reader(store, self._path, buffer_size=_HEADERS_BYTES)
                self._file_at = 0
            if self._file_at != self._at:
                # As does asking where it is, this drops what was read ahead.
                file.seek(self._at)
            found = bytes(file.read(nbytes))
        self._file, self._file_at = file, self._at + len(found)
        return found


def _tar(path: str) -> str:
    return f"tar file {path!r}"


def _part_of(key: Any) -> Part | None:
    return None if isinstance(key, str) else Part(*key)


def _whole(key: str | Part, value: bytes, size: int) -> bytes:
    if len(value) != size:
        raise TruncatedObject(f"key {key!r} has {size} bytes, and {len(value)} arrived")
    return value


# ---- obstore's threads, one runtime for the whole process, do not survive a fork ---------------

_used = False
_parent_used = False
_undecided = threading.Lock()
"""Held where this process begins to read with obstore, and where it forks because it has not."""


def _check_runtime() -> None:
    """Record that this process reads with obstore; RuntimeError: its parent does, so that the call would hang."""
    global _used
    if _parent_used:
        raise RuntimeError(
            "this process was forked from one that had read objects already, and obstore's threads do not come along: "
            "give the loader multiprocessing_context='forkserver' or workers='thread', or read nothing before "
            "its workers start"
        )
    with _undecided:
        _used = True


def _after_fork() -> None:
    global _parent_used, _undecided
    _parent_used, _undecided = _used, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _in_a_fork(call: Callable[[], Iterator[T]]) -> list[T]:
    """What a function yields in a child process, so that this process can still be forked for workers.

    If this process already reads with obstore, it calls the function itself. Values and an exception are pickled.
    TimeoutError: The child said nothing for too long, and was killed. RuntimeError: It died, or Rust code panicked.
    """
    with _undecided:
        is_used = _used or _parent_used or sys.platform != "linux" or _runtime_runs()
        if not is_used:
            reader, writer = Pipe(duplex=False)
            child = os.fork()
    if is_used:
        with _panics():
            return list(call())
    if not child:
        try:
            reader.close()
            try:
                with _panics():
                    for value in call():
                        writer.send(value)
                writer.send(StopIteration())
            except BaseException as error:
                writer.send(_picklable(error))
        finally:
            os._exit(0)
    writer.close()
    found: list[T] = []
    ended = False
    try:
        while reader.poll(_SILENCE_S):
            value = reader.recv()
            ended = isinstance(value, Exception)
            if isinstance(value, StopIteration):
                return found
            if ended:
                raise value
            found.append(value)
        raise TimeoutError(f"the process that lists the keys said nothing for {_SILENCE_S:.0f} s")
    except EOFError:
        raise RuntimeError("the process that lists the keys died") from None
    finally:
        reader.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD may be ignored
            if not ended:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _runtime_runs() -> bool:
    """Whether this process has threads of such a runtime, from any library."""
    names = Path("/proc/self/task").glob("*/comm")
    return any(name.read_text(errors="replace").startswith("tokio") for name in names)


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Turn a panic of Rust code, which is no ``Exception``, into one."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise RuntimeError(f"obstore panicked: {error}") from error
        raise


def _picklable(error: BaseException) -> Exception:
    with contextlib.suppress(Exception):  # obstore's own classes may not be picklable
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, Exception):
            return again
    return RuntimeError(f"{type(error).__name__}: {error}")
