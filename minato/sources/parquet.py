"""Rows of Parquet files, through pyarrow (extra ``parquet``)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from minato.errors import missing

try:
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow import types
except ModuleNotFoundError:
    raise missing("minato.sources.parquet", "pyarrow", "parquet") from None

from minato._support.counters import shared_integers
from minato._support.text import message_of
from minato.checks import check_shard
from minato.sources.base import KeyedSource, Retry, Row, SourceError
from minato.sources.connections import Env, Place

__all__ = ["Parquet", "ParquetStream"]

_GROUPS, _ROWS = 0, 1
"""The purpose of a generator, a part of its seed after (seed, epoch)."""

_Get = Callable[[int], Any]
_Rows = tuple[int, Callable[[int], Row]]
"""Number of rows, and the function that returns row i."""


class _RowGroups:
    """The row groups of Parquet files, of which only the selected columns and rows are read.

    Args: As of :class:`ParquetStream`.
    """

    def __init__(
        self,
        files: object,
        columns: Sequence[str] | None,
        where: ds.Expression | None,
        filesystem: object,
    ) -> None:
        self.files = Place(files) if isinstance(files, (str, Env)) else files
        self._columns = None if columns is None else list(columns)
        self._where = where
        self._filesystem = filesystem
        self._all: list[Any] | None = None

    def __getstate__(self) -> Row:
        return {**self.__dict__, "_all": None}

    @property
    def all(self) -> list[Any]:
        """The row groups that may contain selected rows, in the order of the files."""
        if self._all is None:
            files = self.files.url if isinstance(self.files, Place) else self.files
            dataset = ds.dataset(files, format="parquet", filesystem=self._filesystem)
            try:
                dataset.scanner(columns=self._columns, filter=self._where)
            except (pa.ArrowException, KeyError) as error:
                raise ValueError(
                    f"columns or where: {message_of(error).splitlines()[0]}: the files have the columns "
                    f"{', '.join(dataset.schema.names)}"
                ) from error
            self._all = [
                group
                for fragment in dataset.get_fragments(self._where)
                for group in fragment.split_by_row_group(self._where, schema=dataset.schema)
            ]
        return self._all

    def counts(self) -> list[int]:
        if self._where is None:
            return [group.row_groups[0].num_rows for group in self.all]
        return [group.to_table(columns=[], filter=self._where).num_rows for group in self.all]

    def read(self, number: int) -> _Rows:
        group = self.all[number]
        try:
            table = group.to_table(columns=self._columns, filter=self._where, use_threads=False)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise SourceError(
                f"cannot read row group {group.row_groups[0].id} of {group.path!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return len(table), _rows_of(table)


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
        if kept_groups < 1:
            raise ValueError(f"kept_groups={kept_groups} is too small: give at least 1")
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
        _, row = self._group(number)
        return row(key - (int(self._ends[number - 1]) if number else 0))

    def _group(self, number: int) -> _Rows:
        # Under the lock: otherwise several threads would read the same row group.
        with self.connections.lease() as (lock, kept), lock:
            group: _Rows = kept.pop(number, None) or self._groups.read(number)
            kept[number] = group
            while len(kept) > self._kept_groups:
                kept.popitem(last=False)
        return group


class ParquetStream(IterableDataset[Any]):
    """Streaming: each worker reads its share of the row groups, one after the other.

    Args:
        files: A file, a directory or a list of files, or the URL of one (``s3://…``), which may be an
            :class:`~minato.sources.connections.Env`.
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
        if window_rows < 1:
            raise ValueError(f"window_rows={window_rows} is too small: give at least 1")
        self._groups = _RowGroups(files, columns, where, filesystem)
        self._seed = seed
        self._window_rows = window_rows
        self._shard = check_shard(shard)
        self._decode = decode
        # In shared memory, where persistent workers see it change.
        self._epoch = shared_integers(1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch)
        rows = self._shuffled(epoch) if self._seed is not None else self._in_order()
        return rows if self._decode is None else map(self._decode, rows)

    def _mine(self, numbers: Sequence[int]) -> Sequence[int]:
        rank, ranks = self._shard
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return numbers[rank * workers + number :: ranks * workers]

    def _in_order(self) -> Iterator[Row]:
        for number in self._mine(range(len(self._groups.all))):
            count, row = self._groups.read(number)
            yield from map(row, range(count))

    def _shuffled(self, epoch: int) -> Iterator[Row]:
        assert self._seed is not None
        seed = self._seed % 2**64
        order = np.random.default_rng((seed, epoch, _GROUPS)).permutation(len(self._groups.all))
        mine = self._mine(order.tolist())
        # The seed depends on the share, so that neither timing nor other workers influence the order.
        generator = np.random.default_rng((seed, epoch, _ROWS, *mine[:1]))
        window: list[tuple[Callable[[int], Row], int]] = []
        for number in mine:
            count, row = self._groups.read(number)
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


# ---- Arrow columns as NumPy -----------------------------------------------------------------


def _rows_of(table: pa.Table) -> Callable[[int], Row]:
    """Convert a table once for all rows; returns the function that returns row i as a dict of its columns.

    Numbers become NumPy scalars, lists of numbers arrays (views of the column), strings ``str``, structs dicts, nulls
    None. Lists with nulls in them, and values of other types, are converted by Arrow's ``as_py``.
    """
    columns = {name: _getter(_one_chunk(table[name])) for name in table.column_names}

    def row(i: int) -> Row:
        return {name: get(i) for name, get in columns.items()}

    return row


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([])
    return combined


def _getter(column: pa.Array) -> _Get:
    """The function that returns value i, converted by the type of the column alone; None where it is null."""
    if not column.null_count:
        return _converter(column)
    get = _converter(column.drop_null())
    there = column.is_valid().to_numpy(zero_copy_only=False)
    at = there.cumsum() - 1
    return lambda i: get(at[i]) if there[i] else None


def _converter(column: pa.Array) -> _Get:
    """:func:`_getter` of a column without nulls."""
    kind = column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return _numpy(column.to_numpy_ndarray())
    if types.is_dictionary(kind):
        return _converter(column.dictionary_decode())
    if _is_number(kind):
        return _numpy(column.to_numpy(zero_copy_only=False, writable=True))
    if types.is_struct(kind):
        fields = [(kind.field(i).name, _getter(part)) for i, part in enumerate(column.flatten())]
        return lambda i: {name: get(i) for name, get in fields}
    if _is_list(kind) and _is_number(kind.value_type):
        return _lists(column)
    return _listed(column)


def _lists(column: pa.Array) -> _Get:
    """Of lists of numbers: arrays, or ``as_py``'s lists for those that hold a null."""
    inner = column.flatten()
    whole = inner.drop_null() if inner.null_count else inner
    values = whole.to_numpy(zero_copy_only=False, writable=True)
    lengths = np.full(len(column), getattr(column.type, "list_size", 0))
    if not types.is_fixed_size_list(column.type):
        lengths = column.value_lengths().to_numpy()
    ends = lengths.cumsum()
    starts = ends - lengths
    if not inner.null_count:
        return lambda i: values[starts[i] : ends[i]]
    # The number of values before each place, without nulls.
    before = np.concatenate([[0], inner.is_valid().to_numpy(zero_copy_only=False).cumsum()])
    first, last = before[starts], before[ends]
    return lambda i: (
        values[first[i] : last[i]] if last[i] - first[i] == lengths[i] else column[int(i)].as_py()
    )


def _numpy(values: npt.NDArray[np.generic]) -> _Get:
    return lambda i: values[i]


def _listed(column: pa.Array) -> _Get:
    try:
        values: list[Any] = column.to_pylist()
    except Exception:  # a value that Python cannot hold fails by itself, not its row group
        return lambda i: column[int(i)].as_py()
    return values.__getitem__


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    lists = types.is_list(kind) or types.is_large_list(kind)
    return bool(lists or types.is_fixed_size_list(kind))
