"""Batches that are closed by the cost of their samples: bounds, and each sample once whatever happens meanwhile."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import minato
from minato import CostBatches, CostBatchSampler, DataLoader, PadCollate, Record
from minato._support.counters import shared_integers
from minato.loader import torch_arguments
from tests.datasets import Keeping, Numbers, Parts, wait_until
from tests.selection import mostly_slow

SIZE = 300
MASKED = PadCollate(masks={"mask": "tokens"})


def text_of(index: int) -> dict[str, Any]:
    length = max(int(random.Random(index).lognormvariate(3, 1)), 1)
    return {"tokens": torch.full((min(length, 400),), index), "at": index}


def make(workers: int = 0, order: str = "arrival", readers: int = 0, **options: Any) -> Any:
    dataset: Any = Parts(SIZE) if readers else Numbers(SIZE)
    options = {"batch_size": CostBatches(1500, "tokens", max_wait=90), **options}
    if readers:
        options["readers"] = readers
    else:
        options.update(shuffle=True, seed=1)
    return DataLoader(
        dataset,
        order=order,
        num_workers=workers,
        **{"transforms": [text_of], "collate_fn": MASKED, **options},
    )


def indices_of(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch["at"].tolist()]


# ---- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_no_batch_is_above_a_bound(seed: int) -> None:
    draw = random.Random(seed)
    most, padding = draw.choice([500, 2000]), draw.choice([0.05, 0.3, 0.6])
    size, wait = draw.choice([None, 1, 7]), draw.choice([0, 20, 1000])
    plan = CostBatches(most, "tokens", max_padding=padding, max_size=size, max_wait=wait)
    arrived = []

    def noted(index: int) -> dict[str, Any]:
        arrived.append(index)
        return text_of(index)

    seen = []
    for batch in make(batch_size=plan, transforms=[noted]):
        mask = batch["mask"]
        assert mask.numel() <= most
        assert 1 - mask.float().mean() <= padding + 1e-6
        assert size is None or len(mask) <= size
        oldest = min(map(arrived.index, batch["at"].tolist()))
        # One sample more has come, which may have opened the next batch.
        assert len(arrived) - oldest <= wait + 2 or len(arrived) == SIZE
        seen += batch["at"].tolist()
    assert sorted(seen) == [*range(SIZE)]


def test_batches_are_full_where_enough_samples_are_alike() -> None:
    plan = CostBatches(1000, "tokens", max_padding=0.2)
    loader = make(batch_size=plan, transforms=[lambda i: {"tokens": torch.ones(10), "at": i}])
    assert [len(batch["at"]) for batch in loader] == [100, 100, 100]


def test_any_share_of_padding_has_groups() -> None:
    for share in (1e-17, 1 - 1e-16):
        loader = DataLoader([torch.ones(3), torch.ones(2)], CostBatches(9, max_padding=share))
        assert sum(len(batch) for batch in loader) == 2


def test_without_padding_costs_are_added() -> None:
    options: Any = {"padded": False, "max_padding": 0.01, "max_wait": SIZE}
    plan = CostBatches(100, lambda sample: sample["cost"], **options)
    costs = [lambda i: {"at": i, "cost": 3.0 if i % 2 else 30.0}]
    loader = make(batch_size=plan, transforms=costs, collate_fn=list)
    sums = [sum(each["cost"] for each in batch) for batch in loader]
    assert max(sums) <= 100
    assert min(sums[:-1]) > 70


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_what_the_dataset_returned(num_workers: int) -> None:
    samples = [(np.ones(length), length) for length in (2, 3)]
    plan = CostBatches(5, lambda sample: sample[0].size, padded=False)
    (batch,) = DataLoader(samples, plan, collate_fn=list, num_workers=num_workers)
    assert [(type(each), type(each[0]), each[1]) for each in batch] == [
        (tuple, np.ndarray, length) for length in (2, 3)
    ]


def test_the_length_of_a_sample_is_its_cost_and_it_is_padded() -> None:
    samples = [torch.ones(3), torch.ones(2), torch.ones(3)]
    loader = DataLoader(samples, CostBatches(9, max_padding=0.5))
    assert [batch.tolist() for batch in loader] == [[[1, 1, 1], [1, 1, 0], [1, 1, 1]]]


@pytest.mark.parametrize("batch_size", [CostBatches(100, "tokens"), None], ids=["cost", "single"])
def test_others_do_not_wait_for_a_slow_sample(batch_size: Any) -> None:
    loaded = shared_integers(1)

    def wait_for_others(index: int) -> dict[str, Any]:
        """Sample 0 is loaded after two hundred others."""
        if index == 0:
            wait_until(lambda: int(loaded) >= 200)
        loaded.add_(1)
        return {"tokens": torch.ones(10), "at": index}

    options: Any = {"order": "arrival", "num_workers": 2, "transforms": [wait_for_others]}
    loader = DataLoader(Numbers(SIZE), batch_size, **options)
    ats = [torch.as_tensor(batch["at"]).flatten().tolist() for batch in loader]
    assert sorted(itertools.chain(*ats)) == [*range(SIZE)]


# ---- each sample once ---------------------------------------------------------------------------


@mostly_slow("seed", range(12), quick=2)
def test_any_number_of_stops_and_workers(seed: int) -> None:
    order, readers, draw = ("strict", "arrival")[seed % 2], (0, 3, 1)[seed % 3], random.Random(seed)
    for _ in range(2):
        state, seen = None, list[int]()
        while len(seen) < SIZE:
            plan = CostBatches(draw.choice([600, 1500]), "tokens", max_wait=draw.choice([10, 90]))
            loader = make(draw.choice([0, 0, 2]), order, readers, batch_size=plan)
            if state is not None:
                loader.load_state_dict(json.loads(state))
            seen += indices_of(itertools.islice(loader, draw.randint(0, 12)))
            state = json.dumps(loader.state_dict())
        assert sorted(seen) == [*range(SIZE)]


def test_epochs_follow_each_other_and_the_report_counts_batches() -> None:
    loader = make(2, persistent_workers=True)
    for epoch in range(3):
        batches = [*loader]
        assert sorted(indices_of(batches)) == [*range(SIZE)]
        assert loader.coverage().complete
        last = loader.report().epochs[-1]
        assert last.throughput.batches == len(batches), epoch
        assert last.throughput.samples == SIZE


def test_programs_find_the_workers() -> None:
    iterator = iter(make(2, prefetch_factor=2))  # with a window that grows they may end early
    next(iterator)
    assert [worker.is_alive() for worker in iterator._workers] == [True, True]


def broken_at(*bad: int) -> list[Any]:
    """The transform, which raises for some samples."""

    def transform(index: int) -> dict[str, Any]:
        if index in bad:
            raise ValueError(f"bad {index}")
        return text_of(index)

    return [transform]


def test_skipped_samples_are_no_loss() -> None:
    loader = make(2, errors="skip", transforms=broken_at(*range(3, SIZE, 10)))
    with pytest.warns(minato.MinatoWarning, match="30 samples"):
        assert sorted(indices_of(loader)) == [i for i in range(SIZE) if i % 10 != 3]
    assert loader.coverage().skipped.samples == SIZE // 10


def goes_on_after(loader: Any, error: type[BaseException], match: str) -> list[int]:
    """The samples of an epoch in which ``next()`` raises once."""
    batches, seen = iter(loader), list[int]()
    with pytest.raises(error, match=match):
        while True:
            seen += next(batches)["at"].tolist()
    return sorted(seen + indices_of(batches))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_takes_the_place_of_a_batch(workers: int) -> None:
    loader = make(workers, transforms=broken_at(77))
    seen = goes_on_after(loader, ValueError, "bad 77")
    assert seen == [i for i in range(SIZE) if i != 77]


@pytest.mark.parametrize(
    ("cost", "match"),
    [(-1.0, "cost= returned -1.0"), (2000.0, "raise max_cost"), ("x", "cost= returned 'x'")],
)
def test_a_sample_without_a_cost(cost: object, match: str) -> None:
    plan = CostBatches(1500, lambda sample: cost if sample["at"] == 5 else len(sample["tokens"]))
    seen = goes_on_after(make(batch_size=plan), ValueError, match)
    assert seen == [i for i in range(SIZE) if i != 5]


@pytest.mark.parametrize(
    ("cost", "sample", "what"),
    [("name", torch.ones(3), "a field"), (7, (1, 2), "a field"), (None, 5, "the sample")],
)
def test_a_key_that_gives_no_length_is_named(cost: object, sample: object, what: str) -> None:
    loader = DataLoader([sample], CostBatches(10, cost))
    with pytest.raises((LookupError, TypeError)) as caught:
        next(iter(loader))
    (note,) = caught.value.__notes__
    assert f"cost={cost!r}) takes the length of {what}, and the sample is of type" in note


@pytest.mark.parametrize("sample", [{"tokens": [1, 2], "label": 1}, (torch.ones(2), 1)])
def test_the_number_of_fields_is_no_cost(sample: Any) -> None:
    with pytest.raises(TypeError, match="has fields, whose number is no cost: give cost="):
        next(iter(DataLoader([sample], CostBatches(9))))


def once(action: Callable[[Any], Any], error: BaseException) -> Callable[[Any], Any]:
    """An action that raises at its 50th call."""
    calls = itertools.count(1)

    def act(value: Any) -> Any:
        if next(calls) == 50:
            raise error
        return action(value)

    return act


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interruption_loses_nothing(workers: int) -> None:
    cost = once(lambda sample: len(sample["tokens"]), KeyboardInterrupt("now"))
    loader = make(workers, batch_size=CostBatches(1500, cost))
    assert goes_on_after(loader, KeyboardInterrupt, "now") == [*range(SIZE)]
    collate = once(MASKED, KeyboardInterrupt("now"))
    loader = make(workers, batch_size=CostBatches(400, "tokens", max_size=2), collate_fn=collate)
    assert goes_on_after(loader, KeyboardInterrupt, "now") == [*range(SIZE)]


def test_a_batch_that_cannot_be_collated_counts_as_delivered() -> None:
    collate = once(MASKED, ValueError("no"))
    loader = make(batch_size=CostBatches(400, "tokens", max_size=2), collate_fn=collate)
    assert len(goes_on_after(loader, ValueError, "no")) == SIZE - 2


# ---- what it goes with ----------------------------------------------------------------------------


def test_loaders_that_are_made_of_it_have_it() -> None:
    loader = make()
    for other in (
        DataLoader(**torch_arguments(loader)),
        DataLoader.from_torch(loader, num_workers=1),
        pickle.loads(pickle.dumps(DataLoader(Numbers(3), CostBatches(9, abs)))),
    ):
        with pytest.raises(TypeError, match="number of batches is unknown"):
            len(other)
    assert isinstance(loader, TorchLoader)
    assert loader.batch_size is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "meta"}, "use pin_memory=True"),
        (
            {
                "batch_sampler": CostBatchSampler([1], 3),
                "shuffle": None,
                "seed": None,
                "order": None,
            },
            "use sampler=",
        ),
        ({"recording": Record("order")}, "leave it out"),
        ({"batch_size": lambda: CostBatches(0)}, "max_cost=0 is no cost"),
        ({"batch_size": lambda: CostBatches(1, max_padding=1)}, "max_padding=1 is no share"),
        ({"batch_size": lambda: CostBatches(1, max_size=0)}, "max_size=0"),
        ({"drop_last": True}, r"CostBatches\(...\) .*drop_last=True.*leave it out"),
    ],
)
def test_what_it_does_not_go_with(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        if callable(given := options.get("batch_size")):
            given()
        make(**options)


def test_a_dataset_with_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the dataset has a state_dict\(\)"):
        iter(minato.DataLoader(Keeping(4), CostBatches(9, abs)))
