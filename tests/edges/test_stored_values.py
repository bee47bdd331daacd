"""Values that stores keep: what comes back equals what went in, or it was refused with its key and column."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato.sources.base import SourceError
from minato.sources.sql import SQLite

pytestmark = pytest.mark.large  # pyarrow


def test_every_member_of_a_tar_file_is_read_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from minato.sources.objects import Objects, tar_members

    def packed(name: str, *members: tuple[str, Any]) -> None:
        with tarfile.open(tmp_path / name, "w") as archive:
            for member, how in members:
                info = tarfile.TarInfo(member)
                if isinstance(how, tuple):
                    info.type, info.linkname = how
                info.size = len(how) if isinstance(how, bytes) else 0
                archive.addfile(info, io.BytesIO(how if isinstance(how, bytes) else b""))

    source = Objects(f"file://{tmp_path}")
    packed("linked.tar", ("one", b"content"), ("two", (tarfile.LNKTYPE, "one")))
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


def test_rows_of_one_key_are_not_merged_and_a_named_key_column_comes(tmp_path: Path) -> None:

    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("CREATE TABLE goods (id INTEGER, price REAL)")
        connection.execute("INSERT INTO goods VALUES (1, 1.5), (2, 2.5), (2, 3.5)")
    connection.close()
    goods = SQLite(tmp_path / "a.db", "goods")
    named = SQLite(tmp_path / "a.db", "goods", columns=["id", "price"])
    assert (goods.get(1), named.get(1)) == ({"price": 1.5}, {"id": 1, "price": 1.5})
    with pytest.raises(SourceError, match="2 rows with key 2"):
        goods.get(2)
    for source in (goods, named):
        source.close()  # or Python 3.13 warns


# ---- Parquet --------------------------------------------------------------------------------


def columns() -> dict[str, tuple[Any, list[Any]]]:
    """A type of Arrow's and three values of it."""
    pa = pytest.importorskip("pyarrow")
    names = "int8", "uint16", "int64", "uint64", "halffloat", "float", "double"
    numbers = [[1, 2], [3, 4], [5, 6]]
    return {
        **{name: (pa.type_for_alias(name), [1, 2, 3]) for name in names},
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
        "permuted": (pa.fixed_shape_tensor(pa.int16(), [2, 1], permutation=[1, 0]), numbers),
    }


def stored(path: Path, group: int = 10, **columns: Any) -> Any:
    """A file of these columns."""
    pa = pytest.importorskip("pyarrow")
    from minato.sources.parquet import Parquet

    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table(columns), path, row_group_size=group
    )
    return Parquet(path)


def described(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return {name: described(part) for name, part in value.items()}
    return type(value), value


def test_a_null_beside_it_changes_no_value_of_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")

    def array(kind: Any, given: list[Any]) -> Any:
        if isinstance(kind, pa.FixedShapeTensorType):
            return pa.ExtensionArray.from_storage(kind, pa.array(given, kind.storage_type))
        return pa.array(given, kind)

    for name, (kind, values) in columns().items():

        def rows(given: list[Any], group: int, kind: Any = kind) -> list[Any]:
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
            source = stored(path, group, x=array(kind, given))
            return [source[i]["x"] for i in range(len(source))]

        plain = [described(value) for value in rows(values, 10)]
        for place in range(4):
            found = rows([*values[:place], None, *values[place:]], 10)
            assert found.pop(place) is None, name
            assert [described(value) for value in found] == plain, name
        assert rows([None, None], 10) == [None, None], name
        found = rows([*values, None, *values], 1)
        assert [described(value) for value in found if value is not None] == plain * 2, name


def test_a_null_in_a_list_changes_only_that_list(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    ragged = pa.array([[1, 2], [3, None], None, [4], []], pa.list_(pa.int16()))
    fixed = pa.array([[1, 2], [3, None], None, [4, 5], [6, 7]], pa.list_(pa.float32(), 2))
    source = stored(tmp_path / "a.parquet", r=ragged, f=fixed)
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
    broken = pa.StringArray.from_buffers(
        2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")
    )
    source = stored(tmp_path / "a.parquet", x=broken)
    assert source[0] == {"x": "a"}
    with pytest.raises(SourceError, match="key 1"):
        source[1]
