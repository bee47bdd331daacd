"""Randomness by (seed, epoch, index): the same content for any number and kind of workers, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import minato
from minato import DataLoader
from minato.sampling.epoch import Seeds
from tests.datasets import (
    ORDERS,
    TOO_MANY_WORKERS,
    Draws,
    Helped,
    Numbers,
    add_draws,
    helped_draws,
    three_draws,
)
from tests.parity.harness import seed_everything
from tests.parity.material import identity
from tests.selection import each_of, mostly_slow, workers_of

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

TorchLoader = torch.utils.data.DataLoader

PROCESSES = workers_of("inline", "1-process", "2-processes", "7-processes")
THREADS = workers_of("1-thread", "7-threads")
FEW = workers_of("inline", "2-processes")


def contents(loader: Any, epochs: int = 2) -> list[dict[int, tuple[float, ...]]]:
    """Of each epoch, what was delivered for each index; ``sample[0]`` is the index, and batches lists of samples."""
    found = []
    for _ in range(epochs):
        samples = [tuple(sample) for batch in loader for sample in batch]
        by_index = {int(sample[0]): sample for sample in samples}
        assert len(by_index) == len(samples) > 0
        found.append(by_index)
    return found


def loader(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, 3, **{"seed": 4, "collate_fn": identity, **options})


@pytest.mark.parametrize(
    ("order", "workers"),
    [*(("strict", one) for one in PROCESSES), *((one, "2-processes") for one in ORDERS[1:])],
)
def test_content_is_a_function_of_seed_epoch_and_index(order: str, workers: str) -> None:
    options = {"transforms": [add_draws, add_draws], "shuffle": True}
    expected = contents(loader(Draws(22), **options))
    assert contents(loader(Draws(22), order=order, **options, **PROCESSES[workers])) == expected


def test_every_sample_epoch_and_seed_has_its_own_draws() -> None:
    options = {"transforms": [add_draws], "shuffle": True}
    epochs = contents(loader(Draws(22), **options), 3) + contents(loader(Draws(22), seed=5), 1)
    drawn = [value for epoch in epochs for sample in epoch.values() for value in sample[1:]]
    assert len(drawn) == 22 * (3 * 8 + 4)
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= value < 1 for epoch in epochs for s in epoch.values() for value in s[1:4])


@each_of({**FEW, **THREADS})
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_minatos_generators_in_processes_and_threads(order: str, workers: dict[str, Any]) -> None:
    options = {"transforms": [helped_draws]}
    found = contents(loader(Helped(22), order=order, **options, **workers))
    assert found == contents(loader(Helped(22), **options))
    drawn = [value for epoch in found for sample in epoch.values() for value in sample[1:]]
    assert len(set(drawn)) == len(drawn) == 2 * 22 * 6


RARE = {
    "random": lambda: random.random(),
    "numpy": lambda: float(np.random.random()),
    "numpy-normal": lambda: float(np.random.standard_normal()),
    "torch": lambda: float(torch.rand(())),
    "torch-normal": lambda: float(torch.randn(())),
    "random-gauss": lambda: random.gauss(0, 1),
    "helper": lambda: float(minato.numpy_rng().random()),
    "many": lambda: float(np.random.random(5000)[-1]) + random.random(),
}


class Rarely(Numbers):
    """Draws in few of many cheap samples, the first time after many that do not draw."""

    def __init__(self, size: int, draw: Callable[[], float]) -> None:
        super().__init__(size)
        self.draw = draw

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), *(self.draw() for _ in range(2) if index % 97 == 96)]


@mostly_slow(
    ("name", "num_workers"),
    [*((name, 0) for name in RARE), ("numpy", 1), ("torch", 2), ("helper", 7)],
    ((name, 2) for name in RARE),
)
def test_samples_that_rarely_draw(name: str, num_workers: int) -> None:
    draw = RARE[name]
    options = {"collate_fn": identity, "seed": 4, "shuffle": True, "num_workers": num_workers}
    for epoch, samples in enumerate(contents(DataLoader(Rarely(1000, draw), 50, **options))):
        drawn = {index: sample[1:] for index, sample in samples.items() if len(sample) > 1}
        assert drawn == {i: bound_draws(4, epoch, i, draw) for i in range(96, 1000, 97)}


def bound_draws(seed: int, epoch: int, index: int, draw: Callable[[], float]) -> tuple[float, ...]:
    """Two draws as they must come out for a sample, whoever runs it."""
    randomness = minato.transforms.rng.SampleRandomness(Seeds(seed).of(epoch))
    with randomness.saved():
        randomness.bind(epoch, index)
        return draw(), draw()


class Later(Numbers):
    begun = False

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), *(draw() for draw in (random.random,) * 2 if self.begun)]


def test_in_line_what_the_last_epoch_has_taught_is_not_relied_on() -> None:
    dataset = Later(200)
    loader = DataLoader(dataset, 50, collate_fn=identity, seed=4)
    for epoch in range(3):
        dataset.begun = epoch == 2
        (samples,) = contents(loader, 1)
        for index, sample in samples.items():
            drawn = bound_draws(4, epoch, index, random.random) if dataset.begun else ()
            assert sample == (index, *drawn)


class Reseeds(Numbers):
    """Seeds the global generators itself, in some samples, as some augmentations do."""

    def __getitem__(self, index: int) -> list[float]:
        if index % 3 == 0:
            random.seed(index)
            np.random.seed(index)
            torch.manual_seed(index)
        return [float(index), *three_draws()]


@each_of(FEW)
def test_samples_that_seed_leave_no_trace_in_others(workers: dict[str, Any]) -> None:
    expected = first, second = contents(loader(Reseeds(22), shuffle=True))
    assert contents(loader(Reseeds(22), shuffle=True, **workers)) == list(expected)
    for index in range(22):
        assert (first[index] == second[index]) is (index % 3 == 0)


@each_of({**FEW, "7-threads": THREADS["7-threads"]})
def test_without_a_seed_torchs_generator_decides(workers: dict[str, Any]) -> None:
    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return contents(loader(Helped(12), seed=None, shuffle=True, **workers))

    first, second = run(1)
    assert run(1) == [first, second]
    assert run(2) != [first, second]
    assert all(first[index] != second[index] for index in range(12))


def test_persistent_workers_differ_from_epoch_to_epoch() -> None:
    stays = {"num_workers": 2, "persistent_workers": True}
    for seed in (None, 8):
        found = contents(loader(Draws(12), seed=seed, transforms=[add_draws], **stays), 3)
        assert all(len({epoch[i] for epoch in found}) == 3 for i in range(12))
    again = loader(Draws(12), seed=8, transforms=[add_draws])
    assert contents(again, 3) == found


def test_seeds_of_any_size() -> None:
    seeds = [0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 2**64 + 1]
    found = [contents(loader(Draws(4), seed=seed, shuffle=True), 1) for seed in seeds]
    for number in (2, 6, 8):
        there = loader(Draws(4), seed=seeds[number], shuffle=True, num_workers=1)
        assert contents(there, 1) == found[number]
    values = {tuple(sorted(epochs[0].items())) for epochs in found}
    # Seeds count modulo 2**64.
    assert len(values) == len({seed % 2**64 for seed in seeds})


def test_values_are_the_same_in_every_version() -> None:
    # Else a run could not be repeated after an update.
    (epoch,) = contents(loader(Draws(3), seed=1), 1)
    assert epoch == GOLDEN


GOLDEN = {
    0: (0, 0.3835472054437552, 0.5480806256851922, 0.2578836679458618, -0.016692188484927113),
    1: (1, 0.7479293625084644, 0.03832705819791937, 0.7577298879623413, 0.34496740453094443),
    2: (2, 0.8209653342809059, 0.4614580882373315, 0.9674732685089111, -1.0582033120324636),
}


# ---- the main process -----------------------------------------------------------------------


def states() -> tuple[Any, ...]:
    kind, words, *rest = np.random.get_state()
    return random.getstate(), kind, words.tolist(), rest, torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("workers", "compat"),
    [
        (PROCESSES["inline"], None),
        (PROCESSES["2-processes"], None),
        (PROCESSES["2-processes"], "torch"),
        (THREADS["1-thread"], None),
    ],
    ids=["inline", "processes", "processes-as-torch", "threads"],
)
def test_generators_of_the_main_process_are_left_alone(compat: Any, workers: Any) -> None:
    random.gauss(0, 1)  # leaves a second value behind, as the next line does
    np.random.standard_normal()
    torch.randn(1)
    dataset: Any = Helped(30) if "workers" in workers else Draws(30)
    iterator = iter(loader(dataset, compat=compat, transforms=[helped_draws], **workers))
    before = states()
    for _ in iterator:
        assert states() == before
    assert minato.transforms.rng.current() is None


def test_consumer_draws_between_inline_samples() -> None:
    def consumed(epoch: Any) -> Any:
        seed_everything(0)
        return [three_draws() for _ in epoch]

    assert consumed(loader(Draws(12))) == consumed(TorchLoader(Numbers(12), 3))
