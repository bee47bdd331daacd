"""What only object stores have: ranges, tar shards, and a runtime that must not be forked."""

from __future__ import annotations

import base64
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest

import minato
from minato.sources.base import MissingKey, Retry, SourceError, TruncatedObject
from tests.sources.kinds import COUNT, Kind, name_of, of_bytes, record, records_tar

pytest.importorskip("obstore", reason="obstore is not installed: install the extra 'test'")

import obstore

from minato.sources.objects import Objects, Part, _whole, tar_members
from minato.sources.splits import load_splits, save_splits
from tests.subprocesses import in_forks


def test_members_of_a_tar_file_are_read_by_their_ranges(
    kind_named: Callable[[str], Kind], tmp_path: Path
) -> None:
    shards = kind_named("s3").source(url="s3://minato/shards")
    members = tar_members(shards, "first.tar", suffix=".bin")
    assert list(members) == [f"{name_of(i)}.bin" for i in range(COUNT)]
    parts = list(members.values())
    how: Any = {"num_workers": 2, "workers": "thread", "fetch_concurrency": 4}
    loader = minato.DataLoader(shards.subset(parts), 10, **how)
    assert [label for batch in loader for label in batch["label"].tolist()] == list(range(COUNT))
    save_splits(tmp_path / "index.json", {"first": parts})
    kept = load_splits(tmp_path / "index.json")["first"]
    assert kept == parts
    assert shards.subset(kept)[7]["label"] == 7
    assert tar_members(shards, "first.tar", suffix=".txt") == {}


def test_a_range_beyond_the_end_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(bytes(100))
    source = Objects(f"file://{tmp_path}", **ONCE)
    assert source.get(Part("object", 10, 20)) == bytes(10)
    with pytest.raises(SourceError, match=r"Part\(path='object', start=90, end=120\)"):
        source.get(Part("object", 90, 120))
    with pytest.raises(MissingKey, match="'other'"):
        source.get(Part("other", 0, 1))
    assert source.get(["object", 10, 20]) == bytes(10)  # as JSON gives it
    with pytest.raises(TruncatedObject, match="'object' has 9 bytes, and 8 arrived"):
        _whole("object", bytes(8), 9)


