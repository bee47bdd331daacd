"""Rows of Parquet files: map-style and streaming."""

from __future__ import annotations

import copy
import datetime
import decimal
import itertools
import pickle
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import numpy as np
import pytest

import minato
from minato.sources.base import Retry, SourceError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: install the extra 'test'")

import pyarrow.compute as pc  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from minato.sources.connections import Env  # noqa: E402
from minato.sources.parquet import Parquet, ParquetShards, ParquetStream  # noqa: E402

ROWS, GROUP = 100, 10


def table(numbers: range) -> Any:
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "x": pa.array([[i, i + 0.5] for i in numbers], pa.list_(pa.float32(), 2)),
            "ragged": pa.array([list(range(i % 4)) for i in numbers], pa.list_(pa.int32())),
            "name": [f"row {i}" for i in numbers],
            "nested": [{"a": i, "b": {"c": str(i)}} for i in numbers],
            "gaps": pa.array([None if i % 2 else i for i in numbers], pa.int64()),
            "texts": [["a"] * (i % 3) for i in numbers],
            "flag": [i % 2 == 0 for i in numbers],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of five row groups each."""
    path = tmp_path_factory.mktemp("parquet")
    for number in range(2):
        numbers = range(number * ROWS // 2, (number + 1) * ROWS // 2)
        pq.write_table(table(numbers), path / f"{number}.parquet", row_group_size=GROUP)
    return path


def ids(samples: Any) -> list[int]:
    """Of rows or of batches of them."""
    return [number for each in samples for number in np.atleast_1d(each["id"]).tolist()]


def test_rows_and_columns_become_numpy(folder: Path) -> None:
    source = Parquet(folder)
    assert len(source) == ROWS
    for i in (0, 57, 99, -1):
        row, number = source[i], i % ROWS
        assert row["id"] == number
        assert np.array_equal(row["x"], np.array([number, number + 0.5], np.float32))
        assert row["x"].dtype == np.float32
        assert row["ragged"].tolist() == list(range(number % 4))
        assert row["ragged"].dtype == np.int32
        assert row["name"] == f"row {number}"
        assert row["nested"] == {"a": number, "b": {"c": str(number)}}
        assert row["gaps"] == (None if number % 2 else number)
        assert row["texts"] == ["a"] * (number % 3)
        assert bool(row["flag"]) == (number % 2 == 0)
    with pytest.raises(IndexError):
        source[ROWS]


def changed_in_place(value: Any) -> None:
    """Change whatever can be changed in a value."""
    if isinstance(value, np.ndarray):
        assert value.base is None  # otherwise the value keeps the memory of its column
        value += 7
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            changed_in_place(part)
        value.clear()


def test_a_row_that_is_changed_in_place_changes_no_other(tmp_path: Path) -> None:
    """Each kind of column, without nulls and with them."""
    lists = [[1.0, 2.0], [3.0, 4.0], [5.0, None], [6.0, 7.0]]
    tensors = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    columns = {
        "number": pa.array([1, 2, 3, 4]),
        "text": pa.array(["a", "b", "c", "d"]),
        "list": pa.array(lists[:2] * 2, pa.list_(pa.float64())),
        "gaps": pa.array(lists, pa.list_(pa.float64())),
        "fixed": pa.array(lists[:2] * 2, pa.list_(pa.float32(), 2)),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors),
        "texts": pa.array([["a"], ["b"], [], ["c"]]),
        "lists": pa.array([[[1]], [[2], []], [], [[3, 4]]]),
        "map": pa.array([[("k", [1])]] * 4, pa.map_(pa.string(), pa.list_(pa.int64()))),
        "struct": pa.array([{"q": [1, 2], "r": ["a"]}] * 4),
        "structs": pa.array([[{"q": 1}]] * 4),
    }
    holes = pa.array([True, False, True, True])
    whole = pa.table(columns)
    for name, column in columns.items():
        if name != "tensor":
            whole = whole.append_column(f"{name} or null", pc.if_else(holes, column, None))
    pq.write_table(whole, tmp_path / "a.parquet")
    source = Parquet(tmp_path)
    others = whole.drop_columns(["tensor"])
    for _ in range(2):
        for i, row in enumerate(map(source.get, range(4))):
            assert np.array_equal(row["tensor"], tensors[i])
            changed_in_place(row.pop("tensor"))
            again = pa.Table.from_pylist([row], schema=others.schema)
            assert again.to_pylist() == others.slice(i, 1).to_pylist()
            changed_in_place(row)


def test_columns_and_rows_are_pushed_down(folder: Path) -> None:
    source = Parquet(folder, ["id"], where=ds.field("id") >= 75)
    assert len(source._groups.found()[0]) == 3  # statistics exclude the others
    assert ids(source[i] for i in range(len(source))) == list(range(75, 100))
    assert list(source[0]) == ["id"]
    assert len(Parquet(folder, where=ds.field("id") > 1000)) == 0
    with pytest.raises(ValueError, match="where= excludes the rows of all: give other files"):
        next(iter(ParquetShards(folder, where=ds.field("id") > 1000)))


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_are_strings_and_rows_are_selected_by_them(kind: Any, tmp_path: Path) -> None:
    """As other programs than pyarrow write them: Arrow itself selects no rows of such columns."""
    texts = pa.array(["a", None, "c"]).cast(kind)
    pq.write_table(pa.table({"id": [0, 1, 2], "text": texts}), tmp_path / "a.parquet")
    assert [row["text"] for row in ParquetStream(tmp_path)] == texts.to_pylist()
    assert ids(ParquetStream(tmp_path, where=ds.field("text") > texts[0].as_py())) == [2]
    assert ids(ParquetStream(tmp_path, ["id"], where=ds.field("id") < 2)) == [0, 1]
    parts = pa.table({"parts": pa.StructArray.from_arrays([texts], ["text"], mask=texts.is_null())})
    parts = parts.append_column("texts", pa.array([["a"], None, []], pa.list_(kind)))
    pq.write_table(parts, tmp_path / "b.parquet")
    assert list(ParquetStream(tmp_path / "b.parquet")) == parts.to_pylist()


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.string_view()),
        pa.large_list(pa.binary_view()),
        pa.list_(pa.string_view(), 1),
        pa.list_(pa.struct([("view", pa.list_(pa.string_view()))])),
        pa.map_(pa.string_view(), pa.string_view()),
    ],
    ids=str,
)
def test_rows_are_selected_beside_views_within_other_types(kind: Any, tmp_path: Path) -> None:
    inner: Any = [{"view": ["a"]}] if "struct" in str(kind) else ["a"]
    values = [[("a", "a")] if pa.types.is_map(kind) else inner, None]
    table = pa.table({"x": [1, 2, 3, 4], "c": pa.array(values * 2, kind)})
    pq.write_table(table, tmp_path / "0.parquet")
    source = Parquet(tmp_path, where=ds.field("x") > 1)
    assert [row["c"] for row in source] == table["c"].to_pylist()[1:]


@pytest.mark.parametrize("kind", [pa.list_view, pa.large_list_view])
def test_views_of_lists_are_lists(kind: Any, tmp_path: Path) -> None:
    """Otherwise numbers would become booleans where the first file has these."""
    values = [[1, 2], None, [3, None], []]
    files = written(tmp_path, False, (values, kind(WHOLE)), ([[True]], pa.list_(FLAG)))
    numbers, nothing, gap, empty = (row["x"] for row in ParquetStream(files[0]))
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [1, 2]
    assert isinstance(empty, np.ndarray)
    assert (nothing, gap, empty.tolist()) == (None, [3, None], [])
    with pytest.raises(SourceError, match="Unsupported cast"):
        list(ParquetStream(files[::-1]))


def test_columns_of_texts_may_hold_more_than_two_gibibytes(tmp_path: Path) -> None:
    kinds = [pa.string(), pa.string_view(), pa.binary(), pa.binary_view()]
    texts = pa.table({str(kind): pa.array(["a"] * 4, kind) for kind in kinds})
    pq.write_table(texts, tmp_path / "a.parquet")
    with mock.patch("minato.sources.parquet._rows_of", lambda read: read.schema.types.__getitem__):
        found = list(ParquetStream(tmp_path / "a.parquet"))
    assert found == [pa.large_string()] * 2 + [pa.large_binary()] * 2


def test_a_row_group_is_read_once_as_long_as_it_is_kept(folder: Path) -> None:
    source = Parquet(folder, ["id"], kept_groups=2)
    with mock.patch.object(source._groups, "read", wraps=source._groups.read) as read:
        assert ids(source[i] for i in (5, 15, 6, 16, 25, 7)) == [5, 15, 6, 16, 25, 7]
    assert [call.args for call in read.call_args_list] == [(0,), (1,), (2,), (0,)]


def test_a_stream_in_order_and_shuffled(folder: Path) -> None:
    assert ids(ParquetStream(folder, ["id"])) == list(range(ROWS))
    stream = ParquetStream(folder, ["id"], seed=3, window_rows=30)
    first, again = ids(stream), ids(stream)
    assert again == first != list(range(ROWS))
    stream.set_epoch(1)
    second = ids(stream)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert second != first
    # Whatever ran before, an epoch is the function of (seed, epoch).
    stream.set_epoch(0)
    assert ids(stream) == first
    assert ids(ParquetStream(folder, ["id"], seed=4, window_rows=30)) != first


def test_a_window_mixes_rows_of_several_groups(folder: Path) -> None:
    narrow = ids(ParquetStream(folder, ["id"], seed=1, window_rows=1))
    groups = [[i // GROUP for i in narrow[k : k + GROUP]] for k in range(0, ROWS, GROUP)]
    assert sum(len(set(group)) == 1 for group in groups) >= 8  # one group after the other, about
    wide = ids(ParquetStream(folder, ["id"], seed=1, window_rows=ROWS))
    assert len({i // GROUP for i in wide[:GROUP]}) > 3


def test_ranks_and_workers_share_the_row_groups(folder: Path) -> None:
    together = []
    for rank in range(2):
        stream = ParquetStream(folder, ["id"], seed=5, shard=(rank, 2))
        first, second = (ids(minato.DataLoader(stream, 5, num_workers=2)) for _ in range(2))
        assert first == second
        together += first
    assert sorted(together) == list(range(ROWS))


@pytest.mark.parametrize("more", [{}, {"readers": 2}, {"workers": "thread"}])
def test_workers_that_stay_hear_of_the_epoch(more: Any, folder: Path) -> None:
    stream = ParquetStream(folder, ["id"], seed=5)
    loader = minato.DataLoader(stream, 10, num_workers=1, persistent_workers=True, **more)
    epochs = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        epochs.append(ids(loader))
        assert sorted(epochs[-1]) == list(range(ROWS))
    assert epochs[0] == epochs[2] != epochs[1]
    loader.close()


def test_a_dataset_that_holds_a_stream_hears_of_its_epoch_where_it_is_copied() -> None:
    stream = ParquetStream("nowhere")
    copied = copy.deepcopy([stream])
    stream.set_epoch(3)
    assert copied[0].epoch == 3


def test_an_epoch_goes_on_whatever_the_loader_counts(folder: Path) -> None:
    def loader(epoch: int) -> minato.DataLoader[Any]:
        stream = ParquetStream(folder, ["id"], seed=5)
        stream.set_epoch(epoch)
        return minato.DataLoader(stream, 10)

    first = loader(7)
    begun = ids(itertools.islice(first, 3))
    for epoch in (7, 0):
        again = loader(epoch)
        again.load_state_dict(first.state_dict())
        assert begun + ids(again) == ids(loader(7))


def test_a_row_group_that_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "0.parquet").read_bytes()
    path = tmp_path / "damaged.parquet"
    path.write_bytes(whole[:4] + bytes(300) + whole[304:])
    with pytest.raises(SourceError, match=r"row group 0 of '.*damaged.parquet'"):
        Parquet(path)[0]


def test_a_signed_url_is_named_without_its_secrets(folder: Path) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")

    class Web(memory.MemoryFileSystem):  # type: ignore[misc, name-defined]
        store: ClassVar[dict[str, Any]] = {}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return path

    url, whole = "https://example.org/a?token=hunter2", (folder / "0.parquet").read_bytes()
    files = Web()
    files.pipe_file(url, whole[:4] + bytes(300) + whole[304:])
    shards = ParquetShards([url], filesystem=files)
    assert next(iter(shards.shards())) == "https://example.org/a#0"
    with pytest.raises(SourceError, match=r"row group 0 of 'https://example.org/a':"):
        next(iter(shards))


@pytest.mark.parametrize("kind", [Parquet, ParquetShards, ParquetStream])
def test_files_are_read_again_after_a_lost_connection(kind: Any, folder: Path) -> None:
    local = pytest.importorskip("fsspec.implementations.local")
    opened = itertools.count()

    class Flaky(local.LocalFileSystem):  # type: ignore[misc, name-defined]
        cachable = False

        def _open(self, path: str, *arguments: Any, **keywords: Any) -> Any:
            if next(opened) % 8 == 1:
                raise ConnectionError("reset")
            return super()._open(path, *arguments, **keywords)

    source = kind(str(folder), filesystem=Flaky())
    source.retry = Retry(30, first_s=0)
    rows = map(source.__getitem__, range(ROWS)) if kind is Parquet else iter(source)
    assert [row["id"] for row in rows] == [*range(ROWS)]
    assert source.counters.totals()[0] > 0


@pytest.mark.parametrize("wrong", [{"columns": ["price"]}, {"where": ds.field("price") > 3}])
def test_columns_that_are_not_there_are_named_before_a_read(folder: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"\bprice\b.*the files have the columns id, x, ragged"):
        next(iter(ParquetStream(str(folder), **wrong)))
    with pytest.raises(SourceError, match=r"\bprice\b.*the files have the columns id, x, ragged"):
        len(Parquet(str(folder), **wrong))
    with pytest.raises(TypeError, match=r"where='id > 3': give a condition, as pyarrow"):
        Parquet(str(folder), where=cast(Any, "id > 3"))
    parts = ParquetStream(str(folder), ["nested.a", "__filename"])
    assert set(next(iter(parts))) == {"a", "__filename"}


def test_what_cannot_be_opened_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="cannot read the list of keys.*/no/such/folder"):
        len(Parquet("/no/such/folder"))
    with pytest.raises(TypeError, match="is a secret and is not pickled"):
        pickle.dumps(Parquet("s3://me:hush@box/rows"))
    monkeypatch.setenv("ROWS_HERE", str(folder))
    assert len(pickle.loads(pickle.dumps(Parquet(Env("ROWS_HERE"))))) == ROWS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parquet("x", kept_groups=0), "kept_groups=0 is too small"),
        (lambda: ParquetStream("x", window_rows=0), "window_rows=0 is too small"),
        (lambda: ParquetStream("x", shard=(2, 2)), r"shard=\(2, 2\) is not possible"),
        (lambda: ParquetStream("x", shard=(None, 2)), r"shard=\(None, 2\) is not possible"),
        (lambda: ParquetStream("x", shard=2), "shard=2 is not possible"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_file_twice(folder: Path) -> None:
    files = [str(folder / f"{i}.parquet") for i in (0, 1, 0)]
    assert ids(ParquetStream(files, ["id"])) == [*range(ROWS), *range(ROWS // 2)]
    with pytest.raises(ValueError, match=r"0\.parquet#0' comes twice in shards\(\)"):
        list(ParquetShards(files, ["id"]))


@pytest.mark.parametrize("kind", [Parquet, ParquetStream, ParquetShards])
def test_all_copies_know_the_same_files(kind: Any, tmp_path: Path) -> None:
    """Otherwise a file that is written meanwhile has readers divide different lists."""
    pq.write_table(table(range(50, 70)), tmp_path / "b.parquet", row_group_size=GROUP)
    source = kind(tmp_path, ["id"])
    pq.write_table(table(range(20)), tmp_path / "a.parquet", row_group_size=GROUP)
    copied = pickle.loads(pickle.dumps(source))
    for each in (source, copied, copy.deepcopy(copied)):
        rows = map(each.get, range(len(each))) if kind is Parquet else each
        assert ids(rows) == list(range(50, 70))


def written(tmp_path: Path, reverses: bool, *columns: Any) -> list[str]:
    """A file for each column of values and their type."""
    files = [str(tmp_path / f"{i}.parquet") for i in range(len(columns))]
    for file, (values, kind) in zip(files, columns, strict=True):
        pq.write_table(pa.table({"x": pa.array(values, kind)}), file)
    return files[::-1] if reverses else files


def test_a_file_that_was_written_again_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (file,) = written(tmp_path, False, ([*range(100)], pa.int64()))
    stream = ParquetStream(file)
    assert len(list(stream)) == 100
    written(tmp_path, False, (["other"] * 7, pa.string()))
    with pytest.raises(SourceError, match="written again meanwhile, make a new source and loader"):
        list(stream)


SECONDS = [datetime.timedelta(seconds=3)]
DAY, TIME = datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 1, 5)
FLAG, WHOLE = pa.bool_(), pa.int64()
PARTS = pa.struct([("a", FLAG)]), pa.struct([("a", WHOLE)])
DAYS = pa.struct([("a", pa.date32())]), pa.struct([("a", pa.timestamp("us"))])


@pytest.mark.parametrize("reverses", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (([[True]], pa.list_(FLAG)), ([[2, 3]], pa.list_(WHOLE)), [[1], [2, 3]]),
        (([{"a": True}], PARTS[0]), ([{"a": 2}], PARTS[1]), [{"a": 1}, {"a": 2}]),
        (
            ([{"a": DAY}], DAYS[0]),
            ([{"a": TIME}], DAYS[1]),
            [{"a": datetime.datetime(2020, 1, 2)}, {"a": TIME}],
        ),
        (
            ([[("k", True)]], pa.map_(pa.string(), FLAG)),
            ([[("k", 2)]], pa.map_(pa.string(), WHOLE)),
            [[("k", 1)], [("k", 2)]],
        ),
    ],
)
def test_parts_of_columns_have_a_type_that_holds_the_values_of_all_files(
    first: Any, second: Any, expected: list[Any], reverses: bool, tmp_path: Path
) -> None:
    found = [row["x"] for row in ParquetStream(written(tmp_path, reverses, first, second))]
    found = [value.tolist() if isinstance(value, np.ndarray) else value for value in found]
    assert found == (expected[::-1] if reverses else expected)
    assert repr(found).count("True") == 0  # which equals 1


@pytest.mark.parametrize("reverses", [False, True])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (([7], WHOLE), (SECONDS, pa.duration("s"))),
        (([7], WHOLE), ([TIME], pa.timestamp("us"))),
        (([TIME], pa.timestamp("us", "Europe/Berlin")), ([TIME], pa.timestamp("us"))),
        (([TIME], pa.timestamp("us", "Europe/Berlin")), ([DAY], pa.date32())),
        (([[7]], pa.list_(WHOLE)), ([SECONDS], pa.list_(pa.duration("ms")))),
        (([[7]], pa.list_view(WHOLE)), ([SECONDS], pa.large_list_view(pa.duration("ms")))),
        (([0.5], pa.float32()), ([decimal.Decimal(10**50)], pa.decimal256(60))),
        (([[0.5]], pa.list_(pa.float32())), ([[decimal.Decimal(7)]], pa.list_(pa.decimal128(9)))),
        (
            ([{"a": True, "b": 1}], pa.struct([("a", FLAG), ("b", WHOLE)])),
            ([{"a": 2, "c": "x"}], pa.struct([("a", WHOLE), ("c", pa.string())])),
        ),
    ],
)
def test_columns_of_which_values_would_be_cut_are_refused(
    first: Any, second: Any, reverses: bool, tmp_path: Path
) -> None:
    files = written(tmp_path, reverses, first, second)
    with pytest.raises(ValueError, match="column 'x' is of type .* no type holds the values of bo"):
        list(ParquetStream(files))


def test_row_groups_are_found_by_name(folder: Path) -> None:
    shards = pickle.loads(pickle.dumps(ParquetShards(folder)))
    for i, name in enumerate(shards.shards()):
        assert name == f"{folder}/{i // 5}.parquet#{i % 5}"
        assert ids(shards.iter_shard(name)) == [*range(GROUP * i, GROUP * (i + 1))]


def test_a_stream_decodes(folder: Path) -> None:
    assert list(ParquetStream(folder, ["id"], decode=lambda row: int(row["id"])))[:3] == [0, 1, 2]
