"""What a ``collate_fn`` draws belongs to its batch: neither workers nor order nor an interruption change it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

from minato import DataLoader, ErrorPolicy
from tests.datasets import Failing, Lists, Numbers, forked, helped_draws, three_draws
from tests.selection import loaders, mostly_slow

SIZE, BATCH = 24, 3


class Drawing(Numbers):
    """Samples that draw, or not, before the batch does."""

    def __init__(self, size: int, draws: bool = False) -> None:
        super().__init__(size)
        self.draws = draws

    def __getitem__(self, index: int) -> Any:
        return [index, random.random() if self.draws else 0.0]


def of_globals(samples: list[Any]) -> Any:
    return samples, three_draws()


class OfOwn:
    """A ``collate_fn`` with generators of its own, as of mixup."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.choice = random.Random()
        self.generator = torch.Generator()

    def __call__(self, samples: list[Any]) -> Any:
        drawn = float(torch.rand((), generator=self.generator))
        return samples, [self.rng.random(), self.choice.random(), drawn]

    def method(self, samples: list[Any]) -> Any:
        return self(samples)


def closure() -> Any:
    rng = np.random.default_rng()
    return lambda samples: (samples, [rng.random()])


def of_helpers(samples: list[Any]) -> Any:
    return samples, helped_draws([])


COLLATIONS: dict[str, Any] = {
    "globals": lambda: of_globals,
    "own": OfOwn,
    "method": lambda: OfOwn().method,
    "closure": closure,
    "helpers": lambda: of_helpers,
}
LOADERS = {
    **loaders("inline", "fork", "persistent", "reads", "forkserver"),
    "3": {**forked(3), "order": "batch"},
}


def loading(dataset: Any, collate_fn: Any = of_globals, **options: Any) -> Any:
    return DataLoader(dataset, BATCH, seed=7, collate_fn=collate_fn, **options)


def content(collation: Any, draws: bool = False, epochs: int = 2, **options: Any) -> list[Any]:
    loader = loading(Drawing(SIZE, draws), collation(), shuffle=True, **options)
    return [sorted(loader, key=lambda batch: batch[0][0]) for _ in range(epochs)]


@pytest.mark.parametrize("draws", [False, True], ids=["samples draw nothing", "samples draw"])
@mostly_slow("name", COLLATIONS, quick=2)
def test_a_batch_draws_the_same_with_any_workers(name: str, draws: bool) -> None:
    collation = COLLATIONS[name]
    alone = content(collation, draws)
    first, second = ([drawn for _, drawn in epoch] for epoch in alone)
    assert len({tuple(drawn) for drawn in first + second}) == 2 * SIZE // BATCH
    for loader, options in LOADERS.items():
        if loader == "forkserver" and (name != "own" or draws):
            continue  # one start of processes is enough
        if loader == "reads" and draws:
            continue  # which share the global generators
        assert content(collation, draws, **options) == alone, loader


def test_helpers_draw_the_same_in_threads() -> None:
    options = {"num_workers": 2, "workers": "thread"}
    assert content(COLLATIONS["helpers"], **options) == content(COLLATIONS["helpers"])


def test_a_batch_and_its_first_sample_draw_other_numbers() -> None:
    loader = DataLoader(Drawing(4, draws=True), 1, seed=7, collate_fn=of_globals)
    assert all(drawn[0] != sample[1] for (sample,), drawn in loader)


def test_repeated_indices_draw_other_numbers() -> None:
    loader = DataLoader(Numbers(2), 2, sampler=[0, 1] * 4, seed=7, collate_fn=of_globals)
    drawn = [tuple(drawn) for _, drawn in loader]
    assert len(set(drawn)) == 4
    assert [tuple(drawn) for _, drawn in loader] != drawn  # in another epoch


@pytest.mark.parametrize("batch_size", [None, 1])
def test_single_samples(batch_size: int | None) -> None:
    def batches(**options: Any) -> list[Any]:
        return list(DataLoader(Numbers(6), batch_size, seed=7, collate_fn=of_globals, **options))

    assert batches() == batches(**forked(2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_draws_what_it_would_have_drawn(num_workers: int) -> None:
    options = forked(num_workers)
    whole, first, resumed = (loading(Drawing(SIZE), shuffle=True, **options) for _ in range(3))
    iterator = iter(first)
    begun = [next(iterator) for _ in range(3)]
    resumed.load_state_dict(first.state_dict())
    assert begun + list(resumed) == list(whole)


class DiesOnce:
    """Its process dies in the middle of a batch, after a draw."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, samples: list[Any]) -> Any:
        drawn = random.random()
        if samples[0] == 9 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return samples, drawn


def test_a_collation_whose_worker_died_draws_the_same(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="Another worker takes its place"):
        found = list(loading(Numbers(SIZE), DiesOnce(tmp_path / "died"), **forked(2)))
    assert found == list(loading(Numbers(SIZE), DiesOnce(tmp_path)))


def test_datasets_that_take_lists() -> None:
    assert list(loading(Lists(SIZE))) == list(loading(Lists(SIZE), **forked(2)))


def test_a_batch_whose_first_sample_is_skipped_draws_the_same() -> None:
    dataset = Failing(SIZE, dict.fromkeys(range(0, SIZE, 4), ValueError))

    def batches(**options: Any) -> list[Any]:
        with pytest.warns(RuntimeWarning, match="skipped"):
            return list(loading(dataset, errors=ErrorPolicy(on_error="skip"), **options))

    assert batches() == batches(**forked(2))


def test_the_programs_generators_stay_as_they_are_without_workers() -> None:
    collation = OfOwn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = three_draws()
    state = collation.rng.bit_generator.state
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for collate_fn in (of_globals, collation):
        list(DataLoader(Numbers(6), 2, generator=torch.Generator(), collate_fn=collate_fn))
    assert three_draws() == expected
    assert collation.rng.bit_generator.state == state


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_compat_draws_as_torch(num_workers: int) -> None:
    options = forked(num_workers)

    def batches(loader: Any, **more: Any) -> list[Any]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return list(loader(Drawing(8, True), 2, collate_fn=of_globals, **options, **more))

    assert batches(DataLoader, compat="torch") == batches(TorchLoader)


def test_default_collate_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from minato.workers.runner import Runner

    monkeypatch.setattr(Runner, "bound_to_batch", None)
    assert len(list(DataLoader(Numbers(6), 2))) == 3
    assert len(list(DataLoader(Numbers(6), 2, collate_fn=default_collate))) == 3
    assert len(list(DataLoader(Numbers(6), None))) == 6
