"""Two thousand combinations of arguments, or a sample of a hundred, each delivered by both classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from multiprocessing import resource_sharer

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.parity import configurations
from tests.parity.configurations import Configuration
from tests.parity.harness import AS_TORCH_IS_NOW

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # they are recorded and compared
    pytest.mark.parametrize(
        "share",
        [
            pytest.param(0.05, id="sample"),
            pytest.param(1.0, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        ],
    ),
]

SIZES = {"many": (9, 5, 12), "few": (6, 2, 0), "other": (13, 1, 3)}
"""Sizes of the dataset; no two of them share one, so that no configuration is counted twice."""
sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())


def check(
    compare: Callable[[Configuration], None],
    workers: tuple[int, ...],
    sizes: tuple[int, ...],
    number: float,
) -> None:
    """Compare this number of different configurations; the same ones whenever it is called."""
    number = round(number)
    seen: set[Configuration] = set()

    @hypothesis.seed(1)
    @settings(
        max_examples=4 * number,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(configurations.configurations(workers, sizes))
    def compare_new(configuration: Configuration) -> None:
        if configuration not in seen and len(seen) < number:
            compare(configuration)
            seen.add(configuration)

    compare_new()
    resource_sharer.stop()  # a thread that torch's tensors leave behind
    assert len(seen) == number


@sizes
@pytest.mark.parametrize(
    ("compare", "workers", "number"),
    [
        pytest.param(configurations.compare_in_line, (0,), 600, marks=AS_TORCH_IS_NOW),
        (configurations.compare_in_processes, (1, 2), 40),
        (configurations.compare_round_robin, (1, 2, 3), 20),
        pytest.param(configurations.compare_in_threads, (1, 2), 20, marks=AS_TORCH_IS_NOW),
    ],
    ids=["in line", "processes", "processes with torch's assignment", "threads"],
)
def test_the_same_as_torch(
    share: float,
    sizes: tuple[int, ...],
    compare: Callable[[Configuration], None],
    workers: tuple[int, ...],
    number: int,
) -> None:
    check(compare, workers, sizes, number * share)


@pytest.mark.slow
def test_processes_that_are_not_forked(share: float) -> None:
    def compare(configuration: Configuration) -> None:
        if configuration.multiprocessing_context is None:
            configuration = replace(configuration, multiprocessing_context="forkserver")
        configurations.compare_round_robin(configuration)

    check(compare, (1, 2), (4, 7), 20 * share)
