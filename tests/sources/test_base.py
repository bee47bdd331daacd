"""Settings, tries and connections, without any server."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import numpy as np
import pytest
import torch

import minato
from minato.sources.base import (
    BatchedSource,
    KeyedSource,
    MissingKey,
    Retry,
    SourceError,
    TruncatedObject,
)
from minato.sources.connections import Connections, Env, Place, Settings, shown_text, shown_url
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


def database(path: Path, *statements: str) -> Path:
    """A file of SQLite in which these were executed."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


class Kept(BatchedSource):
    """Takes the keys of a list only, and none that merely equal them."""

    keys_of_all = (7, 3, "a", UUID(int=1), ("b", 0, 4))

    def read_value(self, key: object) -> str:
        if (type(key), key) not in [(type(each), each) for each in self.keys_of_all]:
            raise LookupError(key)
        return repr(key)

    def read_values(self, keys: list[object]) -> list[str]:
        return list(map(self.read_value, keys))

    def list_keys(self) -> tuple[object, ...]:
        return self.keys_of_all


def containers() -> list[Any]:
    """The keys 3 and 7, and others."""
    pd = pytest.importorskip("pandas")
    numbers = np.array([3, 7])
    of_numpy = [numbers, numbers.astype(np.int16), list(numbers), tuple(numbers)]
    of_pandas = [pd.Series(numbers, index=[5, 1]), pd.Index(numbers)]
    others = [torch.tensor(numbers), iter([3, 7]), range(3, 8, 4), minato.share([3, 7])]
    return [*of_numpy, *of_pandas, *others]


@pytest.mark.parametrize("number", range(10))
def test_keys_may_be_in_any_container(number: int) -> None:
    keys = containers()[number]
    source = Kept(keys)
    again = Kept().subset(containers()[number])
    for each in (source, again):
        assert len(each) == 2
        assert [each[0], each[1], each.get(each.keys[1])] == ["3", "7", "7"]
        assert each.__getitems__([1, 0]) == ["7", "3"]
        assert each.__getitems__([]) == []
    if isinstance(keys, (np.ndarray, Sequence)):
        assert source.keys is keys  # a copy may be large


def test_keys_stay_what_they_are() -> None:
    assert [Kept()[i] for i in range(5)] == [*map(repr, Kept.keys_of_all)]
    assert Kept(np.array(["a"]))[0] == "'a'"
    assert Kept(np.array([["b", 0, 4]], object))[0] == "('b', 0, 4)"
    for wrong in ({3: 0}, {3}, 3):
        for make in (Kept, Kept().subset):
            with pytest.raises(TypeError, match=r"keys is a \w+.*: give a list with one item for"):
                make(wrong)


class ReadTimeout(Exception):
    """As those of httpx and requests, which are none of Python's."""


@pytest.mark.parametrize("error", [ConnectionError, ReadTimeout])
def test_what_passes_is_tried_again_and_counted(error: type[Exception]) -> None:
    source = Flaky(3, error, Retry(attempts=4, first_s=0.001))
    assert [source[0], source[1]] == ["A", "B"]
    assert source.retries == 6


@pytest.mark.parametrize("retry", [3, Retry])
def test_attempts_are_a_retry(retry: Any) -> None:
    for make in (lambda: Flaky(3, OSError, retry), lambda: minato.ShardedDataset(retry=retry)):
        with pytest.raises(TypeError, match=r"retry=.* is a \w+: give a Retry, such as"):
            make()


@pytest.mark.parametrize(
    ("retry", "tries"),
    [(Retry(attempts=3, first_s=0.001), 3), (Retry(attempts=9, first_s=0.5, deadline_s=0.01), 1)],
)
def test_tries_end(retry: Retry, tries: int) -> None:
    source = Flaky(100, TimeoutError, retry)
    with pytest.raises(SourceError, match=r"^Flaky\(\) cannot read key 'a' after .* not now$"):
        source[0]
    assert 100 - source.left == tries


def test_the_first_attempt_counts_in_the_deadline() -> None:
    pauses = Retry(first_s=0.0, deadline_s=0.01).pauses()
    time.sleep(0.02)
    assert list(pauses) == []


class Partial(MissingKey):
    """Has a constructor of its own."""

    def __init__(self, *, part: str) -> None:
        super().__init__(f"{part} is not there")


