"""Samples encoded for a store, as bytes or as a row of columns, and decoded to equal samples again."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["as_bytes", "as_row", "decoded", "digest"]

_TREE = "minato-sample.json"
"""The first member of an archive: what the sample consists of, with the numbers of its arrays."""
_BEGIN, _NAME_AT = b"PK\x03\x04", 30
"""The first bytes of a ZIP file, and where the name of its first member begins."""
_MOST_BYTES, _MOST_RATIO = 256 << 20, 16
"""Limits of an unpacked archive: bytes, and multiples of its own size; ``ingest()`` writes without compression."""
_FIELD, _ONLY = "field_", "data"
"""Prefix of the columns of a tuple, before their numbers; the column of a sample that is neither dict nor tuple."""
_INT64 = range(-(1 << 63), 1 << 63)
_AS_PYTHON = (np.bool_, np.int64, np.float64)
"""NumPy's types of numbers that are collated as Python's are."""


def as_bytes(sample: object) -> bytes:
    """Encode a sample as bytes, from which :func:`decoded` makes an equal one.

    Bytes stay unchanged. Anything else becomes an ``.npz`` file with a member that describes the sample: None, numbers,
    text, bytes, arrays, NumPy scalars, tensors, and dicts, lists and tuples of them.

    Raises:
        TypeError: It contains a value of another type, whose nature would be lost.
    """
    return _plain_bytes(sample) if type(sample) in _BYTES else _archive(sample)


def as_row(sample: object) -> dict[str, Any]:
    """Encode a sample as columns, from which :func:`decoded` makes an equal one.

    A dict has its keys as columns, a tuple ``field_0``, ``field_1`` …, any other sample ``data``. Cells are None,
    ``bool``, ``int``, ``float``, ``str`` and ``bytes``; other values are encoded by :func:`as_bytes`.

    Raises:
        TypeError: It contains a value of another type.
        ValueError: It has no columns, or they would be read as those of a sample of another kind.
    """
    if type(sample) is dict:
        unnamed = [name for name in sample if type(name) is not str or not name]
        if unnamed or not sample:
            raise ValueError(
                f"a dict with {f'the key {unnamed[0]!r}' if unnamed else 'no keys'} has no columns of a table: give "
                "encode=, which makes a dict with names"
            )
        if _kind(sample) is not dict:
            raise ValueError(
                f"a dict with the columns {list(sample)} would be read as a {_kind(sample).__name__}: rename them by "
                "encode=, or read the source with decode=decoded"
            )
        return {name: _cell(value, name) for name, value in sample.items()}
    if type(sample) is tuple and sample:
        return {f"{_FIELD}{i}": _cell(value, f"{_FIELD}{i}") for i, value in enumerate(sample)}
    return {_ONLY: _cell(sample, _ONLY)}


def decoded(value: Any) -> Any:
    """Decode a value that :func:`minato.sources.ingest.ingest` wrote without ``encode``; for a source's ``decode``.

    It equals the sample in type and content, with these exceptions: ``bytearray`` and ``memoryview`` come as ``bytes``;
    in the cells of a table ``numpy.int64``, ``float64`` and ``bool_`` as Python's types, from Parquet the other way.
    Bytes that ``ingest`` did not make come as they are.
    """
    if not isinstance(value, Mapping):
        return _decoded(value)
    parts = {name: _decoded(cell) for name, cell in value.items()}
    kind = _kind(parts)
    if kind is tuple:
        return tuple(parts.values())
    return parts if kind is dict else parts[_ONLY]


def digest(value: Any) -> int:
    """The CRC-32 of a result of :func:`as_bytes` or :func:`as_row`."""
    if not isinstance(value, Mapping):
        return zlib.crc32(value)
    crc = 0
    for name in sorted(value):
        cell = value[name]
        data = cell if isinstance(cell, bytes) else repr(cell).encode()
        crc = zlib.crc32(data, zlib.crc32(f"{name}:{len(data)}:".encode(), crc))
    return crc


def _kind(row: Mapping[str, Any]) -> type:
    """The kind of sample that has these columns."""
    if list(row) == [_ONLY]:
        return object
    return tuple if list(row) == [f"{_FIELD}{i}" for i in range(len(row))] else dict


_BYTES = (bytes, bytearray, memoryview)


def _plain_bytes(value: Any) -> bytes:
    if isinstance(value, memoryview) and (value.ndim, value.itemsize) != (1, 1):
        raise TypeError("a memoryview of other items than bytes cannot be written: give bytes")
    return bytes(value)


def _cell(value: object, column: str) -> Any:
    if type(value) in _AS_PYTHON:
        value = value.item()  # type: ignore[attr-defined]
    if value is None or type(value) in (bool, float):
        return value
    if (type(value) is int and value in _INT64) or (type(value) is str and _is_text(value)):
        return value
    try:
        return as_bytes(value)
    except TypeError as error:
        raise TypeError(f"column {column!r}: {error}") from None


def _is_text(value: str) -> bool:
    """Whether databases hold a text as it is."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


