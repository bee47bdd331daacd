"""The iterator between torch's protocol and the source of batches."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.utils.data import DistributedSampler

from minato import DataLoader
from tests.datasets import Journal, Numbers, wait_until


def test_after_a_wrong_prediction_no_epoch_is_begun_early() -> None:
    dataset = Journal(24)
    sampler = DistributedSampler(dataset, 1, 0)
    options = {"num_workers": 1, "persistent_workers": "next_epoch"}
    loader: Any = DataLoader(dataset, 2, sampler=sampler, **options)
    assert len(list(loader)) == 12
    wait_until(lambda: len(dataset.begun()) > 24)
    time.sleep(0.1)  # until all of epoch 1 that may be has begun
    early = len(dataset.begun()) - 24
    sampler.set_epoch(5)
    assert len(list(loader)) == 12
    time.sleep(0.1)
    assert len(dataset.begun()) == 48 + early
    loader.close()


def test_a_profiler_sees_the_range_that_torch_records() -> None:
    with profile() as recorded:
        next(iter(DataLoader(Numbers(6), 2)))
    names = [event.name for event in recorded.function_events]
    assert names.count("enumerate(DataLoader)#BatchIterator.__next__") == 1


@pytest.mark.parametrize("workers", [{}, {"workers": "thread"}])
def test_a_generator_that_delegates_to_the_loader_may_be_left_early(workers):
    dataset = torch.arange(40)
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True, **workers)

    def batches():
        yield from loader

    for _ in range(2):
        left = batches()
        assert next(left).tolist() == [0, 1, 2, 3]
        left.close()  # which closes the loader's iterator as well, unlike one of torch's
    assert [batch.tolist() for batch in batches()] == dataset.reshape(10, 4).tolist()
    loader.close()
