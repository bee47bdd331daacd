"""Which parameters of a test run in ``make test``, in ``make test-slow``, and under ``make stress``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from tests.datasets import forked
from tests.pairwise import pairwise

__all__ = [
    "WORKERS",
    "each",
    "each_of",
    "loaders",
    "mostly_slow",
    "numbers_for",
    "sweep",
    "workers_of",
]


def each_of(workers: dict[str, dict[str, Any]]) -> Any:
    """The mark of a test that runs with each of these workers, its argument ``workers``."""
    return pytest.mark.parametrize("workers", workers.values(), ids=workers)


def workers_of(*names: str) -> dict[str, dict[str, Any]]:
    """Arguments of loaders with the workers that their names say: "inline", "2-processes", "1-thread"."""
    numbers = {name: name.partition("-")[::2] for name in names}
    return {
        name: {
            "num_workers": int(number) if kind else 0,
            **({"workers": "thread"} if kind.startswith("thread") else {}),
        }
        for name, (number, kind) in numbers.items()
    }


WORKERS = workers_of("inline", "2-processes", "2-threads")
each = each_of(WORKERS)
_LOADERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": WORKERS["2-threads"],
    "fork": forked(2),
    "persistent": {**forked(2), "persistent_workers": True},
    "compat": {**forked(2), "compat": "torch"},
    "batch": {**forked(2), "order": "batch"},
    "arrival": {**forked(2), "order": "arrival"},
    "reads": {**forked(2), "fetch_concurrency": 2},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}
"""Arguments of loaders that differ in how they load."""


def loaders(*names: str) -> dict[str, dict[str, Any]]:
    """Some of these."""
    return {name: _LOADERS[name] for name in names}


def sweep(**dimensions: Iterable[Any]) -> Any:
    """The mark of a test in which any two values of its parameters meet; a mapping has names for these."""
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


def mostly_slow(
    names: Any,
    values: Iterable[Any],
    others: Iterable[Any] | None = None,
    *,
    quick: int | None = None,
    **options: Any,
) -> Any:
    """The mark of a test with parameters of which ``make test`` runs the first, or all but ``others``.

    Args:
        names: One name, or a tuple; values are tuples then.
        values: Of the parameters.
        others: Slow ones, but for those that are among the values, too.
        quick: How many of the values run in ``make test``, if neither one nor all.
        **options: Others of ``parametrize``.
    """
    chosen = [*values]
    num_quick = quick or (1 if others is None else len(chosen))
    chosen += [each for each in others or () if each not in chosen]
    cases = [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if number < num_quick else [pytest.mark.slow],
        )
        for number, value in enumerate(chosen)
    ]
    return pytest.mark.parametrize(names, cases, **options)


def numbers_for(seconds: float, first: int) -> Iterator[int]:
    """The integers from ``first`` on, as many as a stress test has time for."""
    until = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < until, itertools.count(first))
