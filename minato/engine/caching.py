"""``cache=``: the first transforms of a loader move behind its cache."""

from __future__ import annotations

import pickle
from typing import Any

from torch.utils.data import IterableDataset, MapDataPipe

from minato.caching.base import Cache
from minato.caching.dataset import CachedDataset
from minato.options import Options
from minato.sampling.resume import is_stateful
from minato.transforms.compose import Transforms
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import generators_created

__all__ = ["behind", "check_cache", "wrap_dataset"]


def check_cache(cache: Cache, options: Options, transforms: Transforms, dataset: object) -> None:
    """Check that a cache can serve a loader.

    Raises:
        ValueError: It cannot; the message says what to do.
        TypeError: It is none.
    """
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


def behind(cache: Cache | None, transforms: Transforms) -> Transforms:
    """The transforms that run on what the cache returns: the stages of a sample after its "dataset"."""
    return transforms if cache is None else transforms.after(_cut(cache, transforms))


def wrap_dataset(cache: Cache, dataset: object, transforms: Transforms) -> tuple[Any, Transforms]:
    """The dataset with cached transforms that workers read, and the remaining transforms."""
    steps = transforms.steps[: _cut(cache, transforms)]
    owned = _OwnedStates({"dataset": dataset, "transforms": steps})
    cached = CachedDataset(dataset, steps, cache, generators_created, owned)
    return cached, behind(cache, transforms)


class _OwnedStates:
    """The states of the generators that some objects own, in the process that asks.

    Args:
        roots: The objects, by name.
    """

    def __init__(self, roots: dict[str, object]) -> None:
        self._roots = roots
        self._found: OwnedGenerators | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_roots": self._roots, "_found": None}

    def __call__(self) -> bytes:
        if self._found is None:
            self._found = OwnedGenerators(self._roots)
        return pickle.dumps([each.save() for each in self._found.generators.values()])


def _cut(cache: Cache, transforms: Transforms) -> int:
    """The number of transforms whose results the cache keeps."""
    return len(transforms) if cache.after is None else cache.after
