"""Randomness: what the main process draws, and what the workers' generators begin with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import minato
from tests.datasets import Numbers, three_draws
from tests.parity.harness import WORKERS, generator_states, same_for_both, seed_everything
from tests.parity.material import Drawing, DrawingStream, Stream, identity
from tests.selection import mostly_slow

# ---- the main process -----------------------------------------------------------------------

SAMPLING: dict[str, Callable[[torch.Generator | None], dict[str, Any]]] = {
    "sequential": lambda g: {},
    "shuffled": lambda g: {"shuffle": True, "generator": g},
    "random sampler": lambda g: {"sampler": data.RandomSampler(range(9))},
    "random sampler with a generator": lambda g: {
        "sampler": data.RandomSampler(range(9), generator=g)
    },
    "replacement": lambda g: {
        "sampler": data.RandomSampler(range(9), replacement=True, num_samples=40, generator=g)
    },
    "more than there are": lambda g: {"sampler": data.RandomSampler(range(9), num_samples=21)},
    "weighted": lambda g: {
        "sampler": data.WeightedRandomSampler([1, 2, 3], 9, generator=g),
        "generator": g,
    },
    "subset": lambda g: {"sampler": data.SubsetRandomSampler([5, 2, 4], generator=g)},
    "distributed": lambda g: {"sampler": data.DistributedSampler(range(9), 2, 0)},
    "a generator, nothing to draw": lambda g: {"generator": g},
}


WITH_WORKERS = ("shuffled", "replacement", "distributed")
"""The others draw as these do, in the main process, in each run of the tests without workers."""
NO_GENERATOR = ("sequential", "random sampler", "more than there are", "distributed")


@pytest.mark.parametrize(
    ("name", "given", "how"),
    [
        *(
            pytest.param(
                *(name, False, how),
                marks=pytest.mark.slow if how != "inline" and name not in WITH_WORKERS else (),
            )
            for name, how in itertools.product(SAMPLING, WORKERS)
        ),
        *(
            pytest.param(name, True, how, marks=pytest.mark.slow)
            for name, how in zip(SAMPLING, itertools.cycle(WORKERS), strict=False)
            if name not in NO_GENERATOR
        ),
    ],
)
def test_states_after_each_step(name: str, given: bool, how: str) -> None:
    """Samples leave the generators of the main process alone, so that they show what the loader itself draws."""
    workers, own = WORKERS[how]

    def case(make: Any) -> Any:
        generator = torch.Generator().manual_seed(11) if given else None
        seen: list[Any] = []

        def note(what: Any) -> None:
            seen.append((what, generator_states(generator)))

        # It draws as it goes, so that what it has drawn depends on how far ahead the loader works.
        fixed = {"prefetch_factor": 2} if name == "replacement" and workers["num_workers"] else {}
        loader = make(Numbers(9), 2, **SAMPLING[name](generator), **workers, **fixed)
        note("made")
        note(len(loader))
        for stop in (1, 0, None):  # epochs are left early, too
            iterator = iter(loader)
            note(iterator._base_seed)
            for batch in itertools.islice(iterator, stop):
                note(batch)
            note("over")
        note(next(iter(loader)))
        return seen

    same_for_both(case, **own)
    if workers["num_workers"] and not own:
        same_for_both(case, compat="torch")


@pytest.mark.parametrize("given", [False, True], ids=["global", "own"])
@pytest.mark.parametrize("dataset", [Numbers(7), Stream(7)], ids=["map", "stream"])
def test_base_seed_of_persistent_workers(dataset: Any, given: bool) -> None:
    """It is drawn when they start, and not again."""

    def case(make: Any) -> Any:
        generator = torch.Generator().manual_seed(11) if given else None
        shuffle = True if isinstance(dataset, Numbers) else None
        loader = make(
            dataset, 2, shuffle, num_workers=1, persistent_workers=True, generator=generator
        )
        seen = []
        for _ in range(3):
            iterator = iter(loader)
            seen.append([iterator._base_seed, *iterator, generator_states(generator)])
        return seen

    same_for_both(case)


def test_same_generator_for_sampler_and_loader_in_two_loaders() -> None:
    def case(make: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        loaders = [make(Numbers(6), 2, True, generator=generator) for _ in range(2)]
        return [[*zip(*loaders, strict=True)] for _ in range(2)]

    same_for_both(case)


# ---- the workers ----------------------------------------------------------------------------


def reseed(worker: int) -> None:
    """What programs do to seed other libraries, too."""
    seed = torch.initial_seed() % 2**32
    random.seed(seed + 1)
    np.random.seed(seed)


def reseed_by_worker_info(worker: int) -> None:
    """Another way that is often seen."""
    info = data.get_worker_info()
    assert info is not None
    torch.manual_seed(info.seed % 1000 + worker)


AUGMENTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "own generator": {"shuffle": True, "generator": 4},
    "worker_init_fn": {"worker_init_fn": reseed},
    "another": {"worker_init_fn": reseed_by_worker_info, "persistent_workers": True},
    "persistent": {"shuffle": True, "persistent_workers": True},
    "one ahead": {"prefetch_factor": 1, "drop_last": True},
    "collated": {"collate_fn": identity},
    "alone": {"batch_size": None},
}


@pytest.mark.parametrize("dataset", [Drawing(13), DrawingStream(5)], ids=["map", "stream"])
@mostly_slow("name", AUGMENTED, quick=5)
def test_augmentations_are_torchs_bit_for_bit(name: str, dataset: Any) -> None:
    options = {"batch_size": 2, **AUGMENTED[name]}
    stream = isinstance(dataset, DrawingStream)
    if stream:
        options.pop("shuffle", None)

    def case(make: Any) -> Any:
        arguments = dict(options)
        if "generator" in arguments:
            arguments["generator"] = torch.Generator().manual_seed(arguments["generator"])
        loader = make(dataset, num_workers=2, **arguments)
        return [[*loader] for _ in range(2)], three_draws()

    same_for_both(case, **({} if stream else {"compat": "torch"}))


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_augmentations_with_other_start_methods(context: str) -> None:
    def case(make: Any) -> Any:
        arguments = {"num_workers": 2, "multiprocessing_context": context}
        loader = make(Drawing(9), 2, True, persistent_workers=True, **arguments)
        return [[*loader] for _ in range(2)], three_draws()

    same_for_both(case, compat="torch")


def test_augmentations_in_line() -> None:
    """Without workers there is one stream, the main process's own, which the loop draws from, too."""

    def case(make: Any) -> Any:
        loader = make(Drawing(9), 2, True)
        return [(batch, three_draws()) for _ in range(2) for batch in loader]

    same_for_both(case, compat="torch")
    same_for_both(case, compat="torch")


def test_augmentations_by_sample_do_not_touch_torchs_shuffling() -> None:
    """The default binds what samples draw to their index; which indices there are is torch's all the same."""
    found = []
    for own in ({}, {"num_workers": 2}, {"num_workers": 2, "order": "batch"}):
        seed_everything()
        batches = [*minato.DataLoader(Drawing(9), 3, True, **own)]
        found.append(sorted((batch[0].tolist(), batch[1].tolist()) for batch in batches))
    seed_everything()
    theirs = [batch[0].tolist() for batch in torch.utils.data.DataLoader(Drawing(9), 3, True)]
    assert [indices for indices, _ in found[0]] == sorted(theirs)
    assert found[0] == found[1] == found[2]
