"""What a table or a file holds is not what it was when the source was opened."""

from __future__ import annotations

import itertools
import signal
import sqlite3
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from minato.sources.base import Retry, SourceError
from minato.sources.sql import SQLite


def test_a_column_that_is_gone_from_sqlite(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    with connection:
        connection.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY, price REAL, size REAL)")
        connection.executemany("INSERT INTO goods VALUES (?, 1.5, 2)", [(1,), (2,)])
    source = SQLite(tmp_path / "a.db", "goods", columns=["price"], retry=Retry(first_s=0.001))
    assert source.get(1) == {"price": 1.5}
    with connection:
        connection.execute("ALTER TABLE goods RENAME COLUMN price TO cost")
    connection.close()
    with pytest.raises(SourceError, match=r"cannot read key 2.*: no such column: goods.price"):
        source.get(2)
    source.close()
    misspelt = SQLite(tmp_path / "a.db", "goods", "idd", retry=Retry(first_s=0.001))
    with pytest.raises(SourceError, match=r"cannot read the list of keys.*: goods.idd"):
        len(misspelt)
    misspelt.close()


KILLED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA cache_size = 2")  # so that changes are in the file before they are committed
connection.executemany("UPDATE goods SET price = ? WHERE id = ?", [("x" * 1000, i) for i in range(100)])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_what_a_killed_writer_left_in_sqlite_is_undone(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY, price TEXT)")
    with connection:
        connection.executemany("INSERT INTO goods VALUES (?, ?)", [(i, "1") for i in range(100)])
    connection.close()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert killed.returncode == -signal.SIGKILL
    assert Path(f"{path}-{'journal' if mode == 'delete' else 'wal'}").exists()
    source = SQLite(path, "goods", columns=["price"])
    assert [source.get(i) for i in range(100)] == [{"price": "1"}] * 100
    source.close()


@pytest.mark.parametrize("kind", ["Parquet", "ParquetStream", "ParquetShards"])
def test_rows_of_parquet_have_the_same_columns_and_types_in_all_files(
    kind: str, tmp_path: Path
) -> None:
    """Each pair of types that a column may have in two files; None: it is missing there."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    from minato.sources import parquet

    kinds = [None, pa.null(), pa.int8(), pa.int64(), pa.float32()]
    pairs = {f"{a} {b}": (a, b) for a, b in itertools.product(kinds, kinds) if a or b}
    largest = {pa.null(): None, pa.int8(): 100, pa.int64(): 1 << 20, pa.float32(): 0.5}
    nested = ([], {"x": 1, "y": []}), ([{"a": 1, "b": 2}], {"x": 2.5, "y": [3], "z": 4})
    for i in range(2):
        columns = {
            name: pa.array([largest[pair[i]]], pair[i]) for name, pair in pairs.items() if pair[i]
        }
        columns["boxes"], columns["record"] = (pa.array([value]) for value in nested[i])
        columns["count"] = pa.array([(True, 5)[i]])
        columns["day"] = pa.array([(date(2026, 1, 1), datetime(2026, 1, 1, 5))[i]])
        pq.write_table(pa.table({"id": [i], **columns}), tmp_path / f"{i}.parquet")

    def rows(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        source = getattr(parquet, kind)(tmp_path, *arguments, **options)
        return [source[i] for i in range(len(source))] if kind == "Parquet" else list(source)

    found = rows()
    assert [row["id"] for row in found] == [0, 1]
    for name, pair in pairs.items():
        values = [row[name] for row in found]
        assert values == [largest.get(of) for of in pair]
        assert len({value.dtype for value in values if value is not None}) <= 1
    assert [row["boxes"] for row in found] == [[], [{"a": 1, "b": 2}]]
    assert [row["count"] for row in found] == [1, 5]
    assert [row["day"] for row in found] == [datetime(2026, 1, 1), datetime(2026, 1, 1, 5)]
    records = [{**row["record"], "y": list(row["record"]["y"])} for row in found]
    assert records == [{"x": 1, "y": [], "z": None}, {"x": 2.5, "y": [3], "z": 4}]
    assert [row["int64 None"] for row in rows(["id", "int64 None"])] == [1 << 20, None]
    for name, only in (("int64 None", 0), ("None int64", 1)):
        assert [row["id"] for row in rows(["id"], where=ds.field(name) > 0)] == [only]


def test_parquet_files_that_do_not_fit(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from minato.sources.parquet import Parquet

    for i, column in enumerate((pa.array([1], pa.int8()), pa.array(["one"]))):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{i}.parquet")
    source = Parquet(tmp_path)
    assert source[0] == {"x": 1}
    with pytest.raises(
        SourceError, match=r"cannot read key 1: .*row group 0 of '.*1.parquet'.*one"
    ):
        source[1]
    whole = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / "0.parquet").write_bytes(whole[:-60])  # an upload that broke off
    with pytest.raises(SourceError, match=r"cannot read the list of keys.*0.parquet"):
        Parquet(tmp_path / "0.parquet")[0]
