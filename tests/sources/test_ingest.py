"""Ingesting into every store, killed in the middle and begun again, and what was written read by the sources."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.cli.main import main
from minato.errors import MinatoError
from minato.sources.base import SourceError
from minato.sources.ingest import Completed, IngestError, Journal, JournalError, ingest
from minato.sources.sql import SQLite
from minato.sources.stores import (
    CassandraStore,
    ObjectStore,
    PostgresStore,
    RedisStore,
    Store,
    UnknownStore,
    open_store,
)
from tests.sources.kinds import Kind

ROOT = Path(minato.__file__).parents[1]
COUNT = 50


COLUMNS = {"x": bytes, "label": int}


class Numbers(torch.utils.data.Dataset):
    """Rows of two columns."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full((2, 3), index, np.float32).tobytes(), "label": index}


def packed(row: dict[str, Any]) -> bytes:
    """A row as a value of bytes."""
    return bytes([row["label"]]) + row["x"]


class Target:
    """A store, and the source over what was written into it, whose samples are values or rows."""

    def __init__(self, store: Any, source: Callable[[], Any], worker_method: str = "process"):
        self.store, self.source, self.worker_method = store, source, worker_method
        self.encode = packed if store.columns == {"data": bytes} else None


def sqlite(folder: Path, _: Any) -> Target:
    store = open_store(f"sqlite:{folder / 'samples.db'}", columns=COLUMNS)
    return Target(store, lambda: SQLite(folder / "samples.db", "samples"))


def lmdb(folder: Path, _: Any) -> Target:
    from minato.sources.lmdb import LMDB

    return Target(open_store(f"lmdb:{folder / 'lmdb'}"), lambda: LMDB(folder / "lmdb"))


def parquet(folder: Path, _: Any) -> Target:
    from minato.sources.parquet import Parquet

    store = open_store(f"parquet:{folder / 'rows'}", columns=COLUMNS)
    return Target(store, lambda: Parquet(str(folder / "rows"), columns=["x", "label"]))


def files(folder: Path, _: Any) -> Target:
    from minato.sources.objects import Objects

    url = f"file://{folder / 'objects'}"
    return Target(open_store(url), lambda: Objects(url), "thread")


def tar(folder: Path, _: Any) -> Target:
    from minato.sources.objects import Objects, tar_members

    url = f"file://{folder / 'shards'}"

    def source() -> Any:
        shards = Objects(url)
        parts = [part for name in shards.keys for part in tar_members(shards, name).values()]
        return shards.subset(parts)

    return Target(open_store(f"tar+{url}"), source, "thread")


def redis(_: Path, kind_named: Callable[[str], Kind]) -> Target:
    given = kind_named("redis").source()
    again = partial(type(given), given.place.url, "ingested/", **given.settings.values())
    return Target(RedisStore(again()), again)


def postgres(_: Path, kind_named: Callable[[str], Kind]) -> Target:
    from minato.sources.postgres import Postgres

    again = partial(Postgres, "", "ingested", **kind_named("postgres").source().settings.values())
    return Target(PostgresStore(again(), COLUMNS), again)


def cassandra(_: Path, kind_named: Callable[[str], Kind]) -> Target:
    from minato.sources.cassandra import Cassandra

    settings = kind_named("cassandra").source().settings.values()
    again = partial(Cassandra, ["127.0.0.1"], "minato.ingested", **settings)
    return Target(CassandraStore(again(), COLUMNS), again)


def s3(_: Path, kind_named: Callable[[str], Kind]) -> Target:
    given = kind_named("s3").source()
    settings = {"client_options": given.client_options.values(), **given.settings.values()}
    again = partial(type(given), "s3://minato/ingested", **settings)
    return Target(ObjectStore(again()), again, "thread")


TARGETS = {make.__name__: make for make in (sqlite, lmdb, parquet, files, tar)}
TARGETS |= {make.__name__: make for make in (redis, postgres, cassandra, s3)}


@pytest.fixture(params=TARGETS)
def target(
    request: pytest.FixtureRequest, tmp_path: Path, kind_named: Callable[[str], Kind]
) -> Target:
    try:
        return TARGETS[request.param](tmp_path, kind_named)
    except (ImportError, UnknownStore) as error:
        pytest.skip(str(error))


