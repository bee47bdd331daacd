"""The tree of tuples that describes a sample, as a flat list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

__all__ = ["SpecNode", "flatten", "placed"]

Spec: TypeAlias = "tuple[Any, ...]"
"""A sample as a tree of tuples; see :class:`minato._core.Packer`."""


class SpecNode(NamedTuple):
    """One node of a spec.

    Attributes:
        tag: The first element of the spec's tuple.
        shape: Shape of the item that the node writes; ``()`` for nodes that write nothing, too.
        dtype: The item's dtype, of torch for tensors and of numpy for the rest; ``None`` if the
            node writes nothing.
        offset: Bytes from the batch's region to the field.
        exact: The type that the sample must have here; the dtype of a tensor; the keys of a dict;
            of an array the type that it may have instead of ``numpy.ndarray``.
        length: Number of children.
    """

    tag: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int
    exact: Any
    length: int


_NUMBERS = {"float": (float, np.float64), "int": (int, np.int64), "bool": (bool, np.bool_)}


def flatten(spec: Spec) -> list[SpecNode]:
    """List the nodes of a spec in the order of the tree, parents before their children.

    Raises:
        ValueError: A node of the spec has an unknown tag or the wrong arguments.
    """
    match spec:
        case ("tensor", str(name), shape, offset):
            dtype = getattr(torch, name)
            return [SpecNode("tensor", shape, dtype, offset, dtype, 0)]
        case ("array", dtype, shape, offset):
            return [SpecNode("array", shape, np.dtype(dtype), offset, np.memmap, 0)]
        case ("scalar", dtype, offset):
            return [SpecNode("scalar", (), np.dtype(dtype), offset, np.dtype(dtype).type, 0)]
        case ("float" | "int" | "bool" as tag, offset):
            exact, dtype = _NUMBERS[tag]
            return [SpecNode(tag, (), np.dtype(dtype), offset, exact, 0)]
        case ("text", exact) if exact in (str, bytes):
            return [SpecNode("text", (), None, 0, exact, 0)]
        case (tag, exact, children) if _is_container(tag, exact, len(children)):
            nodes = [SpecNode(tag, (), None, 0, exact, len(children))]
            for child in children:
                nodes += flatten(child)
            return nodes
    raise ValueError(f"not a node of a spec: {spec!r}")


def _is_container(tag: object, exact: object, length: int) -> bool:
    match tag:
        case "list":
            return exact is list
        case "tuple" | "namedtuple":
            return isinstance(exact, type) and issubclass(exact, tuple)
        case "dict":
            return isinstance(exact, tuple) and len(exact) == length
    return False


def placed(spec: Spec, offsets: Iterator[int]) -> tuple[Any, ...]:
    """Return a spec with other offsets of its fields."""
    if spec[0] == "text":
        return spec
    if isinstance(spec[-1], int):
        return (*spec[:-1], next(offsets))
    return (*spec[:-1], tuple([placed(child, offsets) for child in spec[-1]]))
