"""What a table or a file holds is not what it was when the source was opened."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

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


def test_a_column_that_some_parquet_files_lack(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from minato.sources.parquet import Parquet

    pq.write_table(pa.table({"id": [0, 1], "x": [1.0, 2.0]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"id": [2, 3]}), tmp_path / "1.parquet")
    source = Parquet(tmp_path, ["id", "x"])
    assert source[1] == {"id": 1, "x": 2.0}
    with pytest.raises(SourceError, match=r"cannot read key 2: .*row group 0 of '.*1.parquet'.*x"):
        source[2]
    whole = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / "0.parquet").write_bytes(whole[:-60])  # an upload that broke off
    with pytest.raises(SourceError, match=r"cannot read the list of keys.*0.parquet"):
        Parquet(tmp_path / "0.parquet")[0]