@pytest.mark.parametrize(
    "error",
    [MissingKey("row 3"), TruncatedObject("row 3"), SourceError("row 3"), Partial(part="row 3")],
)
def test_errors_of_a_part_keep_their_types_and_name_the_key(error: SourceError) -> None:
    class Parts(Kept):
        def read_value(self, key: object) -> str:
            raise error from OSError("the cause")

    with pytest.raises(type(error), match=r"cannot read key 'a': row 3") as raised:
        Parts().get("a")
    assert type(raised.value) is type(error)
    assert str(raised.value.__cause__) == "the cause"


def test_what_does_not_pass_is_not_tried_again() -> None:
    source = Flaky(1, ValueError, Retry())
    with pytest.raises(SourceError, match=r"cannot read key 'a': ValueError: not now"):
        source[0]
    assert source.retries == 0
    with pytest.raises(MissingKey, match=r"Flaky\(\) has no key 'a'"):
        Flaky(1, KeyError, Retry())[0]


def test_what_only_looks_as_if_it_might_pass(tmp_path: Path) -> None:
    path = database(tmp_path / "empty.db")
    with closing(SQLite(path, "samples")) as source:
        with pytest.raises(
            SourceError, match=r"cannot read key 3: OperationalError: no such table"
        ):
            source.get(3)
        database(
            path,
            "CREATE TABLE samples (id INTEGER PRIMARY KEY, text TEXT)",
            "INSERT INTO samples VALUES (3, CAST(x'ff' AS TEXT))",
        )
        with pytest.raises(SourceError, match=r"cannot read key 3: .* Could not decode to UTF-8"):
            source.get(3)
        with pytest.raises(SourceError, match=r"no such column: samples.name: key= names the col"):
            len(SQLite(path, "samples", "name"))
        assert source.retries == 0


@pytest.mark.parametrize("name", ["a?b#c%41.db", "\udcff é.db"])
def test_sqlite_opens_files_of_any_name(name: str, tmp_path: Path) -> None:
    path = database(
        tmp_path / name, "CREATE TABLE t (id INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1)"
    )
    for each in (path, f"/{path}"):
        with closing(SQLite(each, "t")) as source:
            assert source.keys == [1]


def test_sqlite_takes_names_in_any_case_and_answers_with_those_asked_for(tmp_path: Path) -> None:
    path = database(
        tmp_path / "a.db",
        'CREATE TABLE t (id INTEGER PRIMARY KEY, Label INT, "É" INT, "é" INT)',
        "INSERT INTO t VALUES (1, 2, 3, 4)",
    )
    rest = {"Label": 2, "É": 3, "é": 4}
    for key in ("id", "ID", "rowid"):
        for columns, expected in (
            (None, rest if key != "rowid" else {"id": 1, **rest}),
            (["label"], {"label": 2}),
            (["LABEL", "É", key], {"LABEL": 2, "É": 3, key: 1}),
            (["iD"], {"iD": 1}),
        ):
            with closing(SQLite(path, "T", key, columns)) as source:
                assert source.keys == [1]
                assert source[0] == expected
    with closing(SQLite(path, "t", "é")) as source:
        assert source[0] == {"id": 1, "Label": 2, "É": 3}


def test_pauses_double_up_to_a_bound() -> None:
    pauses = list(Retry(attempts=8, first_s=1.0, longest_s=8.0, deadline_s=1e9).pauses())
    bounds = [1, 2, 4, 8, 8, 8, 8]
    assert len(pauses) == len(bounds)
    assert all(b / 2 <= pause <= b for pause, b in zip(pauses, bounds, strict=True))
    assert len(list(Retry(attempts=3000, first_s=1e-9, longest_s=1e-9).pauses())) == 2999
    with pytest.raises(ValueError, match="attempts=0 is too small"):
        Retry(attempts=0)
    with pytest.raises(ValueError, match="longest_s=-1 is not possible: give 0 seconds or more"):
        Retry(longest_s=-1)


