"""Plans: drawn once from seed, epoch and index, and obeyed wherever the sample runs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from minato import DataLoader
from minato.chain.chain import Chain
from minato.chain.plans import Obeying, Planned, planner
from minato.chain.rng import SampleRandomness
from tests.datasets import Numbers


class Scale:
    """Multiplies by a drawn factor."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.drawn = 0
        self.told: object = None

    def plan(self, rng: np.random.Generator, meta: object) -> float:
        self.drawn += 1
        self.told = meta
        return float(rng.uniform(1, self.most))

    def apply(self, sample: float, plan: float) -> float:
        return sample * plan

    def __call__(self, sample: float) -> float:
        return self.apply(sample, self.plan(np.random.default_rng(), None))


def negate(sample: float) -> float:
    return -sample


def steps_of(*transforms):
    return Chain.of(list(transforms)).steps


def test_plans_are_a_function_of_seed_epoch_and_key():
    plans_of = planner(steps_of(Scale(2), negate, Scale(2)))
    plans = plans_of(7, 1, 42)
    assert plans[1] is None
    assert plans[0] != plans[2]
    again = planner(steps_of(Scale(2), negate, Scale(2)))
    assert again(7, 1, 42) == plans
    assert all(again(*key) != plans for key in ((8, 1, 42), (7, 2, 42), (7, 1, 43), (7, 1, "42")))


def test_draws_are_as_they_should_be():
    uniform = np.array([planner(steps_of(Scale(2)))(7, 1, key)[0] - 1 for key in range(2000)])
    assert 0.48 < uniform.mean() < 0.52
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.07


def test_what_was_planned_is_obeyed_and_not_drawn_again():
    scale = Scale(2)
    chain = Chain.of([scale, negate])
    (plan, _) = planner(chain.steps)(7, 1, 42)
    randomness = SampleRandomness(7)
    with randomness.saved():
        randomness.bind(1, 42)
        assert chain.run(10.0) == -10.0 * plan
    assert scale.drawn == 2
    assert scale.told == 42  # the sample's index
    assert chain.run(10.0) != -10.0 * plan  # of no sample: it draws itself


def test_a_chain_shows_the_transforms_as_they_were_given():
    scale = Scale(2)
    chain = Chain.of([scale, negate])
    assert chain.transforms == (scale, negate)
    assert (chain.names, chain.plans) == (("Scale", "negate"), True)
    assert not Chain.of([negate]).plans
    assert isinstance(pickle.loads(pickle.dumps(chain)).steps[0], Obeying)
    assert planner(Chain.of([negate]).steps) is None
    assert not isinstance(abs, Planned)


class Refusing(Scale):
    def plan(self, rng: np.random.Generator, meta: object) -> float:
        raise LookupError("no plan")


def test_a_plan_that_cannot_be_made_is_the_samples_error():
    assert planner(steps_of(Refusing(2)))(7, 1, 42) == ()
    with pytest.raises(LookupError, match="no plan"):
        list(DataLoader(Numbers(4), 2, transforms=[Refusing(2)]))


class Jitter:
    """Draws from a generator that nobody binds, unless its draws are planned."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def plan(self, rng: np.random.Generator, meta: object) -> float:
        return float(rng.random())

    def apply(self, sample: torch.Tensor, plan: float) -> torch.Tensor:
        return sample + plan

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return self.apply(sample, self.plan(self.own, None))


def floats(value: int) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def test_samples_obey_wherever_they_run():
    """Cheap samples run without bound generators while they seem not to draw: what is planned must be bound even so."""
    contents = []
    for workers in (
        {},
        {"num_workers": 2},
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
    ):
        loader = DataLoader(Numbers(200), 4, seed=3, transforms=[floats, Jitter()], **workers)
        contents.append([torch.cat(list(loader)) for epoch in range(2)])
    for first, second in contents:
        assert torch.equal(first, contents[0][0])
        assert torch.equal(second, contents[0][1])
    assert not torch.equal(*contents[0])
    assert loader.reproduce(17, epoch=1) == contents[0][1][17]


def test_streams_of_torch_are_left_to_the_transform():
    loader = DataLoader(Numbers(20), 4, seed=3, rng="worker", transforms=[floats, Jitter()])
    assert not torch.equal(torch.cat(list(loader)), torch.cat(list(loader)))
