"""Generators that a dataset and its transforms own: a seeded run gives the same content with any workers."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import minato
from minato import DataLoader
from minato.ray import ActorSpec, SampleServer, unpack
from minato.sampling.epoch import Seeds
from minato.transforms.compose import Transforms
from tests.behaviour.states import begun, resumed
from tests.datasets import ORDERS, TOO_MANY_WORKERS, Numbers, forked
from tests.parity.material import identity

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

TorchLoader = torch.utils.data.DataLoader
SIZE = 40
MODULES_OWN = np.random.default_rng(1)


class Randomizable:
    """As MONAI's: a state of the class, that each object may replace by one of its own."""

    R = np.random.RandomState()

    def set_random_state(self, seed: int) -> None:
        self.R = np.random.RandomState(seed)


class Rotates(Randomizable):
    def __call__(self, sample: list[float]) -> list[float]:
        return [*sample, float(self.R.rand()), float(self.R.randn())]


class Composed(Rotates):
    """As albumentations': two generators that all parts share."""

    def __init__(self) -> None:
        self.random_generator = np.random.default_rng()
        self.py_random = random.Random()
        self.parts = [Part(self.random_generator, self.py_random) for _ in range(2)]

    def __call__(self, sample: list[float]) -> list[float]:
        for part in self.parts:
            sample = part(sample)
        return sample


class Part:
    def __init__(self, random_generator: Any, py_random: random.Random) -> None:
        self.random_generator, self.py_random = random_generator, py_random

    def __call__(self, sample: list[float]) -> list[float]:
        drawn = float(self.random_generator.normal()), self.py_random.gauss(0, 1)
        return [*sample, *drawn, self.py_random.random()]


class Noise(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, sample: list[float]) -> list[float]:
        return [*sample, float(torch.rand((), generator=self.generator))]


class Augmented(Numbers):
    """Generators of all kinds, one of them made at first use."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.rng = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.late: random.Random | None = None
        self.derived = Rotates()
        self.transforms = [Composed(), Noise()]

    def __getitem__(self, index: int) -> list[float]:
        if self.late is None:
            self.late = random.Random()
        self.derived.set_random_state(int(self.legacy.randint(1 << 30)))  # as MONAI's ArrayDataset
        sample = [float(index), self.rng.random(), self.late.random(), MODULES_OWN.random()]
        sample = self.derived(sample)
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def make(dataset: Any = None, **options: Any) -> Any:
    options = {"shuffle": True, "seed": 5, "collate_fn": identity, **options}
    dataset = Augmented() if dataset is None else dataset
    return DataLoader(dataset, 4, transforms=[Rotates()], **options)


def epoch(loader: Any) -> dict[float, tuple[float, ...]]:
    samples = [tuple(sample) for batch in loader for sample in batch]
    return {sample[0]: sample[1:] for sample in samples}


@functools.cache
def expected() -> list[dict[float, tuple[float, ...]]]:
    loader = make()
    return [epoch(loader) for _ in range(2)]


class Drawing(Numbers):
    """Draws, once it has a generator."""

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        super().__init__(SIZE)
        self.generator = generator

    def __getitem__(self, index: int) -> float:  # type: ignore[override]
        return 0.0 if self.generator is None else self.generator.random()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_that_a_dataset_gets_between_epochs_is_bound(num_workers: int) -> None:
    found = []
    for generator in (None, np.random.default_rng(1)):
        dataset = Drawing(generator)
        loader = DataLoader(dataset, 4, seed=3, num_workers=num_workers)
        list(loader)
        dataset.generator = np.random.default_rng(2)
        for _ in range(2):
            loader.set_epoch(5)
            found.append(torch.cat(list(loader)).tolist())
    assert found[1:] == found[:1] * 3
    assert len(set(found[0])) == SIZE


def test_each_generator_draws_anew_for_each_sample() -> None:
    first, second = expected()
    assert len(first) == SIZE
    for drawn in zip(*first.values(), strict=True):
        assert len(set(drawn)) == SIZE
    for numbers in zip(*([*each.values()] for each in (first, second)), strict=True):
        assert set(numbers[0]).isdisjoint(numbers[1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"num_workers": 2, "order": order} for order in ORDERS),
        {"num_workers": 5, "persistent_workers": True},
        pytest.param(
            {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_same_with_any_workers(options: dict[str, Any]) -> None:
    loader = make(**options)
    assert [epoch(loader), epoch(loader)] == expected()
    assert tuple(loader.reproduce(7)[1:]) == expected()[1][7]
    assert tuple(loader.reproduce(7, epoch=0)[1:]) == expected()[0][7]


def test_in_torchs_place() -> None:
    def found() -> dict[float, tuple[float, ...]]:
        torch.manual_seed(2)
        # Forked: torch's own loader pickles no generator of torch's.
        loader = torch.utils.data.DataLoader(Augmented(), 4, collate_fn=identity, **forked(2))
        return epoch(loader)

    with minato.patch():
        first = found()
        assert found() == first
    # torch's workers begin with the same states, so that what they draw is alike.
    assert len({drawn[0] for drawn in found().values()}) < SIZE
    assert len({drawn[0] for drawn in first.values()}) == SIZE


def test_the_middle_of_an_epoch_goes_on() -> None:
    loader = make(num_workers=2)
    epoch(loader)
    got, state = begun(loader, 3)
    assert {**epoch(got), **epoch(resumed(state, make()))} == expected()[1]


def served() -> list[Any]:
    """What an actor makes of samples, the first of which makes a generator."""
    server = SampleServer(0, ActorSpec(Augmented(), Transforms((Rotates(),)), 2, 1, None))
    answers = [server.sample(index, 0, Seeds(5).of(0), index == 3) for index in (7, 3)]
    return [unpack(answer.pickled, answer.arrays) for answer in answers]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is missing")
def test_in_an_actor() -> None:
    with torch.multiprocessing.get_context("fork").Pool(1) as pool:
        sample, again = pool.apply(served)
    assert tuple(sample[1:]) == expected()[0][7]
    assert again == make().reproduce(3, epoch=0, occurrence=1)


def test_an_index_that_comes_again() -> None:
    def found(num_workers: int) -> list[tuple[float, ...]]:
        loader = make(shuffle=None, sampler=[3, 3, 1, 3], num_workers=num_workers)
        return [tuple(sample) for batch in loader for sample in batch]

    assert found(0) == found(2)
    assert len({sample[1] for sample in found(0)}) == 4
    for occurrence, position in enumerate((0, 1, 3)):
        sample = make().reproduce(3, epoch=0, occurrence=occurrence)
        assert tuple(sample) == found(0)[position]


class Deadly(Augmented):
    """Ends its worker once, after it has drawn."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.flag = folder / "died"

    def __getitem__(self, index: int) -> list[float]:
        sample = super().__getitem__(index)
        if index == 13 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_a_worker_that_is_replaced(tmp_path: Path) -> None:
    assert epoch(make(Deadly(tmp_path), num_workers=2)) == expected()[0]


