"""The iterator between torch's protocol and the source of batches."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from minato import DataLoader
from minato.workers import pools, supervision
from tests.datasets import Journal, Numbers, wait_until
from tests.threads import wait_for_main


def test_after_a_wrong_prediction_no_epoch_is_begun_early() -> None:
    dataset = Journal(24)
    sampler = DistributedSampler(dataset, 1, 0)
    options = {"num_workers": 1, "persistent_workers": "next_epoch", "prefetch_factor": 2}
    loader: Any = DataLoader(dataset, 2, sampler=sampler, **options)
    assert len(list(loader)) == 12
    early = 2 * 2  # of epoch 1
    wait_until(lambda: len(dataset.begun()) == 24 + early)
    sampler.set_epoch(5)
    assert len(list(loader)) == 12
    time.sleep(0.1)  # more might begin
    assert len(dataset.begun()) == 48 + early
    loader.close()


@pytest.mark.parametrize("kind", ["torch", "process", "thread"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_generator_that_delegates_to_the_loader_may_be_left_early(kind, persistent):
    options = {"num_workers": 2, "persistent_workers": persistent}
    if kind == "torch":
        loader: Any = TorchLoader(Workers(40), 4, **options)
    else:
        loader = DataLoader(Workers(40), 4, workers=kind, **options)

    def batches():
        yield from loader

    workers = set[int]()
    for _ in range(3):
        left = batches()
        index, worker = next(left)
        workers |= {*worker.tolist()}
        left.close()
        assert index.tolist() == [0, 1, 2, 3]
    epoch = [*batches()]
    assert [batch[0].tolist() for batch in epoch] == torch.arange(40).reshape(10, 4).tolist()
    workers |= {worker for batch in epoch for worker in batch[1].tolist()}
    assert len(workers) <= 2 or not persistent
    if kind == "process" and not persistent:
        wait_until(lambda: not any(map(psutil.pid_exists, workers)))


class Workers(Numbers):
    """Each number with the thread that loads it, which a process has one of."""

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, threading.get_native_id()


@pytest.mark.parametrize("workers", ["process", "thread"])
@pytest.mark.parametrize(
    ("by", "end"), [("handler", "close"), ("thread", "close"), ("thread", "_shutdown_workers")]
)
def test_the_workers_are_ended_while_next_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, workers: Any, by: str, end: str
) -> None:
    for module in (supervision, pools):
        monkeypatch.setattr(module, "_GRACE_S", 0.05)
    release = threading.Event()

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> Any:
            return index if index < 2 else release.wait(60)

    loader = DataLoader(Stuck(8), 2, num_workers=1, workers=workers)
    iterator: Any = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    ends = loader.close if end == "close" else iterator._shutdown_workers

    def end_in_wait() -> None:
        wait_for_main("pools.py", "wait")
        if by == "thread":
            ends()
        else:
            os.kill(os.getpid(), signal.SIGALRM)

    other = threading.Thread(target=end_in_wait)
    before = signal.signal(signal.SIGALRM, lambda *_: ends())
    began = time.monotonic()
    try:
        other.start()
        with pytest.raises(RuntimeError, match="was closed before the end of the epoch"):
            next(iterator)
        other.join(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 30
    with pytest.raises(RuntimeError if end == "close" else StopIteration):
        next(iterator)
    release.set()
