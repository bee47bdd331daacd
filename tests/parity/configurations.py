"""Combinations of arguments, and what both classes make of one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch.utils import data

import minato
from tests.parity import material
from tests.parity.harness import (
    TorchLoader,
    attempt,
    drain,
    failure,
    generator_states,
    record_warnings,
    recorded_warnings,
    seed_everything,
    seen_attributes,
    where_they_part,
)

DATASETS = {
    "numbers": material.Numbers,
    "tensors": material.Tensors,
    "arrays": material.Arrays,
    "mixed": material.Mixed,
    "ragged": material.Ragged,
    "failing": material.Failing,
    "apples": material.Apples,
    "listed": material.Listed,
    "drawing": material.Drawing,
    "list": lambda n: [float(i) for i in range(n)],
    "range": range,
    "text": lambda n: "abcdefghijklmnopq"[:n],
    "array": lambda n: torch.arange(2.0 * n).view(n, 2),
    "subset": lambda n: data.Subset(material.Listed(2 * n), list(range(2 * n))[::-2]),
    "concatenated": lambda n: data.ConcatDataset(
        [material.Tensors(n - n // 2), material.Tensors(n // 2)]
    ),
    "tensor-dataset": lambda n: data.TensorDataset(torch.arange(n), torch.ones(n, 2)),
    "stacked": lambda n: data.StackDataset(number=material.Numbers(n), image=material.Tensors(n)),
}
STREAMS = {
    "stream": material.Stream,
    "drawing-stream": material.DrawingStream,
    "uneven-stream": material.UnevenStream,
    "lying-stream": material.LyingStream,
    "failing-stream": material.FailingStream,
    "chained-stream": lambda n: data.ChainDataset([material.Stream(n), material.DrawingStream(2)]),
}
SAMPLERS = {
    "list": lambda n: list(range(n))[::-1],
    "tuple": lambda n: tuple(range(n)),
    "range": lambda n: range(0, n, 2),
    "repeated": lambda n: [0] * n,
    "generator": lambda n: (i for i in range(n)),
    "only-iter": lambda n: material.OnlyIter(range(n)),
    "tensor": lambda n: torch.arange(n),
    "sequential": lambda n: data.SequentialSampler(range(n)),
    "random": lambda n: data.RandomSampler(range(n or 1)),
    "replacement": lambda n: data.RandomSampler(range(n or 1), replacement=True, num_samples=n + 3),
    "weighted": lambda n: data.WeightedRandomSampler([1.0 + i for i in range(n or 1)], n + 1),
    "subset-random": lambda n: data.SubsetRandomSampler(range(n // 2)),
    "distributed": lambda n: data.DistributedSampler(range(n), num_replicas=2, rank=1),
    "grumpy": material.Grumpy,
    "out-of-range": lambda n: [0, n, 1],
    "empty": lambda n: [],
}
BATCH_SAMPLERS = {
    "batches": lambda n: data.BatchSampler(data.SequentialSampler(range(n)), 4, drop_last=False),
    "random": lambda n: data.BatchSampler(data.RandomSampler(range(n or 1)), 3, drop_last=True),
    "lists": lambda n: [[i, i] for i in range(n)],
    "tuples": lambda n: (tuple(range(i)) for i in range(1, min(n, 4))),
    "ranges": lambda n: [range(n), range(n // 2)],
    "with-empty": lambda n: [[0], [], [0]],
    "only-iter": lambda n: material.OnlyIter([[0], [n - 1]]),
}
COLLATE = {
    "default": None,
    "identity": material.identity,
    "shapes": material.shapes,
    "picky": material.picky,
    "convert": data.default_convert,
}
INITS = {"none": None, "no-op": material.no_op, "draws": material.add_one_more}
OWN = ("size", "positional", "epochs", "asks_length", "stop_after")
"""Fields of a configuration that are no arguments."""
MOST_POSITIONAL = 13
BLUNDERS: tuple[dict[str, Any], ...] = (
    {"num_workers": -1},
    {"timeout": -1},
    {"timeout": 90},
    {"prefetch_factor": 3},
    {"prefetch_factor": -1},
    {"persistent_workers": True},
    {"batch_size": 0},
    {"batch_size": -2},
    {"batch_size": True},
    {"batch_size": 2.5},
    {"batch_size": "3"},
    {"drop_last": True, "batch_size": None},
    {"drop_last": 1},
    {"shuffle": True, "sampler": "list"},
    {"shuffle": "yes"},
    {"batch_size": 2, "batch_sampler": "lists"},
    {"sampler": "list", "batch_sampler": "lists"},
    {"shuffle": True, "batch_sampler": "lists"},
    {"drop_last": True, "batch_sampler": "lists"},
    {"multiprocessing_context": "fork"},
    {"multiprocessing_context": "sideways"},
    {"multiprocessing_context": 7},
    {"generator": 3, "shuffle": True},
    {"sampler": "grumpy"},
    {"sampler": "out-of-range"},
)


@dataclass(frozen=True)
class Configuration:
    """One point of the product; what are arguments are in torch's order."""

    dataset: str
    size: int
    batch_size: Any = 1
    shuffle: Any = None
    sampler: str | None = None
    batch_sampler: str | None = None
    num_workers: int = 0
    collate_fn: str = "default"
    pin_memory: bool = False
    drop_last: Any = False
    timeout: float = 0
    worker_init_fn: str = "none"
    multiprocessing_context: Any = None
    generator: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True
    positional: int = 1
    """So many arguments are passed by position."""
    epochs: int = 1
    asks_length: bool = True
    stop_after: int | None = None
    """Leave the first epoch after so many batches."""

    def arguments(self) -> tuple[list[Any], dict[str, Any], torch.Generator | None]:
        """Fresh arguments of the constructor, and the generator among them."""
        n = self.size
        generator = self.generator
        if type(generator) is str:
            generator = torch.Generator().manual_seed(5)
        values = {name: value for name, value in vars(self).items() if name not in OWN}
        values |= {
            "dataset": {**DATASETS, **STREAMS}[self.dataset](n),
            "sampler": self.sampler and SAMPLERS[self.sampler](n),
            "batch_sampler": self.batch_sampler and BATCH_SAMPLERS[self.batch_sampler](n),
            "collate_fn": COLLATE[self.collate_fn],
            "worker_init_fn": INITS[self.worker_init_fn],
            "generator": generator,
        }
        positional = [values.pop(name) for name in [*values][: self.positional]]
        return positional, values, generator if isinstance(generator, torch.Generator) else None


