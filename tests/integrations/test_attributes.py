"""minato's own arguments as attributes, and the number of an epoch: what trainers build on."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

import minato
from minato._support.loader_class import TorchDataLoader
from minato.caching import MemoryCache
from tests.datasets import InOrder, Numbers

OWN = {
    name: parameter.default
    for name, parameter in inspect.signature(minato.DataLoader.__init__).parameters.items()
    if name not in inspect.signature(TorchDataLoader.__init__).parameters
}
GIVEN: dict[str, Any] = {
    "transforms": [float],
    "order": minato.Arrival(3),
    "seed": 5,
    "memory_budget": 1 << 20,
    "workers": "thread",
    "errors": minato.ErrorPolicy(on_worker_death="raise"),
}
DEVICE = {"device": minato.DeviceCopies(torch.device("meta"), 3)}
SHARED = {"workers": minato.SharedPool("continue")}
READS = {"fetch_concurrency": 3, "cache": MemoryCache(1000), "workers": "thread"}


def of(loader: Any) -> dict[str, Any]:
    return {name: vars(loader)[name] for name in OWN}


@pytest.mark.parametrize(
    "given", [{}, GIVEN, READS, {"in_order": False}, {"compat": "torch"}, DEVICE, SHARED]
)
def test_a_loader_can_be_built_from_the_attributes_of_another(given: dict[str, Any]) -> None:
    loader = minato.DataLoader(Numbers(8), 4, num_workers=2, **given)
    assert {name: getattr(loader, name) for name in given} == given
    names = [*OWN, "dataset", "batch_size", "num_workers", "in_order", "prefetch_factor", "timeout"]
    again = minato.DataLoader(**{name: getattr(loader, name) for name in names})
    assert of(again) == of(loader)
    assert again._minato_options == loader._minato_options
    assert type(again.prefetch_factor) is type(loader.prefetch_factor) is not int


@pytest.mark.parametrize("name", OWN)
def test_they_are_frozen_as_torchs_are(name: str) -> None:
    class Loader(minato.DataLoader):
        pass

    loader, told = Loader(Numbers(8)), []
    for each, value in (("batch_size", 3), (name, getattr(loader, name))):
        with pytest.raises(ValueError, match="should not be set") as raised:
            setattr(loader, each, value)
        told.append(str(raised.value))
    assert told[1] == told[0].replace("batch_size", name)


def test_what_a_subclass_has_under_their_names_is_no_argument() -> None:
    class Loader(minato.DataLoader):
        def __init__(self, **given: Any) -> None:
            self.name = "early"
            assert self.name == "early"
            self.seed = "mine"
            super().__init__(Numbers(6), 2, **given)
            self.order = "mine"

        def cache(self) -> None:
            pass

    loader: Any = Loader(seed=3, shuffle=True, order="batch", errors="skip")
    twin: Any = minato.DataLoader(Numbers(6), 2, True, seed=3, order="batch", errors="skip")
    assert (loader.seed, loader.order, loader.errors) == ("mine", "mine", "skip")
    assert repr(loader).replace("Loader", "DataLoader", 1) == repr(twin)
    assert [each.tolist() for each in loader] == [each.tolist() for each in twin]
    again = minato.DataLoader.from_torch(loader)
    assert of(again) == of(twin)
    loader.in_order = False
    assert (loader.order, loader._minato_options.order) == ("mine", "batch")
    with pytest.raises(ValueError, match="errors attribute should not be set"):
        loader.errors = "raise"


def test_private_names_are_left_to_subclasses() -> None:
    ours = {**vars(minato.DataLoader), **vars(minato.DataLoader(Numbers(6)))}
    torchs = {*dir(TorchDataLoader(Numbers(6))), "_abc_impl"}
    private = {name for name in ours if name.startswith("_") and not name.endswith("__")} - torchs
    assert [name for name in private if not name.startswith("_minato_")] == []

    class Loader(minato.DataLoader):
        def __init__(self, transforms: list[str]) -> None:
            super().__init__(Numbers(6), 2, transforms=[float])
            self._transforms, self._options, self._history = transforms, {}, [0]

    (first, *_) = loader = Loader(["theirs"])
    assert (first.dtype, loader._transforms) == (torch.float64, ["theirs"])


def test_a_loader_can_be_renamed_by_programs_that_name_loaders() -> None:
    loader = minato.DataLoader(Numbers(8), observe=minato.Observe(name="training"))
    loader.name = "validation"
    assert loader._minato_options.name == loader.name == "validation"
    assert minato.DataLoader(Numbers(8))._minato_options.name == "Numbers"


def test_a_number_of_workers_that_changes_is_taken_over() -> None:
    scale = minato.AutoScale(start=2, max=3)
    loader = minato.DataLoader(Numbers(8), 4, num_workers=scale)
    again = minato.DataLoader(loader.dataset, num_workers=loader.num_workers)
    again = pickle.loads(pickle.dumps(again))
    assert again.num_workers == 2
    assert again._minato_options.autoscale == loader._minato_options.autoscale


def test_prefetch_factor_reads_as_torchs() -> None:
    for kind in (TorchDataLoader, minato.DataLoader):
        assert str(kind(Numbers(8), num_workers=2).prefetch_factor) == "2"
        assert kind(Numbers(8)).prefetch_factor is None


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_copies_keep_everything(twin: Any) -> None:
    loader = minato.DataLoader(Numbers(8), 4, num_workers=2, **GIVEN)
    assert of(twin(loader)) == of(loader)
    assert type(twin(loader).prefetch_factor) is type(loader.prefetch_factor)


def drawn(loader: Any) -> list[float]:
    """What one epoch's samples draw; depends on the epoch."""
    return [value for batch in loader for value in batch.tolist()]


