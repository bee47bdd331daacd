"""Settings, tries and connections, without any server."""

from __future__ import annotations

import os
import pickle
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minato.sources.base import KeyedSource, MissingKey, Retry, SourceError
from minato.sources.connections import (
    Connections,
    Env,
    Place,
    Settings,
    shown_url,
)
from minato.sources.sql import SQLite


class Flaky(KeyedSource):
    """Fails so many times before each read succeeds."""

    def __init__(self, failures: int, error: type[Exception], retry: Retry) -> None:
        super().__init__(None, None, retry)
        self.failures = self.left = failures
        self.error = error

    def __repr__(self) -> str:
        return "Flaky()"

    def read_value(self, key: str) -> str:
        if self.left:
            self.left -= 1
            raise self.error("not now")
        self.left = self.failures
        return key.upper()

    def list_keys(self) -> list[str]:
        return ["a", "b"]


def test_what_passes_is_tried_again_and_counted() -> None:
    source = Flaky(3, ConnectionError, Retry(attempts=4, first_s=0.001))
    assert [source[0], source[1]] == ["A", "B"]
    assert source.retries == 6


@pytest.mark.parametrize(
    ("retry", "tries"),
    [(Retry(attempts=3, first_s=0.001), 3), (Retry(attempts=9, first_s=0.5, deadline_s=0.01), 1)],
)
def test_tries_end(retry: Retry, tries: int) -> None:
    source = Flaky(100, TimeoutError, retry)
    with pytest.raises(SourceError, match=r"^Flaky\(\) cannot read key 'a' after .* not now$"):
        source[0]
    assert 100 - source.left == tries


def test_what_does_not_pass_is_not_tried_again() -> None:
    source = Flaky(1, ValueError, Retry())
    with pytest.raises(SourceError, match=r"cannot read key 'a': ValueError: not now"):
        source[0]
    assert source.retries == 0
    with pytest.raises(MissingKey, match=r"Flaky\(\) has no key 'a'"):
        Flaky(1, KeyError, Retry())[0]


def test_what_only_looks_as_if_it_might_pass(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").close()
    source = SQLite(tmp_path / "empty.db", "samples")
    with pytest.raises(SourceError, match=r"cannot read key 3: OperationalError: no such table"):
        source.get(3)
    assert source.retries == 0
    source.close()


def test_pauses_double_up_to_a_bound() -> None:
    pauses = list(Retry(attempts=8, first_s=1.0, longest_s=8.0, deadline_s=1e9).pauses())
    bounds = [1, 2, 4, 8, 8, 8, 8]
    assert len(pauses) == len(bounds)
    assert all(b / 2 <= pause <= b for pause, b in zip(pauses, bounds, strict=True))
    with pytest.raises(ValueError, match="attempts=0 is too small"):
        Retry(attempts=0)


def test_settings_keep_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        {
            "user": "me",
            "password": "hush",
            "access_key_id": "me",
            "session_token": Env("TOKEN_HERE"),
        }
    )
    assert repr(settings) == (
        "user='me', password=<secret>, access_key_id='me', session_token=Env('TOKEN_HERE')"
    )
    monkeypatch.setenv("TOKEN_HERE", "t")
    assert settings.values()["password"] == "hush"
    assert settings.values()["session_token"] == "t"
    with pytest.raises(TypeError, match="'password' is a secret and is not pickled"):
        pickle.dumps(settings)
    assert pickle.loads(pickle.dumps(Settings({"password": Env("TOKEN_HERE")}))).values() == {
        "password": "t"
    }
    monkeypatch.delenv("TOKEN_HERE")
    with pytest.raises(ValueError, match="TOKEN_HERE is not set"):
        settings.values()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/data", "https://host/data"),
        ("https://me:hush@host/data?version=2", "https://host/data?version=2"),
        ("https://hush@host", "https://host"),
        ("https://host/#access_token=hush", "https://host/"),
        ("https://host/a?api_key=hush&apikey=hush&code=hush&region=eu", "https://host/a?region=eu"),
        ("sftp://me:hush@host/data", "sftp://me@host/data"),
        ("sftp://me:hush@hush@host/data", "sftp://me@host/data"),
        ("sftp://me@host/data", "sftp://me@host/data"),
        ("simplecache::https://me:hush@host/a", "simplecache::https://host/a"),
        ("hf://datasets/me/photographs@main/a", "hf://datasets/me/photographs@main/a"),
        ("http://host:9000/box@2", "http://host:9000/box@2"),
        ("file:///data/run#3?a", "file:///data/run#3?a"),
        ("abfs://box@account/data", "abfs://box@account/data"),
        ("az://box?sv=2024&sp=r&sig=hush", "az://box?sv=2024&sp=r"),
        ("s3://box/a?X-Amz-Signature=hush&X-Amz-Credential=hush", "s3://box/a"),
        ("redis://host/0?password=hush", "redis://host/0"),
        ("/a/folder", "/a/folder"),
    ],
)
def test_a_place_keeps_its_secrets(url: str, shown: str) -> None:
    place = Place(url)
    assert (repr(place), place.url) == (repr(shown), url)
    if shown == url:
        assert pickle.loads(pickle.dumps(place)).url == url
    else:
        with pytest.raises(TypeError, match="'url' is a secret and is not pickled"):
            pickle.dumps(place)


