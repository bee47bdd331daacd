"""Accelerate in one process: what it rebuilds stays ours, with all options."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

import minato
from tests.behaviour.states import Stateful
from tests.datasets import Numbers
from tests.integrations.models import OURS, Indexed, Stream, fresh_accelerate, noisy
from tests.integrations.ranks import engines

accelerate = pytest.importorskip("accelerate", "1.0")
from accelerate.data_loader import prepare_data_loader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OPTIONS: dict[str, Any] = {
    "transforms": [noisy],
    "order": minato.FastFirst(3),
    "seed": 5,
    "memory_budget": 1 << 20,
    "workers": "thread",
    "errors": minato.ErrorPolicy(on_worker_death="raise"),
    "fetch_concurrency": 3,
}


@pytest.fixture
def make_accelerator() -> Iterator[Callable[..., Any]]:
    def make(**options: Any) -> Any:
        config = accelerate.DataLoaderConfiguration(**options)
        return accelerate.Accelerator(cpu=True, dataloader_config=config)

    with fresh_accelerate():
        yield make


@pytest.fixture
def accelerator(make_accelerator: Callable[..., Any]) -> Any:
    return make_accelerator()


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def drawn(batches: Any) -> list[Any]:
    """The indices and what their transform has drawn."""
    return [(batch["index"].tolist(), batch["noise"].tolist()) for batch in batches]


SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 5, "transforms": [noisy]}


def loader_of(size: int = 20, batch_size: int = 4, **options: Any) -> minato.DataLoader[Any]:
    return minato.DataLoader(Indexed(size), batch_size, **options)


def test_prepare_keeps_engine_and_options(accelerator: Any) -> None:
    prepared = accelerator.prepare(loader_of(num_workers=2, shuffle=True, **OPTIONS))
    with engines() as seen:
        batches = list(prepared)
    assert seen() == OURS
    assert all(batch["marked"].all() for batch in batches)
    assert sorted(chain(*indices(batches))) == list(range(20))
    assert type(prepared.base_dataloader) is minato.DataLoader
    assert {name: getattr(prepared, name) for name in OPTIONS} == OPTIONS
    assert type(prepared.prefetch_factor) is not int  # the default, which does not bound
    bounded = accelerator.prepare(loader_of(num_workers=1, prefetch_factor=3))
    assert (bounded.prefetch_factor, type(bounded.prefetch_factor)) == (3, int)


def test_prepare_gives_what_the_loader_gives(accelerator: Any) -> None:
    loader, prepared = (loader_of(num_workers=2, **SHUFFLED) for _ in range(2))
    prepared = accelerator.prepare(prepared)
    for _ in range(3):
        assert drawn(loader) == drawn(prepared)


@pytest.mark.parametrize("shuffle", [False, True])
def test_skipping_without_an_accelerator(shuffle: bool) -> None:
    loader = loader_of(**{**SHUFFLED, "shuffle": shuffle})
    loader.set_epoch(2)
    whole = drawn(loader)
    loader.set_epoch(2)
    skipping = accelerate.skip_first_batches(loader, 2)
    assert type(skipping) is minato.DataLoader
    assert drawn(skipping) == whole[2:]
    # Who has the whole loader asks it for the report, as trainers' callbacks do.
    assert [each.throughput.batches for each in loader.report().epochs] == [5, 3]


def test_skipping_in_a_stream(accelerator: Any) -> None:
    prepared = accelerator.prepare(minato.DataLoader(Stream(20), 4, num_workers=1))
    batches = [list(range(i, i + 4)) for i in range(0, 20, 4)]
    with engines() as seen:
        assert indices(accelerator.skip_first_batches(prepared, 3)) == batches[3:]
        plain = minato.DataLoader(Stream(20), 4)
        assert indices(accelerate.skip_first_batches(plain, 4)) == batches[4:]
    assert seen() == OURS


def test_a_batch_sampler(accelerator: Any) -> None:
    batches = [[0, 1, 2], [3], [4, 5, 6, 7]]
    prepared = accelerator.prepare(
        minato.DataLoader(Indexed(8), batch_sampler=batches, num_workers=1, transforms=[noisy])
    )
    with engines() as seen:
        assert indices(prepared) == batches
    assert seen() == OURS


class Counting(Stateful, Numbers):
    kept = ("size",)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["pipe", "mixing"])
def test_a_loader_without_a_state_says_why_if_asked(
    kind: str, accelerator: Any, make_accelerator: Callable[..., Any], tmp_path: Path
) -> None:
    pipe = torch.utils.data.datapipes.iter.IterableWrapper(range(8))
    of_mixing = {"order": "arrival"} if kind == "mixing" else {}

    def loader() -> Any:
        return minato.DataLoader(pipe if kind == "pipe" else Counting(8), 4, **of_mixing)

    prepared = accelerator.prepare(loader())
    assert [batch.tolist() for batch in prepared] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(
        AttributeError, match="data pipes" if kind == "pipe" else "use order='strict'"
    ):
        prepared.state_dict()
    pytest.importorskip("torchdata.stateful_dataloader")
    accelerator = make_accelerator(use_stateful_dataloader=True)
    with pytest.warns(minato.MinatoWarning, match="loads without minato's engine"):
        accelerator.prepare(loader())
    accelerator.save_state(str(tmp_path))


def test_set_epoch_reaches_a_distributed_sampler(accelerator: Any) -> None:
    sampler = DistributedSampler(Indexed(20), 1, 0, seed=5)
    prepared = accelerator.prepare(minato.DataLoader(Indexed(20), 20, sampler=sampler))
    prepared.set_epoch(4)
    assert sampler.epoch == 4
    assert list(chain(*indices(prepared))) == list(sampler)
    assert prepared.base_dataloader._minato_position.epoch == 4


def test_a_seedable_sampler_on_demand(make_accelerator: Callable[..., Any]) -> None:
    accelerator = make_accelerator(use_seedable_sampler=True)
    for seed in (None, 5):
        prepared = accelerator.prepare(loader_of(shuffle=True, seed=seed))
        first, second = indices(prepared), indices(prepared)
        assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(20))
        assert first != second
        prepared.set_epoch(0)
        assert indices(prepared) == first


def test_a_prepared_loader_can_be_copied(accelerator: Any) -> None:
    prepared = accelerator.prepare(loader_of(8, order="arrival"))
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert type(twin.base_dataloader) is minato.DataLoader
        assert twin.order == "arrival"
        assert indices(twin) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_subclass_becomes_ours_as_torchs_become_torchs(accelerator: Any) -> None:
    class Special(minato.DataLoader):
        def __init__(self, path: str) -> None:
            super().__init__(Indexed(8), 4, transforms=[noisy])

    prepared = accelerator.prepare(Special("somewhere"))
    assert type(prepared.base_dataloader) is minato.DataLoader
    assert all(batch["marked"].all() for batch in prepared)


def test_torchs_loaders_stay_torchs(accelerator: Any) -> None:
    loader = torch.utils.data.DataLoader(Indexed(8), 4, sampler=RandomSampler(Indexed(8)))
    prepared = accelerator.prepare(loader)
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
    assert type(accelerate.skip_first_batches(loader, 1)) is torch.utils.data.DataLoader
    assert sorted(chain(*indices(prepared))) == list(range(8))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_losing_the_engine_is_told(make_accelerator: Callable[..., Any]) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    accelerator = make_accelerator(use_stateful_dataloader=True)
    accelerator.prepare(torch.utils.data.DataLoader(Indexed(8), 4))
    # A process that reads for others is ahead of them, which is known of torchdata's states alone.
    processes = mock.Mock(num_processes=2, process_index=0)
    how = {"dispatch_batches": True, "put_on_device": True, "use_stateful_dataloader": True}
    with (
        mock.patch("accelerate.data_loader.PartialState", return_value=processes),
        pytest.warns(minato.MinatoWarning, match="loads without minato's engine"),
    ):
        prepared = prepare_data_loader(loader_of(8, transforms=[noisy]), **how)
    assert all(batch["marked"].all() for batch in prepared.base_dataloader)