# ---- archives -------------------------------------------------------------------------------


def _archive(sample: object) -> bytes:
    arrays: list[Any] = []
    tree = _tree(sample, arrays)
    to = io.BytesIO()
    with zipfile.ZipFile(to, "w") as archive:
        # ZipInfo has no date: equal samples have equal bytes.
        archive.writestr(zipfile.ZipInfo(_TREE), json.dumps(tree))
        for number, array in enumerate(arrays):
            file = io.BytesIO()
            np.lib.format.write_array(file, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{number}.npy"), file.getvalue())
    return to.getvalue()


def _tree(value: Any, arrays: list[Any]) -> Any:
    """A value as JSON: itself, or a list of its kind and its parts; adds its arrays."""
    kind = type(value)
    if kind is str and not _is_text(value) and json.loads(json.dumps(value)) != value:
        raise TypeError(f"the text {value!r} cannot be written as it is: give encode=")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (list, tuple):
        return [kind.__name__, *(_tree(part, arrays) for part in value)]
    if kind is dict:
        return [
            "dict",
            *([_tree(key, arrays), _tree(part, arrays)] for key, part in value.items()),
        ]
    if kind in _BYTES:
        arrays.append(np.array(bytearray(_plain_bytes(value)), np.uint8))
        return ["bytes", len(arrays) - 1]
    if isinstance(value, torch.Tensor):
        arrays.append(_tensor_bytes(value))
        return ["tensor", len(arrays) - 1, str(value.dtype).removeprefix("torch."), *value.shape]
    if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        arrays.append(_checked(np.asarray(value), value))
        return ["array" if isinstance(value, np.ndarray) else "scalar", len(arrays) - 1]
    raise _unknown(value)


def _unknown(value: object) -> TypeError:
    return TypeError(
        f"a {type(value).__name__} cannot be written: give encode=, which makes bytes of a sample, or a dict of "
        "numbers, text, bytes and arrays"
    )


def _tensor_bytes(value: torch.Tensor) -> Any:
    if (
        type(value) is not torch.Tensor
        or value.layout is not torch.strided
        or value.is_quantized
        or value.device.type != "cpu"
        or value.requires_grad
    ):
        raise TypeError(
            f"a {type(value).__name__} ({value.dtype}, {value.layout}, on {value.device}, requires_grad="
            f"{value.requires_grad}) cannot be written as it is: give encode=, which makes a plain tensor of it"
        )
    plain = value.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy()


def _checked(array: Any, value: object) -> Any:
    """An array that NumPy's format holds as it is."""
    known = not array.dtype.hasobject and array.dtype.metadata is None
    if known:
        written = np.lib.format.dtype_to_descr(array.dtype)
        known = np.lib.format.descr_to_dtype(written) == array.dtype
    # An array drops zeros at the end of a text.
    if not known or (isinstance(value, (str, bytes)) and array[()] != value):
        raise TypeError(f"an array of {array.dtype!r} cannot be written as it is: give encode=")
    return array


def _decoded(value: Any) -> Any:
    if not isinstance(value, _BYTES):
        return value
    end = _NAME_AT + len(_TREE)
    if bytes(value[:4]) != _BEGIN or bytes(value[_NAME_AT:end]) != _TREE.encode():
        return bytes(value)
    with zipfile.ZipFile(io.BytesIO(value)) as archive:
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        if unpacked > max(_MOST_BYTES, _MOST_RATIO * len(value)):
            raise ValueError(
                f"an .npz file of {len(value)} bytes names arrays of {unpacked} bytes, which is too much to be meant: "
                "if it is, give decode= a function of yours that reads it"
            )
        tree = json.loads(archive.read(_TREE))
        arrays = [
            np.lib.format.read_array(io.BytesIO(archive.read(member)), allow_pickle=False)
            for member in members[1:]
        ]
    return _value(tree, arrays)


def _value(tree: Any, arrays: list[Any]) -> Any:
    """The value that a result of :func:`_tree` describes."""
    if type(tree) is not list:
        return tree
    kind, *parts = tree
    if kind == "list":
        return [_value(part, arrays) for part in parts]
    if kind == "tuple":
        return tuple(_value(part, arrays) for part in parts)
    if kind == "dict":
        return {_value(key, arrays): _value(part, arrays) for key, part in parts}
    if kind == "complex":
        return complex(*parts)
    array = arrays[parts[0]]
    if kind == "tensor":
        flat = torch.from_numpy(array).view(getattr(torch, parts[1]))
        return flat.view(parts[2:])
    if kind == "bytes":
        return array.tobytes()
    return array if kind == "array" else array[()]
