"""Values that stores keep: what comes back equals what went in, or it was refused with its key and column."""

from __future__ import annotations

import itertools
import operator
import random
import re
import sqlite3
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato.errors import MinatoError
from minato.sources.base import SourceError
from minato.sources.ingest import ingest
from minato.sources.sql import SQLite
from minato.sources.stores import PostgresStore, RedisStore, Store, open_store
from tests.sources.conftest import kind_named  # noqa: F401  (a fixture)
from tests.sources.kinds import Kind


class Text(str):
    """Another type than ``str``, which is equal to it."""


TYPES = (bool, int, float, str, bytes)
CELLS: list[Any] = [
    None,
    True,
    False,
    0,
    7,
    -1,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**63,
    2**70,
    0.0,
    -0.0,
    1.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    5e-324,
    1e300,
    complex(1, -0.0),
    "",
    "007",
    "7",
    "text",
    Text("text"),
    "caf\u00e9",
    "cafe\u0301",
    "\ud800",
    "\ud83d\ude00",
    "a\0b",
    b"",
    b"\0\1",
    b"PK\x05\x06" + bytes(18),
    b"\x93NUMPY\x01\x00",
    bytearray(b"ab"),
    memoryview(b"ab"),
    np.int64(3),
    np.float64("nan"),
    np.bool_(True),
    np.str_("n"),
    np.bytes_(b"n\0"),
    np.arange(3),
    torch.tensor(3),
    {"a": 1},
    [1],
    (1, 2),
    object(),
]
REFUSED_BY_ALL = ["\ud800", "\ud83d\ude00", "a\0b", 2**63, 2**70]
REFUSED_BY_SQLITE = [True, False, float("nan")]


def is_in(value: Any, values: list[Any]) -> bool:
    return any(type(each) is type(value) and repr(each) == repr(value) for each in values)


def fits(value: Any, kind: type, store: str) -> bool:
    """Whether a column of this type holds a value as it is."""
    if value is None:
        return True
    refused = [*REFUSED_BY_ALL, *(REFUSED_BY_SQLITE if store == "sqlite" else [])]
    return type(value) is kind and not is_in(value, refused)


# ---- stores ---------------------------------------------------------------------------------

Read = Callable[[int], Any]


def sqlite(folder: Path) -> tuple[str, Read]:
    return f"sqlite:{folder}/a.db", lambda number: SQLite(f"{folder}/a.db", "samples").get(number)


def lmdb(folder: Path) -> tuple[str, Read]:
    from minato.sources.lmdb import LMDB

    return f"lmdb:{folder}/lmdb", lambda number: LMDB(folder / "lmdb")[number]


def parquet(folder: Path) -> tuple[str, Read]:
    import pyarrow.parquet as pq

    def read(number: int) -> Any:
        (row,) = (row for row in pq.read_table(f"{folder}/rows").to_pylist() if row["id"] == number)
        return {name: cell for name, cell in row.items() if name != "id"}

    return f"parquet:{folder}/rows", read


def files(folder: Path) -> tuple[str, Read]:
    from minato.sources.objects import Objects

    url = f"file://{folder}/objects"
    return url, lambda number: Objects(url).get(f"{number:08d}")


def tar(folder: Path) -> tuple[str, Read]:
    from minato.sources.objects import Objects, tar_members

    def read(number: int) -> Any:
        shards = Objects(f"file://{folder}/shards")
        parts = [tar_members(shards, name) for name in shards.keys]
        (found,) = [part[f"{number:08d}"] for part in parts if f"{number:08d}" in part]
        return shards.get(found)

    return f"tar+file://{folder}/shards", read


STORES = {make.__name__: make for make in (sqlite, parquet, lmdb, files, tar)}
TABLES = ["sqlite", "parquet"]


def check(
    store: Store, read: Read, samples: list[Any], journal: Path, chunk_samples: int = 8
) -> bool:
    """Whether a store takes samples; it must then hold them as they are, and else say which it does not take."""
    told = ""
    try:
        ingest(iter(samples), store, workers=1, chunk_samples=chunk_samples, journal=journal)
    except (MinatoError, ValueError) as error:
        told = str(error)
    if told:
        numbers = range(len(samples))
        assert re.search(rf"keys? b?'?0*{list(numbers)}".replace(", ", ""), told), told
        assert "column" in told or "UNIQUE" in told or "in the table" in told, told
        return False
    for number, sample in enumerate(samples):
        found = read(number)
        assert repr(found) == repr(sample)  # nan is nan, and 0.0 is not -0.0
        assert type(found) is type(sample)
    return True


