"""Collation: ``collate_fn`` is called on the samples of a batch; one that pads samples of different lengths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from minato._compat import collate_in_own_memory

__all__ = ["Bind", "Collate", "PadCollate", "RunAgain", "pad_stack"]

Bind = Callable[[int, int, Any, int], AbstractContextManager[None]]
"""Binds randomness to a batch, by seed, epoch, and index and occurrence of its first sample."""

RunAgain = Callable[[int, int, Any], list[Any]]
"""Runs a sample of a batch in this worker, by its position and index; the list is empty if it is skipped."""


class Collate:
    """The loader's ``collate_fn``, called as torch calls it.

    Args:
        collate_fn: Called with the list of samples, or with the sample if ``batched`` is false.
        batched: Whether the loader has a batch size.
        bind: Binds randomness to a batch while a worker collates it; None: it is not bound, or the caller does so.

    Attributes:
        is_own: Whether batches are built by calling ``collate_fn`` instead of in fields.
        draws: Whether ``collate_fn`` is the program's own, which may draw random numbers.
        bind: As given; None too if it does not draw.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], batched: bool, bind: Bind | None = None
    ) -> None:
        by_default = collate_fn is default_collate
        self.is_own = not (by_default and batched)
        self.draws = not (by_default or collate_fn is default_convert)
        self.bind = bind if self.draws else None
        self._batched = batched
        self._collate_fn = collate_in_own_memory if by_default else collate_fn

    def __call__(self, samples: Any) -> Any:
        """The batch of these samples, or of one call's result in their place."""
        return self._collate_fn(samples if self._batched else samples[0])


# ---- samples of different lengths ----


def pad_stack(
    arrays: Sequence[torch.Tensor | np.ndarray], value: float = 0, multiple_of: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack tensors or arrays of shape (length, …), padded to the longest.

    Args:
        arrays: They may differ in length and in dtype.
        value: Padding value.
        multiple_of: The common length is rounded up to a multiple of this.

    Returns:
        The stack, shape (number, longest, …), of the dtype to which torch promotes those of all; and the lengths,
        shape (number,), int64.

    Raises:
        ValueError: They differ in another dimension, or hold integers among which the padding value is not.
    """
    tensors = [torch.as_tensor(each) for each in arrays]
    shapes = {tuple(each.shape[1:]) for each in tensors}
    if len(shapes) != 1 or any(each.ndim == 0 for each in tensors):
        raise ValueError(
            f"only the first dimension is padded, and samples have the shapes "
            f"{sorted({tuple(each.shape) for each in tensors})}"
        )
    lengths = torch.tensor([len(each) for each in tensors])
    longest = -(-int(lengths.max()) // multiple_of) * multiple_of
    dtype = functools.reduce(torch.promote_types, {each.dtype for each in tensors})
    shape = (len(tensors), longest, *shapes.pop())
    stack = tensors[0].new_full(shape, value, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        held = stack.new_full((), value).item()
        if held != value:
            raise ValueError(
                f"the padding value {value!r} is none of {dtype}, of which the samples are: it would become {held!r}"
            )
    for row, each in zip(stack, tensors, strict=True):
        row[: len(each)] = each
    return stack, lengths


@dataclass(frozen=True)
class PadCollate:
    """A ``collate_fn`` that pads tensors and arrays to the longest of the batch, along their first dimension.

    The structure of batches is that of torch's ``default_collate``, which collates all other values.

    Attributes:
        value: Padding value; or a dictionary from names of fields to theirs, with 0 for other fields.
        multiple_of: Lengths are rounded up to a multiple of this.
        masks: For samples that are dictionaries: from the name of a new field to the name of a padded one. The new
            field is True at content, and False at padding: bool, shape (samples, longest).

    Raises:
        ValueError: Samples differ in another dimension than the first.
        KeyError: A field in ``masks`` does not exist.
    """

    value: float | Mapping[str, float] = 0
    multiple_of: int = 1
    masks: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, samples: list[object]) -> Any:
        """Return the batch."""
        return self._collated(samples, None)

    def _collated(self, samples: Any, name: Any) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            batch = {key: self._collated([each[key] for each in samples], key) for key in first}
            if name is None:
                for mask, of in self.masks.items():
                    lengths = torch.tensor([len(each[of]) for each in samples])
                    batch[mask] = torch.arange(batch[of].shape[1]) < lengths[:, None]
            return batch
        if isinstance(first, (list, tuple)):
            parts = [self._collated(part, name) for part in zip(*samples, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else parts
        if isinstance(first, (torch.Tensor, np.ndarray)) and first.ndim:
            value = self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value
            return pad_stack(samples, value, self.multiple_of)[0]
        return collate_in_own_memory(samples)
