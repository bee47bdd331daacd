"""With a real GPU: nothing is written to memory that it has still to read.

Memory is poisoned as soon as it may be used again, and the GPU is kept busy, so that its copies come late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from minato import DataLoader
from minato.batching.arena import Arena, Slot
from tests.datasets import Filled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

SIZE, BATCH_SIZE, SHAPE = 240, 8, (64, 256)
BATCH_BYTES = 4 * BATCH_SIZE * SHAPE[0] * SHAPE[1]
BUSY_CYCLES = 5_000_000

WORKERS: Any = pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "thread"}],
    ids=["in line", "processes", "threads"],
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = Arena.acquire

    def poisoning(arena: Arena) -> Slot:
        slot = acquire(arena)
        arena.segment.array[slot.start : slot.start + BATCH_BYTES] = 0xAB
        return slot

    monkeypatch.setattr(Arena, "acquire", poisoning)


def firsts(batches: Iterable[torch.Tensor]) -> list[float]:
    """The value that fills each sample, one epoch; all of it must have arrived."""
    kept, whole = [], []
    for batch in batches:
        on_gpu = batch.to("cuda", non_blocking=True)
        del batch
        whole.append((on_gpu == on_gpu[:, :1, :1]).all())
        kept.append(on_gpu[:, 0, 0].clone())
        torch.cuda._sleep(BUSY_CYCLES)
    assert all(whole), "written again before it was read"
    return torch.cat(kept).tolist()


@WORKERS
def test_batches_are_sent_there(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(SIZE, *SHAPE), BATCH_SIZE, device="cuda", **workers)
    for _ in range(2):
        assert firsts(loader) == [*range(SIZE)]


@WORKERS
def test_batches_pinned_in_place_are_copied_by_the_program(workers: dict[str, Any]) -> None:
    loader = DataLoader(Filled(SIZE, *SHAPE), BATCH_SIZE, pin_memory="in_place", **workers)
    assert next(iter(loader)).is_pinned()
    for _ in range(2):
        assert firsts(loader) == [*range(SIZE)]


def test_consumers_have_them_sent() -> None:
    loader = DataLoader(Filled(SIZE, *SHAPE), BATCH_SIZE, num_workers=2)
    one, other = (iter(each) for each in loader.consumers(devices=["cuda", "cuda"]))
    pairs = range(SIZE // BATCH_SIZE // 2)
    assert firsts(next(each) for _ in pairs for each in (one, other)) == [*range(SIZE)]
