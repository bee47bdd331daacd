"""``minato demo``: torch's loader and minato on uneven samples that sleep, in ten seconds."""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minato._core import now_ns
from minato._support.loader_class import TorchDataLoader
from minato.loader import DataLoader
from minato.observe.text import format_value

_SAMPLES, _BATCH, _WORKERS = 480, 16, 4
_COST_S, _STRAGGLER_S, _STRAGGLERS = 0.012, 0.36, 10
_STEP_S = 0.05


class SleepingSamples(torch.utils.data.Dataset[int]):
    """Samples that sleep for their cost and return their index."""

    def __init__(self, costs_s: Sequence[float]) -> None:
        self._costs_s = costs_s

    def __len__(self) -> int:
        return len(self._costs_s)

    def __getitem__(self, index: int) -> int:
        time.sleep(self._costs_s[index])
        return index


@dataclass(frozen=True)
class _Run:
    name: str
    epoch_s: float
    waiting_s: float
    first_s: float
    is_complete: bool


def _costs_s(samples: int) -> list[float]:
    """The cost of each sample; every 48th is a straggler, at random places that are always the same."""
    costs = [_COST_S] * samples
    for index in random.Random(0).sample(range(samples), max(samples * _STRAGGLERS // _SAMPLES, 1)):
        costs[index] = _STRAGGLER_S
    return costs


def _timed(name: str, loader: TorchDataLoader[int], samples: int) -> _Run:
    seen: list[int] = []
    waiting_ns = first_ns = 0
    start_ns = asked_ns = now_ns()
    for batch in loader:
        waited_ns = now_ns() - asked_ns
        first_ns = first_ns or waited_ns
        waiting_ns += waited_ns
        seen += batch.tolist()
        time.sleep(_STEP_S)
        asked_ns = now_ns()
    end_ns = now_ns()
    return _Run(
        name,
        epoch_s=(end_ns - start_ns) / 1e9,
        waiting_s=(waiting_ns + end_ns - asked_ns) / 1e9,
        first_s=first_ns / 1e9,
        is_complete=sorted(seen) == list(range(samples)),
    )


def compare(samples: int = _SAMPLES) -> Iterator[_Run]:
    """Run one epoch with each loader, on the same dataset and with the same number of workers."""
    dataset = SleepingSamples(_costs_s(samples))
    arguments: dict[str, Any] = {"batch_size": _BATCH, "num_workers": _WORKERS}
    loaders: dict[str, TorchDataLoader[int]] = {
        "torch": TorchDataLoader(dataset, **arguments),
        "torch, in_order=False": TorchDataLoader(dataset, in_order=False, **arguments),
        "minato": DataLoader(dataset, **arguments),
    }
    for name, loader in loaders.items():
        yield _timed(name, loader, samples)


def _ideal_s(samples: int) -> float:
    """No loader is faster: all workers are busy all the time, or the training step is."""
    steps = -(-samples // _BATCH)
    return max(sum(_costs_s(samples)) / _WORKERS, steps * _STEP_S)


# ---- the command ----------------------------------------------------------------------------

_EXPLANATION = f"""\
{_SAMPLES} samples of {1e3 * _COST_S:.0f} ms, {_STRAGGLERS} of them stragglers of {1e3 * _STRAGGLER_S:.0f} ms. \
{_WORKERS} workers, batches of {_BATCH}, a step of {1e3 * _STEP_S:.0f} ms.
Samples and steps sleep, so this needs no data and few cores.
"""
_HONEST = """
minato returns the same batches in the same order as torch; with in_order=False torch changes the order of batches.
This workload is made for stragglers: where all samples cost the same, or the training step takes longer than loading,
expect 1.0×. To measure your own loader: minato profile train.py:make_loader"""


def add_to(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser of all."""
    parser = add_parser(
        "demo", help="compare torch's loader and minato on samples with stragglers, in ten seconds"
    )
    parser.set_defaults(run=_run, failed="the demo failed: {}")


def _run(_: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print(_EXPLANATION)
    ideal_s = _ideal_s(_SAMPLES)
    row = "{:24}{:>10}{:>13}{:>13}{:>10}"
    print(row.format("loader", "epoch", "waiting", "first batch", "× ideal"))
    complete = True
    for run in compare():
        times = (format_value(each, "s") for each in (run.epoch_s, run.waiting_s, run.first_s))
        print(row.format(run.name, *times, f"{run.epoch_s / ideal_s:.2f}"), flush=True)
        if not run.is_complete:
            print(f"minato: {run.name} did not return each sample once", file=sys.stderr)
            complete = False
    print(row.format("ideal (lower bound)", format_value(ideal_s, "s"), "", "", "1.00"))
    print(_HONEST)
    return 0 if complete else 1
