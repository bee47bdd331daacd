"""Without workers, an epoch that is over leaves its engine to the next one, which begins as with a new engine."""

from __future__ import annotations

import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minato import DataLoader, Readers
from tests.datasets import ORDERS, Failing, Numbers, Stream, drain, flat, indices

FIRST = [[0, 1], [2, 3], [4]]


def engine_of(iterator: Any) -> Any:
    return iterator._source


@pytest.mark.parametrize("options", [*({"order": order} for order in ORDERS), {"compat": "torch"}])
def test_epochs_follow_one_another_in_the_same_memory(options: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(50), 4, **options)
    arenas = set()
    for _ in range(4):
        iterator = iter(loader)
        arenas.add(id(engine_of(iterator).arena))
        assert sorted(flat(indices(iterator))) == list(range(50))
        assert loader.coverage().complete
        assert loader.coverage().delivered.samples == 50
    assert len(arenas) == 1


def test_two_iterators_at_once_have_engines_of_their_own() -> None:
    loader = DataLoader(Numbers(5), 2)
    for _ in range(3):
        one, other = iter(loader), iter(loader)
        assert engine_of(one) is not engine_of(other)
        assert [indices(pair) for pair in zip(one, other, strict=True)] == [[b, b] for b in FIRST]


def test_an_epoch_that_is_broken_off_leaves_no_engine() -> None:
    loader = DataLoader(Numbers(5), 2)
    assert indices(loader) == FIRST
    iterator = iter(loader)
    next(iterator)
    broken = weakref.ref(engine_of(iterator))
    del iterator
    assert broken() is None
    assert indices(loader) == FIRST


def test_an_error_in_one_epoch_is_not_in_the_next() -> None:
    dataset = Failing(5, {2: KeyError})
    loader = DataLoader(dataset, 2)
    found, (error,) = drain(loader)
    assert (found, type(error)) == ([0, 1, 4], KeyError)
    dataset.raises = {}
    assert indices(loader) == FIRST


def change_collate_fn(loader: Any) -> None:
    loader.collate_fn = lambda samples: torch.tensor(samples) * 10


def change_dataset(loader: Any) -> None:
    loader.dataset.__class__ = type(
        "Lists", (Numbers,), {"__getitems__": lambda self, keys: [10 * key for key in keys]}
    )


@pytest.mark.parametrize("change", [change_collate_fn, change_dataset])
def test_what_was_changed_between_two_epochs_counts(change: Callable[[Any], None]) -> None:
    loader = DataLoader(Numbers(5), 2)
    assert indices(loader) == FIRST
    change(loader)
    assert indices(loader) == [[0, 10], [20, 30], [40]]


def test_another_order_and_larger_batches_count_too() -> None:
    loader = DataLoader(Numbers(5), 2)
    first = iter(loader)
    kept = weakref.ref(engine_of(first))
    assert indices(first) == FIRST
    loader.in_order = False
    iterator = iter(loader)
    assert kept() is None
    assert indices(iterator) == FIRST
    assert isinstance(loader.batch_sampler, torch.utils.data.BatchSampler)
    loader.batch_sampler.batch_size = 5
    assert indices(loader) == [[0, 1, 2, 3, 4]]


def test_each_epoch_has_the_random_numbers_of_its_thread() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> int:
            return random.getrandbits(32)

    def epoch() -> None:
        list(loader)
        states.append(random.getstate())

    loader = DataLoader(Draws(20), 2, seed=3)
    states = [random.getstate()]
    epoch()
    thread = threading.Thread(target=epoch)
    thread.start()
    thread.join()
    assert states[0] == states[1]  # the main thread finds its generators as they were
    assert states[2] != states[1]  # any other draws from them


def test_epochs_in_different_threads_share_what_reads() -> None:
    def epoch() -> None:
        assert indices(loader) == FIRST

    loader = DataLoader(Numbers(5), 2, fetch_concurrency=2)
    endings = []
    for _ in range(3):
        epoch()
        thread = threading.Thread(target=epoch)
        thread.start()
        thread.join()
        [(_, _, engine)] = loader._minato_engines.idle
        endings.append(len(engine.afterwards))
    assert endings == endings[:1] * 3


def test_a_report_tells_each_epoch_apart() -> None:
    loader = DataLoader(Numbers(40), 4)
    for _ in range(3):
        list(loader)
    for notes in loader._minato_history.epoch_log.past:
        assert notes.metrics.counts["samples"] == 40
        assert notes.metrics.counts["batches"] == 10
        assert notes.metrics.histograms["total"].count == 40


@pytest.mark.usefixtures("collected_on_request")
def test_an_epoch_that_is_over_leaves_its_engine_to_the_next() -> None:
    loader = DataLoader(Numbers(5), 2)
    iterator = iter(loader)
    engine = weakref.ref(engine_of(iterator))
    assert indices(iterator) == FIRST
    iterator = iter(loader)
    assert engine_of(iterator) is engine()
    assert indices(iterator) == FIRST
    del loader, iterator
    assert engine() is None


def test_a_rank_of_many_keeps_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "300")
    monkeypatch.setenv("WORLD_SIZE", "512")
    loader = DataLoader(Stream(5), 2, readers=Readers(512, ranks="auto"))
    assert loader._minato_spec() is loader._minato_spec()
    kept = loader._minato_spec()
    monkeypatch.setenv("RANK", "301")
    assert loader._minato_spec().sampling.dealt == (301, 512) != kept.sampling.dealt


def test_a_copy_of_a_loader_has_an_engine_of_its_own() -> None:
    loader = DataLoader(Numbers(5), 2)
    list(loader)
    twin = pickle.loads(pickle.dumps(loader))
    one, other = iter(loader), iter(twin)
    assert engine_of(one) is not engine_of(other)
    assert indices(one) == indices(other) == FIRST