def labels(source: Any) -> list[int]:
    found = []
    for index in range(len(source)):
        row = source[index]
        if isinstance(row, bytes):
            row = {"label": row[0], "x": row[1:]}
        found.append(int(row["label"]))
        assert row == Numbers()[found[-1]]
    return found


def test_every_store_holds_each_sample_once(target: Target, tmp_path: Path) -> None:
    given: Any = {
        "workers": 2,
        "chunk_samples": 8,
        "journal": tmp_path / "journal",
        "verify": True,
        "worker_method": target.worker_method,
        "encode": target.encode,
    }
    done = ingest(Numbers(), target.store, **given)
    assert (done.samples, done.written, done.verified) == (COUNT, COUNT, COUNT)
    assert done.stored_bytes > COUNT * 24
    again = ingest(Numbers(), target.store, **given)
    assert (again.samples, again.written, again.verified) == (COUNT, 0, COUNT)
    # The journal was lost: all is written again, to the same places.
    (tmp_path / "journal").unlink()
    assert ingest(Numbers(), target.store, **given).written == COUNT
    source = target.source()
    assert labels(source) == list(range(COUNT))
    if hasattr(source, "close"):
        source.close()


def generated(count: int) -> Iterator[dict[str, Any]]:
    return (Numbers()[index] for index in range(count))


def test_an_iterable_goes_on_where_it_stopped(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path}/samples.db", columns=COLUMNS)
    given: Any = {"chunk_samples": 4, "workers": 3, "journal": tmp_path / "journal"}

    def breaking() -> Iterator[dict[str, Any]]:
        yield from generated(22)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        ingest(breaking(), store, **given)
    done = ingest(generated(30), store, **given, verify=True)
    assert (done.samples, done.verified) == (30, 30)
    assert 10 <= done.written < 30
    assert labels(SQLite(tmp_path / "samples.db", "samples")) == list(range(30))


PROGRAM = """
import os, time
class Slow:
    def __len__(self):
        return 120
    def __getitem__(self, index):
        if index >= 60 and not os.path.exists("again"):
            time.sleep(600)  # until it is killed
        with open("read", "a") as file:
            file.write(f"{index} ")
        return b"%d" % index
"""


