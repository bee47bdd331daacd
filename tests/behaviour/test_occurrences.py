"""An index that comes more than once in an epoch: each time with random numbers of its own, as with torch."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

import minato
from minato import DataLoader, ErrorPolicy, Record, Replay
from minato.sampling import samplers
from minato.sampling.samplers import SeededSampler, occurrence_counter
from tests.behaviour.states import HowFar, begun, resumed, saved
from tests.datasets import ORDERS, TOO_MANY_WORKERS, Draws, Numbers, late_by
from tests.parity.material import identity, multi_epochs
from tests.selection import each_of

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

TorchLoader = torch.utils.data.DataLoader

WORKERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "2-processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "workers": "thread"},
    "reads": {"num_workers": 1, "fetch_concurrency": 3},
}
each = each_of(WORKERS)
REPEATED = [3, 1, 3, 3, 0, 1, 2, 3, 3, 1, 0, 2, 2, 3]


class Own(Numbers):
    """A draw that is bound to the sample in threads too."""

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), minato.python_rng().random()]


def samples_of(loader: Any) -> list[tuple[float, ...]]:
    return [tuple(sample) for batch in loader for sample in batch]


def make(dataset: Any = None, **options: Any) -> Any:
    options = {"sampler": REPEATED, "seed": 6, "collate_fn": identity, **options}
    return DataLoader(Own(4) if dataset is None else dataset, 3, **options)


@each
@pytest.mark.parametrize("order", ORDERS)
def test_each_occurrence_draws_anew_whoever_runs_it(order: str, workers: dict[str, Any]) -> None:
    expected = samples_of(make())
    assert len(set(expected)) == len(REPEATED)
    loader = make(order=order, **workers)
    assert sorted(samples_of(loader)) == sorted(expected)
    # The first of them draws what it does where nothing comes twice.
    alone = dict(samples_of(make(sampler=[0, 1, 2, 3])))
    first = {index: drawn for index, drawn in reversed(expected)}
    assert first == alone
    assert set(samples_of(loader)).isdisjoint(expected)  # the next epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_as_many_augmentations_as_with_torch(num_workers: int) -> None:
    def augmentations(make: Any) -> int:
        torch.manual_seed(0)
        sampler = data.WeightedRandomSampler([1.0] * 5 + [0.001] * 95, 200)
        loader = make(Draws(100), 50, sampler=sampler, num_workers=num_workers)
        return len({tuple(sample) for batch in loader for sample in torch.stack(batch).T.tolist()})

    assert augmentations(DataLoader) == augmentations(TorchLoader) == 200


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_without_an_end_repeats_no_augmentation(num_workers: int) -> None:
    with minato.patch():
        patched = multi_epochs(torch.utils.data.DataLoader)
    assert issubclass(patched, DataLoader)
    for base in (multi_epochs(TorchLoader), patched):
        loader = base(Draws(4), 2, num_workers=num_workers)
        epochs = [[tuple(batch[1].tolist()) for batch in loader] for _ in range(3)]
        assert len({drawn for epoch in epochs for drawn in epoch}) == 6


class Lists(Own):
    """Gets the indices of a batch in one call, in the sampler's container."""

    def __getitems__(self, indices: Any) -> list[Any]:
        assert isinstance(indices, torch.Tensor)
        return [[float(index), random.random()] for index in indices.tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_the_dataset_gets_as_a_whole(num_workers: int) -> None:
    batches = [torch.tensor(numbers) for numbers in ([0, 1], [0, 1], [2, 3], [0, 1], [1, 0])]
    options: dict[str, Any] = {"batch_sampler": batches, "seed": 2, "collate_fn": identity}
    expected = samples_of(DataLoader(Lists(4), **options))
    assert len(set(expected)) == 10
    assert samples_of(DataLoader(Lists(4), num_workers=num_workers, **options)) == expected


@pytest.mark.parametrize(
    "keys", [list("abacaba"), [(1, 2), (1, 3), (1, 2), 1, None, 1.5, 2**70, "a"], [np.int64(3)] * 4]
)
def test_keys_of_any_kind(keys: list[Any]) -> None:
    class Keyed(Numbers):
        def __getitem__(self, key: Any) -> Any:
            return [repr(key), random.random()]

    expected = samples_of(make(Keyed(9), sampler=keys))
    assert len(set(expected)) == len(keys)
    assert samples_of(make(Keyed(9), sampler=keys, num_workers=2)) == expected


# ---- what the count travels with


def test_reproduce() -> None:
    loader = make(num_workers=2)
    expected = samples_of(loader)
    before: Counter[float] = Counter()
    for index, drawn in expected:
        occurrence = before[index]
        assert loader.reproduce(int(index), occurrence=occurrence) == [index, drawn]
        before[index] += 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_resume(order: str, num_workers: int) -> None:
    def loader(num_workers: int = 0) -> Any:
        generator = torch.Generator().manual_seed(1)
        sampler = data.WeightedRandomSampler([1.0, 5.0, 2.0, 9.0], 30, generator=generator)
        return make(sampler=sampler, order=late_by(order, 2), num_workers=num_workers)

    got, state = begun(loader(num_workers), 4)
    later = resumed(state, loader(2 - num_workers))
    assert sorted(samples_of(got) + samples_of(later)) == sorted(samples_of(loader()))
    assert later.coverage().complete


@pytest.mark.parametrize("order", ORDERS)
def test_the_recorded_order(order: str, tmp_path: Path) -> None:
    path = tmp_path / "order"
    recorded = make(order=order, num_workers=2, recording=Record(path))
    epochs = [samples_of(recorded) for _ in range(2)]
    replayed = make(seed=None, recording=Replay(path))
    assert [samples_of(replayed) for _ in range(2)] == epochs
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert any([3, 5] in line for line in lines if isinstance(line, list))


class Torn(Own):
    """The third time that index 3 comes, it fails: as often as its draws are the same."""

    def __init__(self, bad: float) -> None:
        super().__init__(4)
        self.bad = bad

    def __getitem__(self, index: int) -> list[float]:
        sample = super().__getitem__(index)
        if sample[1] == self.bad:
            raise ValueError("torn")
        return sample


@each
def test_what_fails_is_tried_and_told_as_the_same_occurrence(
    workers: dict[str, Any], tmp_path: Path
) -> None:
    expected = samples_of(make())
    third = [sample for sample in expected if sample[0] == 3][2]
    policy = ErrorPolicy(on_error="skip", retries=2, log=tmp_path / "quarantine")
    loader = make(Torn(third[1]), errors=policy, **workers)
    with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
        assert sorted(samples_of(loader)) == sorted({*expected} - {third})
    record = json.loads((tmp_path / "quarantine").read_text())
    assert (record["index"], record["occurrence"], record["attempts"]) == (3, 2, 3)
    told = {name: record[name] for name in ("index", "epoch", "seed", "occurrence")}
    with pytest.raises(ValueError, match="torn"):
        loader.reproduce(**told)


# ---- what it costs


@pytest.mark.parametrize(
    ("sampler", "may_repeat"),
    [
        (data.SequentialSampler(Numbers(5)), False),
        (data.RandomSampler(Numbers(5)), False),
        (SeededSampler(Numbers(5), 1), False),
        (data.DistributedSampler(Numbers(5), 2, 0), False),
        (data.BatchSampler(data.RandomSampler(Numbers(5)), 2, False), False),
        ([1, 2], True),
        (data.RandomSampler(Numbers(5), replacement=True), True),
        (data.RandomSampler(Numbers(5), num_samples=6), True),
        (data.SubsetRandomSampler([1, 1]), True),
        (type("Own", (data.SequentialSampler,), {})(Numbers(5)), True),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samplers_that_may_repeat_are_counted(sampler: Any, may_repeat: bool) -> None:
    mark = occurrence_counter(sampler, 5)
    assert (mark is not None) == may_repeat
    if mark is not None:
        assert mark([1], 0) == [1]
        again = mark([1, 2], 1)
        assert (again.indices, again.occurrences) == ([1, 2], [1, 0])


class Interrupted(BaseException):
    """What the handler of a signal raises."""


def test_an_interruption_counts_no_index_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = samples_of(make())
    real = samplers.Recurring

    def recurring(*arguments: Any) -> object:
        monkeypatch.setattr(samplers, "Recurring", real)
        raise Interrupted

    iterator = iter(make())
    monkeypatch.setattr(samplers, "Recurring", recurring)
    with pytest.raises(Interrupted):
        next(iterator)
    assert samples_of(iterator) == expected


def test_a_sampler_that_is_asked_twice_for_the_epoch_is_counted_once() -> None:
    class Places(HowFar):
        def __iter__(self) -> Iterator[int]:
            return self.left(REPEATED)

    loader = make(sampler=Places())
    begun(loader, 2)  # its place is the sampler's state when the next epoch begins
    begun(loader, 1)
    iterator = iter(loader)
    got = [tuple(sample) for sample in next(iterator)]
    state = saved(loader)
    expected = got + samples_of(iterator)
    assert got + samples_of(resumed(state, make(sampler=Places()))) == expected