class Answers(BaseHTTPRequestHandler):
    """Paths end with ``whole``, an object of ten bytes, ``short``, which breaks off, ``loose``, or a status.

    The length of ``loose`` is not told. No answer is a range.
    """

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    authorized: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.authorized.append(self.headers["authorization"])
        name = unquote(self.path.partition("?")[0])
        is_loose = name.endswith("loose")
        whole = b"0123456789"
        sent = {"whole": whole, "loose": whole, "short": b"01234"}.get(name[-5:], b"")
        self.send_response(200 if sent else int(name.rpartition("/")[2]))
        if not is_loose:
            self.send_header("Content-Length", "10" if sent else "0")
        self.send_header("Last-Modified", "Sat, 01 Nov 2025 00:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(sent if self.command == "GET" else b"")
        self.close_connection = is_loose or name.endswith("short")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Standard error is the tests'."""


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server of objects."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


GOOGLE = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
"""An account that signs nothing."""


PLAIN: dict[str, Any] = {"client_options": {"allow_http": True}}
ONCE: dict[str, Any] = {"retry": Retry(attempts=1)}
THRICE: dict[str, Any] = {"retry": Retry(attempts=3, first_s=0.001)}


def services(address: str) -> dict[str, tuple[str, dict[str, Any]]]:
    account = json.dumps({**GOOGLE, "gcs_base_url": f"http://{address}"})
    azure = {"account_name": "me", "endpoint": f"http://{address}", "skip_signature": True}
    return {
        "http": (f"http://me:hush@{address}/data", {}),
        "az": ("az://box/data", azure),
        "gs": ("gs://box/data", {"service_account_key": account}),
    }


@pytest.mark.parametrize("service", ["http", "az", "gs"])
def test_each_service_gives_objects_and_clear_errors(service: str, address: str) -> None:
    url, settings = services(address)[service]
    client = {"allow_http": True, "default_headers": {"x-key": "hush"}}
    source = Objects(url, keys=["whole", "short", "404"], client_options=client, **ONCE, **settings)
    assert source[0] == b"0123456789"
    assert unquote(Answers.asked[-1]).endswith("/data/whole")
    with pytest.raises(SourceError, match="cannot read key 'short'") as short:
        source[1]
    with pytest.raises(MissingKey, match="no key '404'") as missing:
        source[2]
    for text in (repr(source), str(short.value), str(missing.value)):
        assert "hush" not in text
    with pytest.raises(TypeError, match="is a secret and is not pickled"):
        pickle.dumps(source)
    source.close()


def test_the_password_of_a_url_is_sent_and_not_told(address: str) -> None:
    source = Objects(f"http://me:hu%40sh@{address}/data", **ONCE, **PLAIN)
    assert source.get("whole") == b"0123456789"
    assert Answers.authorized[-1] == f"Basic {base64.b64encode(b'me:hu@sh').decode()}"
    source.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    away = Objects(f"http://me:hush@127.0.0.1:{port}/data", **ONCE, **PLAIN)
    with pytest.raises(SourceError, match="cannot read key 'whole'") as raised:
        away.get("whole")
    assert "hush" not in f"{raised.value} {raised.value.__cause__!r}"
    assert len(str(raised.value).splitlines()) == 1
    away.close()


def test_what_a_server_refuses_is_asked_for_once(address: str) -> None:
    source = Objects(f"http://{address}", **THRICE, **PLAIN)
    for status in (400, 401, 403, 404, 410, 416, 408, 429, 500, 503):
        Answers.asked.clear()
        with pytest.raises(SourceError):
            source.get(str(status))
        repeated = status >= 500 or status in (408, 429)
        assert len(Answers.asked) == (3 if repeated else 1), status


def test_what_a_server_cannot_do_is_asked_for_once(address: str) -> None:
    source = Objects(f"http://{address}", **THRICE, **PLAIN)
    with pytest.raises(
        SourceError, match="Content-Length Header missing.*Files reads it all the same"
    ):
        source.get("loose")
    with pytest.raises(SourceError, match="Range request not supported.*need a server that gives"):
        tar_members(source, "whole")
    assert source.retries == 0


def test_what_this_machine_refuses_is_asked_for_once(tmp_path: Path) -> None:
    for url, key, words in (
        ("http://127.0.0.1:9/data", "whole", r"needs client_options={'allow_http': True}$"),
        (f"file://{tmp_path}", "x" * 600, "File name too long"),
        (f"file://{tmp_path}/missing", "x", "missing"),
        (f"{tmp_path}", "x", "write a directory as 'file:///directory'$"),
        ("ftp://box/data", "x", "ftp://box/data"),
        ("s3://box/data", "x", r"belong to client_options, as {'allow_http': True}$"),
        (f"file://{tmp_path}/new%0Aline", "x", "Error parsing Path"),
    ):
        options = {"allow_http": True} if url.startswith("s3") else {}
        source = Objects(url, **THRICE, **options)
        with pytest.raises(SourceError, match=words):
            source.get(key)
        assert source.retries == 0


LISTED = """
import os, signal, sys
from minato.sources import objects
from minato.sources.base import Retry

class PanicException(BaseException):
    pass  # Rust's: no Exception

def panics(*_):
    raise PanicException("index out of bounds")

def pages(ends):
    def listed(self):
        yield ["a"]
        ends()
    return listed

def source():
    return objects.Objects("file://" + FOLDER, retry=Retry(attempts=1))

def check(does, message):
    try:
        does()
    except Exception as error:
        assert type(error).__name__ == "SourceError" and message in str(error), repr(error)
    else:
        raise AssertionError(message)

assert list(source().keys) == ["a"]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
assert list(source().keys) == ["a"]
for ends, message in (
    (panics, "panicked: index out of bounds"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "died"),
    (signal.pause, "said nothing for 0 s"),
):
    objects._SILENCE_S = 0.2 if ends is signal.pause else 60.0
    objects.Objects._pages = pages(ends)
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGCHLD, handler)
        check(lambda: source().keys, message)
objects.obstore.get = panics
check(lambda: source().get("a"), "key 'a': RuntimeError: obstore panicked: index out of bounds")
"""


FORKS = """
import sys, minato
from minato.sources.objects import Objects
from minato.sources.base import Retry
from tests.sources.kinds import of_bytes

def labels(source):
    loader = minato.DataLoader(source, batch_size=10, num_workers=2, multiprocessing_context="fork")
    return [label for batch in loader for label in batch["label"].tolist()]

source = Objects("file://" + FOLDER, decode=of_bytes, retry=Retry(attempts=1))
assert labels(source) == list(range(20)), "listing the keys lets workers be forked"
assert source[3]["label"] == 3
try:
    labels(source)
except Exception as error:
    assert "forked from one that had read objects" in str(error), error
else:
    raise AssertionError("a worker read though its parent had")
"""


BEGINS = """
import os, threading
from minato.sources.objects import Objects
from minato.sources.base import Retry

source = Objects("file://" + FOLDER, retry=Retry(attempts=1))
reads = threading.Thread(target=source.get, args=["a"])
fork = os.fork

def fork_late():
    reads.start()
    reads.join(0.5)
    return fork()

os.fork = fork_late
assert list(source.keys) == ["a"], "a thread that begins to read waits for the fork"
reads.join()
"""


def test_processes_that_list_and_read(tmp_path: Path) -> None:
    """A listing that panics, dies or hangs is an error; forked workers read unless their parent did."""
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    (one / "a").write_bytes(b"1")
    many.mkdir()
    for i in range(20):
        (many / name_of(i)).write_bytes(record(i))
    pairs = (one, LISTED), (many, FORKS), (f"{one}/", BEGINS)
    scripts = {f"FOLDER = {str(folder)!r}": script for folder, script in pairs}
    _, failures = in_forks({each: f"{each}\n{scripts[each]}" for each in scripts}, "-W", "ignore")
    assert failures == {}


def test_the_keys_of_a_tar_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(records_tar(0))
    assert tar_members(Objects(f"file://{tmp_path}", decode=of_bytes), "empty.tar") == {}


def test_empty_objects_that_mark_folders_are_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consoles of object stores make them; obstore gives ``dir/`` as ``dir``, and finds none of this name."""
    sizes = {"": 0, "b/c/d": 3, "b": 0, "b-": 0, "b/c": 0, "e": 0, "f": 1, "f/g": 1}
    found = [{"path": path, "size": size} for path, size in sizes.items()]
    monkeypatch.setattr(obstore, "list", lambda store: [found[:4], found[4:]])
    assert Objects(f"file://{tmp_path}").keys == ["b-", "b/c/d", "e", "f", "f/g"]


def test_headers_of_a_tar_file_are_read_again_after_lost_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = obstore.open_reader

    class Breaking:
        """Gives some parts, and then no more."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._file = opened(*arguments, **options)
            self.seek, self._left = self._file.seek, 50

        def read(self, nbytes: int) -> Any:
            self._left -= 1
            if self._left < 0:
                raise OSError("Generic HTTP error: error sending request")
            return self._file.read(nbytes)

    monkeypatch.setattr(obstore, "open_reader", Breaking)
    (tmp_path / "a.tar").write_bytes(records_tar(COUNT))
    source = Objects(f"file://{tmp_path}", **THRICE)
    assert len(tar_members(source, "a.tar")) == COUNT
    assert source.retries >= COUNT // 50
    with pytest.raises(SourceError, match=r"cannot read tar file 'a\.tar' after .* error sending"):
        tar_members(Objects(f"file://{tmp_path}", **ONCE), "a.tar")
    with pytest.raises(MissingKey, match=r"has no tar file 'none\.tar'"):
        tar_members(source, "none.tar")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data.replace(b"07.bin", b"x7.bin"), "a header is damaged"),
        (lambda data: data[: 5 * 1024], "and may be cut"),
        (lambda data: data[: 5 * 1024 + 100], "a header is damaged: truncated header"),
        (lambda data: data[: 5 * 1024 + 520], "unexpected end of data"),
        (lambda data: data + data, "another archive follows"),
    ],
)
def test_a_damaged_tar_file_is_no_shorter_one(damage: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(damage(records_tar(10)))
    with pytest.raises(SourceError, match=rf"cannot read tar file 'a\.tar': .*{text}"):
        tar_members(Objects(f"file://{tmp_path}"), "a.tar")
