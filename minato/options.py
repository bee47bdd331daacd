"""minato's own options of a loader, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from minato._system import available_cores
from minato.checks import (
    IN_PLACE,
    as_path,
    check_choice,
    check_device,
    check_error_budget,
    check_fetching,
    check_ray,
    check_ray_options,
    check_sample_timeout,
    check_sharing,
    check_slow,
    check_whole,
    metrics_address,
    worker_range,
)
from minato.fetching import Fetching

__all__ = ["Options", "PaperController", "Unbound"]

ORDERS = ("strict", "batch", "arrival", "fast_first")
DEFAULT_RETRIES = 2
DEFAULT_MAX_LAG = 32
"""Batches; about what a few workers finish during a sample that takes a hundred times as long as the others."""
_SLOW_PERCENTILE = 75.0
"""Of the costs, as in the MinatoLoader paper."""
_MOST_AT_FIRST = 12
"""Workers with which ``num_workers="auto"`` begins at most, as in the MinatoLoader paper."""
_AHEAD = 2
"""Batches on the device besides the one that is handed out, as in the MinatoLoader paper."""
_INT64 = 1 << 63


class Unbound(int):
    """torch's default of ``prefetch_factor``: reads like it, but does not bound what is loaded ahead.

    A type of its own, so that a loader made from another one's attributes is not bound either.
    """


@dataclass(frozen=True)
class PaperController:
    """The worker controller of the MinatoLoader paper with constants of your own: ``controller=PaperController(...)``.

    Every period the number of workers changes by α (1 - ready batches / batches in flight) + β (processor use - θ).

    Attributes:
        alpha: Weight of the empty part of the queue; the paper does not say.
        beta: Weight of the processor's use above ``theta``; the paper does not say.
        theta: The use of the processor that is aimed at, from 0 to 1.
        clip: Largest change per period, both ways.
        smoothing: Weight of the latest period in the moving average of the queue, above 0 and up to 1.

    Raises:
        ValueError: A value is not possible.
    """

    alpha: float = 2.0
    beta: float = 2.0
    theta: float = 0.7
    clip: float = 2.0
    smoothing: float = 0.3

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta, self.clip) < 0:
            raise ValueError(
                f"alpha={self.alpha}, beta={self.beta} and clip={self.clip} must not be below 0"
            )
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta={self.theta} is not between 0 and 1")
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing={self.smoothing} is not above 0 and up to 1")


@dataclass(frozen=True)
class Options:
    """What torch's loader does not know.

    Attributes:
        order: ``strict``, ``batch``, ``arrival`` or ``fast_first``.
        max_lag: Batches by which a sample may be late in the last two.
        seed: Seed of shuffling and samples, modulo 2**64 as a signed number; None for torch's generator.
        memory_budget_bytes: Bytes of batches loaded ahead, None for a share of what is available.
        worker_method: ``process``, ``thread`` or ``ray``.
        rng: ``sample`` or ``worker``.
        schedule: ``dynamic`` or ``round_robin``.
        on_worker_death: ``restart`` or ``raise``.
        record_order: Path of the file to which the order is appended, or None.
        replay_order: Path of the file whose order is repeated, or None.
        fetch_concurrency: Samples that a worker reads at once, or how it does.
        on_error: ``raise``, ``skip``, ``retry`` or a function.
        retries: How often a sample that raised is tried again first.
        error_budget: Samples of an epoch that may fail: a number, a share below 1, or None.
        quarantine: Path of the file that keeps failures, or None.
        sample_timeout_s: Seconds that a sample may take, or None.
        min_workers, max_workers: Limits of a changing number of workers, both None for a fixed one.
        controller: ``corrected``, ``paper``, or the latter with constants.
        slow_percentile: Of the costs of samples, from which on they are slow.
        slow_after_s: The same in seconds, or None.
        profile: Folder that keeps what samples cost, or None.
        measure: Whether times are taken for ``report()``; ``"gpu"``: and the GPUs are watched.
        metrics_port: Where an endpoint tells figures: a port, or host and port; None: nowhere.
        trace: Path of the file that keeps what the run did, or None.
        device: Where batches go, or None for main memory.
        prefetch_to_device: How many batches go there before their turn.
        shared_pool: Whether the ranks of a node share their workers.
        on_rank_death: ``raise``, ``continue`` or ``wait``.
        ray_options: What Ray is told of each actor, or None.
        snapshot_every_n_steps: How often a worker of a stream sends its state, in batches; 0 or None: never.
    """

    order: str
    max_lag: int
    seed: int | None
    memory_budget_bytes: int | None
    worker_method: str
    rng: str
    schedule: str
    on_worker_death: str
    record_order: str | None
    replay_order: str | None
    fetch_concurrency: int | Fetching
    on_error: Any
    retries: int
    error_budget: float | None
    quarantine: str | None
    sample_timeout_s: float | None
    min_workers: int | None
    max_workers: int | None
    controller: str | PaperController
    slow_percentile: float
    slow_after_s: float | None
    profile: str | None
    measure: bool | str
    metrics_port: int | str | None
    trace: str | None
    device: torch.device | None
    prefetch_to_device: int
    shared_pool: bool
    on_rank_death: str
    ray_options: Mapping[str, Any] | None
    snapshot_every_n_steps: int | None

    @property
    def target(self) -> torch.device | None:
        """The device, unless it is main memory."""
        return None if self.device is None or self.device.type == "cpu" else self.device

    @property
    def settles_failures(self) -> bool:
        """Whether a sample that raises is anything but an error of its batch."""
        settled = self.on_error != "raise" or self.retries or self.quarantine is not None
        return bool(settled or self.sample_timeout_s is not None)

    @classmethod
    def of(
        cls,
        *,
        in_order: bool,
        has_batch_sampler: bool,
        is_stream: bool,
        pin_memory: bool | str,
        order: str | None,
        max_lag: int | None,
        seed: int | None,
        memory_budget_bytes: int | None,
        worker_method: str,
        rng: str | None,
        schedule: str,
        on_worker_death: str,
        record_order: str | os.PathLike[str] | None,
        replay_order: str | os.PathLike[str] | None,
        fetch_concurrency: int | Fetching,
        on_error: Any,
        retries: int | None,
        error_budget: float | None,
        quarantine: Any,
        sample_timeout_s: float | None,
        num_workers: int | str,
        min_workers: int | None,
        max_workers: int | None,
        controller: str | PaperController,
        slow_percentile: float | None,
        slow_after_s: float | None,
        profile: Any,
        measure: bool | str,
        metrics_port: int | str | None,
        trace: str | os.PathLike[str] | None,
        device: str | torch.device | None,
        prefetch_to_device: int | None,
        shared_pool: bool,
        on_rank_death: str,
        ray_options: Mapping[str, Any] | None,
        snapshot_every_n_steps: int | None,
    ) -> Options:
        """Check the arguments and fill in the defaults that depend on others.

        Raises:
            ValueError: A value is not possible; the message names the argument, the value and the remedy.
            TypeError: A number is no integer.
            ModuleNotFoundError: Ray is asked for, and not installed.
        """
        check_choice("order", order, (None, *ORDERS))
        check_choice("worker_method", worker_method, ("process", "thread", "ray"))
        check_choice("rng", rng, (None, "sample", "worker"))
        check_choice("on_worker_death", on_worker_death, ("restart", "raise"))
        check_choice("schedule", schedule, ("dynamic", "round_robin"))
        if not callable(on_error):
            check_choice("on_error", on_error, ("raise", "skip", "retry"))
        check_whole("retries", retries, 0)
        check_error_budget(error_budget)
        quarantine = as_path(quarantine)
        if not isinstance(controller, PaperController):
            check_choice("controller", controller, ("corrected", "paper"))
        check_choice("measure", measure, (True, False, "gpu"))
        if metrics_port is not None:
            metrics_address(metrics_port)
            if not measure:
                raise ValueError(
                    f"metrics_port={metrics_port!r} contradicts measure=False, which takes no figures: leave one out"
                )
        check_slow(slow_percentile, slow_after_s)
        place = check_device(device)
        if isinstance(pin_memory, str):
            check_choice("pin_memory", pin_memory, (False, True, IN_PLACE))
        check_whole("prefetch_to_device", prefetch_to_device, 0)
        if prefetch_to_device is not None and place is None:
            raise ValueError(
                f"prefetch_to_device={prefetch_to_device} has no meaning without a device: give device="
            )
        check_whole("min_workers", min_workers, 1)
        check_whole("max_workers", max_workers, 1)
        check_whole("max_lag", max_lag, 0)
        if not isinstance(fetch_concurrency, Fetching):
            check_whole("fetch_concurrency", fetch_concurrency, 1)
        check_whole("memory_budget_bytes", memory_budget_bytes, 1)
        check_whole("seed", seed, None)
        check_whole("snapshot_every_n_steps", snapshot_every_n_steps, 0)
        record_order, replay_order = as_path(record_order), as_path(replay_order)
        if is_stream and (record_order or replay_order):
            raise ValueError(
                "record_order and replay_order write down the keys of each batch, and an iterable dataset has none: "
                "leave them out"
            )
        if replay_order is not None:
            if order not in (None, "strict"):
                raise ValueError(
                    f"replay_order gives the batches as they are recorded, and order={order!r} would change them: "
                    "leave order out"
                )
            if record_order is not None and os.path.abspath(record_order) == os.path.abspath(
                replay_order
            ):
                raise ValueError(
                    f"record_order and replay_order are the same file {record_order!r}: use two"
                )
            order = "strict"
            in_order = True
        if order is None:
            whole = has_batch_sampler or is_stream or schedule == "round_robin"
            free = "batch" if whole else "arrival"
            order = "strict" if in_order else free
        if order == "strict" and not in_order:
            raise ValueError("order='strict' contradicts in_order=False: give one of the two")
        if order in ("arrival", "fast_first") and has_batch_sampler:
            raise ValueError(
                f"order={order!r} mixes the batches that a batch_sampler makes: use order='batch' to get each "
                "of them as soon as it is complete"
            )
        if order in ("arrival", "fast_first") and (is_stream or schedule == "round_robin"):
            cause = "an iterable dataset" if is_stream else f"schedule={schedule!r}"
            raise ValueError(
                f"order={order!r} mixes batches, but with {cause} each batch is one worker's: use order='batch' to "
                "get each of them as soon as it is complete"
            )
        if is_stream and rng == "sample":
            raise ValueError(
                "rng='sample' binds randomness to indices, and an iterable dataset has none: leave rng out"
            )
        if schedule == "round_robin" and rng == "sample":
            raise ValueError(
                "rng='sample' contradicts schedule='round_robin', which gives torch's own streams: leave rng out"
            )
        if max_lag is not None and order not in ("arrival", "fast_first"):
            raise ValueError(
                f"max_lag={max_lag} has no meaning with order={order!r}: samples are late only with "
                "order='arrival' or 'fast_first'"
            )
        if is_stream and (on_error != "raise" or retries or quarantine is not None):
            raise ValueError(
                f"on_error={on_error!r}, retries={retries} and quarantine={quarantine!r} are for samples that have an "
                "index: catch the error in the iterable dataset itself"
            )
        if error_budget is not None and on_error in ("raise", "retry"):
            raise ValueError(
                f"error_budget={error_budget} has no meaning with on_error={on_error!r}, where no sample is left out: "
                "use on_error='skip' or a function"
            )
        if sample_timeout_s is not None:
            check_sample_timeout(sample_timeout_s, num_workers, worker_method, is_stream, schedule)
        if retries is None:
            retries = DEFAULT_RETRIES if on_error == "retry" else 0
        if num_workers == "auto" or min_workers is not None or max_workers is not None:
            if is_stream or schedule == "round_robin":
                cause = "an iterable dataset" if is_stream else f"schedule={schedule!r}"
                raise ValueError(
                    f"the number of workers cannot change with {cause}, whose content depends on it: give "
                    "num_workers as a number, without min_workers and max_workers"
                )
            min_workers, max_workers = worker_range(num_workers, min_workers, max_workers)
        elif controller != "corrected":
            raise ValueError(
                f"controller={controller!r} has no meaning while the number of workers is fixed: give max_workers, or "
                "num_workers='auto'"
            )
        most_workers = max_workers if isinstance(num_workers, str) else max_workers or num_workers
        fetching = Fetching.of(fetch_concurrency)
        check_fetching(fetching, is_stream, schedule, rng, most_workers)
        check_sharing(
            shared_pool,
            on_rank_death,
            {
                "an iterable dataset": is_stream,
                "num_workers=0": num_workers == 0,
                f"worker_method={worker_method!r}": worker_method != "process",
                "schedule='round_robin'": schedule == "round_robin",
                f"on_error={on_error!r}": on_error not in ("raise", "retry"),
                f"record_order={record_order!r}": record_order is not None,
                f"replay_order={replay_order!r}": replay_order is not None,
                f"pin_memory={pin_memory!r}": pin_memory == IN_PLACE,
            },
        )
        check_ray_options(ray_options, worker_method)
        if worker_method == "ray":
            changes = min_workers is not None
            check_ray(num_workers, changes, fetching, is_stream, schedule)
        return cls(
            order=order,
            max_lag=DEFAULT_MAX_LAG if max_lag is None else max_lag,
            seed=None if seed is None else (seed + _INT64) % (2 * _INT64) - _INT64,
            memory_budget_bytes=memory_budget_bytes,
            worker_method=worker_method,
            rng=rng or ("worker" if schedule == "round_robin" else "sample"),
            schedule=schedule,
            on_worker_death=on_worker_death,
            record_order=record_order,
            replay_order=replay_order,
            fetch_concurrency=fetch_concurrency,
            on_error="raise" if on_error == "retry" else on_error,
            retries=retries,
            error_budget=error_budget,
            quarantine=quarantine,
            sample_timeout_s=sample_timeout_s,
            min_workers=min_workers,
            max_workers=max_workers,
            controller=controller,
            slow_percentile=_SLOW_PERCENTILE if slow_percentile is None else slow_percentile,
            slow_after_s=slow_after_s,
            profile=None if profile is None else os.fspath(profile),
            measure=measure,
            metrics_port=metrics_port,
            trace=as_path(trace),
            device=place,
            prefetch_to_device=_AHEAD if prefetch_to_device is None else prefetch_to_device,
            shared_pool=shared_pool,
            on_rank_death=on_rank_death,
            ray_options=ray_options,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def first_workers(self, num_workers: int | str) -> int:
        """How many workers there are at first, as a number."""
        if num_workers != "auto":
            return cast(int, num_workers)
        least, most = cast(int, self.min_workers), cast(int, self.max_workers)
        return max(least, min(int(available_cores()), _MOST_AT_FIRST, most))
