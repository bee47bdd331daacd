"""``torch.manual_seed`` before an epoch repeats that epoch, in the same process or in another one, as with torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import minato
from tests.behaviour import states
from tests.behaviour.states import begun, resumed
from tests.datasets import TOO_MANY_WORKERS, Draws
from tests.parity.harness import TorchLoader, seed_everything

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

SIZE = 8
both = pytest.mark.parametrize("make", [TorchLoader, minato.DataLoader], ids=["torch", "minato"])
each = pytest.mark.parametrize("num_workers", [0, 2])


def plain(batches: Any) -> list[Any]:
    return [[*map(list, zip(*batch, strict=True))] for batch in states.plain(batches)]


def epoch(loader: Any, seed: int) -> list[Any]:
    seed_everything(seed)  # torch needs more than its own generator in line
    return plain(loader)


def loader_of(make: Any, num_workers: int, **options: Any) -> Any:
    return make(Draws(SIZE), 4, num_workers=num_workers, **{"shuffle": True, **options})


@both
@each
def test_a_seeded_epoch_comes_again(make: Any, num_workers: int) -> None:
    loader = loader_of(make, num_workers)
    first = epoch(loader, 3)
    assert plain(loader) != first
    assert epoch(loader, 4) != first
    assert epoch(loader, 3) == first
    assert epoch(loader_of(make, num_workers), 3) == first
    with minato.patch():
        patched = loader_of(torch.utils.data.DataLoader, num_workers)
    again = epoch(patched, 3)
    assert plain(patched) != again
    assert epoch(patched, 3) == again
    assert (again == first) == (make is minato.DataLoader)


@both
@each
@pytest.mark.parametrize("told", [False, True])
def test_a_run_that_seeds_each_epoch_goes_on_in_another_process(
    make: Any, num_workers: int, told: bool
) -> None:
    """By a loader that knows no epoch, also with a sampler that is told it."""

    def epochs(numbers: range) -> list[Any]:
        sampler = DistributedSampler(Draws(SIZE), 1, 0)
        loader = loader_of(
            make, num_workers, **({"shuffle": None, "sampler": sampler} if told else {})
        )
        found = []
        for number in numbers:
            sampler.set_epoch(number)
            found.append(epoch(loader, 100 + number))
        return found

    assert epochs(range(2, 4)) == epochs(range(4))[2:]


@each
def test_the_middle_of_an_epoch_goes_on_as_it_would_have(num_workers: int) -> None:
    run, first = (loader_of(minato.DataLoader, num_workers) for _ in range(2))
    epochs = [epoch(run, 100 + number) for number in range(4)]
    plain(first), plain(first)
    torch.manual_seed(102)
    got, state = begun(first, 1)
    later = resumed(state, loader_of(minato.DataLoader, 2 - num_workers))
    assert plain(got) + plain(later) == epochs[2]
    assert epoch(later, 103) == epochs[3]


def test_the_epochs_of_persistent_workers() -> None:
    def persistent() -> Any:
        return loader_of(minato.DataLoader, 2, shuffle=None, persistent_workers=True)

    run = persistent()
    epochs = [epoch(run, 5), plain(run), plain(run)]
    assert len({json.dumps(each) for each in epochs}) == 3
    for number, found in enumerate(epochs):  # each one again, by its number
        assert run.reproduce(0, epoch=number) == found[0][0]
    first = persistent()
    torch.manual_seed(5)
    plain(first)
    got, state = begun(first, 1)
    later = resumed(state, persistent())
    assert [plain(got) + plain(later), plain(later)] == epochs[1:]
    # The same after the workers were ended in between, which makes the next iterator begin anew.
    loader = persistent()
    for _ in range(2):
        found = [epoch(loader, 5), plain(loader)]
        assert found == epochs[:2]
        assert loader.reproduce(0, epoch=loader._minato_position.epoch - 1) == found[0][0][0]
        loader._iterator = None


def test_a_failures_seed_is_that_of_its_own_epoch() -> None:
    failures: list[minato.SampleFailure] = []

    class Torn(Draws):
        def __getitem__(self, index: int) -> list[float]:
            raise ValueError(super().__getitem__(index))

    def note(failure: minato.SampleFailure) -> Any:
        failures.append(failure)
        return minato.SKIP

    loader = minato.DataLoader(Torn(2), 2, errors=note)
    with pytest.warns(RuntimeWarning, match="2 samples of this epoch were skipped"):
        plain(loader), plain(loader)
    assert [failure.epoch for failure in failures] == [0, 0, 1, 1]
    for failure in failures:
        with pytest.raises(ValueError, match=r"^\[") as raised:
            loader.reproduce(failure.index, failure.epoch, failure.seed)
        assert raised.value.args == failure.error.args
