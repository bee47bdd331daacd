"""What the GPU does meanwhile: its use by NVML, and by a trace whether copies run beside kernels."""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile

INTERVAL_S = 0.1
_PLAIN_COPIES = 20
Span = tuple[float, float]


class Utilisation:
    """Asks NVML ten times a second how much of the time a kernel was running; a context manager.

    Attributes:
        percent: What it said, from 0 to 100.
    """

    def __init__(self, index: int) -> None:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        self._device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.percent: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        pynvml.nvmlShutdown()

    def _look(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.percent.append(pynvml.nvmlDeviceGetUtilizationRates(self._device).gpu)

    @property
    def idle_share(self) -> float:
        """Share of the time in which no kernel ran."""
        return 1 - statistics.fmean(self.percent) / 100 if self.percent else float("nan")


class Copies(NamedTuple):
    """Copies from main memory to the GPU, by a trace; NaN without any.

    Attributes:
        beside: Share of their time in which a kernel was running.
        rate: Bytes per second of their time.
    """

    beside: float
    rate: float


def copies_of(run: Callable[[], None]) -> Copies:
    """What a trace of ``run`` says of them."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return copies_among(json.loads(path.read_text())["traceEvents"])


def copies_among(events: Iterable[dict[str, Any]]) -> Copies:
    """The same from the events of a trace."""
    copies, kernels = [], []
    taken_us, nbytes = 0.0, 0
    for event in events:
        span = (event.get("ts", 0.0), event.get("ts", 0.0) + event.get("dur", 0.0))
        if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            copies.append(span)
            taken_us += event["dur"]
            nbytes += event["args"]["bytes"]
        elif event.get("cat") == "kernel":
            kernels.append(span)
    copies, kernels = _merged(copies), _merged(kernels)
    both = sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in copies for b in kernels)
    total = sum(end - start for start, end in copies)
    if not total:
        return Copies(float("nan"), float("nan"))
    return Copies(both / total, 1e6 * nbytes / taken_us)


def plain_copies(nbytes: int, device: torch.device) -> Copies:
    """Copies of so many bytes from memory that torch has pinned, one after the other."""
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def run() -> None:
        for _ in range(_PLAIN_COPIES):
            pinned.to(device, non_blocking=True)

    run()
    return copies_of(run)


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