def test_settings_keep_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    token = Env("TOKEN_HERE")
    settings = Settings({"user": "me", "password": "hush", "session_token": token})
    assert repr(settings) == "user='me', password=<secret>, session_token=Env('TOKEN_HERE')"
    monkeypatch.setenv("TOKEN_HERE", "t")
    assert settings.values()["password"] == "hush"
    assert settings.values()["session_token"] == "t"
    with pytest.raises(TypeError, match="'password' is a secret and is not pickled"):
        pickle.dumps(settings)
    assert copy.deepcopy(settings).values() == settings.values()  # as readers of a stream do
    again = pickle.loads(pickle.dumps(Settings({"password": token})))
    assert again.values() == {"password": "t"}
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
        ("zip://a@b::sftp://me:hush@host/a.zip", "zip://a@b::sftp://me@host/a.zip"),
        ("zip://*::https://host/a@b.zip?sig=hush", "zip://*::https://host/a@b.zip"),
        ("http://hush@[::1]:9000/box@2", "http://[::1]:9000/box@2"),
        ("https://me:hu::sh@host/data", "https://host/data"),
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
    if "://" in url:
        said = f"status 403, url='{{}}': http://elsewhere, {'x' * 1000}"
        assert shown_text(said.format(url)) == said.format(shown)
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
    words = "has a password with one of the characters"
    for url in (f"{scheme}://me:hu{letter}sh@host/data", f"{scheme}://me:h@hu{letter}sh@host"):
        for take in (Place, shown_url):
            with pytest.raises(ValueError, match=words) as told:
                take(url)
            assert "hu" not in str(told.value)
            assert shown_text(f"no {url}") == "no <secret>"
            assert "sh" not in str(told.value).replace("shown", "")


SECRET = """
master_key private_key pkey api_key apikey sse_customer_key encryption_key conn_str connection_string
bearer jwt pwd cookies session account_key access_key key secret
sasl_password dsn conninfo
"""
OPEN = """
access_key_id key_name keyspace ssl_keyfile sslkey keepalives session_timeout user connect_timeout
port
"""


def test_settings_that_are_secret_by_name() -> None:
    for name in SECRET.split():
        assert repr(Settings({name: "hush"})) == f"{name}=<secret>"
    for name in OPEN.split():
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
    used: set[int] = set()

    def use(_: int) -> None:
        with made.connections.lease() as number:
            assert number not in used
            used.add(number)
            time.sleep(0.002)
            used.remove(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(40)))
    assert 1 <= len(made.opened) <= 4
    made.connections.close()
    assert len(made.closed) == len(made.opened)


@pytest.mark.parametrize("shared", [False, True])
def test_a_broken_connection_is_not_used_again(shared: bool) -> None:
    lease, numbers = Opened(shared).connections.lease, []
    for error in (None, LookupError, None, OSError, None):
        with nullcontext() if error is None else pytest.raises(error), lease() as number:
            numbers.append(number)
            if error is not None:
                raise error
    assert numbers == [1, 1, 1, 1, 2]


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


def test_a_misspelt_argument_is_no_setting_of_local_files(tmp_path: Path) -> None:
    """It would be taken for one, and have no effect: no seed, no function that decodes."""
    for package in ("obstore", "fsspec"):
        pytest.importorskip(package, reason=f"{package} is not installed: install the extra 'test'")
    from minato.sources.files import Files
    from minato.sources.objects import Objects
    from minato.sources.tars import TarShards

    makes: list[Any] = [Files, Objects]
    for make, place in itertools.product(makes, (str(tmp_path), f"file://{tmp_path}")):
        with pytest.raises(TypeError, match="no argument 'decod', .* did you mean 'decode'"):
            make(place, decod=str)
    with pytest.raises(TypeError, match="TarShards has no argument 'sead', .* mean 'seed'"):
        TarShards([tmp_path / "a.tar"], sead=1)
    TarShards(["s3://box/a.tar", "simplecache::file://a.tar"], key="k")


def test_one_text_in_place_of_several_is_refused() -> None:
    """Its letters would be taken for names of columns, files or keys."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: install the extra 'test'")
    pytest.importorskip("datasets", reason="datasets is not installed: install the extra 'test'")
    from minato.sources.hugging_face import HuggingFaceShards
    from minato.sources.parquet import Parquet, ParquetShards, ParquetStream

    one: Any = "ab"
    for make in (Parquet, ParquetShards, ParquetStream):
        with pytest.raises(TypeError, match="columns='ab' is one: give a list"):
            make("x.parquet", columns=one)
    for option in ("columns", "keys"):
        with pytest.raises(TypeError, match=f"{option}='ab' is one: give a list"):
            SQLite("x.db", "samples", **{option: one})
    with pytest.raises(TypeError, match=r"is one: give a list, as sorted\(glob\.glob\('\*'\)\)$"):
        HuggingFaceShards("json", cast(Any, "*"))
    with pytest.raises(TypeError, match="keys='ab' is one: give a list"):
        SQLite("x.db", "samples").subset(one)
    with pytest.raises(TypeError, match="files='ab' is one: give a list"):
        HuggingFaceShards("json", one)