def check_cells(store: str, tmp_path: Path, cells: list[Any]) -> None:
    kinds: tuple[type, ...] = TYPES if store in TABLES else (bytes,)
    for number, (value, kind) in enumerate(itertools.product(cells, kinds)):
        folder = tmp_path / str(number)
        folder.mkdir()
        url, read = STORES[store](folder)
        if store in TABLES:
            opened = open_store(url, columns={"a": kind, "b": int})
            taken = check(opened, read, [{"a": value, "b": 1}], folder / "journal")
            assert taken == fits(value, kind, store), (value, kind)
        else:
            taken = check(open_store(url), read, [value], folder / "journal")
            assert taken == (type(value) is bytes), value


@pytest.mark.parametrize("store", STORES)
def test_values_come_back_or_are_refused(store: str, tmp_path: Path) -> None:
    check_cells(store, tmp_path, CELLS[:: 3 if store in TABLES else 1])


@pytest.mark.slow
@pytest.mark.parametrize("store", TABLES)
def test_all_values_come_back_or_are_refused(store: str, tmp_path: Path) -> None:
    check_cells(store, tmp_path, CELLS)


def pairs(count: int) -> list[tuple[Any, Any]]:
    plain = [cell for cell in CELLS if type(cell) in TYPES or cell is None]
    return random.Random(5).sample(list(itertools.permutations(plain, 2)), count)


