"""Samples encoded for a store, as bytes or as a row of columns, and decoded again."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["as_bytes", "as_row", "decoded", "digest"]

_ARRAY, _ARCHIVE = b"\x93NUMPY", b"PK\x03\x04"
"""The first bytes of NumPy's files: of a single array, of named arrays."""
_MOST_BYTES, _MOST_RATIO = 256 << 20, 16
"""Limits of an unpacked archive: bytes, and multiples of its own size; ``ingest()`` writes without compression."""
_FIELD, _ONLY = "field_", "data"
"""Prefix of the columns of a tuple, before their numbers; the column of a sample without parts."""


def as_bytes(sample: object) -> bytes:
    """Encode a sample as bytes.

    Bytes stay unchanged; an array, tensor or number becomes an ``.npy`` file, a dict or tuple of them an ``.npz``.

    Raises:
        TypeError: It contains a value of another type.
    """
    if isinstance(sample, (bytes, bytearray, memoryview)):
        return bytes(sample)
    to = io.BytesIO()
    if isinstance(sample, (Mapping, tuple, list)):
        with zipfile.ZipFile(to, "w") as archive:
            for name, value in _parts(sample, ""):
                info = zipfile.ZipInfo(
                    f"{name}.npy"
                )  # without a date: equal samples have equal bytes
                archive.writestr(info, _npy(value))
        return to.getvalue()
    return _npy(sample)


def as_row(sample: object) -> dict[str, Any]:
    """Encode a sample as columns: numbers, strings and bytes unchanged, arrays and tensors as ``.npy`` files.

    A tuple has the columns ``field_0``, ``field_1`` …, and a sample without parts the column ``data``.

    Raises:
        TypeError: It contains a value of another type.
    """
    if isinstance(sample, (Mapping, tuple, list)):
        return {name: _cell(value) for name, value in _parts(sample, _FIELD)}
    return {_ONLY: _cell(sample)}


def decoded(value: Any) -> Any:
    """Decode a value that :func:`minato.sources.ingest.ingest` wrote without ``encode``; for a source's ``decode``.

    Numbers become NumPy scalars, tensors become arrays, lists become tuples.
    """
    if isinstance(value, Mapping):
        parts = {name: _of_cell(cell) for name, cell in value.items()}
        if set(parts) == {_ONLY}:
            return parts[_ONLY]
        return _joined(parts, _FIELD)
    if bytes(value[:4]) != _ARCHIVE:
        return _of_cell(value)
    with np.load(io.BytesIO(value), allow_pickle=False) as archive:
        unpacked = sum(member.file_size for member in archive.zip.infolist())
        if unpacked > max(_MOST_BYTES, _MOST_RATIO * len(value)):
            raise ValueError(
                f"an .npz file of {len(value)} bytes names arrays of {unpacked} bytes, which is too much to be meant: "
                "if it is, give decode= a function of yours that reads it"
            )
        return _joined({name: _plain(archive[name]) for name in archive.files}, "")


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


def _parts(sample: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(sample, Mapping):
        return [(str(name), value) for name, value in sample.items()]
    return [(f"{prefix}{number}", value) for number, value in enumerate(sample)]


def _joined(parts: dict[str, Any], prefix: str) -> Any:
    if list(parts) == [f"{prefix}{number}" for number in range(len(parts))]:
        return tuple(parts.values())
    return parts


def _npy(value: object) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        array: Any = np.frombuffer(bytes(value) + b"\0", f"V{len(value) + 1}")  # there is no V0
    else:
        array = _array(value)
    to = io.BytesIO()
    np.lib.format.write_array(to, array, allow_pickle=False)
    return to.getvalue()


def _array(value: object) -> Any:
    if not isinstance(value, (np.ndarray, np.generic, torch.Tensor, int, float, complex, str)):
        raise TypeError(
            f"a {type(value).__name__} cannot be written: give encode=, which makes bytes of a sample, or a dict of "
            "numbers, text, bytes and arrays"
        )
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} cannot be written: give encode=")
    return array


def _cell(value: object) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.dim()):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else _npy(value)


def _of_cell(cell: object) -> Any:
    if isinstance(cell, (bytes, memoryview)) and bytes(cell[:6]) == _ARRAY:
        return _plain(np.lib.format.read_array(io.BytesIO(cell), allow_pickle=False))
    return cell


def _plain(array: Any) -> Any:
    if array.dtype.kind == "V" and array.dtype.names is None:
        return array.tobytes()[:-1]
    if array.dtype.kind == "U" and not array.ndim:
        return str(array)
    return array if array.ndim else array[()]
