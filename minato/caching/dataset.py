"""A dataset with the first transforms of a loader, whose results are cached."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from minato._support.hashes import fingerprint
from minato._support.objects import attribute, length_of
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
            sample = self._kept(place, self._dataset[index], before)
        return sample

    async def _aget(self, index: object) -> Any:
        place = self._place(index)
        found, sample = self._cache.get(place)
        if not found:
            sample = self._kept(place, await self._dataset.__aget__(index), self._drawn())
        return sample

    def _kept(self, place: bytes, sample: object, before: object) -> Any:
        """What the cache keeps of a sample of the dataset; refuses one for which generators have moved since."""
        for step in self._steps:
            sample = step(sample)
        if before != self._drawn():
            raise ValueError(
                "the dataset, or one of the transforms before the cache, draws random numbers, so that every epoch "
                f"would get the same ones: of {len(self._steps)} transforms, give the cache's after= as the number "
                "of those before the first random one"
            )
        self._cache.put(place, sample)
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
        numpy_parts: Any = np.random.get_state(legacy=True)
        return (
            self._asked(),
            self._owned(),
            random.getstate(),
            [part.tobytes() if hasattr(part, "tobytes") else part for part in numpy_parts],
            torch.random.get_rng_state().numpy().tobytes(),
        )


def _prefix(version: str | None, dataset: Any, steps: Sequence[_Step]) -> bytes:
    if version is not None:  # whose users differ by their types and the dataset's length
        things = (dataset, *steps)
        names = [
            f"{type_name(one, module=True)} {attribute(one, '__qualname__', '')}" for one in things
        ]
        return fingerprint(version, length_of(dataset), *names)
    try:
        return fingerprint(dataset, steps)
    except TypeError as error:
        raise TypeError(f"{error}, or give the cache a version= of your own") from error
