"""``cache=``: the first transforms of a loader move behind its cache."""

from __future__ import annotations

from typing import Any

from minato.caching.base import Cache
from minato.caching.dataset import CachedDataset
from minato.chain.chain import Chain
from minato.chain.rng import generators_asked
from minato.options import Options

__all__ = ["behind", "check_cache"]


def check_cache(
    cache: Cache | None, options: Options, chain: Chain, is_stream: bool, workers_end: bool
) -> None:
    """Check that a cache can serve a loader.

    Args:
        workers_end: Whether the loader has workers that do not outlive an epoch.

    Raises:
        ValueError: It cannot; the message says what to do.
        TypeError: It is none.
    """
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise TypeError(
            f"cache={cache!r} is a {type(cache).__name__}: give a DiskCache or a MemoryCache"
        )
    if is_stream:
        raise ValueError(
            "cache= keeps samples by their index, and an iterable dataset has none: leave it out"
        )
    if workers_end and options.worker_method == "process" and not cache.shared:
        raise ValueError(
            f"{cache!r} belongs to one process, and the worker processes of each epoch are new ones: use a DiskCache, "
            "persistent_workers=True or worker_method='thread'"
        )
    if cache.after is not None and cache.after > len(chain):
        raise ValueError(
            f"after={cache.after} of the cache is more than the {len(chain)} transforms of the loader"
        )


def behind(cache: Cache | None, dataset: Any, chain: Chain) -> tuple[Any, Chain]:
    """The dataset that workers read, with the cached transforms in it, and the transforms that are left."""
    if cache is None:
        return dataset, chain
    cut = len(chain) if cache.after is None else cache.after
    return CachedDataset(dataset, chain.steps[:cut], cache, generators_asked), Chain(
        chain.steps[cut:]
    )