@pytest.mark.slow
def test_killed_in_the_middle_and_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(PROGRAM)
    arguments = ["ingest", "slow.py:Slow", "sqlite:samples.db", "--journal", "journal"]
    arguments += ["--workers", "2", "--chunk", "5"]
    journal = tmp_path / "journal"
    first = subprocess.Popen(
        [sys.executable, "-m", "minato", *arguments],
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    while not journal.exists() or len(journal.read_text().splitlines()) < 6:
        assert first.poll() is None
        time.sleep(0.01)
    first.kill()
    first.wait()
    noted = len(journal.read_text().splitlines()) - 1
    assert noted < 24
    with Journal(journal, json.loads(journal.read_text().splitlines()[0])):
        pass  # its workers have ended
    (tmp_path / "read").unlink()
    (tmp_path / "again").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([*arguments, "--verify"]) == 0
    told = capsys.readouterr().out
    assert "120 samples" in told
    assert f"{120 - 5 * noted} written by this run, 120 verified" in told
    assert len((tmp_path / "read").read_text().split()) == 120 - 5 * noted
    connection = sqlite3.connect(tmp_path / "samples.db")
    rows = connection.execute("SELECT id, data FROM samples").fetchall()
    connection.close()
    assert sorted(rows) == [(index, b"%d" % index) for index in range(120)]
    sys.modules.pop("slow")


def test_a_folder_by_its_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat/1.txt", "cat/2.txt", "dog/1.txt", ".hidden/3.txt"):
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    place = f"sqlite:{tmp_path / 'samples.db'}"
    arguments = [str(tmp_path / "files"), place, "--table", "pets", "--workers", "1", "--verify"]
    arguments += ["--columns", "data:bytes,label:str"]
    assert main(["ingest", *arguments, "--journal", str(tmp_path / "journal")]) == 0
    told = capsys.readouterr()
    assert "3 samples, 0.0 MB, 3 written by this run, 3 verified" in told.out
    assert told.err == "\rwriting: 3/3 samples\rverifying: 3/3 samples\n"
    source = SQLite(tmp_path / "samples.db", "pets")
    assert source.keys == ["cat/1.txt", "cat/2.txt", "dog/1.txt"]
    assert source.get("dog/1.txt") == {"data": b"dog/1.txt", "label": "dog"}
    copied = open_store(f"sqlite:{tmp_path}/copy.db", columns={"label": str, "data": bytes})
    source.close()
    ingest(source, copied, workers=1, journal=tmp_path / "other")
    assert SQLite(tmp_path / "copy.db", "samples").keys == source.keys


def test_keys_of_every_kind() -> None:
    for needed in ("lmdb", "obstore"):
        pytest.importorskip(needed)
    rows, values = open_store("sqlite:a.db"), open_store("file:///folder")
    given = [3, np.int64(3), "a/b", b"c", uuid.UUID(int=5)]
    assert [rows.key(key) for key in given] == [3, 3, "a/b", b"c", str(uuid.UUID(int=5))]
    assert all(type(rows.key(key)) in (int, str, bytes) for key in given)
    expected = ["00000003", "00000003", "a/b", "c", str(uuid.UUID(int=5))]
    assert [values.key(key) for key in given] == expected
    assert open_store("lmdb:a").key(3) == b"00000003"


def test_what_went_wrong_in_the_store_is_found(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path}/samples.db", columns=COLUMNS)
    given: Any = {"chunk_samples": 10, "workers": 1, "journal": tmp_path / "journal"}
    ingest(Numbers(), store, **given)
    with sqlite3.connect(tmp_path / "samples.db") as connection:
        connection.execute("UPDATE samples SET label = 0 WHERE id IN (23, 31)")
    connection.close()
    with pytest.raises(IngestError, match=r"what was written: (23, 31|31, 23);"):
        ingest(Numbers(), store, **given, verify=True)
    (tmp_path / "samples.db").unlink()
    with pytest.raises(IngestError, match="to start again"):
        ingest(Numbers(), store, **given)


class Refusing(Store):
    def __init__(self) -> None:
        super().__init__(SQLite("nowhere.db", "samples"))

    def write(self, chunk: int, rows: Any) -> None:
        raise SourceError(f"no room for {rows[0][0]}")

    def read(self, chunk: int, keys: Any) -> list[Any]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["process", "thread"])
def test_errors_name_keys_and_stop(tmp_path: Path, method: str) -> None:
    given: Any = {"worker_method": method, "workers": 1, "chunk_samples": 4}
    with pytest.raises(SourceError, match="no room for 00000000"):
        ingest([b""], Refusing(), journal=tmp_path / "a", **given)
    place = f"sqlite:{tmp_path}/b.db"
    with pytest.raises(SourceError, match=r"key 0, column 'data': \{1\} is a set, and the"):
        ingest([{1}], open_store(place), journal=tmp_path / "b", **given)
    with pytest.raises(MinatoError, match="key 1 cannot be encoded: KeyError"):
        mixed = [{"a": 1}, {"b": 2}]
        ingest(mixed, open_store(place), encode=first_of, journal=tmp_path / "c", **given)
    with pytest.raises(
        SourceError, match=r"key 1 has the columns \['b'\], and the store has a:int"
    ):
        store = open_store(place, "others", columns={"a": int})
        ingest(mixed, store, journal=tmp_path / "d", **given)
    with pytest.raises(SourceError, match="gone/a.db.*cannot create its table or directory: Oper"):
        ingest([b""], open_store(f"sqlite:{tmp_path}/gone/a.db"), journal=tmp_path / "e", **given)


def first_of(row: dict[str, Any]) -> bytes:
    return b"%d" % row["a"]