def observed(kind: type, configuration: Configuration, **own: Any) -> dict[str, Any]:
    """What one class makes of a configuration; ``own`` are arguments that only minato has."""
    seed_everything()
    record: dict[str, Any] = {}
    positional, named, generator = configuration.arguments()
    with warnings.catch_warnings(record=True) as caught:
        record_warnings()
        try:
            loader = kind(*positional, **named, **own)
        except Exception as error:
            record["construction"] = failure(error)
        else:
            if configuration.asks_length:
                record["length"] = attempt(lambda: len(loader))
            record["attributes"] = seen_attributes(loader)
            record["passes"], record["generators"] = [], [generator_states(generator)]
            for number in range(configuration.epochs):
                stop_after = configuration.stop_after if number == 0 else None
                seen, states = one_pass(loader, stop_after, generator)
                record["passes"].append(seen)
                record["generators"] += states
            del loader
        record["warnings"] = recorded_warnings(caught)
    return record


def one_pass(
    loader: Any, stop_after: int | None, generator: torch.Generator | None
) -> tuple[list[Any], list[Any]]:
    """What one pass over a loader gives, and the states of the generators when it begins and ends."""
    if isinstance(loader.sampler, data.DistributedSampler):
        loader.sampler.set_epoch(loader.sampler.epoch + 1)
    try:
        iterator = iter(loader)
    except Exception as error:
        return [failure(error)], [generator_states(generator)]
    begin = generator_states(generator)
    seen = [attempt(lambda: len(iterator))]
    if stop_after is None:
        seen += drain(iterator)
    else:
        seen += [attempt(lambda: next(iterator)) for _ in range(stop_after)]
    return seen, [begin, generator_states(generator)]


# ---- comparing ------------------------------------------------------------------------------


