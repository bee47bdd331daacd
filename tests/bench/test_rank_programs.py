"""Ranks that go in step, and what ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

import pytest

from bench.harness.ranks import run_ranks, wait_for_all

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def double(number: int) -> int:
    wait_for_all()
    return 2 * number


def raise_in_one(number: int) -> None:
    if number:
        raise LookupError(f"rank {number}")
    wait_for_all()


def die_in_one(number: int) -> None:
    if number:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_all()


def test_each_argument_has_a_rank() -> None:
    assert run_ranks(double, [(1,), (2,), (3,)]) == [2, 4, 6]


@pytest.mark.parametrize(
    ("program", "error"), [(raise_in_one, LookupError), (die_in_one, BrokenProcessPool)]
)
@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)])
def test_nobody_waits_for_a_rank_that_raised_or_died(
    program: Callable[[int], None], error: type[Exception], numbers: tuple[int, int]
) -> None:
    with pytest.raises(error):
        run_ranks(program, [(number,) for number in numbers])
