"""minato's own options: defaults that depend on others, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minato import DataLoader
from minato.options import DEFAULT_MAX_LAG, Options
from tests.datasets import Numbers


def options(**given: Any) -> Options:
    defaults: dict[str, Any] = {
        "in_order": True,
        "has_batch_sampler": False,
        "is_stream": False,
        "pin_memory": False,
        "order": None,
        "max_lag": None,
        "seed": None,
        "memory_budget_bytes": None,
        "worker_method": "process",
        "rng": None,
        "schedule": "dynamic",
        "on_worker_death": "restart",
        "record_order": None,
        "replay_order": None,
        "fetch_concurrency": 1,
        "on_error": "raise",
        "retries": None,
        "error_budget": None,
        "quarantine": None,
        "sample_timeout_s": None,
        "num_workers": 2,
        "min_workers": None,
        "max_workers": None,
        "controller": "corrected",
        "slow_percentile": None,
        "slow_after_s": None,
        "profile": None,
        "measure": True,
        "metrics_port": None,
        "trace": None,
        "device": None,
        "prefetch_to_device": None,
        "shared_pool": False,
        "on_rank_death": "raise",
        "ray_options": None,
        "snapshot_every_n_steps": 1,
    }
    return Options.of(**{**defaults, **given})


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({}, "strict"),
        ({"has_batch_sampler": True}, "strict"),
        ({"in_order": False}, "arrival"),
        ({"in_order": False, "has_batch_sampler": True}, "batch"),
        ({"in_order": False, "is_stream": True}, "batch"),
        ({"in_order": False, "schedule": "round_robin"}, "batch"),
        ({"order": "strict"}, "strict"),
        ({"order": "batch"}, "batch"),
        ({"order": "batch", "has_batch_sampler": True}, "batch"),
        ({"order": "arrival"}, "arrival"),
        ({"order": "fast_first", "in_order": False}, "fast_first"),
    ],
)
def test_order_follows_from_the_other_arguments(given: dict[str, Any], order: str) -> None:
    assert options(**given).order == order


def test_defaults() -> None:
    default = options()
    assert default.max_lag == DEFAULT_MAX_LAG > 0
    assert default.seed is default.memory_budget_bytes is None
    assert (default.worker_method, default.rng, default.schedule) == (
        "process",
        "sample",
        "dynamic",
    )
    assert options(schedule="round_robin").rng == "worker"
    assert options(order="arrival", max_lag=0).max_lag == 0


@pytest.mark.parametrize(
    ("seed", "kept"),
    [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64, 0)],
)
def test_seed_counts_modulo_two_to_the_64(seed: int, kept: int) -> None:
    assert options(seed=seed).seed == kept


@pytest.mark.parametrize("order", ["arrival", "fast_first"])
@pytest.mark.parametrize(
    "with_whole_batches",
    [{"has_batch_sampler": True}, {"is_stream": True}, {"schedule": "round_robin"}],
)
def test_whole_batches_cannot_be_mixed(order: str, with_whole_batches: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"order='{order}' mixes.*use order='batch'"):
        options(order=order, **with_whole_batches)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="order='strict' contradicts in_order=False"):
        options(order="strict", in_order=False)
    with pytest.raises(ValueError, match=r"max_lag=4 has no meaning with order='batch'"):
        options(order="batch", max_lag=4)
    with pytest.raises(ValueError, match="rng='sample' contradicts schedule='round_robin'"):
        options(rng="sample", schedule="round_robin")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("gpu", r"device='gpu' is no device of torch's"),
        ("cuda:77", r"device='cuda:77' is not there: torch sees \d+ CUDA devices"),
        (torch.device("cuda", 77), r"is not there"),
        ("mtia", r"device='mtia' is not there"),
    ],
)
def test_a_device_that_is_not_there_is_refused_at_once(device: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataLoader(Numbers(3), device=device)


def test_a_device_is_a_string_or_torchs() -> None:
    with pytest.raises(TypeError, match=r"device=1\.5 is a float"):
        options(device=1.5)
    assert options(device="meta").target == torch.device("meta")
    assert options(device="cpu").target is None
    assert options(device="meta").prefetch_to_device == 2


def test_batches_on_a_device_need_one() -> None:
    with pytest.raises(ValueError, match="prefetch_to_device=3 has no meaning without a device"):
        options(prefetch_to_device=3)
    with pytest.raises(ValueError, match="prefetch_to_device=-1 is too small"):
        options(prefetch_to_device=-1, device="meta")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"is_stream": True}, "an iterable dataset, whose samples have no indices"),
        ({"num_workers": 0}, "num_workers=0, with which there are no workers to share: use 1"),
        ({"worker_method": "thread"}, "worker_method='thread', whose batches"),
        ({"schedule": "round_robin"}, "schedule='round_robin', where each batch is one worker's"),
        ({"on_error": "skip"}, "on_error='skip', with which ranks might get different numbers"),
        ({"record_order": "file"}, "record_order='file', as each rank has only a part"),
        ({"replay_order": "file"}, "replay_order='file', as each rank has only a part"),
    ],
)
def test_what_a_shared_pool_does_not_go_with(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"shared_pool=True does not go with {words}"):
        options(shared_pool=True, **{"num_workers": 2, **given})


def test_what_becomes_of_ranks_needs_a_shared_pool() -> None:
    with pytest.raises(ValueError, match="on_rank_death='continue' has no meaning without"):
        options(on_rank_death="continue")
    with pytest.raises(ValueError, match="on_rank_death='never' is not possible: choose one of"):
        options(on_rank_death="never", shared_pool=True, num_workers=2)
    with pytest.raises(ValueError, match="shared_pool=3 is not possible"):
        options(shared_pool=3)
    assert options(shared_pool=True, num_workers=2).shared_pool
