"""minato's own options of a loader, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from minato._machine import available_cores

__all__ = ["Options"]

ORDERS = ("strict", "batch", "arrival", "fast_first")
DEFAULT_MAX_LAG = 32
"""Batches; about what a few workers finish during a sample that takes a hundred times as long as the others."""
_MOST_AT_FIRST = 12
"""Workers with which ``num_workers="auto"`` begins at most, as in the MinatoLoader paper."""
_WAITING_PER_CORE, _MOST_WAITING = 8, 32
"""The default of ``max_workers`` where there are few cores: for workers that wait for a disk or a network."""
_INT64 = 1 << 63


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
        min_workers, max_workers: Limits of a changing number of workers, both None for a fixed one.
        controller: ``corrected`` or ``paper``.
    """

    order: str
    max_lag: int
    seed: int | None
    memory_budget_bytes: int | None
    worker_method: str
    rng: str
    schedule: str
    on_worker_death: str
    min_workers: int | None
    max_workers: int | None
    controller: str

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
        num_workers: int | str,
        min_workers: int | None,
        max_workers: int | None,
        controller: str,
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
        _choice("controller", controller, ("corrected", "paper"))
        _whole("min_workers", min_workers, 1)
        _whole("max_workers", max_workers, 1)
        _whole("max_lag", max_lag, 0)
        _whole("memory_budget_bytes", memory_budget_bytes, 1)
        _whole("seed", seed, None)
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
        return cls(
            order=order,
            max_lag=DEFAULT_MAX_LAG if max_lag is None else max_lag,
            seed=None if seed is None else (seed + _INT64) % (2 * _INT64) - _INT64,
            memory_budget_bytes=memory_budget_bytes,
            worker_method=worker_method,
            rng=rng or ("worker" if schedule == "round_robin" else "sample"),
            schedule=schedule,
            on_worker_death=on_worker_death,
            min_workers=min_workers,
            max_workers=max_workers,
            controller=controller,
        )

    def first_workers(self, num_workers: int | str) -> int:
        """How many workers there are at first, as a number."""
        if num_workers != "auto":
            return cast(int, num_workers)
        least, most = cast(int, self.min_workers), cast(int, self.max_workers)
        return max(least, min(int(available_cores()), _MOST_AT_FIRST, most))


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


def _whole(name: str, value: object, least: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: give an integer")
    if least is not None and value < least:
        raise ValueError(f"{name}={value} is too small: give at least {least}")