class Seldom(Numbers):
    def __init__(self) -> None:
        super().__init__(3000)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), self.rng.random() if index == 2900 else 0.0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cheap_samples_that_seem_not_to_draw(num_workers: int) -> None:
    loader = DataLoader(Seldom(), 50, num_workers=num_workers, seed=1, collate_fn=identity)
    drawn = epoch(loader)[2900]
    assert drawn[0] == loader.reproduce(2900)[1] != 0.0


def test_in_the_training_process_they_are_left_as_they_were() -> None:
    dataset = Augmented()
    loader = make(dataset)
    reference = np.random.default_rng(0)
    generator = dataset.transforms[1].generator
    before = generator.get_state()
    for _ in loader:
        assert dataset.rng.random() == reference.random()
        assert torch.equal(generator.get_state(), before)


class Draws(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> list[float]:
        info = get_worker_info()
        return [float(index), self.rng.random(), -1 if info is None else info.id]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_torchs_streams_they_are_torchs(num_workers: int) -> None:
    def found(make: Any, **options: Any) -> list[Any]:
        loader = make(Draws(12), 2, num_workers=num_workers, collate_fn=identity, **options)
        return [batch for _ in range(2) for batch in loader]

    torchs = found(TorchLoader)
    assert found(DataLoader, compat="torch") == torchs
    if num_workers == 0:
        assert found(DataLoader, compat="torch") == torchs
    assert found(DataLoader, seed=1) != torchs


# ---- what cannot be bound


def warned(loader: Any) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        list(loader), list(loader)
    return [str(each.message) for each in caught if "random generators" in str(each.message)]


class CoreRandom:
    """As one of a library in C++."""

    __slots__ = ()


class Foreign(Numbers):
    def __init__(self) -> None:
        super().__init__(4)
        self.engine = CoreRandom()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_cannot_be_bound_is_named_once(num_workers: int) -> None:
    (words,) = warned(DataLoader(Foreign(), num_workers=num_workers))
    assert f"dataset.engine ({__name__}.CoreRandom)" in words
    assert "minato.numpy_rng()" in words
    assert warned(DataLoader(Foreign(), num_workers=num_workers, compat="torch")) == []
    assert warned(DataLoader(Augmented(4), 2, num_workers=num_workers)) == []


def test_generators_that_threads_share_are_named() -> None:
    threads = {"num_workers": 2, "workers": "thread"}
    (words,) = warned(DataLoader(Draws(4), **threads))
    assert "worker threads share them: dataset.rng (numpy" in words
    (words,) = warned(
        DataLoader(Draws(4), num_workers=1, fetch_concurrency=2, transforms=[Noise()])
    )
    assert "reads of several samples share them: dataset.rng (numpy" in words
    assert "Noise" not in words
    assert warned(DataLoader(Numbers(4), **threads)) == []
