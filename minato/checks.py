"""Checks of single arguments of a loader: each names the argument, the value and the remedy."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import cast

import torch

from minato._system import available_cores
from minato.fetching import Fetching

__all__ = [
    "IN_PLACE",
    "as_path",
    "check_choice",
    "check_device",
    "check_error_budget",
    "check_fetching",
    "check_ray",
    "check_ray_options",
    "check_sample_timeout",
    "check_sharing",
    "check_slow",
    "check_whole",
    "metrics_address",
    "worker_range",
]

IN_PLACE = "in_place"
"""The value of ``pin_memory`` with which batches are pinned where the workers write them."""
_UNSHARED = {
    "an iterable dataset": "whose samples have no indices to divide: use a map-style dataset",
    "num_workers": "with which there are no workers to share: use 1 or more",
    "worker_method": "whose batches other processes cannot see: use 'process'",
    "schedule": "where each batch is one worker's: use 'dynamic'",
    "on_error": "with which ranks might get different numbers of batches: use 'raise' or 'retry'",
    "pin_memory": "as torch alone knows when all ranks' copies are over: use device=, or pin_memory=True",
    "record_order": "as each rank has only a part of the batches: leave it out",
    "replay_order": "as each rank has only a part of the batches: leave it out",
}
"""What does not go with shared_pool=True, and why."""
_WAITING_PER_CORE, _MOST_WAITING = 8, 32
"""The default of ``max_workers`` where there are few cores: for workers that wait for a disk or a network."""

_OURS = (
    "concurrency_groups",
    "get_if_exists",
    "lifetime",
    "max_concurrency",
    "max_pending_calls",
    "max_restarts",
    "max_task_retries",
    "name",
    "namespace",
)
"""Options of a Ray actor that the loader answers for: an actor runs one sample at a time, and is the loader's alone."""


def check_slow(percentile: object, after_s: object) -> None:
    """From when on a sample is slow: a percentile or seconds, not both."""
    for name, value in (("slow_percentile", percentile), ("slow_after_s", after_s)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give a number")
    if isinstance(percentile, (int, float)) and not 0 < percentile < 100:
        raise ValueError(f"slow_percentile={percentile} is not between 0 and 100")
    if isinstance(after_s, (int, float)) and not after_s > 0:
        raise ValueError(f"slow_after_s={after_s} is too small: give more than 0 seconds")
    if percentile is not None and after_s is not None:
        raise ValueError(
            f"slow_percentile={percentile} and slow_after_s={after_s} both say from when on a sample is slow: give one"
        )


def check_error_budget(budget: object) -> None:
    """How many samples may fail, or which share."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"error_budget={budget!r} is a {type(budget).__name__}: give a number of samples, or a share below 1"
        )
    if budget < 0 or (isinstance(budget, float) and budget >= 1):
        raise ValueError(
            f"error_budget={budget} is not possible: give a number of samples (an integer), or a share below 1"
        )


def check_sample_timeout(
    limit_s: object, num_workers: int | str, worker_method: str, is_stream: bool, schedule: str
) -> None:
    """Seconds that a sample may take, where workers can be ended and replaced."""
    if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)):
        raise TypeError(f"sample_timeout_s={limit_s!r} is a {type(limit_s).__name__}: give seconds")
    if limit_s <= 0:
        raise ValueError(f"sample_timeout_s={limit_s} is too small: give more than 0 seconds")
    if num_workers == 0 or worker_method != "process":
        raise ValueError(
            f"sample_timeout_s={limit_s} needs worker processes, because nothing else can be ended: use num_workers=1 "
            "or more and worker_method='process'"
        )
    if is_stream or schedule == "round_robin":
        raise ValueError(
            f"sample_timeout_s={limit_s} ends and replaces workers, but those of an iterable dataset or of "
            "schedule='round_robin' hold state that would be lost: use torch's timeout="
        )


def worker_range(
    num_workers: int | str, min_workers: int | None, max_workers: int | None
) -> tuple[int, int]:
    """Least and most workers."""
    cores = int(available_cores())
    least = 1 if min_workers is None else min_workers
    first = max(least, 1) if num_workers == "auto" else cast(int, num_workers)
    # Workers that wait for a disk or a network do not need a core each.
    most = max(cores, min(_WAITING_PER_CORE * cores, _MOST_WAITING), first)
    most = most if max_workers is None else max_workers
    if not least <= first <= most:
        raise ValueError(
            f"num_workers={num_workers!r} is not between min_workers={least} and max_workers={most}"
        )
    return least, most


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """A value is one of some."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not possible: choose one of {allowed}")


