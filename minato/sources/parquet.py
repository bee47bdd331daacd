"""Rows of Parquet files, through pyarrow (extra ``parquet``)."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from minato.errors import is_lost_connection, missing

try:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow import compute, types
except ModuleNotFoundError:
    raise missing("minato.sources.parquet", "pyarrow", "parquet") from None

from minato._support.counters import Counters, SharedIntegers, shared_integers
from minato._support.values import message_of, text_of
from minato.checks import check_shard, check_whole, given_whole, refuse_one
from minato.sources.base import KeyedSource, Retry, Row, SourceError
from minato.sources.connections import Env, Place, described, shown_url
from minato.streams.shards import ShardedDataset

__all__ = ["Parquet", "ParquetShards", "ParquetStream"]

T = TypeVar("T")

_GROUPS, _ROWS = 0, 1  # the purpose of a generator, a part of its seed after (seed, epoch)

_READ_AS = {
    **dict.fromkeys((pa.string(), pa.string_view()), pa.large_string()),
    **dict.fromkeys((pa.binary(), pa.binary_view()), pa.large_binary()),
}
"""Types of columns that hold at most 2 GiB, or of which Arrow cannot select rows, and those that it makes of them."""

_Get = Callable[[int], Any]
_Rows = tuple[int, Callable[[int], Row]]  # number of rows, and the function that returns row i


class _RowGroups:
    """The row groups of Parquet files, of which only the selected columns and rows are read: see ParquetStream."""

    def __init__(
        self,
        files: object,
        columns: Sequence[str] | None,
        where: ds.Expression | None,
        filesystem: object,
    ) -> None:
        self.files = Place(files) if isinstance(files, (str, Env)) else files
        refuse_one("columns", columns)
        if not (where is None or isinstance(where, ds.Expression)):
            raise TypeError(
                f"where={text_of(where)}: give a condition, as pyarrow.dataset.field('label') > 3"
            )
        self._columns = None if columns is None else list(columns)
        self._where, self._filesystem = where, filesystem
        self._paths: list[str] | None = None
        self._all: tuple[list[Any], pa.Schema] | None = None
        self._numbers: dict[str, int] | None = None
        if filesystem is None and isinstance(files, (str, os.PathLike)) and os.path.isdir(files):
            self._listed()  # otherwise each worker would do so, and some find a file that others do not

    def __getstate__(self) -> Row:
        return {**self.__dict__, "_all": None, "_numbers": None}

    def __fingerprint__(self) -> Row:
        return {**self.__getstate__(), "_paths": None}

    def _listed(self) -> Any:
        """The files as a dataset of pyarrow's: those of the first call, also in copies in other processes."""
        files = self.files.url if isinstance(self.files, Place) else self.files
        dataset = ds.dataset(files, format="parquet", filesystem=self._filesystem)
        if self._paths is None:
            self._paths = dataset.files
        elif dataset.files != self._paths:
            dataset = ds.dataset(self._paths, format="parquet", filesystem=dataset.filesystem)
        return dataset

    def found(self) -> tuple[list[Any], pa.Schema]:
        """The row groups that may contain selected rows, in the order of the files; and the columns of their rows."""
        if self._all is None:
            listed = self._listed()
            fragments = list(listed.get_fragments())
            schema = _merged([fragment.physical_schema for fragment in fragments])
            dataset = ds.FileSystemDataset(fragments, schema, listed.format, listed.filesystem)
            try:
                dataset.scanner(columns=self._columns, filter=self._where)
            except (pa.ArrowException, KeyError) as error:
                raise ValueError(
                    f"columns or where: {message_of(error).splitlines()[0]}: the files have the columns "
                    f"{', '.join(schema.names)}"
                ) from error
            groups = [
                group
                for fragment in dataset.get_fragments(self._where)
                for group in fragment.split_by_row_group(self._where, schema=schema)
            ]
            self._all = groups, schema
        return self._all

    def counts(self) -> list[int]:
        groups, schema = self.found()
        if self._where is None:
            return [group.row_groups[0].num_rows for group in groups]
        return [group.to_table(schema, columns=[], filter=self._where).num_rows for group in groups]

    def names(self) -> list[str]:
        """For each row group the file, ``#``, and its number there."""
        return [f"{shown_url(group.path)}#{group.row_groups[0].id}" for group in self.found()[0]]

    def number_of(self, name: str) -> int:
        if self._numbers is None:
            self._numbers = {name: number for number, name in enumerate(self.names())}
        return self._numbers[name]

    def read(self, number: int) -> _Rows:
        groups, schema = self.found()
        group = groups[number]
        try:
            table = group.to_table(
                schema, columns=self._columns, filter=self._where, use_threads=False
            )
        except (pa.ArrowException, OSError, KeyError) as error:
            raise SourceError(
                f"cannot read row group {group.row_groups[0].id} of {shown_url(group.path)!r}: {described(error)}. "
                "If the file was written again meanwhile, make a new source and loader"
            ) from error
        return len(table), _rows_of(table)


