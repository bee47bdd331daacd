"""Arrow columns as NumPy, converted once for all rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import types

__all__ = ["rows_of"]

_Get = Callable[[int], Any]


def rows_of(table: pa.Table) -> Callable[[int], dict[str, Any]]:
    """Convert a table; returns what gives row i as a dict of its columns.

    Numbers become NumPy scalars, lists of numbers arrays (views of the column), strings ``str``, structs dicts;
    anything else, and what is null, becomes what Arrow's ``as_py`` makes of it.
    """
    columns = {name: _getter(_one_chunk(table[name])) for name in table.column_names}

    def row(i: int) -> dict[str, Any]:
        return {name: get(i) for name, get in columns.items()}

    return row


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([])
    return combined


def _getter(column: pa.Array) -> _Get:
    kind = column.type
    if isinstance(column, pa.FixedShapeTensorArray):
        return _numpy(column.to_numpy_ndarray())
    if column.null_count:
        return lambda i: column[i].as_py()
    if _is_number(kind):
        return _numpy(column.to_numpy(zero_copy_only=False, writable=True))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind):
        return _listed(column)
    if types.is_struct(kind):
        fields = [(kind.field(i).name, _getter(part)) for i, part in enumerate(column.flatten())]
        return lambda i: {name: get(i) for name, get in fields}
    if _is_list(kind) and _is_number(kind.value_type) and not column.flatten().null_count:
        values = column.flatten().to_numpy(zero_copy_only=False, writable=True)
        if types.is_fixed_size_list(kind):
            return _numpy(values.reshape(len(column), kind.list_size))
        ends = column.value_lengths().to_numpy().cumsum()
        return lambda i: values[ends[i - 1] if i else 0 : ends[i]]
    return _listed(column)


def _numpy(values: Any) -> _Get:
    return lambda i: values[i]


def _listed(column: pa.Array) -> _Get:
    values: list[Any] = column.to_pylist()
    return values.__getitem__


def _is_number(kind: pa.DataType) -> bool:
    return any(is_one(kind) for is_one in (types.is_integer, types.is_floating, types.is_boolean))


def _is_list(kind: pa.DataType) -> bool:
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(is_one(kind) for is_one in kinds)