@pytest.mark.parametrize("letter", list("/?#"))
@pytest.mark.parametrize("scheme", ["sftp", "https", "redis", "mysql"])
def test_a_password_that_no_library_understands_is_refused_and_not_shown(
    scheme: str, letter: str
) -> None:
    for url in (f"{scheme}://me:hu{letter}sh@host/data", f"{scheme}://me:h@hu{letter}sh@host"):
        for take in (Place, shown_url):
            with pytest.raises(
                ValueError, match="has a password with one of the characters"
            ) as told:
                take(url)
            assert "hu" not in str(told.value)
            assert "sh" not in str(told.value).replace("shown", "")


SECRET = """
master_key private_key pkey api_key apikey sse_customer_key encryption_key conn_str connection_string
bearer jwt pwd cookies session account_key access_key key secret
sasl_password dsn conninfo
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_settings_that_are_secret_by_name(name: str) -> None:
    assert repr(Settings({name: "hush"})) == f"{name}=<secret>"


OPEN = """
access_key_id key_name keyspace ssl_keyfile sslkey keepalives session_timeout user connect_timeout
port
"""


@pytest.mark.parametrize("name", OPEN.split())
def test_settings_that_are_not(name: str) -> None:
    assert repr(Settings({name: "x"})) == f"{name}='x'"


def test_a_place_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE_HERE", "https://me:hush@host/data")
    place = pickle.loads(pickle.dumps(Place(Env("PLACE_HERE"))))
    assert (repr(place), place.url) == ("Env('PLACE_HERE')", "https://me:hush@host/data")


class Opened:
    """Connections that know who opened and who closed them."""

    def __init__(self, shared: bool) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.connections: Connections[int] = Connections(self.open, self.closed.append, shared)

    def open(self) -> int:
        self.opened.append(os.getpid())
        return len(self.opened)


def test_connections_are_used_again_and_never_by_two() -> None:
    made = Opened(shared=False)
    inside, lock, most = [0], threading.Lock(), [0]

    def use(_: int) -> None:
        with made.connections.lease():
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            threading.Event().wait(0.002)
            with lock:
                inside[0] -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(40)))
    assert len(made.opened) == most[0] <= 4
    made.connections.close()
    assert len(made.closed) == len(made.opened)


@pytest.mark.parametrize("shared", [False, True])
def test_a_broken_connection_is_not_used_again(shared: bool) -> None:
    made = Opened(shared)
    with made.connections.lease() as first:
        pass
    with pytest.raises(LookupError), made.connections.lease():
        raise LookupError
    with made.connections.lease() as second:
        assert second == first
    with pytest.raises(OSError, match="gone"), made.connections.lease():
        raise OSError("gone")
    with made.connections.lease() as third:
        assert third == first + 1


def test_a_forked_child_opens_its_own_and_closes_none_of_its_parent() -> None:
    made = Opened(shared=True)
    with made.connections.lease():
        pass
    child = os.fork()
    if not child:
        status = 1
        try:
            made.connections.close()
            with made.connections.lease() as number:
                status = 0 if number == 2 and not made.closed else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with made.connections.lease() as number:
        assert number == 1


def test_a_pickled_source_takes_nothing_along() -> None:
    source: Any = Flaky(0, OSError, Retry())
    again = pickle.loads(pickle.dumps(source))
    assert again.subset(["c"])[0] == "C"
