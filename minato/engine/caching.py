"""``cache=``: the first transforms of a loader move behind its cache, into a dataset that looks there first."""

from __future__ import annotations

import hashlib
import pickle
import random
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, MapDataPipe

from minato._support.hashes import fingerprint
from minato._support.objects import attribute, length_of
from minato._support.values import type_name
from minato.caching import Cache
from minato.options import Options
from minato.sampling.resume import is_stateful
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import generators_created


def check_cache(cache: Cache, options: Options, transforms: Transforms, dataset: object) -> None:
    """Check that a cache can serve a loader; ValueError: it cannot, and what to do. TypeError: it is none."""
    if not isinstance(cache, Cache):
        raise TypeError(
            f"cache={cache!r} is a {type(cache).__name__}: give a DiskCache or a MemoryCache"
        )
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        raise ValueError(
            "cache= keeps samples by their index, which an iterable dataset or a data pipe does not have: leave it out"
        )
    if is_stateful(dataset):
        raise ValueError(
            "cache= keeps samples that are always the same, and those of a dataset with a state_dict() depend on its "
            "state: leave it out"
        )
    if options.worker_kind == "ray":
        raise ValueError(
            f"{cache!r} keeps samples on this machine, and workers=RayWorkers(...) reads them on others: leave it out"
        )
    workers_end = options.num_workers > 0 and not options.persistent_workers
    if workers_end and options.worker_kind == "process" and not cache.shared:
        raise ValueError(
            f"{cache!r} belongs to one process, and the worker processes of each epoch are new ones: use a DiskCache, "
            "persistent_workers=True or workers='thread'"
        )
    if cache.after is not None and cache.after > len(transforms):
        raise ValueError(
            f"after={cache.after} of the cache is more than the {len(transforms)} transforms of the loader"
        )


def behind(cache: Cache, transforms: Transforms) -> Transforms:
    """The transforms that run on what the cache returns: the stages of a sample after its "dataset"."""
    return transforms.after(_cut(cache, transforms))


def _cut(cache: Cache, transforms: Transforms) -> int:
    return len(transforms) if cache.after is None else cache.after


class CachedDataset(Dataset[Any]):
    """``dataset[index]`` after the first transforms, from the cache if it has the sample.

    Args:
        transforms: All transforms of the loader.

    Raises:
        TypeError: The dataset or a transform has no fingerprint, and the cache no ``version``.
    """

    def __init__(self, dataset: Any, cache: Cache, transforms: Transforms) -> None:
        self._dataset, self._cache = dataset, cache
        self._steps = transforms.steps[: _cut(cache, transforms)]
        self._owned: OwnedGenerators | None = None  # made in the process that reads
        self._has_looked = False
        self.begin()
        if attribute(dataset, "__aget__") is not None:
            self.__aget__ = self._aget

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owned": None, "_has_looked": False}

    def begin(self) -> None:
        """Make the keys of an epoch, before its workers start: they may change their copies of the dataset."""
        self._prefix = _prefix(self._cache.version, self._dataset, self._steps)

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
            before = self._drawn()  # a coroutine has a count of its own
            sample = self._kept(place, await self._dataset.__aget__(index), before)
        return sample

    def _kept(self, place: bytes, sample: object, before: object) -> Any:
        """What the cache keeps of a sample of the dataset; refuses one for which generators have moved since."""
        for step in self._steps:
            sample = step(sample)
        if before != self._drawn(after=True):
            who, remedy = "the dataset", "move the draws to transforms=, and give the cache after=0"
            if self._steps:
                who += ", or one of the transforms before the cache,"
                remedy = (
                    f"of {len(self._steps)} transforms, give the cache's after= as the number of those before the "
                    "first random one"
                )
            raise ValueError(
                f"{who} draws random numbers, so that every epoch would get the same ones: {remedy}"
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

    def _drawn(self, after: bool = False) -> Any:
        """State that changes with random draws; in a thread without the generators from which others draw, too."""
        if threading.current_thread() is not threading.main_thread():
            return generators_created()
        if self._owned is None:
            self._owned = OwnedGenerators({"dataset": self._dataset, "transforms": self._steps})
        elif (after and not self._has_looked) or self._owned.moved():
            self._owned.look()  # a first sample may make generators, and any sample may replace them
        self._has_looked |= after
        return (
            generators_created(),
            self._owned.identities,
            pickle.dumps([each.save() for each in self._owned.generators.values()]),
            random.getstate(),
            pickle.dumps(np.random.get_state(legacy=False)),  # arrays do not support ==
            torch.random.get_rng_state().numpy().tobytes(),
        )


def _prefix(version: str | None, dataset: Any, steps: tuple[object, ...]) -> bytes:
    if version is not None:  # whose users differ by their types and the dataset's length
        things = (dataset, *steps)
        names = [
            f"{type_name(one, module=True)} {attribute(one, '__qualname__', '')}" for one in things
        ]
        return fingerprint(version, length_of(dataset), *names)
    try:
        return fingerprint(dataset, steps)
    except TypeError as error:
        raise TypeError(
            f"{error}; you may give the cache a version= of your own instead"
        ) from error
