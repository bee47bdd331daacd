"""Two processes or more over gloo: every rank has the same number of batches, and every index comes once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.models import OURS
from tests.integrations.ranks import run_ranks

pytestmark = pytest.mark.slow

Epoch = list[list[int]]


def indices(epochs: Iterable[Epoch]) -> list[int]:
    """All indices of one epoch over the ranks, sorted."""
    return sorted(chain(*chain(*epochs)))


def check(ranks: list[list[Epoch]], size: int, *, shuffled: bool, length: int = 0) -> None:
    """Compare the epochs of all ranks with what a dataset of this size must give.

    Args:
        length: How many batches each must have; 0: all the same.
    """
    for epochs in zip(*ranks, strict=True):
        lengths = {len(epoch) for epoch in epochs}
        assert lengths == {length} if length else len(lengths) == 1
        assert indices(epochs) == list(range(size))
    first_orders = [tuple(chain(*epoch)) for epoch in ranks[0]]
    assert len(set(first_orders)) == (len(first_orders) if shuffled else 1)


@pytest.mark.parametrize(("program", "count"), [("ddp", 2), ("shared", 4)])
def test_distributed_data_parallel(program: str, count: int) -> None:
    """Each rank with workers of its own, and all with one pool."""
    ranks = run_ranks(program, count)
    for rank in ranks:
        assert rank["engines"] == OURS
        assert [list(chain(*epoch)) for epoch in rank["strict"]] == rank["expected"]
    for order in ("strict", "arrival"):
        check([rank[order] for rank in ranks], 40, shuffled=True)


def test_one_pool_gone_on_with_in_mid_epoch_and_a_device_for_each_rank() -> None:
    ranks = run_ranks("resumed")
    for order in ("strict", "arrival"):
        check([rank[order] for rank in ranks], 40, shuffled=True, length=5)


def test_one_pool_whose_ranks_learn_that_one_was_killed() -> None:
    *others, killed = run_ranks("bereaved", 4, killed=[3])
    assert killed is None
    for rank in others:
        assert "local rank 3" in rank["error"]


def test_one_pool_without_the_rank_that_was_killed() -> None:
    *others, _ = run_ranks("bereaved_and_going_on", 4, killed=[3])
    for number, rank in enumerate(others):
        assert rank == {"engines": OURS, "error": None, "indices": [*range(number, 160, 4)]}


@pytest.fixture(scope="module")
def accelerated() -> list[dict[str, Any]]:
    pytest.importorskip("accelerate", "1.0")
    return run_ranks("accelerated")


@pytest.mark.parametrize("kind", ["torch's shuffling", "seeded"])
def test_accelerate_shards_what_is_shuffled(accelerated: list[dict[str, Any]], kind: str) -> None:
    check([rank[kind] for rank in accelerated], 40, shuffled=True)


def test_accelerate_keeps_the_engine(accelerated: list[dict[str, Any]]) -> None:
    assert [rank["engines"] for rank in accelerated] == [OURS, OURS]


def test_accelerate_skips_batches_of_the_same_epoch(accelerated: list[dict[str, Any]]) -> None:
    for rank in accelerated:
        assert rank["resumed"] == rank["seeded"][1][2:]


def test_accelerate_with_batches_that_mix(accelerated: list[dict[str, Any]]) -> None:
    for epochs in zip(*(rank["arrival"] for rank in accelerated), strict=True):
        assert [len(epoch) for epoch in epochs] == [5, 5]
        assert indices(epochs) == list(range(40))


def test_accelerate_fills_up_the_last_batch(accelerated: list[dict[str, Any]]) -> None:
    for epochs in zip(*(rank["uneven"] for rank in accelerated), strict=True):
        assert [len(epoch) for epoch in epochs] == [6, 6]
        assert set(indices(epochs)) == set(range(42))


def test_accelerate_dispatches_a_stream(accelerated: list[dict[str, Any]]) -> None:
    check([rank["stream"] for rank in accelerated], 40, shuffled=False)


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_a_checkpoint_with_the_state_of_one_rank(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(trainer)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    check([rank["epochs"] for rank in run_ranks(f"{trainer}_checkpoint")], 40, shuffled=True)


@pytest.fixture(scope="module")
def lightning() -> list[dict[str, Any]]:
    pytest.importorskip("lightning", "2.4")
    return run_ranks("lightning")


@pytest.mark.parametrize("kind", ["fabric", "passed", "made"])
def test_lightning_injects_a_sampler(lightning: list[dict[str, Any]], kind: str) -> None:
    for rank in lightning:
        assert rank["engines"] == OURS
        used = {key: value for key, value in rank[kind].items() if key != "epochs"}
        assert used == {
            "sampler": "DistributedSampler",
            "shuffles": True,
            "order": "arrival",
            "seed": 5,
            "bounded": False,
            "last epoch": 2,
        }
    check([rank[kind]["epochs"] for rank in lightning], 40, shuffled=True)
