"""Tar files in WebDataset's layout, as shards; remote ones through fsspec (extra ``fsspec``)."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import tarfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, TypeAlias, cast

from minato._support.values import message_of
from minato.checks import refuse_one
from minato.errors import is_lost_connection, missing
from minato.sources.base import Retry, SourceError
from minato.sources.connections import Place, Settings, check_settings, described, shown_url
from minato.streams.shards import ShardedDataset

__all__ = ["TarShards"]

Sample: TypeAlias = dict[str, Any]
"""``__key__``: the key; and the bytes of each member by its suffix."""

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
"""Key and suffix, which the first dot behind the folders divides."""
_HIDDEN = re.compile(r"(^|/)__[^/]*__($|/|\.)")
_GZIPPED = (".gz", ".tgz")
_COMPRESSED = (*_GZIPPED, ".bz2", ".xz")
_PACKED = "names of packed ones end with .gz, .tgz, .bz2 or .xz"


class TarShards(ShardedDataset[Sample]):
    """Samples in tar files as WebDataset writes them: consecutive members with one name up to the first dot.

    ``cat/7.jpg`` and ``cat/7.cls`` become ``{"__key__": "cat/7", "jpg": b"…", "cls": b"…"}``, with suffixes in lower
    case. Decode them in ``transforms=``, which any worker runs. Folders, members without a suffix, and names like
    ``__this__`` are left out. Passing over samples reads only the headers of a file, unless it is compressed.

    Args:
        files: Paths, or URLs of any fsspec file system (``s3://…``, ``https://…``). Each is a shard, whose name in
            messages and states is the URL without passwords and tokens.
        seed, new_shards, retry: See :class:`~minato.ShardedDataset`.
        settings: fsspec's storage options for the URLs, each a value or an :class:`~minato.sources.connections.Env`.

    Raises:
        SourceError: While iterating: a file is damaged, or cannot be read. If this is skipped, so is the rest of it.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        *,
        seed: int | None = None,
        new_shards: str = "refuse",
        retry: Retry | None = None,
        **settings: object,
    ) -> None:
        super().__init__(seed=seed, new_shards=new_shards, retry=retry)
        refuse_one("files", files)
        urls = [os.fspath(file) for file in files]
        check_settings(urls, settings, TarShards)
        self._names = [shown_url(url) for url in urls]
        self._places = {name: Place(url) for name, url in zip(self._names, urls, strict=True)}
        self.settings = Settings(settings)

    def shards(self) -> Sequence[str] | Mapping[str, float]:
        """The files, with their sizes in bytes if all of them are local and no name comes twice."""
        if any(map(_is_remote, self._names)) or len(self._places) < len(self._names):
            return self._names
        return {name: os.path.getsize(name) for name in self._names}

    def iter_shard(self, name: str, state: object = None) -> Iterator[Sample]:
        url = self._places[name].url
        try:
            if not _is_remote(url):
                return _Samples(name, open(url, "rb"))
            file = _opened(url, self.settings)
            if _can_seek(file):
                file = cast(IO[bytes], _Remote(file, self.attempt))
            return _Samples(name, file)
        except (ImportError, TypeError, ValueError):  # of arguments
            raise
        except Exception as error:
            raise SourceError(f"cannot read {name!r}: {described(error)}") from error


class _Member(NamedTuple):
    key: str
    suffix: str
    info: tarfile.TarInfo


