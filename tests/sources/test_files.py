"""What only fsspec's file systems have: a URL that says how to connect."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.error import URLError

import pytest

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: install the extra 'test'")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from fsspec.utils import infer_storage_options  # noqa: E402

from minato.sources.base import Retry, SourceError  # noqa: E402
from minato.sources.files import Files  # noqa: E402


class Remote(MemoryFileSystem):
    """A file system that wants to know host and user."""

    protocol = "remote"
    connected: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, host: str, **settings: Any) -> None:
        super().__init__()
        self.connected.append({"host": host, **settings})

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(infer_storage_options(path)["path"])

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        told = infer_storage_options(path)
        return {name: told[name] for name in ("host", "username", "password") if name in told}


def test_host_and_user_come_from_the_url() -> None:
    fsspec.register_implementation("remote", Remote, clobber=True)
    MemoryFileSystem().pipe("/data/a", b"content")
    source = Files("remote://me:hush@host/data")
    assert source.keys == ["a"]
    assert source[0] == b"content"
    assert Remote.connected[-1] == {"host": "host", "username": "me", "password": "hush"}
    assert repr(source) == "Files('remote://host/data')"
    with pytest.raises(TypeError, match="is a secret and is not pickled"):
        pickle.dumps(source)
    apart = Files("remote://me@host/data", password="hush")
    assert apart.get("a") == b"content"
    assert Remote.connected[-1]["password"] == "hush"


@pytest.mark.parametrize(
    "key", ["../secret", "a/../../secret", "..", "%2e%2e/secret", "..\\secret", "a\0b"]
)
def test_keys_stay_in_the_folder(key: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"not yours")
    (tmp_path / "data").mkdir()
    source = Files(str(tmp_path / "data"), keys=[key])
    with pytest.raises(SourceError, match="leads out of the directory") as told:
        source[0]
    assert repr(key) in str(told.value)


def test_a_directory_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    assert len(Files(str(tmp_path))) == 0
    with pytest.raises(SourceError, match="cannot read the list of keys: FileNotFoundError.*/none"):
        len(Files(f"{tmp_path}/none"))


def test_links_to_files_are_keys_and_those_to_directories_are_not(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"content")
    (tmp_path / "folder" / "above").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "folder" / "a")
    source = Files(str(tmp_path))
    assert (source.keys, source[0]) == (["b", "folder/a"], b"content")


def test_keys_that_only_look_like_it(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "a..b").write_bytes(b"content")
    assert Files(str(tmp_path), keys=["..data/a..b"])[0] == b"content"


@pytest.mark.parametrize("error", [PermissionError("not yours"), ConnectionResetError("lost")])
def test_a_directory_that_cannot_be_listed_is_not_left_out(error: OSError, tmp_path: Path) -> None:
    errors = [error]

    class Flaky(LocalFileSystem):
        protocol = "flaky"

        def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
            if path.endswith("/folder") and errors:
                raise errors.pop()
            return super().ls(path, detail, **options)

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    for name in ("a", "folder/b", "folder/deeper/c", "z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"content")
    source = Files(f"flaky://{tmp_path}", retry=Retry(2, 0.001))
    if isinstance(error, PermissionError):
        with pytest.raises(SourceError, match="cannot read the list of keys: .* not yours"):
            len(source)
    assert source.keys == ["a", "folder/b", "folder/deeper/c", "z"]


def test_keys_of_an_archive_are_the_names_in_it(tmp_path: Path) -> None:
    """Its paths begin with no slash, as there is no directory."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("a", "folder/b"):
            archive.writestr(name, name)
    source = Files(f"zip://::file://{tmp_path}/all.zip")
    assert source.keys == ["a", "folder/b"]
    assert [*source] == [b"a", b"folder/b"]


class ClientPayloadError(Exception):
    """As that of aiohttp."""


class Response(SimpleNamespace):
    """As that of requests."""

    def __bool__(self) -> bool:
        return bool(self.status_code < 400)


class HTTPError(OSError):
    """As that of requests."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = Response(status_code=status)


def because(cause: Exception | None) -> Exception:
    """What an error has caused; None: that error itself."""
    error = OSError("cannot be opened")
    error.__cause__ = cause or error
    return error


class Unread(ConnectionError):
    """Of a request whose answer cannot be read any more."""

    @property
    def response(self) -> object:
        raise RuntimeError("closed")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ClientPayloadError(), True),
        (TimeoutError(), True),
        (HTTPError(503), True),
        (HTTPError(429), True),
        (HTTPError(403), False),
        (because(HTTPError(503)), True),
        (because(HTTPError(404)), False),
        (because(None), False),
        (Unread(), True),
        (URLError(ConnectionRefusedError()), True),
        (URLError("no such host"), False),
        (PermissionError(), False),
        (ValueError(), False),
    ],
)
def test_what_a_network_loses_is_read_again(error: Exception, passes: bool) -> None:
    errors = [error]

    class Flaky(MemoryFileSystem):
        protocol = "flaky"

        def cat_file(self, *arguments: Any, **options: Any) -> bytes:
            if errors:
                raise errors.pop()
            return b"content"

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    source = Files("flaky://data", keys=["a"], retry=Retry(2, 0.001))
    if passes:
        assert source[0] == b"content"
    else:
        with pytest.raises(SourceError):
            source[0]
    assert source.retries == passes
