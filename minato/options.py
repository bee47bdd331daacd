"""minato's own options of a loader, checked."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Options"]

ORDERS = ("strict", "batch", "arrival", "fast_first")
DEFAULT_MAX_LAG = 32
"""Batches; about what a few workers finish during a sample that takes a hundred times as long as the others."""


@dataclass(frozen=True)
class Options:
    """What torch's loader does not know.

    Attributes:
        order: ``strict``, ``batch``, ``arrival`` or ``fast_first``.
        max_lag: Batches by which a sample may be late in the last two.
        seed: Seed of shuffling and samples, None for torch's generator.
        memory_budget_bytes: Bytes of batches loaded ahead, None for a share of what is available.
        worker_method: ``process`` or ``thread``.
        rng: ``sample`` or ``worker``.
    """

    order: str
    max_lag: int
    seed: int | None
    memory_budget_bytes: int | None
    worker_method: str
    rng: str

    @classmethod
    def of(
        cls,
        *,
        in_order: bool,
        has_batch_sampler: bool,
        order: str | None,
        max_lag: int | None,
        seed: int | None,
        memory_budget_bytes: int | None,
        worker_method: str,
        rng: str,
    ) -> Options:
        """Check the arguments and fill in the defaults that depend on others.

        Raises:
            ValueError: A value is not possible; the message names the argument, the value and the remedy.
            TypeError: A number is no integer.
        """
        _choice("order", order, (None, *ORDERS))
        _choice("worker_method", worker_method, ("process", "thread"))
        _choice("rng", rng, ("sample", "worker"))
        _whole("max_lag", max_lag, 0)
        _whole("memory_budget_bytes", memory_budget_bytes, 1)
        _whole("seed", seed, None)
        if order is None:
            free = "batch" if has_batch_sampler else "arrival"
            order = "strict" if in_order else free
        elif order != "strict" and in_order is True and order in ORDERS:
            pass  # an explicit order says more than torch's default of in_order
        if order == "strict" and not in_order:
            raise ValueError("order='strict' contradicts in_order=False: give one of the two")
        if order in ("arrival", "fast_first") and has_batch_sampler:
            raise ValueError(
                f"order={order!r} mixes the batches that a batch_sampler makes: use order='batch' to get each "
                "of them as soon as it is complete"
            )
        if max_lag is not None and order not in ("arrival", "fast_first"):
            raise ValueError(
                f"max_lag={max_lag} has no meaning with order={order!r}: samples are late only with "
                "order='arrival' or 'fast_first'"
            )
        return cls(
            order=order,
            max_lag=DEFAULT_MAX_LAG if max_lag is None else max_lag,
            seed=seed,
            memory_budget_bytes=memory_budget_bytes,
            worker_method=worker_method,
            rng=rng,
        )


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