def test_a_journal_of_another_or_of_two_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    about = {"what": "this", "chunk_samples": 2, "samples": None}
    with Journal(path, about) as journal:
        journal.add(Completed(3, 10, [1, 2]))
        with pytest.raises(JournalError, match="another ingest is writing"):
            Journal(path, about, patience_s=0.1)
    with path.open("a") as file:
        file.write("[4, 10, [1,")  # killed while it wrote
    with Journal(path, about) as journal:
        assert journal.done == {3: Completed(3, 10, [1, 2])}
        journal.add(Completed(4, 11, []))
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [
        [3, 10, [1, 2]],
        [4, 11, []],
    ]
    with pytest.raises(JournalError, match="is about something else"):
        Journal(path, {**about, "what": "another"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "sqlite:a.db"], "there is no directory 'nowhere'"),
        ([".", "mysql://host"], "names no store"),
        ([".", "samples.db"], "names no store"),
        ([".", "sqlite:a.db", "--columns", "a:list"], "--columns 'a:list' is no NAME:TYPE"),
        (
            [".", "sqlite:a.db", "--columns", "id:int"],
            "the column 'id' of type <class 'int'> is not",
        ),
        ([".", "lmdb:a", "--columns", "a:int"], "has no columns, but values of bytes"),
        ([".", "sqlite:a.db", "--workers", "0"], "--workers 0 is too few"),
        (["slow.py:nothing", "sqlite:a.db"], "has no function 'nothing'"),
        (["slow.py:number", "sqlite:a.db"], "let it return a dataset or an iterable"),
        ([".", "cassandra://host", "--table", "rows"], "has no keyspace"),
    ],
)
def test_the_command_refuses(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "slow.py").write_text("def number():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["ingest", *arguments]) == 2
    assert message in capsys.readouterr().err
    sys.modules.pop("slow", None)


def test_the_command_tells_what_stopped_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("def make():\n    return [b'1', {2}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["ingest", "broken.py:make", "sqlite:a.db", "--chunk", "1"]) == 1
    told = capsys.readouterr().err
    assert "key 1, column 'data': {2} is a set, and the column is declared as bytes" in told
    assert "the same command resumes there" in told
    sys.modules.pop("broken")


def test_what_was_ingested_can_be_loaded(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path}/a.db", columns=COLUMNS)
    ingest(Numbers(20), store, workers=1, journal=tmp_path / "journal")
    source = SQLite(tmp_path / "a.db", "samples", decode=as_array)
    batches = list(minato.DataLoader(source, batch_size=5, num_workers=1))
    assert torch.cat([batch["label"] for batch in batches]).tolist() == list(range(20))
    assert batches[0]["x"].shape == (5, 2, 3)
    source.close()


def as_array(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": np.frombuffer(row["x"], np.float32).reshape(2, 3)}


@pytest.mark.parametrize("number", [0, 1])
def test_links_out_of_a_folder_are_refused(number: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"not yours")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"a")
    (folder / "b").symlink_to(folder / "a")  # inside: a sample like others
    link = [folder / "c", folder / "sub" / "c"][number]
    store = open_store(f"sqlite:{tmp_path / 'samples.db'}")
    assert ingest(folder, store, workers=1, journal=tmp_path / "one").samples == 2
    link.symlink_to("../secret" if number == 0 else "../../secret")
    with pytest.raises(ValueError, match=r"folder/.*c' is a link out of the directory"):
        ingest(folder, store, workers=1, journal=tmp_path / "two")


NAMES = ["image.png", "50%", "100%s", 'a"b', "%(x)s", "a.b.c", "; DROP TABLE samples"]


TYPES = dict.fromkeys(NAMES, str)


def postgres_table(_: Path, kind_named: Callable[[str], Kind]) -> tuple[Any, Callable[..., Any]]:
    from minato.sources.postgres import Postgres

    settings = kind_named("postgres").source().settings.values()
    source = partial(Postgres, "", "any%names", "id", **settings)
    return PostgresStore(source(), TYPES), source


def sqlite_table(tmp_path: Path, _: Any) -> tuple[Any, Callable[..., Any]]:
    path = tmp_path / "samples.db"
    return open_store(f"sqlite:{path}", columns=TYPES), partial(SQLite, path, "samples", "id")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_columns_of_any_name(kind: str, tmp_path: Path, kind_named: Callable[[str], Kind]) -> None:
    tables = {"sqlite": sqlite_table, "postgres": postgres_table}
    store, source_of = tables[kind](tmp_path, kind_named)
    rows = [{name: f"{name} {number}" for name in NAMES} for number in range(3)]
    done = ingest(rows, store, workers=1, journal=tmp_path / "journal", verify=True)
    assert done.verified == 3
    for columns in (None, NAMES):
        source = source_of(columns=columns)
        assert len(source) == 3
        assert [source[number] for number in range(3)] == rows
        if hasattr(source, "__getitems__"):
            assert source.__getitems__([2, 0]) == [rows[2], rows[0]]
        source.close()
