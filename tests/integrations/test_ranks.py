"""Two processes or more over gloo: every rank has the same number of batches, and every index comes once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from tests.integrations.models import OURS
from tests.integrations.ranks import run_ranks

pytestmark = pytest.mark.slow

Epoch = list[list[int]]


def indices(epochs: Iterable[Epoch]) -> list[int]:
    """All indices of one epoch over the ranks, sorted."""
    return sorted(chain(*chain(*epochs)))


def check(
    ranks: list[list[Epoch]], size: int, *, shuffled: bool | None, length: int | None = None
) -> None:
    """Compare the epochs of all ranks, each of so many batches, with what a dataset of this size must give."""
    for epochs in zip(*ranks, strict=True):
        lengths = {len(epoch) for epoch in epochs}
        assert lengths == {length or len(epochs[0])}
        assert indices(epochs) == list(range(size))
    if shuffled is not None:
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


def test_accelerate() -> None:
    """It shards what is shuffled, keeps the engine, skips, fills up the last batch, and dispatches a stream."""
    pytest.importorskip("accelerate", "1.0")
    ranks = run_ranks("accelerated")
    for kind, is_shuffled in (("torch's shuffling", True), ("seeded", True), ("stream", False)):
        check([rank[kind] for rank in ranks], 40, shuffled=is_shuffled)
    check([rank["arrival"] for rank in ranks], 40, shuffled=None, length=5)
    for rank in ranks:
        assert rank["engines"] == OURS
        assert rank["resumed"] == rank["seeded"][1][2:]
    for epochs in zip(*(rank["uneven"] for rank in ranks), strict=True):
        assert [len(epoch) for epoch in epochs] == [6, 6]
        assert set(indices(epochs)) == set(range(42))


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_a_checkpoint_with_the_state_of_one_rank(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(trainer)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    check([rank["epochs"] for rank in run_ranks(f"{trainer}_checkpoint")], 40, shuffled=True)


def test_lightning_injects_a_sampler() -> None:
    pytest.importorskip("lightning", "2.4")
    ranks = run_ranks("lightning")
    expected = {
        "sampler": "DistributedSampler",
        "shuffles": True,
        "order": "arrival",
        "seed": 5,
        "bounded": False,
        "last epoch": 2,
    }
    for rank in ranks:
        assert rank["engines"] == OURS
    for kind in ("fabric", "passed", "made"):
        check([rank[kind].pop("epochs") for rank in ranks], 40, shuffled=True)
        assert [rank[kind] for rank in ranks] == [expected] * 2
