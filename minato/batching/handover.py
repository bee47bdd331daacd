"""Whether the worker that made a sample may hand it to another one, which collates its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch

from minato._core import SharedWords
from minato._core.segment import Memory
from minato.batching.sample_spec import is_plain_tensor

__all__ = ["Handover", "are_plain"]

_PLAIN, _OTHERS = 0, 1
_MOST_PARTS = 4096
"""A sample of more parts takes longer to copy than it is worth, and may refer to something large of the dataset."""

_SCALARS = {np.dtype(code).type for code in "?bBhHiIlLqQefdgFDG"}
_ATOMS = frozenset(
    {
        *(int, float, bool, complex, str, bytes, type(None), PosixPath),
        *(torch.Size, torch.dtype, torch.device, *_SCALARS),
    }
)
"""Exact types of immutable values whose pickle is exact."""
_SEQUENCES = (tuple, list)
_NUMBERS = "?biufcSUmM"
"""Kinds of NumPy's dtypes without objects or fields."""
_has_names: Callable[[torch.Tensor], bool] = getattr(
    torch.Tensor, "has_names", lambda tensor: False
)
"""Names of dimensions, which later versions of torch have no more."""


def are_plain(samples: Iterable[object]) -> bool:
    """Return whether samples are of types that are known to arrive in another process exactly as they are.

    They are numbers, strings, paths, plain tensors and arrays without attributes of their own, and lists, tuples, named
    tuples and dictionaries of these, of exactly those types. No list, dictionary, tensor or array may belong to two of
    the samples: what a dataset shares among its samples would be copied with each.
    """
    before: set[int] = set()
    for sample in samples:
        parts: set[int] = set()
        try:
            if not _is_plain(sample, parts) or not before.isdisjoint(parts):
                return False
        except Exception:  # a list that a thread changes meanwhile, for one
            return False
        before |= parts
    return True


def _is_plain(sample: Any, mutable: set[int]) -> bool:
    """Return whether one sample is plain; adds the ids of its mutable parts."""
    if type(sample) in _ATOMS:
        return True
    left, waiting = _MOST_PARTS, [sample]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if kind is torch.Tensor:
            if not is_plain_tensor(part) or part.__dict__ or _has_names(part):
                return False
        elif kind is np.ndarray:
            if part.dtype.kind not in _NUMBERS or part.dtype.metadata:
                return False
        elif kind in _SEQUENCES or kind is dict or _is_plain_namedtuple(kind):
            left -= len(part) + 1
            if left < 0:
                return False
            if kind is dict:
                if not _ATOMS.issuperset(map(type, part)):
                    return False
                part_values: Iterable[Any] = part.values()
            else:
                part_values = part
            if not _ATOMS.issuperset(map(type, part_values)):
                waiting.extend(each for each in part_values if type(each) not in _ATOMS)
            if kind is not list and kind is not dict:
                continue
        else:
            return False
        mutable.add(id(part))
    return True


def _is_plain_namedtuple(kind: type) -> bool:
    """Return whether ``namedtuple`` or ``NamedTuple`` has made a class; a subclass may have methods of its own."""
    return bool(kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


class Handover:
    """What is known of the samples of a loader, in memory that its workers share.

    A sample arrives in another process as a copy. Where the copy may differ, ``collate_fn`` would get something else
    than with torch. Then the worker that makes the samples of a batch collates them: from the first such sample on,
    each worker claims whole batches, and each sample keeps its place, whatever the order.

    Each word is only ever set, so that workers may do it at the same time.

    Args:
        buffer: Writable memory that every party maps; zeros mean that nothing is known.
        offset: Where its ``NBYTES`` start; a multiple of 8.
    """

    NBYTES = 64

    def __init__(self, buffer: Memory, offset: int) -> None:
        self._words = SharedWords(buffer, offset, 2)

    @property
    def refused(self) -> bool:
        """Whether a sample has turned out to be one that must stay in its worker."""
        return self._words.load(_OTHERS) != 0

    @property
    def keeps_batches(self) -> bool:
        """Whether batches stay in one worker: samples were refused, or nothing is known of them."""
        return self.refused or not self._words.load(_PLAIN)

    @property
    def answer(self) -> bool | None:
        """Whether samples may be handed over; None while nothing is known."""
        return None if not self.refused and self.keeps_batches else not self.refused

    def settle(self, may_travel: bool) -> None:
        """Say that samples may be handed over, or that one may not be; a refusal is final."""
        self._words.store(_PLAIN if may_travel else _OTHERS, 1)
