"""Command line of the comparison of ranks; see ``python -m bench.ranks --help``."""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
import warnings
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

from bench import record
from bench.in_step import run_ranks, wait_for_all
from bench.macro.suite import Spread
from bench.macro.trial import WrongDeliveryError, check_labels
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


class Contender(NamedTuple):
    """A loader with a setting.

    Attributes:
        make: The loader's class.
        more: Its arguments besides those that all get.
        keeps_order: Whether a rank's samples come in the sampler's order.
    """

    make: Any
    more: dict[str, Any]
    keeps_order: bool


LOADERS = {
    "torch": Contender(TorchLoader, {}, True),
    "torch, in_order=False": Contender(TorchLoader, {"in_order": False}, False),
    "minato": Contender(DataLoader, {}, True),
    "minato, shared_pool": Contender(DataLoader, {"shared_pool": True}, True),
}


class Epoch(NamedTuple):
    """What a rank saw of an epoch."""

    took_s: float
    waited_s: float
    indices: list[int]


def train(name: str, costs_s: list[float], rank: int, job: str) -> Epoch:
    """One rank: an epoch that warms up and one that counts, in step with the others."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ.update(local, RANK=str(rank), WORLD_SIZE=str(RANKS), TORCHELASTIC_RUN_ID=job)
    data, contender = SleepingWork(costs_s), LOADERS[name]
    loader = contender.make(
        data,
        sampler=DistributedSampler(data, RANKS, rank, shuffle=False),
        batch_size=BATCH_SIZE,
        num_workers=WORKERS,
        persistent_workers=True,
        **contender.more,
    )
    _epoch(loader)
    epoch = _epoch(loader)
    wait_for_all()  # the host's workers are not to end before the others are through
    return epoch


def _epoch(loader: Any) -> Epoch:
    wait_for_all()
    begun_s, waited_s = time.perf_counter(), 0.0
    indices: list[int] = []
    batches = iter(loader)
    while True:
        asked_s = time.perf_counter()
        batch = next(batches, None)
        waited_s += time.perf_counter() - asked_s
        if batch is None:
            return Epoch(time.perf_counter() - begun_s, waited_s, indices)
        indices += batch[1].tolist()
        time.sleep(STEP_S)
        wait_for_all()  # as the gradients of a step are exchanged


def slowest(name: str, costs_s: list[float]) -> tuple[float, float]:
    """Seconds of an epoch, and the part of it that the rank which waited longer for data did so.

    Raises:
        WrongDeliveryError: Not each sample came once, or not in order where that is promised.
    """
    job = uuid.uuid4().hex
    epochs = run_ranks(train, [(name, costs_s, rank, job) for rank in range(RANKS)])
    for rank, epoch in enumerate(epochs):
        own = list(range(rank, len(costs_s), RANKS))
        if LOADERS[name].keeps_order and epoch.indices != own:
            raise WrongDeliveryError(f"{name}: rank {rank} did not get its samples in order")
    everything = [index for epoch in epochs for index in epoch.indices]
    check_labels(everything, len(costs_s), in_order=False, who=name)
    took_s = max(epoch.took_s for epoch in epochs)
    return took_s, max(epoch.waited_s for epoch in epochs) / took_s


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