class _Samples(Iterator[Sample]):
    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._close = weakref.finalize(self, file.close)
        path = name.partition("?")[0]
        streams = path.endswith(_COMPRESSED) or not _can_seek(file)
        mode: Any = "r|*" if streams else "r:"
        if path.endswith(_GZIPPED):  # tarfile does not compare the checksum
            mode, file = "r|", cast(IO[bytes], gzip.GzipFile(fileobj=file))
        self._archive: Any = tarfile.open(fileobj=file, mode=mode, tarinfo=StrictHeader)  # noqa: SIM115
        self._count = 0
        self._next: _Member | None = None
        self._advance()

    def __next__(self) -> Sample:
        sample = self._take(reads=True)
        if sample is None:
            raise StopIteration
        return sample

    def skip(self, n: int) -> int:
        """Pass over samples; returns how many there were, those that raise among them."""
        for i in range(n):
            try:
                if self._take(reads=False) is None:
                    return i
            except SourceError as error:
                if is_lost_connection(error):
                    raise
                # An earlier run has raised it.
        return n

    def _take(self, reads: bool) -> Sample | None:
        """The next sample, with its bytes or without; None: there is none."""
        member = self._next
        if member is None:
            return None
        key = member.key
        sample: Sample = {"__key__": key}
        twice = None
        try:
            while member is not None and member.key == key:
                suffix = member.suffix
                if suffix in sample:
                    twice = suffix
                sample[suffix] = self._archive.extractfile(member.info).read() if reads else b""
                member = self._advance()
        except Exception as error:  # tarfile raises more than its own, and would do so again
            self._end()
            raise SourceError(
                f"cannot read {self._name!r} behind {self._count} samples, and leaves out the rest: {described(error)}"
            ) from error
        self._count += 1
        if twice is not None:
            raise SourceError(
                f"{self._name!r}: the sample {key!r} has two members with the suffix {twice!r}: give each sample a "
                "name of its own"
            )
        return sample

    def _advance(self) -> _Member | None:
        """Go on to the next member that is part of a sample, and return it; None: there is none."""
        while (member := self._archive.next()) is not None:
            self._archive.members = []  # otherwise it keeps all of them
            found = _NAME.fullmatch(member.name)
            if member.isdir() or found is None or _HIDDEN.search(member.name):
                continue
            if not member.isfile():
                raise tarfile.ReadError(
                    f"the member {member.name!r} is a link or a device: write it as a plain file"
                )
            self._next = _Member(found[1], found[2].lower(), member)
            return self._next
        check_end(self._archive)
        self._end()
        return None

    def _end(self) -> None:
        self._next = None
        self._close()


class StrictHeader(tarfile.TarInfo):
    """A header of a member; a damaged one would otherwise count as the end of the file."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:  # type: ignore[override]
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            # The end of an archive is a header, and an empty archive may have none.
            is_empty = type(error).__name__ == "EmptyHeaderError"
            if type(error).__name__ == "EOFHeaderError" or (is_empty and not archive.offset):
                raise
            if is_empty:
                raise tarfile.ReadError(
                    "the file ends without the block of zeros that ends an archive, and may be cut: fetch or write it "
                    "again"
                ) from error
            other = "" if archive.offset else f", or this is no plain tar file ({_PACKED})"
            raise tarfile.ReadError(f"a header is damaged{other}: {message_of(error)}") from error


def check_end(archive: tarfile.TarFile) -> None:
    """Read what follows the end of an archive, which counts for nothing; ReadError: it is another archive."""
    is_first, file = True, cast(IO[bytes], archive.fileobj)
    while block := file.read(tarfile.BLOCKSIZE):
        if is_first and block.strip(b"\0"):
            is_first = False
            with contextlib.suppress(tarfile.HeaderError):
                tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
                raise tarfile.ReadError(
                    "another archive follows behind the end of this one, as where files were joined: unpack both, and "
                    "write one archive or a file for each"
                )


def _is_remote(name: str) -> bool:
    return "://" in name or "::" in name


def _opened(url: str, settings: Settings) -> IO[bytes]:
    try:
        import fsspec
    except ModuleNotFoundError:
        raise missing(f"the URL {shown_url(url)!r}", "fsspec", "fsspec") from None
    # Otherwise a forked worker would get the instance and the event loop of its parent.
    system, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **settings.values())
    found: IO[bytes] = system.open(path, "rb")
    return found


def _can_seek(file: IO[bytes]) -> bool:
    """Whether it can, which fsspec's file of a server that gives no ranges says of itself, too."""
    try:
        file.seek(1)
        file.seek(0)
    except (OSError, ValueError):
        return False
    return True


class _Remote:
    """A file that reads again after a lost connection: to open the shard again, it would read all before once more."""

    def __init__(self, file: IO[bytes], attempt: Callable[[Callable[[], bytes]], bytes]) -> None:
        self._file, self._attempt = file, attempt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        at = self._file.tell()

        def read() -> bytes:
            self._file.seek(at)
            return self._file.read(size)

        return self._attempt(read)
