"""Which parameters of a test run in ``make test``, in ``make test-slow``, and under ``make stress``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from tests.pairwise import pairwise

__all__ = ["WORKERS", "each", "each_of", "mostly_slow", "numbers_for", "sweep"]


def each_of(workers: dict[str, dict[str, Any]]) -> Any:
    """The mark of a test that runs with each of these workers, its argument ``workers``."""
    return pytest.mark.parametrize("workers", workers.values(), ids=workers)


WORKERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "2-processes": {"num_workers": 2},
    "2-threads": {"num_workers": 2, "workers": "thread"},
}
each = each_of(WORKERS)


def sweep(**dimensions: Iterable[Any]) -> Any:
    """The mark of a test in which any two values of its parameters meet, not all combinations.

    Args:
        dimensions: The values of each parameter; a mapping has names for them.
    """
    named = [
        values if isinstance(values, Mapping) else {_name_of(value): value for value in values}
        for values in dimensions.values()
    ]
    cases = pairwise(itertools.product(*named))
    return pytest.mark.parametrize(
        tuple(dimensions),
        [[values[name] for values, name in zip(named, case, strict=True)] for case in cases],
        ids=map("-".join, cases),
    )


def _name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def mostly_slow(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Parameters of which only the first are quick, where all of them would take long.

    Args:
        values: The parameters, those first that find most; a tuple where there are several names.
        quick: How many run in ``make test``.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if number < quick else [pytest.mark.slow],
        )
        for number, value in enumerate(values)
    ]


def numbers_for(seconds: float, first: int) -> Iterator[int]:
    """The integers from ``first`` on, as many as a stress test has time for."""
    until = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < until, itertools.count(first))
