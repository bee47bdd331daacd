"""What only a fresh process can tell: the cold first batch, and memory; run as a program, it prints one JSON line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import psutil

from bench import record
from bench.growth.curves import LOADERS
from bench.growth.work import Naps, Vectors

_LIMIT_S = 120.0
_LOOK_EVERY_S = 0.01


def first_batch(loader: str, workers: str, method: str) -> dict[str, Any]:
    """Milliseconds from building a loader to its first batch, of samples that cost nothing."""
    begun = time.perf_counter()
    made = LOADERS[loader](
        Naps(4096, 0.0),
        batch_size=8,
        num_workers=int(workers),
        multiprocessing_context=method,
    )
    iterator = iter(made)
    next(iterator)
    taken_ms = 1e3 * (time.perf_counter() - begun)
    del iterator
    return {"first_batch_ms": taken_ms}


def memory(loader: str, workers: str, nbytes: str) -> dict[str, Any]:
    """MiB that an epoch takes at most, in this process and its workers (PSS), beyond what was there before."""
    dataset = Vectors(2048, int(nbytes))
    made = LOADERS[loader](dataset, batch_size=32, num_workers=int(workers))
    this = psutil.Process()
    before, over = pss(this), threading.Event()
    peaks = [0]

    def look() -> None:
        while not over.wait(_LOOK_EVERY_S):
            peaks[0] = max(peaks[0], pss(this))

    iterator = iter(made)  # forks before there is a thread
    watcher = threading.Thread(target=look)
    watcher.start()
    count = 0
    for batch in iterator:
        count += len(batch)
        time.sleep(0.005)
    over.set()
    watcher.join()
    if count != len(dataset):
        raise RuntimeError(f"{loader}: {count} samples came, not {len(dataset)}")
    return {"peak_mib": (peaks[0] - before) / 2**20}


def pss(process: psutil.Process) -> int:
    """Memory of a process and its children, in bytes; what several of them share is counted once."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


def ask(what: str, *arguments: str) -> float:
    """Run one of the above in a process of its own."""
    command = [sys.executable, "-m", "bench.growth.fresh", what, *arguments]
    ended = subprocess.run(
        command, cwd=record.ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=True
    )
    (value,) = json.loads(ended.stdout.splitlines()[-1]).values()
    return float(value)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    measured = {"first_batch": first_batch, "memory": memory}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(measured))
