"""Command line of the comparison of ranks; see ``python -m bench.ranks --help``."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
import uuid
import warnings
from typing import Any, NamedTuple

import torch
from torch.utils.data import DistributedSampler

from bench import record
from bench.macro.suite import Spread
from bench.macro.work import SleepingWork, straggler_costs_s
from minato import DataLoader

RANKS, WORKERS, BATCH_SIZE, STEP_S = 2, 2, 8, 0.004
SAMPLES, SHORT_SAMPLES = 3200, 160
REPEATS = 5


class Load(NamedTuple):
    """What the samples of a dataset cost.

    Attributes:
        title: In words.
        costs_s: Of so many samples.
    """

    title: str
    costs_s: list[float]


def loads(count: int) -> dict[str, Load]:
    """What is compared."""
    uneven = [0.001 if index % RANKS else 0.005 for index in range(count)]
    return {
        "uniform": Load("each sample takes 3 ms", [0.003] * count),
        "stragglers": Load(
            "one sample in a hundred takes 200 ms, the others 1 ms",
            straggler_costs_s(count, usual_s=0.001, straggler_s=0.201, share=0.01),
        ),
        "uneven": Load("5 ms in the part of one rank, 1 ms in that of the other", uneven),
    }


LOADERS: dict[str, Any] = {
    "torch": lambda data, sampler, **more: torch.utils.data.DataLoader(
        data, sampler=sampler, **more
    ),
    "minato": lambda data, sampler, **more: DataLoader(data, sampler=sampler, **more),
    "minato, shared_pool": lambda data, sampler, **more: DataLoader(
        data, sampler=sampler, shared_pool=True, **more
    ),
}


def train(name: str, costs_s: list[float], rank: int, job: str, together: Any, sent: Any) -> None:
    """One rank: an epoch that warms up and one that counts, in step with the others."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ.update(local, RANK=str(rank), WORLD_SIZE=str(RANKS), TORCHELASTIC_RUN_ID=job)
    data = SleepingWork(costs_s)
    sampler = DistributedSampler(data, RANKS, rank, shuffle=False)
    loader = LOADERS[name](
        data, sampler, batch_size=BATCH_SIZE, num_workers=WORKERS, persistent_workers=True
    )
    for _ in range(2):
        together.wait()
        begun_s, waited_s, seen = time.perf_counter(), 0.0, 0
        batches = iter(loader)
        while True:
            asked_s = time.perf_counter()
            batch = next(batches, None)
            waited_s += time.perf_counter() - asked_s
            if batch is None:
                break
            seen += BATCH_SIZE
            time.sleep(STEP_S)
            together.wait()  # as the gradients of a step are exchanged
        took_s = time.perf_counter() - begun_s
    if seen != len(costs_s) // RANKS:
        raise RuntimeError(f"{name}: rank {rank} got {seen} of {len(costs_s) // RANKS} samples")
    sent.send((took_s, waited_s))
    together.wait()


def slowest(name: str, costs_s: list[float]) -> tuple[float, float]:
    """Seconds of an epoch, and the part of it that the rank which waited longer for data did so."""
    fork = multiprocessing.get_context("fork")
    together, (received, sent) = fork.Barrier(RANKS), fork.Pipe(duplex=False)
    job = uuid.uuid4().hex
    ranks = [
        fork.Process(target=train, args=(name, costs_s, rank, job, together, sent))
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    found = [received.recv() for _ in ranks]
    for rank in ranks:
        rank.join()
    took_s, waited_s = (max(times) for times in zip(*found, strict=True))
    return took_s, waited_s / took_s


def main(arguments: list[str] | None = None) -> int:
    about = "Compare a pool of workers for each rank with one for all ranks of a node."
    options = record.options_of("bench.ranks", about, REPEATS).parse_args(arguments)
    conditions = record.environment()
    count, repeats = (SHORT_SAMPLES, 1) if options.short else (SAMPLES, options.repeats)
    lines = [
        "# One pool of workers for several ranks",
        "",
        f"Written by `python -m bench.ranks --out docs/benchmarks`. {RANKS} ranks in step, each with",
        f"`num_workers={WORKERS}` and steps of {1e3 * STEP_S:.0f} ms, an epoch of {count} samples in batches of",
        f"{BATCH_SIZE}, in strict order. Samples sleep. The epoch of the slower rank, after one that warmed up: median",
        f"and range of {repeats} runs, in turn.",
        "",
        "| load | | loader | epoch | of which a rank waits for data |",
        "|---|---|---|---|---|",
    ]
    for title, load in loads(count).items():
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in LOADERS}
        for _ in range(repeats):
            for name, runs in found.items():
                runs.append(slowest(name, load.costs_s))
        for name, runs in found.items():
            spread = Spread.of([took_s for took_s, _ in runs])
            waited = statistics.median(share for _, share in runs)
            lines.append(
                f"| {title} | {load.title} | {name} | {spread.median:.2f} s ({spread.least:.2f}–{spread.greatest:.2f}) "
                f"| {100 * waited:.0f} % |"
            )
            print(lines[-1], flush=True)
    record.finish(lines, conditions, options.out and options.out / "ranks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