def check_pairs(store: str, tmp_path: Path, count: int, table: str | None = None) -> None:
    """Check two values of one column, in one chunk and in two; in a table of the user's, if one is given."""
    for number, (one, other) in enumerate(pairs(count)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if table is not None:
            with sqlite3.connect(folder / "a.db") as connection:
                connection.execute(table)
            connection.close()
        url, read = STORES[store](folder)
        kind = bytes if one is None else type(one)
        samples = [{"a": one, "b": "x"}, {"a": other, "b": "x"}]
        opened = open_store(url, columns={"a": kind, "b": str})
        taken = check(opened, read, samples, folder / "journal", 1 + number % 2)
        if table is None:
            assert taken == (fits(one, kind, store) and fits(other, kind, store))


@pytest.mark.parametrize("store", TABLES)
def test_neighbours_in_a_column_change_nothing(store: str, tmp_path: Path) -> None:
    check_pairs(store, tmp_path, 24)


@pytest.mark.slow
@pytest.mark.parametrize("store", TABLES)
def test_many_neighbours_in_a_column_change_nothing(store: str, tmp_path: Path) -> None:
    check_pairs(store, tmp_path, 300)


@pytest.mark.parametrize(
    "columns",
    [
        "id INTEGER PRIMARY KEY, a TEXT, b TEXT",
        "id INTEGER PRIMARY KEY, a REAL, b TEXT",
        "id INTEGER PRIMARY KEY, a INTEGER, b TEXT",
        "id TEXT PRIMARY KEY COLLATE NOCASE, a, b TEXT",
        "id INTEGER PRIMARY KEY, a NUMERIC UNIQUE, b TEXT",
    ],
)
def test_a_table_of_the_users_changes_nothing(columns: str, tmp_path: Path) -> None:
    check_pairs("sqlite", tmp_path, 8, f"CREATE TABLE samples ({columns})")


def test_columns_of_a_store() -> None:
    for columns in ({"a": list}, {"id": int}, {"a": None}):
        with pytest.raises(ValueError, match="is not possible: declare bool, int, float, str or"):
            open_store("sqlite:a.db", columns=columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no columns, but values of bytes"):
        open_store("lmdb:a", columns={"a": bytes})


@pytest.mark.slow
def test_redis_keeps_each_value_or_refuses_it(
    tmp_path: Path,
    kind_named: Callable[[str], Kind],  # noqa: F811
) -> None:
    from minato.sources.redis import Redis

    given = kind_named("redis").source()
    for number, value in enumerate(CELLS):
        source = Redis(given.place.url, f"stored{number}/", **given.settings.values())
        taken = check(
            RedisStore(source), source.__getitem__, [value], tmp_path / f"{number}.journal"
        )
        assert taken == (type(value) is bytes)
        source.close()


@pytest.mark.slow
def test_postgres_keeps_each_value_or_refuses_it(
    tmp_path: Path,
    kind_named: Callable[[str], Kind],  # noqa: F811
) -> None:
    from minato.sources.postgres import Postgres

    settings = kind_named("postgres").source().settings.values()
    for number, value in enumerate(CELLS):
        kind = type(value) if type(value) in TYPES else bytes
        source = Postgres("", f"stored{number}", **settings)
        store = PostgresStore(source, {"a": kind, "b": int})
        samples = [{"a": value, "b": number}]
        taken = check(store, source.__getitem__, samples, tmp_path / f"{number}.journal")
        assert taken == fits(value, kind, "postgres")
        source.close()


# ---- keys -----------------------------------------------------------------------------------

KEYS: list[Any] = [
    0,
    7,
    -1,
    2**70,
    True,
    1.0,
    "0",
    "7",
    "00000007",
    "007",
    b"a",
    "a",
    "A",
    "",
    "caf\u00e9",
    "cafe\u0301",
    "a/b",
    "a//b",
    "a/",
    "/a",
    "./a",
    "..",
    "a\0b",
    "\ud800",
    b"\xff\x00",
    "x" * 600,
    np.int64(7),
    uuid.UUID(int=5),
]


class Keyed(torch.utils.data.Dataset[bytes]):
    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> bytes:
        return b"sample %d" % index


def key_source(kind: str, folder: Path) -> Any:
    if kind == "sqlite":
        return SQLite(folder / "a.db", "samples", decode=operator.itemgetter("data"))
    if kind == "lmdb":
        from minato.sources.lmdb import LMDB

        return LMDB(folder / "lmdb")
    from minato.sources.objects import Objects, tar_members

    objects = Objects(f"file://{folder}/{'objects' if kind == 'files' else 'shards'}")
    if kind == "files":
        return objects
    members = {
        name: part for shard in objects.keys for name, part in tar_members(objects, shard).items()
    }
    source = objects.subset(list(members))
    source.get = lambda key: objects.get(members[key])
    return source


def check_keys(kind: str, tmp_path: Path, chosen: list[tuple[Any, Any]]) -> None:
    taken = 0
    for number, keys in enumerate(chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        url, _ = STORES[kind](folder)
        store, told = open_store(url), ""
        try:
            done = ingest(
                Keyed(list(keys)), store, workers=1, worker_method="thread", journal=folder / "j"
            )
        except (ValueError, SourceError) as error:
            told = str(error)
        if told:
            named = (
                [str(key) for key in keys] + [repr(key) for key in keys] + ["key 1"]
            )  # True is 1
            assert any(name in told for name in named), told
            continue
        taken += 1
        source = key_source(kind, folder)
        assert done.samples == len(source) == 2
        for index, key in enumerate(keys):
            assert source.get(store.key(key)) == b"sample %d" % index
    assert taken > 0


@pytest.mark.parametrize("kind", ["sqlite", "lmdb", "files", "tar"])
def test_keys_stay_apart_or_are_refused(kind: str, tmp_path: Path) -> None:
    chosen = list(itertools.combinations(KEYS, 2))
    check_keys(kind, tmp_path, random.Random(7).sample(chosen, 12))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "lmdb", "files", "tar"])
def test_many_keys_stay_apart_or_are_refused(kind: str, tmp_path: Path) -> None:
    check_keys(kind, tmp_path, list(itertools.combinations(KEYS, 2))[::2])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a", "b", "a"], "'a' .sample 0. and 'a' .sample 2. are one key"),
        ([b"a", "a", "b"], "are one key"),
        ([1, "00000001", "b"], "are one key"),
    ],
)
def test_repeated_keys_are_refused_before_anything_is_written(
    keys: list[Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        ingest(Keyed(keys), open_store(f"file://{tmp_path}/objects"), journal=tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []


def test_other_keys_are_another_journal(tmp_path: Path) -> None:
    given: Any = {"workers": 1, "worker_method": "thread", "journal": tmp_path / "journal"}
    ingest(Keyed(["a", "b"]), open_store(f"sqlite:{tmp_path}/a.db"), **given)
    with pytest.raises(ValueError, match="is about something else"):
        ingest(Keyed(["a", "c"]), open_store(f"sqlite:{tmp_path}/a.db"), **given)


def test_keys_that_are_not_as_many_as_the_samples(tmp_path: Path) -> None:
    dataset = Keyed(["a", "b"])
    dataset.__class__ = type("Longer", (Keyed,), {"__len__": lambda _: 3})
    with pytest.raises(ValueError, match="3 samples and 2 keys"):
        ingest(dataset, open_store(f"sqlite:{tmp_path}/a.db"), journal=tmp_path / "journal")


def test_what_was_written_can_be_copied(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    from minato.sources.lmdb import LMDB

    def copy(data: Any, url: str, number: int, **how: Any) -> None:
        journal = tmp_path / f"journal{number}"
        ingest(data, open_store(url, **how), workers=1, worker_method="thread", journal=journal)

    copy(iter([b"one", b""]), f"lmdb:{tmp_path}/one", 1)
    copy(LMDB(tmp_path / "one"), f"lmdb:{tmp_path}/two", 2)
    assert [LMDB(tmp_path / "two")[i] for i in range(2)] == [b"one", b""]
    rows = [{"x": b"\0", "n": None}, {"x": b"1", "n": "é"}]
    columns = {"n": str, "x": bytes}
    copy(iter(rows), f"sqlite:{tmp_path}/one.db", 3, columns=columns)
    source = SQLite(tmp_path / "one.db", "samples")
    copy(source, f"sqlite:{tmp_path}/two.db", 4, columns=columns)
    copied = SQLite(tmp_path / "two.db", "samples")
    assert [copied[i] for i in range(2)] == rows


# ---- directories, tar files, databases ------------------------------------------------------


def directory(tmp_path: Path) -> Path:
    for name in ("data/cats/1", "elsewhere/dogs/2"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("dogs", "../elsewhere/dogs", "is a link out of the directory"),
        ("cats/up", "..", "is a link to a directory that it lies in"),
        ("cats/self", "../cats", "is a link to a directory that it lies in"),
        ("gone", "nowhere", "is no file"),
    ],
)
def test_links_in_a_directory_are_not_left_out(
    link: str, target: str, message: str, tmp_path: Path
) -> None:
    data = directory(tmp_path)
    (data / link).symlink_to(target)
    with pytest.raises(ValueError, match=message):
        ingest(data, open_store(f"sqlite:{tmp_path}/a.db"), journal=tmp_path / "journal")


def test_a_linked_directory_inside_has_its_files(tmp_path: Path) -> None:
    data = directory(tmp_path)
    (data / "felines").symlink_to("cats")
    ingest(data, open_store(f"sqlite:{tmp_path}/a.db"), workers=1, journal=tmp_path / "journal")
    source = SQLite(tmp_path / "a.db", "samples")
    assert source.keys == ["cats/1", "felines/1"]


def test_every_member_of_a_tar_file_is_read_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from minato.sources.objects import Objects, tar_members

    def packed(name: str, *members: tuple[str, Any]) -> None:
        with tarfile.open(tmp_path / name, "w") as archive:
            for member, how in members:
                info = tarfile.TarInfo(member)
                if how is not None:
                    info.type, info.linkname = how
                archive.addfile(info)

    source = Objects(f"file://{tmp_path}")
    (tmp_path / "plain").write_bytes(b"content")
    with tarfile.open(tmp_path / "linked.tar", "w") as archive:
        archive.add(tmp_path / "plain", "one")
        link = tarfile.TarInfo("two")
        link.type, link.linkname = tarfile.LNKTYPE, "one"
        archive.addfile(link)
    members = tar_members(source, "linked.tar")
    assert list(members) == ["one", "two"]
    assert source.get(members["two"]) == b"content"
    assert list(tar_members(source, "linked.tar", suffix="wo")) == ["two"]
    refused = {
        "comes twice": (("a", None), ("a", None)),
        "is a symbolic link": (("a", None), ("b", (tarfile.SYMTYPE, "a"))),
        "is a link to 'gone'": (("b", (tarfile.LNKTYPE, "gone")),),
        "or a device": (("pipe", (tarfile.FIFOTYPE, "")),),
    }
    for number, (message, members_of) in enumerate(refused.items()):
        packed(f"{number}.tar", *members_of)
        with pytest.raises(ValueError, match=message):
            tar_members(source, f"{number}.tar")
        assert tar_members(source, f"{number}.tar", suffix=".png") == {}


def test_a_sparse_file_in_a_tar_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from minato.sources.objects import Objects, tar_members

    info = tarfile.TarInfo("holes")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (1 << 20, 512)  # one piece of 512 bytes, after a hole
    header[483:495] = b"%011o\0" % ((1 << 20) + 512)  # the real size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "s.tar").write_bytes(bytes(header) + b"x" * 512 + bytes(1024))
    with pytest.raises(ValueError, match="'holes' is a sparse file"):
        tar_members(Objects(f"file://{tmp_path}"), "s.tar")


def test_lmdb_lists_what_is_a_sample(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    from minato.sources.lmdb import LMDB

    with lmdb.open(str(tmp_path / "db"), max_dbs=3, map_size=1 << 22) as environment:
        with environment.begin(write=True) as to:
            to.put(b"plain", b"value")
            to.put(b"of 48 bytes", bytes(48))
        for name, options in ((b"labels", {}), (b"several", {"dupsort": True})):
            with environment.begin(write=True, db=environment.open_db(name, **options)) as to:
                to.put(b"a", b"1")
                to.put(b"a", b"2", dupdata=True)
    assert LMDB(tmp_path / "db").keys == [b"of 48 bytes", b"plain"]
    assert LMDB(tmp_path / "db", "labels")[0] == b"2"
    with pytest.raises(SourceError, match="key b'a' has several values"):
        len(LMDB(tmp_path / "db", "several"))


def test_lmdb_is_one_file_by_any_path(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    from minato.sources.lmdb import LMDB

    environment = lmdb.open(str(tmp_path / "db"), map_size=1 << 22)
    with environment.begin(write=True) as to:
        to.put(b"key", b"value")
    environment.close()
    (tmp_path / "link").symlink_to("db")
    one, other = LMDB(tmp_path / "db"), LMDB(tmp_path / "link")
    assert (one[0], other[0]) == (b"value", b"value")
    one.close()
    assert other[0] == b"value"
    other.close()


def test_rows_of_one_key_are_not_merged_and_a_named_key_column_comes(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("CREATE TABLE goods (id INTEGER, price REAL)")
        connection.execute("INSERT INTO goods VALUES (1, 1.5), (2, 2.5), (2, 3.5)")
    connection.close()
    assert SQLite(tmp_path / "a.db", "goods").get(1) == {"price": 1.5}
    assert SQLite(tmp_path / "a.db", "goods", columns=["id", "price"]).get(1) == {
        "id": 1,
        "price": 1.5,
    }
    with pytest.raises(SourceError, match="2 rows with key 2"):
        SQLite(tmp_path / "a.db", "goods").get(2)


# ---- Parquet --------------------------------------------------------------------------------


def columns() -> dict[str, tuple[Any, list[Any]]]:
    """A type of Arrow's and three values of it."""
    pa = pytest.importorskip("pyarrow")
    found: dict[str, tuple[Any, list[Any]]] = {
        str(kind): (kind, [1, 2, 3])
        for kind in (
            pa.int8(),
            pa.uint16(),
            pa.int64(),
            pa.uint64(),
            pa.float16(),
            pa.float32(),
            pa.float64(),
        )
    }
    numbers = [[1, 2], [3, 4], [5, 6]]
    more = {
        "bool": (pa.bool_(), [True, False, True]),
        "string": (pa.string(), ["a", "", "c"]),
        "large_string": (pa.large_string(), ["a", "", "c"]),
        "binary": (pa.binary(), [b"a", b"", b"c"]),
        "date": (pa.date32(), [1, 2, 3]),
        "timestamp": (pa.timestamp("us"), [1, 2, 3]),
        "decimal": (pa.decimal128(5, 2), [1, 2, 3]),
        "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"]),
        "dictionary of numbers": (pa.dictionary(pa.int8(), pa.float32()), [1, 2, 1]),
        "list": (pa.list_(pa.int32()), [[1], [], [2, 3]]),
        "large_list": (pa.large_list(pa.float32()), [[1], [], [2, 3]]),
        "fixed list": (pa.list_(pa.float32(), 2), numbers),
        "list of flags": (pa.list_(pa.bool_()), [[True], [], [False]]),
        "list of texts": (pa.list_(pa.string()), [["a"], [], ["b", "c"]]),
        "list of lists": (pa.list_(pa.list_(pa.int16())), [[[1]], [], [[2], []]]),
        "struct": (
            pa.struct([("a", pa.int16()), ("b", pa.list_(pa.float32()))]),
            [{"a": 1, "b": [1]}, {"a": 2, "b": []}, {"a": 3, "b": [2, 3]}],
        ),
        "map": (pa.map_(pa.string(), pa.int8()), [[("a", 1)], [], [("b", 2)]]),
        "tensor": (pa.fixed_shape_tensor(pa.float32(), [2]), numbers),
        "permuted": (
            pa.fixed_shape_tensor(pa.int16(), [2, 1], permutation=[1, 0]),
            numbers,
        ),
    }
    return {**found, **more}


NAMES = [
    "int8", "uint16", "int64", "uint64", "halffloat", "float", "double", "bool", "string", "large_string", "binary",
    "date", "timestamp", "decimal", "dictionary", "dictionary of numbers", "list", "large_list", "fixed list",
    "list of flags", "list of texts", "list of lists", "struct", "map", "tensor", "permuted",
]  # fmt: skip


def described(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    return type(value), value


@pytest.mark.parametrize("name", NAMES)
def test_a_null_beside_it_changes_no_value_of_parquet(name: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from minato.sources.parquet import Parquet

    kind, values = columns()[name]

    def array(given: list[Any]) -> Any:
        if isinstance(kind, pa.FixedShapeTensorType):
            return pa.ExtensionArray.from_storage(kind, pa.array(given, kind.storage_type))
        return pa.array(given, kind)

    def rows(given: list[Any], group: int) -> list[Any]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        pq.write_table(pa.table({"x": array(given)}), path, row_group_size=group)
        source = Parquet(path)
        return [source[i]["x"] for i in range(len(source))]

    plain = [described(value) for value in rows(values, 10)]
    for place in range(4):
        found = rows([*values[:place], None, *values[place:]], 10)
        assert found.pop(place) is None
        assert [described(value) for value in found] == plain
    assert rows([None, None], 10) == [None, None]
    found = rows([*values, None, *values], 1)
    assert [described(value) for value in found if value is not None] == plain * 2


def test_a_null_in_a_list_changes_only_that_list(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from minato.sources.parquet import Parquet

    ragged = pa.array([[1, 2], [3, None], None, [4], []], pa.list_(pa.int16()))
    fixed = pa.array([[1, 2], [3, None], None, [4, 5], [6, 7]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"r": ragged, "f": fixed}), tmp_path / "a.parquet")
    source = Parquet(tmp_path / "a.parquet")
    found = [source[i] for i in range(5)]
    assert [described(row["r"]) for row in found] == [
        (np.ndarray, np.int16, (2,), [1, 2]),
        (list, [3, None]),
        (type(None), None),
        (np.ndarray, np.int16, (1,), [4]),
        (np.ndarray, np.int16, (0,), []),
    ]
    assert [described(row["f"]) for row in found] == [
        (np.ndarray, np.float32, (2,), [1, 2]),
        (list, [3, None]),
        (type(None), None),
        (np.ndarray, np.float32, (2,), [4, 5]),
        (np.ndarray, np.float32, (2,), [6, 7]),
    ]


def test_a_value_that_python_cannot_hold_fails_alone(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from minato.sources.parquet import Parquet

    broken = pa.StringArray.from_buffers(
        2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")
    )
    pq.write_table(pa.table({"x": broken}), tmp_path / "a.parquet")
    source = Parquet(tmp_path / "a.parquet")
    assert source[0] == {"x": "a"}
    with pytest.raises(SourceError, match="key 1"):
        source[1]


@pytest.mark.parametrize("store", ["parquet", "tar"])
def test_files_of_an_earlier_ingest_are_not_read_with_these(store: str, tmp_path: Path) -> None:
    url, _ = STORES[store](tmp_path)
    given: Any = {"workers": 1, "chunk_samples": 2}
    ingest(iter([b"a"] * 7), open_store(url), journal=tmp_path / "1", **given)
    with pytest.raises(MinatoError, match=r"(part|shard)-000002.* of an earlier ingest"):
        ingest(iter([b"a"] * 4), open_store(url), journal=tmp_path / "2", **given)


def test_another_declaration_is_another_journal(tmp_path: Path) -> None:
    given: Any = {"workers": 1, "journal": tmp_path / "journal"}
    url = f"sqlite:{tmp_path}/a.db"
    ingest(iter([{"a": 1}]), open_store(url, columns={"a": int}), **given)
    with pytest.raises(ValueError, match="is about something else"):
        ingest(iter([{"a": "1"}]), open_store(url, columns={"a": str}), **given)