def unshuffled() -> DistributedSampler[Any]:
    return DistributedSampler(Numbers(6), 1, 0, shuffle=False)


def draw(index: int) -> torch.Tensor:
    return torch.rand(())


@pytest.fixture
def epochs() -> list[list[float]]:
    loader = minato.DataLoader(Numbers(6), 2, seed=5, transforms=[draw])
    return [drawn(loader) for _ in range(5)]


@pytest.mark.parametrize("batched", [False, True])
def test_epochs_follow_the_sampler(epochs: list[list[float]], batched: bool) -> None:
    sampler = unshuffled()
    given: dict[str, Any] = {"batch_size": 2, "sampler": sampler}
    if batched:
        given = {"batch_sampler": BatchSampler(sampler, 2, False)}
    loader = minato.DataLoader(Numbers(6), seed=5, transforms=[draw], **given)
    for said, expected in ((2, 2), (1, 1), (None, 2), (0, 0)):
        if said is not None:
            sampler.set_epoch(said)
        assert drawn(loader) == epochs[expected]


def test_set_epoch_tells_the_sampler() -> None:
    sampler = DistributedSampler(Numbers(6), 1, 0, seed=5)
    loader = minato.DataLoader(Numbers(6), batch_sampler=BatchSampler(sampler, 6, False))
    for epoch in (4, 1):
        loader.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert drawn(loader) == list(sampler)


def test_seeded_shuffling_follows_its_sampler_too() -> None:
    loader = minato.DataLoader(Numbers(6), 6, seed=5, shuffle=True)
    assert isinstance(loader.sampler, RandomSampler)  # it is recognised as shuffling
    orders = [drawn(loader) for _ in range(3)]
    assert len(set(map(tuple, orders))) == 3
    loader.sampler.set_epoch(1)  # as Lightning does
    assert drawn(loader) == orders[1]
    assert drawn(loader) == orders[2]


def test_persistent_workers_are_told_in_time(epochs: list[list[float]]) -> None:
    sampler = unshuffled()
    how: Any = {"num_workers": 1, "persistent_workers": "next_epoch", "transforms": [draw]}
    loader = minato.DataLoader(Numbers(6), 2, sampler=sampler, seed=5, **how)
    for epoch in (0, 1, 3, 4, 0):
        sampler.set_epoch(epoch)
        assert drawn(loader) == epochs[epoch]


def test_a_sampler_that_answers_to_every_name() -> None:
    class Agreeable(InOrder):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *arguments: self

    loader = minato.DataLoader(Numbers(4), 4, sampler=Agreeable(4))
    loader.set_epoch(1)
    assert drawn(loader) == [0, 1, 2, 3]