def compare_in_line(configuration: Configuration) -> None:
    """Without workers everything is the same, what is drawn at random included."""
    compare(configuration, **({} if configuration.dataset in STREAMS else {"compat": "torch"}))


def compare_in_processes(configuration: Configuration) -> None:
    """With processes everything is the same, too, but what depends on who ran a sample."""
    if configuration.dataset == "drawing":
        configuration = replace(configuration, dataset="mixed")
    compare(configuration)


def compare_round_robin(configuration: Configuration) -> None:
    """With torch's own assignment nothing at all differs."""
    compare(configuration, compat="torch")


def compare_in_threads(configuration: Configuration) -> None:
    """torch has no threads: the loader gives what torch's processes give, unless it draws in them."""
    assume(configuration.dataset not in ("drawing", *STREAMS))
    assume(configuration.worker_init_fn != "draws")
    compare(configuration, workers="thread")


def compare(configuration: Configuration, **own: Any) -> None:
    expected = observed(TorchLoader, configuration)
    found = observed(minato.DataLoader, configuration, **own)
    assert found == expected, where_they_part(found, expected)


# ---- strategies -----------------------------------------------------------------------------


@st.composite
def configurations(
    draw: Any, num_workers: tuple[int, ...], sizes: tuple[int, ...]
) -> Configuration:
    """Mostly possible configurations, and some blunders; with these numbers of workers and sizes of the dataset."""
    workers = draw(st.sampled_from(num_workers))
    drawn: dict[str, Any] = {
        "dataset": draw(st.sampled_from(sorted(DATASETS))),
        "size": draw(st.sampled_from(sizes)),
        "num_workers": workers,
        "collate_fn": draw(st.sampled_from(("default", "default", *COLLATE))),
        "generator": draw(st.sampled_from((None, None, "seeded"))),
        "worker_init_fn": draw(st.sampled_from(sorted(INITS))),
        "positional": draw(st.integers(1, MOST_POSITIONAL)),
        "epochs": draw(st.sampled_from((1, 1, 2))),
        "asks_length": draw(st.booleans()),
        "stop_after": draw(st.sampled_from((None, None, None, 0, 1, 2))),
    }
    kinds = ("plain", "plain", "sampler", "batches", "none", "stream")
    match draw(st.sampled_from(kinds)):
        case "stream":
            drawn["dataset"] = draw(st.sampled_from(sorted(STREAMS)))
            drawn["batch_size"] = draw(st.sampled_from((None, 1, 2, 3, 20)))
            drawn["shuffle"] = draw(st.sampled_from((None, None, False, True)))
            drawn["drop_last"] = drawn["batch_size"] is not None and draw(st.booleans())
        case "plain":
            drawn["batch_size"] = draw(st.sampled_from((1, 2, 3, 4, 20)))
            drawn["shuffle"] = draw(st.sampled_from((None, False, True)))
            drawn["drop_last"] = draw(st.booleans())
        case "sampler":
            drawn["batch_size"] = draw(st.sampled_from((1, 2, 3, 5)))
            drawn["sampler"] = draw(st.sampled_from(sorted(SAMPLERS)))
            drawn["drop_last"] = draw(st.booleans())
        case "batches":
            drawn["batch_sampler"] = draw(st.sampled_from(sorted(BATCH_SAMPLERS)))
        case "none":
            drawn["batch_size"] = None
            drawn["sampler"] = draw(st.sampled_from((None, *sorted(SAMPLERS))))
            if drawn["sampler"] is None:
                drawn["shuffle"] = draw(st.booleans())
    if workers:
        drawn["prefetch_factor"] = draw(st.sampled_from((None, 1, 2, 3)))
        drawn["persistent_workers"] = draw(st.booleans())
        drawn["timeout"] = draw(st.sampled_from((0, 90)))
    if draw(st.integers(0, 9)) == 0:
        drawn["pin_memory"] = True
        drawn["pin_memory_device"] = draw(st.sampled_from(("", "cuda")))
    configuration = Configuration(**drawn)
    if draw(st.integers(0, 7)) == 0:
        configuration = replace(configuration, **draw(st.sampled_from(BLUNDERS)))
    if workers == 1 and draw(st.integers(0, 5)) == 0:
        configuration = replace(configuration, in_order=False)
    return configuration
