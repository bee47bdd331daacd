"""minato's own options of a loader, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

from minato._machine import available_cores
from minato.fetching import Fetching

__all__ = ["Options", "PaperController"]

ORDERS = ("strict", "batch", "arrival", "fast_first")
DEFAULT_RETRIES = 2
DEFAULT_MAX_LAG = 32
"""Batches; about what a few workers finish during a sample that takes a hundred times as long as the others."""
_SLOW_PERCENTILE = 75.0
"""Of the costs, as in the MinatoLoader paper."""
_MOST_AT_FIRST = 12
"""Workers with which ``num_workers="auto"`` begins at most, as in the MinatoLoader paper."""
_WAITING_PER_CORE, _MOST_WAITING = 8, 32
"""The default of ``max_workers`` where there are few cores: for workers that wait for a disk or a network."""
_INT64 = 1 << 63


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
        worker_method: ``process`` or ``thread``.
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
        measure: Whether times are taken for ``report()``.
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
    measure: bool

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
        measure: bool,
    ) -> Options:
        """Check the arguments and fill in the defaults that depend on others.

        Raises:
            ValueError: A value is not possible; the message names the argument, the value and the remedy.
            TypeError: A number is no integer.
        """
        _choice("order", order, (None, *ORDERS))
        _choice("worker_method", worker_method, ("process", "thread"))
        _choice("rng", rng, (None, "sample", "worker"))
        _choice("on_worker_death", on_worker_death, ("restart", "raise"))
        _choice("schedule", schedule, ("dynamic", "round_robin"))
        if not callable(on_error):
            _choice("on_error", on_error, ("raise", "skip", "retry"))
        _whole("retries", retries, 0)
        _check_budget(error_budget)
        quarantine = _path(quarantine)
        if not isinstance(controller, PaperController):
            _choice("controller", controller, ("corrected", "paper"))
        _choice("measure", measure, (True, False))
        _check_slow(slow_percentile, slow_after_s)
        _whole("min_workers", min_workers, 1)
        _whole("max_workers", max_workers, 1)
        _whole("max_lag", max_lag, 0)
        if not isinstance(fetch_concurrency, Fetching):
            _whole("fetch_concurrency", fetch_concurrency, 1)
        _whole("memory_budget_bytes", memory_budget_bytes, 1)
        _whole("seed", seed, None)
        record_order, replay_order = _path(record_order), _path(replay_order)
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
            _check_sample_timeout(sample_timeout_s, num_workers, worker_method, is_stream, schedule)
        if retries is None:
            retries = DEFAULT_RETRIES if on_error == "retry" else 0
        if num_workers == "auto" or min_workers is not None or max_workers is not None:
            if is_stream or schedule == "round_robin":
                cause = "an iterable dataset" if is_stream else f"schedule={schedule!r}"
                raise ValueError(
                    f"the number of workers cannot change with {cause}, whose content depends on it: give "
                    "num_workers as a number, without min_workers and max_workers"
                )
            min_workers, max_workers = _range(num_workers, min_workers, max_workers)
        elif controller != "corrected":
            raise ValueError(
                f"controller={controller!r} has no meaning while the number of workers is fixed: give max_workers, or "
                "num_workers='auto'"
            )
        most_workers = max_workers if isinstance(num_workers, str) else max_workers or num_workers
        fetching = Fetching.of(fetch_concurrency)
        _check_fetching(fetching, is_stream, schedule, rng, most_workers)
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
        )

    def first_workers(self, num_workers: int | str) -> int:
        """How many workers there are at first, as a number."""
        if num_workers != "auto":
            return cast(int, num_workers)
        least, most = cast(int, self.min_workers), cast(int, self.max_workers)
        return max(least, min(int(available_cores()), _MOST_AT_FIRST, most))


def _check_slow(percentile: object, after_s: object) -> None:
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


def _check_budget(budget: object) -> None:
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


def _check_sample_timeout(
    limit_s: object, num_workers: int | str, worker_method: str, is_stream: bool, schedule: str
) -> None:
    if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)):
        raise TypeError(f"sample_timeout_s={limit_s!r} is a {type(limit_s).__name__}: give seconds")
    if limit_s <= 0:
        raise ValueError(f"sample_timeout_s={limit_s} is too small: give more than 0 seconds")
    if num_workers == 0 or worker_method == "thread":
        raise ValueError(
            f"sample_timeout_s={limit_s} needs worker processes, because nothing else can be ended: use num_workers=1 "
            "or more and worker_method='process'"
        )
    if is_stream or schedule == "round_robin":
        raise ValueError(
            f"sample_timeout_s={limit_s} ends and replaces workers, but those of an iterable dataset or of "
            "schedule='round_robin' hold state that would be lost: use torch's timeout="
        )


def _range(
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


def _choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not possible: choose one of {allowed}")


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)


def _whole(name: str, value: object, least: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give an integer")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} is too small: give at least {least}")


def _check_fetching(
    fetching: Fetching,
    is_stream: bool,
    schedule: str,
    rng: str | None,
    most_workers: int | None,
) -> None:
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