def metrics_address(value: int | str) -> tuple[str, int]:
    """Host and port of ``metrics_port``; without a host, this machine alone can reach it."""
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"metrics_port={value!r} is no port: give a number up to 65535, or a text such as '0.0.0.0:9100'"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def check_device(device: object) -> torch.device | None:
    """A device that torch knows and this machine has, or None."""
    if device is None:
        return None
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device={device!r} is a {type(device).__name__}: give a string or a torch.device"
        )
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device of torch's: {error}") from None
    if found.type == "cuda":  # asked without starting it up, because workers are still to be forked
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise ValueError(
                f"device={device!r} is not there: torch sees {count} CUDA devices; give another, or "
                "device=None to have batches in main memory"
            )
        return found
    try:
        torch.empty(0, device=found)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # of devices that this build of torch lacks, too
        raise ValueError(f"device={device!r} is not there: {str(error).splitlines()[0]}") from None
    return found


def as_path(path: str | os.PathLike[str] | None) -> str | None:
    """A path as a string."""
    return None if path is None else os.fspath(path)


def check_whole(name: str, value: object, least: int | None) -> None:
    """An integer of at least ``least``, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give an integer")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} is too small: give at least {least}")


def check_fetching(
    fetching: Fetching,
    is_stream: bool,
    schedule: str,
    rng: str | None,
    most_workers: int | None,
) -> None:
    """Reads at once, where samples are read by their keys and have randomness of their own."""
    if fetching.most is not None and most_workers is not None and fetching.most < most_workers:
        raise ValueError(
            f"most={fetching.most} reads are fewer than {most_workers} workers, of which each may have one under way: "
            "use fewer workers"
        )
    if not fetching.at_once and fetching.slow_start is None:
        return
    given = f"fetch_concurrency={fetching}"
    if is_stream:
        raise ValueError(
            f"{given} reads several samples by their keys, and an iterable dataset has none: leave it out, or use a "
            "map-style dataset"
        )
    if schedule == "round_robin" or rng == "worker":
        other = "rng='worker'" if rng == "worker" else f"schedule={schedule!r}"
        raise ValueError(
            f"{given} contradicts {other}: samples that are read at once draw from the worker's stream in any order; "
            "leave one of the two out"
        )


def check_sharing(shared_pool: object, on_rank_death: object, given: dict[str, bool]) -> None:
    """One pool for several ranks, where each of them has something of it.

    Args:
        given: Arguments with their values that do not go with it, and whether they were given.
    """
    check_choice("shared_pool", shared_pool, (True, False))
    check_choice("on_rank_death", on_rank_death, ("raise", "continue", "wait"))
    if not shared_pool and on_rank_death != "raise":
        raise ValueError(
            f"on_rank_death={on_rank_death!r} has no meaning without shared_pool=True: leave it out"
        )
    for argument, is_given in given.items():
        if shared_pool and is_given:
            why = _UNSHARED[argument.partition("=")[0]]
            raise ValueError(f"shared_pool=True does not go with {argument}, {why}")


def check_ray(
    num_workers: int | str,
    changes: bool,
    fetching: Fetching,
    is_stream: bool,
    schedule: str,
) -> None:
    """What actors of a Ray cluster can do for a loader.

    Args:
        changes: The number of workers shall follow the load.
    """
    given = "worker_method='ray'"
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(f"{given} needs the package ray: pip install 'minatoloader[ray]'")
    if num_workers == 0:
        raise ValueError(
            f"{given} has actors as workers, and num_workers=0 has none: use num_workers=1 or more"
        )
    if changes:
        raise ValueError(
            f"{given} has as many workers as the cluster has room for, num_workers at most: give it as a number, "
            "without min_workers and max_workers"
        )
    if is_stream:
        raise ValueError(
            f"{given} sends actors the keys of samples, and an iterable dataset has none: use worker_method='process', "
            "or a map-style dataset"
        )
    if schedule == "round_robin":
        raise ValueError(
            f"schedule={schedule!r} gives the streams of torch's worker processes: use worker_method='process'"
        )
    if fetching.at_once or fetching.slow_start is not None:
        raise ValueError(
            f"fetch_concurrency={fetching} contradicts {given}, whose actors run one sample at a time: leave it out, "
            "and use more workers with ray_options={'num_cpus': 0.25}"
        )


def check_ray_options(options: object, worker_method: str) -> None:
    """What Ray shall be told of each actor."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(
            f"ray_options={options!r} is a {type(options).__name__}: give a dictionary, as {{'num_cpus': 2}}"
        )
    if worker_method != "ray":
        raise ValueError(
            f"ray_options={options!r} has no meaning with worker_method={worker_method!r}: leave it out"
        )
    ours = [name for name in options if name in _OURS]
    if ours:
        raise ValueError(
            f"ray_options cannot say {', '.join(ours)}, which the loader decides: leave it out"
        )
