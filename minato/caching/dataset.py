"""A dataset with the first transforms of a loader, whose results are cached."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from minato._support.hashes import fingerprint
from minato._support.objects import attribute
from minato._support.text import type_name
from minato.caching.base import Cache

__all__ = ["CachedDataset"]

_Step = Callable[[Any], Any]


class CachedDataset(Dataset[Any]):
    """``dataset[index]`` after the first transforms, from the cache if it has the sample.

    Args:
        steps: The transforms before the cache.
        asked: Returns the number of generators that the current sample has requested from minato.
        owned: Returns the states of the generators that the dataset and the steps own.

    Raises:
        TypeError: The dataset or a transform has no fingerprint, and the cache no ``version``.
    """

    def __init__(
        self,
        dataset: Any,
        steps: Sequence[_Step],
        cache: Cache,
        asked: Callable[[], int],
        owned: Callable[[], bytes],
    ) -> None:
        self._dataset = dataset
        self._steps = tuple(steps)
        self._cache = cache
        self._asked = asked
        self._owned = owned
        # Computed once, before the workers start: they may change their copies of the dataset.
        self._prefix = _prefix(cache.version, dataset, self._steps)
        if attribute(dataset, "__aget__") is not None:
            self.__aget__ = self._aget

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: object) -> Any:
        place = self._place(index)
        found, sample = self._cache.get(place)
        if not found:
            before = self._drawn()
            sample = self._run(self._dataset[index])
            self._check(before)
            self._cache.put(place, sample)
        return sample

    async def _aget(self, index: object) -> Any:
        place = self._place(index)
        found, sample = self._cache.get(place)
        if not found:
            sample = await self._dataset.__aget__(index)
            before = self._drawn()
            sample = self._run(sample)
            self._check(before)
            self._cache.put(place, sample)
        return sample

    def _run(self, sample: object) -> Any:
        for step in self._steps:
            sample = step(sample)
        return sample

    def _place(self, index: object) -> bytes:
        if isinstance(index, np.integer):  # NumPy's integers are what they are equal to
            index = int(index)
        if type(index) in (int, str):
            text = f"{type(index).__name__} {index}".encode("utf-8", "surrogatepass")
            return self._prefix + hashlib.blake2b(text, digest_size=16).digest()
        return self._prefix + fingerprint(index)

    def _drawn(self) -> Any:
        """State that changes with random draws; in a thread without the generators from which others draw, too."""
        if threading.current_thread() is not threading.main_thread():
            return self._asked()
        return (
            self._asked(),
            self._owned(),
            random.getstate(),
            [part.tobytes() if hasattr(part, "tobytes") else part for part in _numpy_state()],
            torch.random.get_rng_state().numpy().tobytes(),
        )

    def _check(self, before: object) -> None:
        if before != self._drawn():
            raise ValueError(
                "the dataset, or one of the transforms before the cache, draws random numbers, so that every epoch "
                f"would get the same ones: of {len(self._steps)} transforms, give the cache's after= as the number "
                "of those before the first random one"
            )


def _prefix(version: str | None, dataset: Any, steps: Sequence[_Step]) -> bytes:
    if version is not None:
        return fingerprint(version, *_described(dataset, steps))
    try:
        return fingerprint(dataset, steps)
    except TypeError as error:
        raise TypeError(f"{error}, or give the cache a version= of your own") from error


def _described(dataset: Any, steps: Sequence[_Step]) -> Iterator[Any]:
    """What tells two users of one version apart: the length and the type of the dataset, and names of the steps."""
    try:
        yield len(dataset)
    except Exception:  # it need not have one
        yield None
    for thing in (dataset, *steps):
        yield f"{type_name(thing, module=True)} {attribute(thing, '__qualname__', '')}"


def _numpy_state() -> Any:
    return np.random.get_state(legacy=True)
