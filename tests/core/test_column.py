from __future__ import annotations

import gc
import pickle
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import load

TWIN = "column"


def memory_of(*parts: Any) -> tuple[np.ndarray[Any, Any], list[int]]:
    """All parts in one array, each at a multiple of 8; and where each begins."""
    content, starts = bytearray(), []
    for part in parts:
        content += bytes(-len(content) % 8)
        starts.append(len(content))
        content += part if isinstance(part, bytes) else part.tobytes()
    return np.frombuffer(bytes(content), np.uint8), starts


def strings(items: list[bytes]) -> tuple[bytes, np.ndarray[Any, Any]]:
    return b"".join(items), np.cumsum([0, *map(len, items)])


@pytest.mark.parametrize(
    ("kind", "dtype", "items"),
    [
        ("int", np.int64, [0, -1, 2**63 - 1, -(2**63)]),
        ("float", np.float64, [0.0, -1.5, float("inf"), 1e-300]),
        ("bool", np.bool_, [True, False, True]),
    ],
)
def test_numbers(twin: ModuleType, kind: str, dtype: Any, items: list[Any]) -> None:
    memory, [start] = memory_of(np.array(items, dtype))
    column = twin.Column((kind, len(items), start, 0, (), ()), memory)
    assert [*column] == items == column[:]
    assert all(type(item) is type(items[0]) for item in column)


@pytest.mark.parametrize(
    ("kind", "items"),
    [
        ("str", ["", "plain", "ümläut", "漢字🙂", "a\0b", "\udc80"]),
        ("bytes", [b"", b"\x00\xff", b"abc"]),
        ("pickle", [None, {"a": [1, 2.5]}, (), 2**100]),
    ],
)
def test_items_of_any_length(twin: ModuleType, kind: str, items: list[Any]) -> None:
    encode = {
        "str": lambda item: item.encode("utf-8", "surrogatepass"),
        "bytes": bytes,
        "pickle": pickle.dumps,
    }[kind]
    memory, [start, offsets] = memory_of(*strings([*map(encode, items)]))
    column = twin.Column((kind, len(items), start, offsets, (), ()), memory)
    assert [*column] == items == [column[i] for i in range(len(items))]


def test_nested(twin: ModuleType) -> None:
    memory, [ints, text, beginnings, lists] = memory_of(
        np.arange(6), *strings([b"x", b"yy"]), np.array([0, 4, 6])
    )
    numbers = ("int", 6, ints, 0, (), ())
    rows = ("list", 2, 0, lists, (), (numbers,))
    names = ("str", 2, text, beginnings, (), ())
    first = ("int", 2, ints, 0, (), ())
    pair = twin.Column(("tuple", 2, 0, 0, (), (rows, names)), memory)
    record = twin.Column(("dict", 2, 0, 0, ("row", "n"), (rows, first)), memory)
    assert [*pair] == [([0, 1, 2, 3], "x"), ([4, 5], "yy")]
    assert [*record] == [{"row": [0, 1, 2, 3], "n": 0}, {"row": [4, 5], "n": 1}]
    assert [*record[1]] == ["row", "n"]


def test_indices_are_those_of_lists(twin: ModuleType) -> None:
    items = [10, 11, 12, 13, 14]
    memory, [start] = memory_of(np.array(items))
    column = twin.Column(("int", 5, start, 0, (), ()), memory)
    assert len(column) == 5
    assert [column[i] for i in range(-5, 5)] == [*items, *items]
    assert column[np.int64(2)] == 12
    assert column[True] == 11
    for part in (slice(None), slice(1, 3), slice(None, None, -2), slice(-2, 99), slice(4, 1)):
        assert column[part] == items[part]
    for index in (5, -6, 2**62):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 5 items"):
            column[index]
    for index in ("0", 1.0, None):
        with pytest.raises(TypeError):
            column[index]


def test_an_empty_column(twin: ModuleType) -> None:
    memory, [start] = memory_of(np.zeros(1, np.int64))
    column = twin.Column(("str", 0, start, start, (), ()), memory)
    assert [*column] == [] == column[:]
    with pytest.raises(IndexError):
        column[0]


def test_the_memory_lives_as_long_as_the_column(twin: ModuleType) -> None:
    memory, [start] = memory_of(np.arange(3))
    column = twin.Column(("int", 3, start, 0, (), ()), memory)
    del memory
    gc.collect()
    assert [*column] == [0, 1, 2]


def test_items_belong_to_the_caller(twin: ModuleType) -> None:
    memory, [start, offsets] = memory_of(*strings([b"abc", b"defg"]))
    text = ("str", 2, start, offsets, (), ())
    pairs = twin.Column(("tuple", 2, 0, 0, (), (text,)), memory)
    plain = (b"defg".decode(),)  # what getrefcount() counts depends on the version of Python
    expected = sys.getrefcount(plain), sys.getrefcount(plain[0])
    for _ in range(1000):
        item = pairs[1]
        counts = sys.getrefcount(item), sys.getrefcount(item[0])
        assert item == plain
        assert counts == expected


def test_a_layout_that_does_not_fit_is_refused() -> None:
    memory, [start] = memory_of(np.arange(3))
    for layout in (
        ("int", 4, start, 0, (), ()),
        ("str", 3, 0, 0, (), ()),
        ("int", -1, 0, 0, (), ()),
    ):
        with pytest.raises(ValueError, match="does not fit 24 bytes"):
            load("column", "compiled").Column(layout, memory)
