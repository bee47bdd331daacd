"""The account of each epoch: what was asked for is what was delivered."""

from __future__ import annotations

from typing import Any

import pytest

from minato import CoverageError, DataLoader
from minato.sampling.progress import Tally
from tests.datasets import ORDERS, Numbers, Sleepy, Stream, flat, indices

NOTHING = Tally(0, 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "workers",
    [
        *({}, {"num_workers": 2}, {"num_workers": 3, "workers": "thread"}),
        {"num_workers": 2, "persistent_workers": "next_epoch"},
    ],
)
def test_a_whole_epoch_is_covered_in_every_order(order: str, workers: dict[str, Any]) -> None:
    loader = DataLoader(
        Sleepy(41, 0.0002, {5: 0.02}), 4, shuffle=True, seed=1, order=order, **workers
    )
    before = loader.coverage()
    assert (before.epoch, before.requested, before.complete) == (-1, NOTHING, True)
    tallies = []
    for epoch in range(2):
        assert sorted(flat(indices(loader))) == list(range(41))
        coverage = loader.coverage()
        assert (coverage.epoch, coverage.complete) == (epoch, True)
        assert (coverage.skipped, coverage.outstanding) == (NOTHING, NOTHING)
        assert coverage.requested == coverage.delivered
        tallies.append(coverage.delivered)
    assert tallies[0] == tallies[1] == Tally(41, tallies[0].hash)  # whatever the order
    assert tallies[0].hash != 0


def test_an_epoch_that_is_broken_off_is_not_covered() -> None:
    loader = DataLoader(Numbers(20), 4)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    coverage = loader.coverage()
    assert (coverage.delivered.samples, coverage.complete) == (8, coverage.requested.samples == 8)
    del iterator
    assert loader.coverage() == coverage


@pytest.mark.filterwarnings("ignore:2 readers deliver the same items")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_of_a_stream_are_counted(num_workers: int) -> None:
    loader = DataLoader(Stream(10), 3, num_workers=num_workers)
    got = sum(map(len, loader))
    coverage = loader.coverage()
    assert (coverage.delivered.samples, coverage.requested.samples) == (got, got)
    assert coverage.complete


@pytest.mark.parametrize("order", ["strict", "arrival"])
@pytest.mark.parametrize("fault", ["lost", "repeated", "exchanged"])
def test_lost_repeated_and_exchanged_samples_are_an_error(
    order: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account is of what the ledger says that lay in each batch; so a ledger that errs is found out."""
    loader = DataLoader(Numbers(12), 4, order=order, num_workers=1, workers="thread")
    iterator = iter(loader)
    dispatcher = iterator._source._dispatcher
    ledger = dispatcher._retiring.ledger

    class Faulty:
        def __getattr__(self, name: str) -> Any:
            return getattr(ledger, name)

        def occupants(self, batch: int) -> list[int]:
            found = list(ledger.occupants(batch))
            if fault == "lost":
                return found[:-1]
            if fault == "repeated":
                return [*found, found[0]]
            return [found[0], *found[:-1]]

    monkeypatch.setattr(dispatcher._retiring, "ledger", Faulty())
    with pytest.raises(
        CoverageError, match="the delivered samples are not those that the sampler requested"
    ):
        for _ in iterator:
            pass


def test_a_batch_that_is_lost_after_the_sampler_is_an_error() -> None:
    loader = DataLoader(Numbers(12), 4)
    iterator = iter(loader)
    next(iterator)
    batches = iterator._source._batches
    batches.drop(batches.ahead(1)[0])
    with pytest.raises(CoverageError, match=r"requested 12 samples, delivered 8"):
        list(iterator)
