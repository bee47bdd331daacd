"""Any run: each index comes once, with the same content, whatever the order, the workers, kills and resumptions."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minato import DataLoader
from tests.datasets import ORDERS, Draws, Helped, flat, rows

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 3},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "workers": "thread"},
]
MOST_KILLS = 2
"""A third death of one worker at the same sample is an error."""

LOADERS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 6),
        "order": st.sampled_from(ORDERS),
        "drop_last": st.booleans(),
        "shuffle": st.booleans(),
        "seed": st.sampled_from([None, 8]),
    }
)
ACTIONS = st.lists(
    st.tuples(st.just("take"), st.integers(0, 4))
    | st.tuples(st.just("kill"), st.integers(0, 11))
    | st.tuples(st.just("resume"), st.sampled_from(WORKERS)),
    max_size=8,
)


def compare(got: list[Any], expected: list[Any], order: str) -> None:
    assert len(got) == len(expected)
    assert sorted(flat(got)) == sorted(flat(expected))
    if order == "strict":
        assert got == expected


def kill_a_worker(which: int) -> None:
    # The number of children varies between runs, so it must not decide what Hypothesis draws.
    if children := multiprocessing.active_children():
        pid = children[which % len(children)].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 40), LOADERS, st.sampled_from(WORKERS), ACTIONS)
def test_each_index_comes_once_with_the_same_content(
    size: int, options: dict[str, Any], workers: dict[str, Any], actions: list[tuple[str, Any]]
) -> None:
    in_threads = any(
        "workers" in kind
        for kind in (workers, *(detail for _, detail in actions))
        if isinstance(kind, dict)
    )
    dataset = Helped(size) if in_threads else Draws(size)

    def make(workers: dict[str, Any]) -> Any:
        generator = torch.Generator().manual_seed(6)
        return DataLoader(dataset, generator=generator, **options, **workers)

    quiet = make({"num_workers": 0})
    expected, next_epoch = ([*map(rows, quiet)] for _ in range(2))
    loader = make(workers)
    iterator = iter(loader)
    got: list[Any] = []
    kills = 0
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a worker died
        for action, detail in actions:
            if action == "take":
                left = min(detail, len(expected) - len(got))
                got += [rows(next(iterator)) for _ in range(left)]
            elif action == "kill" and kills < MOST_KILLS:
                kill_a_worker(detail)
                kills += 1
            elif action == "resume":
                state = json.loads(json.dumps(loader.state_dict()))
                workers = detail
                loader = make(workers)
                loader.load_state_dict(state)
                assert json.loads(json.dumps(loader.state_dict())) == state
                iterator = iter(loader)
        got += map(rows, iterator)
        assert loader.coverage().complete
        later = [*map(rows, loader)]
        assert loader.coverage().complete
    compare(got, expected, options["order"])
    if options["seed"] is None and workers.get("persistent_workers"):
        # As with torch, persistent workers keep their seed, and the generator is drawn from less often.
        drawn = [sample[0] for sample in flat(later)]
        assert (len(later), len(set(drawn))) == (len(next_epoch), len(drawn))
    else:
        compare(later, next_epoch, options["order"])
