"""With a real GPU: nothing is written to memory that it has still to read.

Memory is poisoned as soon as it may be used again, and the GPU is kept busy, so that its copies come late.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from minato import DataLoader, Observe
from minato.batching.arena import Arena, Slot
from tests.datasets import Filled, Numbers, Pair
from tests.subprocesses import output

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


def test_batches_that_torch_pins_may_be_dropped_while_they_are_copied() -> None:
    for nbytes_factor in (1, 4):  # pinned when asked for, and pinned early by a thread
        rows = SHAPE[0] * nbytes_factor
        dataset = Filled(SIZE, rows, SHAPE[1])
        loader = DataLoader(dataset, BATCH_SIZE, num_workers=2, pin_memory=True)
        assert next(iter(loader)).is_pinned()
        assert firsts(loader) == [*range(SIZE)]


@WORKERS
@pytest.mark.parametrize(
    "how", [{"device": "cuda"}, {"pin_memory": "in_place"}, {"pin_memory": True}]
)
def test_graphs_are_captured_while_batches_come_and_go(
    workers: dict[str, Any], how: dict[str, Any]
) -> None:
    fixed, sums = torch.zeros(BATCH_SIZE, *SHAPE, device="cuda"), []
    graph = torch.cuda.CUDAGraph()
    loader = DataLoader(Filled(SIZE, *SHAPE), BATCH_SIZE, **how, **workers)
    for number, batch in enumerate(loader):
        fixed.copy_(batch, non_blocking=True)
        if number == 3:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                del batch  # its slot becomes free during the capture
                total = fixed.mean(dim=(1, 2)) + 1
            graph.replay()
        elif number > 3:
            graph.replay()
        if number >= 3:
            sums.append(total.clone())
    assert torch.cat(sums).tolist() == [*range(3 * BATCH_SIZE + 1, SIZE + 1)]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "workers": "thread"}], ids=str)
@pytest.mark.parametrize("how", [{}, {"device": "cuda"}], ids=str)
def test_samples_that_are_on_the_gpu(workers: dict[str, Any], how: dict[str, Any]) -> None:
    for batch_size in (4, None):
        loader = DataLoader(OnGpu(9), batch_size, **workers, **how)
        theirs = [*torch.utils.data.DataLoader(OnGpu(9), batch_size)]
        assert [plain(batch) for batch in loader] == [plain(batch) for batch in theirs]


def plain(batch: dict[str, Any]) -> list[Any]:
    return [batch["x"].device, *(torch.as_tensor(batch[key]).tolist() for key in ("x", "at"))]


class OnGpu(Numbers):
    """Dictionaries of a tensor on the GPU and a number."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(index), device="cuda"), "at": index}


def test_nested_batches_of_a_stream_go_there() -> None:
    for batch in DataLoader(Nested(), 4, num_workers=2, readers=1, device="cuda"):
        assert isinstance(batch, Pair)
        assert batch.image["x"].is_cuda
        assert batch.label[0].is_cuda
        assert {*batch.label[1]} == {"text"}
        assert batch.image["x"][:, 0].tolist() == batch.label[0].tolist()


class Nested(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            yield Pair({"x": np.full((3,), number, np.float64)}, (number, "text"))


@WORKERS
def test_all_memory_is_unpinned_at_the_end(
    workers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.init()
    runtime, pinned = torch.cuda.cudart(), set()

    class Counted:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> Any:  # noqa: N802
            pinned.add(address)
            return runtime.cudaHostRegister(address, nbytes, flags)

        @staticmethod
        def cudaHostUnregister(address: int) -> Any:  # noqa: N802
            status = runtime.cudaHostUnregister(address)
            assert int(status) == 0
            pinned.remove(address)
            return status

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Counted)
    loader = DataLoader(Filled(SIZE, *SHAPE), BATCH_SIZE, device="cuda", **workers)
    assert firsts(loader) == [*range(SIZE)]
    for _ in itertools.islice(loader, 3):
        assert pinned
    del loader
    gc.collect()
    assert not pinned


@pytest.mark.parametrize("how", ["device='cuda'", "pin_memory='in_place'", "pin_memory=True"])
@pytest.mark.parametrize("workers", ["", "num_workers=2", "num_workers=2, workers='thread'"])
def test_a_program_may_end_in_the_middle_of_an_epoch(how: str, workers: str) -> None:
    program = f"""
import torch
from minato import DataLoader
loader = DataLoader(torch.zeros(64, 1 << 16), 4, {how}, {workers})
iterator = iter(loader)
total = next(iterator).to("cuda", non_blocking=True).sum()
"""
    output("-W", "ignore::DeprecationWarning", "-c", program)


@pytest.mark.parametrize("how", [{"device": "cuda"}, {"pin_memory": "in_place"}])
def test_processes_that_are_forked_meanwhile_do_not_part_it_from_its_memory(
    how: dict[str, Any],
) -> None:
    on_gpu, children = [], []
    for batch in DataLoader(Filled(SIZE, *SHAPE), BATCH_SIZE, **how):
        on_gpu.append(batch.to("cuda", non_blocking=True))
        del batch
        if len(on_gpu) % 8 == 0:
            children.append(subprocess.Popen(["sleep", "100"]))
            pid = os.fork()
            if not pid:
                time.sleep(100)
                os._exit(0)
            children.append(pid)
    for child in children:
        if isinstance(child, int):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        else:
            child.kill()
            child.wait()
    assert torch.cat([each[:, 0, 0] for each in on_gpu]).tolist() == [*range(SIZE)]
    assert all((each == each[:, :1, :1]).all() for each in on_gpu)


def test_the_report_says_how_busy_it_was() -> None:
    loader = DataLoader(
        Filled(SIZE, *SHAPE), BATCH_SIZE, num_workers=1, device="cuda", observe=Observe(stats="gpu")
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for batch in loader:
            batch @ batch.mT
            torch.cuda._sleep(BUSY_CYCLES)
            torch.cuda.synchronize()
        gpus = loader.report().run.gpus
        if gpus and gpus[0].samples > 10 and gpus[0].idle_share < 1:
            break
    assert torch.cuda.get_device_name() in gpus[0].name
    assert 0 < gpus[0].busy_share <= 1
    assert 0 < gpus[0].memory_bytes < gpus[0].total_bytes


def test_a_worker_that_uses_it_after_a_fork_says_what_to_do() -> None:
    torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA") as caught:
        next(iter(DataLoader(OnGpu(4), 2, num_workers=1, multiprocessing_context="fork")))
    assert "OnGpu" in str(caught.value) or "__getitem__" in str(caught.value)