def _merged(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns of all files, each of a type that holds the values of all; without one, of the first type.

    ValueError: Either type would cut values of the other.
    """
    columns: dict[str, pa.Field] = {}
    for given in itertools.chain(*schemas):
        field = given.with_type(_read_as(given.type))
        known = columns.setdefault(field.name, field)
        if known.type != field.type:
            both = [pa.schema([known]), pa.schema([field])]
            try:
                choices = [pa.unify_schemas(both, promote_options="permissive").field(0)]
            except (pa.ArrowTypeError, pa.ArrowInvalid):
                choices = [known, field]
            held = (
                each
                for each in choices
                if not any(_would_be_cut(one.type, each.type) for one in (known, field))
            )
            found = next(held, None)
            if found is None:
                raise ValueError(
                    f"column {field.name!r} is of type {known.type} in one file and {field.type} in another, and "
                    "no type holds the values of both: write the files with one type, or read them apart"
                )
            columns[field.name] = found
    return pa.schema(list(columns.values()))


def _read_as(kind: pa.DataType) -> pa.DataType:
    """The type that a column is read as: see _READ_AS. Arrow cannot select rows by views within other types, either."""
    if kind in _READ_AS or "view" not in str(kind):
        return _READ_AS.get(kind, kind)

    def part(field: pa.Field) -> pa.Field:
        return field.with_type(_read_as(field.type))

    if types.is_struct(kind):
        return pa.struct([part(kind.field(i)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(part(kind.key_field), part(kind.item_field))
    if types.is_list(kind):
        return pa.list_(part(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(part(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(part(kind.value_field), kind.list_size)
    return kind  # views of lists, which Arrow does not cast


def _would_be_cut(kind: pa.DataType, to: pa.DataType) -> bool:
    """Whether Arrow casts values to another type without a word about what is lost."""
    if kind == to:
        return False
    parts, others = _parts_of(kind), _parts_of(to)
    if parts and others:
        return any(
            name not in others or _would_be_cut(part, others[name]) for name, part in parts.items()
        )
    whole_days = types.is_date(to) or types.is_time(to)
    one_has_zone = (getattr(kind, "tz", None) is None) != (getattr(to, "tz", None) is None)
    return (
        (types.is_boolean(to) and _is_number(kind))
        or (types.is_decimal(kind) and (types.is_float16(to) or types.is_float32(to)))
        or (whole_days and types.is_timestamp(kind))
        or (_is_number(kind) and types.is_temporal(to))  # which is of any unit
        or (types.is_temporal(kind) and _is_number(to))
        or (types.is_temporal(kind) and types.is_temporal(to) and one_has_zone)
    )


def _parts_of(kind: pa.DataType) -> dict[str, pa.DataType]:
    """The types of the values in values of a type, by name; empty if it has none."""
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    if types.is_struct(kind):
        return {part.name: part.type for part in map(kind.field, range(kind.num_fields))}
    if types.is_map(kind):
        return {"key": kind.key_type, "value": kind.item_type}
    return {"value": kind.value_type} if _is_list(kind) else {}


class Parquet(KeyedSource):
    """Map-style: a sample is a selected row of all files, a dict of its columns, and its key is the row's number.

    A worker reads and converts the whole row group of a row, and keeps the row groups that it used most recently. In
    random order, nearly every sample costs a row group; :class:`ParquetStream` shuffles without this cost.

    Args:
        files, columns, where, filesystem: As for :class:`ParquetStream`.
        kept_groups: Number of row groups that each process keeps.
        keys, retry: See :class:`KeyedSource`. Without ``keys``, all selected rows in the order of the files.
        decode: Called with the dict of a row.
    """

    def __init__(
        self,
        files: object,
        columns: Sequence[str] | None = None,
        *,
        where: ds.Expression | None = None,
        filesystem: object = None,
        kept_groups: int = 4,
        keys: Sequence[int] | None = None,
        decode: Callable[[Row], object] | None = None,
        retry: Retry | None = None,
    ) -> None:
        kept_groups = given_whole("kept_groups", kept_groups, 1)
        super().__init__(keys, decode, retry)
        self._groups = _RowGroups(files, columns, where, filesystem)
        self._kept_groups = kept_groups
        self._ends: Any = None

    def __fingerprint__(self) -> Row:
        return {**super().__fingerprint__(), "_ends": None}

    def __repr__(self) -> str:
        return f"Parquet({self.files!r})"

    @property
    def files(self) -> Any:
        """The files as they were given; a URL or a path as a :class:`Place`."""
        return self._groups.files

    def open_connection(self) -> tuple[threading.Lock, OrderedDict[int, _Rows]]:
        """The row groups that this process keeps."""
        return threading.Lock(), OrderedDict()

    def list_keys(self) -> Sequence[int]:
        return range(self._count())

    def _count(self) -> int:
        if self._ends is None:
            self._ends = np.cumsum(self._groups.counts(), dtype=np.int64)
        return int(self._ends[-1]) if len(self._ends) else 0

    def read_value(self, key: int) -> Row:
        if not 0 <= key < self._count():
            raise LookupError(key)
        number = int(np.searchsorted(self._ends, key, side="right"))
        # Under the lock: otherwise several threads would read the same row group.
        with self.connections.lease() as (lock, kept), lock:
            _, row = kept[number] = kept.pop(number, None) or self._groups.read(number)
            while len(kept) > self._kept_groups:
                kept.popitem(last=False)
        return row(key - (int(self._ends[number - 1]) if number else 0))


class ParquetStream(IterableDataset[Any]):
    """Streaming: each worker reads its share of the row groups, one after the other.

    Args:
        files: A file, a directory or a list of files, or the URL of one (``s3://…``), which may be an
            :class:`~minato.sources.connections.Env`. A local directory is listed here, once for all workers.
        columns: The columns of a sample; None for all.
        where: A pyarrow expression, as ``pyarrow.dataset.field("label") > 3``. Row groups whose statistics exclude it
            are not read.
        filesystem: A pyarrow or fsspec file system for ``files``; with it, credentials stay out of the URL.
        seed: Shuffles the row groups, and the rows within a window, as a function of (seed, epoch); None: the order
            of the files.
        window_rows: Number of rows in the shuffle window of a share.
        shard: ``(rank, number of ranks)``; each rank reads its own row groups. Shares may differ in length, as row
            groups do.
        decode: Called with the dict of a row.

    Attributes:
        retry: How often, and for how long, a row group is read again after a lost connection.
        counters: How often that was done, for the report of a loader.

    The order depends on the number of workers, which share the row groups, and on nothing else. Call ``set_epoch``
    before each epoch, as with torch's ``DistributedSampler``.
    """

    def __init__(
        self,
        files: object,
        columns: Sequence[str] | None = None,
        *,
        where: ds.Expression | None = None,
        filesystem: object = None,
        seed: int | None = None,
        window_rows: int = 10_000,
        shard: tuple[int, int] = (0, 1),
        decode: Callable[[Row], object] | None = None,
    ) -> None:
        window_rows = given_whole("window_rows", window_rows, 1)
        self._groups = _RowGroups(files, columns, where, filesystem)
        self._seed, self._window_rows = check_whole("seed", seed, None), window_rows
        self._shard = check_shard(shard)
        self._decode = decode
        self.retry = Retry()
        self.counters = Counters("retries")
        # In memory that copies share, so that those of workers that persist see it change.
        self._epoch = SharedIntegers(shared_integers(1))

    @property
    def epoch(self) -> int:
        """What ``set_epoch`` was called with last."""
        return int(self._epoch.array[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``."""
        self._epoch.array[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        rows = self._shuffled(self.epoch) if self._seed is not None else self._in_order()
        return rows if self._decode is None else map(self._decode, rows)

    def _mine(self, numbers: Sequence[int]) -> Sequence[int]:
        rank, ranks = self._shard
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return numbers[rank * workers + number :: ranks * workers]

    def _attempt(self, read: Callable[[], T]) -> T:
        return self.retry.call(read, is_lost_connection, self.counters)

    def _count(self) -> int:
        groups, _ = self._attempt(self._groups.found)
        return len(groups)

    def _read(self, number: int) -> _Rows:
        return self._attempt(lambda: self._groups.read(number))

    def _in_order(self) -> Iterator[Row]:
        for number in self._mine(range(self._count())):
            count, row = self._read(number)
            yield from map(row, range(count))

    def _shuffled(self, epoch: int) -> Iterator[Row]:
        assert self._seed is not None
        seed = self._seed % 2**64
        order = np.random.default_rng((seed, epoch, _GROUPS)).permutation(self._count())
        mine = self._mine(order.tolist())
        # The seed depends on the share, so that neither timing nor other workers influence the order.
        generator = np.random.default_rng((seed, epoch, _ROWS, *mine[:1]))
        window: list[tuple[Callable[[int], Row], int]] = []
        for number in mine:
            count, row = self._read(number)
            for i in generator.permutation(count).tolist():
                if len(window) < self._window_rows:
                    window.append((row, i))
                    continue
                at = int(generator.integers(len(window)))
                (get, j), window[at] = window[at], (row, i)
                yield get(j)
        for at in generator.permutation(len(window)).tolist():
            get, j = window[at]
            yield get(j)


class ParquetShards(ShardedDataset[Row]):
    """Streaming, with each row group as a shard: its name is the file, ``#``, and the number of the row group.

    A state says which row groups are done, and resuming reads none of them. Rows are in their order; to shuffle them,
    put a shuffle buffer behind it.

    Args:
        files, columns, where, filesystem: As for :class:`ParquetStream`.
        seed, new_shards, retry: See :class:`~minato.ShardedDataset`.
    """

    def __init__(
        self,
        files: object,
        columns: Sequence[str] | None = None,
        *,
        where: ds.Expression | None = None,
        filesystem: object = None,
        seed: int | None = None,
        new_shards: str = "refuse",
        retry: Retry | None = None,
    ) -> None:
        super().__init__(seed=seed, new_shards=new_shards, retry=retry)
        self._groups = _RowGroups(files, columns, where, filesystem)

    def shards(self) -> Sequence[str] | Mapping[str, float]:
        """The row groups, with their numbers of rows, of which ``where`` may select some, if no name comes twice."""
        names, groups = self._groups.names(), self._groups.found()[0]
        if not names:
            raise ValueError(
                "the files have no row group, or where= excludes the rows of all: give other files, or another where="
            )
        if len(set(names)) < len(names):
            return names
        sizes = [group.row_groups[0].num_rows for group in groups]
        return dict(zip(names, sizes, strict=True))

    def iter_shard(self, name: str, state: object = None) -> Iterator[Row]:
        return _RowsInOrder(*self._groups.read(self._groups.number_of(name)))


class _RowsInOrder(Iterator[Row]):
    """The rows of a row group; it passes over some at no cost."""

    def __init__(self, count: int, row: Callable[[int], Row]) -> None:
        self._count, self._row, self._at = count, row, 0

    def __next__(self) -> Row:
        if self._at == self._count:
            raise StopIteration
        self._at += 1
        return self._row(self._at - 1)

    def skip(self, n: int) -> int:
        before, self._at = self._at, min(self._at + n, self._count)
        return self._at - before


# ---- Arrow columns as NumPy -----------------------------------------------------------------


def _rows_of(table: pa.Table) -> Callable[[int], Row]:
    """Convert a table once for all rows; returns the function that returns row i as a dict of its columns.

    Numbers become NumPy scalars, lists of numbers arrays, strings ``str``, structs dicts, nulls None. Lists with nulls
    in them, and values of other types, are converted by Arrow's ``as_py``. What can be changed in place is new in each
    row: a transform may do so, and a row does not keep the memory of its column.
    """
    columns = {name: _getter(table[name].combine_chunks()) for name in table.column_names}

    def row(i: int) -> Row:
        return {name: get(i) for name, get in columns.items()}

    return row


def _getter(column: pa.Array) -> _Get:
    """The function that returns value i, converted by the type of the column alone; None where it is null."""
    kind = column.type
    if types.is_dictionary(kind):
        return _getter(column.dictionary_decode())
    there = column.is_valid().to_numpy(zero_copy_only=False)
    if types.is_struct(kind):
        fields = [(kind.field(i).name, _getter(part)) for i, part in enumerate(column.flatten())]
        return lambda i: {name: get(i) for name, get in fields} if there[i] else None
    is_tensor = isinstance(column, pa.FixedShapeTensorArray)
    if not (is_tensor or _is_number(kind) or (_is_list(kind) and _is_number(kind.value_type))):
        return _listed(column)
    if not column.null_count:
        return _numbers(column)
    get, at = _numbers(column.drop_null()), there.cumsum() - 1
    return lambda i: get(at[i]) if there[i] else None


def _numbers(column: pa.Array) -> _Get:
    """Of tensors, numbers or lists of numbers, without nulls."""
    if isinstance(column, pa.FixedShapeTensorArray):
        tensors = column.to_numpy_ndarray()
        return lambda i: tensors[i].copy()
    if not _is_number(column.type):
        return _lists(column)
    numbers = column.to_numpy(zero_copy_only=False)
    return lambda i: numbers[i]


def _lists(column: pa.Array) -> _Get:
    """Of lists of numbers: arrays, or ``as_py``'s lists for those that hold a null."""
    inner = column.flatten()
    whole = inner.drop_null() if inner.null_count else inner
    values = whole.to_numpy(zero_copy_only=False)
    lengths = compute.list_value_length(column).to_numpy()
    ends = lengths.cumsum()
    starts = ends - lengths
    if not inner.null_count:
        return lambda i: values[starts[i] : ends[i]].copy()
    # The number of values before each place, without nulls.
    before = np.concatenate([[0], inner.is_valid().to_numpy(zero_copy_only=False).cumsum()])
    first, last = before[starts], before[ends]
    return lambda i: (
        values[first[i] : last[i]].copy()
        if last[i] - first[i] == lengths[i]
        else column[int(i)].as_py()
    )


def _listed(column: pa.Array) -> _Get:
    """Of other types: what ``as_py`` makes, once for all accesses where nobody can change it in place."""
    if not (types.is_nested(column.type) or isinstance(column, pa.ExtensionArray)):
        # A value that Python cannot hold fails by itself, not its row group.
        with suppress(Exception):
            values: list[Any] = column.to_pylist()
            return values.__getitem__
    return lambda i: column[int(i)].as_py()


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists or types.is_list_view(kind) or types.is_large_list_view(kind))
