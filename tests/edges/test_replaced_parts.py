"""Parts of torch's loader that a program has replaced: minato or torch's engine uses them, or an error says so."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import dataloader
from torch.utils.data._utils import collate, fetch, pin_memory, worker

from minato import DataLoader, ErrorPolicy
from minato._compat import fetcher_is_replaced, replaced_parts, torch_looks_on
from tests.datasets import Numbers, Stream, double, forked
from tests.selection import loaders, mostly_slow

TORCHS_ENGINE = "torch's engine loads"


class Bins(fetch._BaseDatasetFetcher):
    """As of trainers that pack samples: a batch consists of bins of indices."""

    def fetch(self, possibly_batched_index: Any) -> Any:
        bins = [[self.dataset[i] for i in each] for each in possibly_batched_index]
        return self.collate_fn(bins)


def sums(bins: list[Any]) -> list[Any]:
    return [sum(each) if isinstance(each, list) else each for each in bins]


class Single(dataloader._SingleProcessDataLoaderIter):
    def _next_data(self) -> Any:
        return super()._next_data() + ["single"]


class Multi(dataloader._MultiProcessingDataLoaderIter):
    def _next_data(self) -> Any:
        return super()._next_data() + ["multi"]


def marked(*arguments: Any) -> None:
    os.environ["MARKED"] = "1"
    _LOOP(*arguments)


_LOOP = worker._worker_loop


class Marks(Numbers):
    """Says whether the worker's loop was replaced."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return index, os.environ.get("MARKED")


def wrapped(method: Callable[..., Any], then: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        return then(method(*arguments, **options))

    return call


def noted(batch: Any) -> Any:
    return [*batch, "noted"]


def mine(batch: Any, **_: Any) -> list[Any]:
    return ["mine", *batch]


BINS: dict[str, Any] = {"batch_sampler": [[[0, 1], [2]], [[3, 4, 5]]], "collate_fn": sums}
LISTS: dict[str, Any] = {"batch_size": 2, "collate_fn": list}
MAP = fetch._MapDatasetFetcher
ITERATOR = dataloader._BaseDataLoaderIter

TWO: dict[str, Any] = {"batch_size": 2}
NONE: dict[str, Any] = {"batch_size": None}
SINGLE, MULTI = dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter

USED: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "fetcher": (fetch, "_MapDatasetFetcher", Bins, BINS),
    "fetcher without batches": (
        MAP,
        "fetch",
        lambda self, index: ["index", index],
        {"batch_size": None, "collate_fn": list},
    ),
    "method of the fetcher": (MAP, "fetch", wrapped(MAP.fetch, noted), LISTS),
    "choice of the fetcher": (
        dataloader._DatasetKind,
        "create_fetcher",
        staticmethod(lambda kind, *arguments: Bins(*arguments)),
        BINS,
    ),
    "next": (ITERATOR, "__next__", wrapped(ITERATOR.__next__, noted), LISTS),
    "reset": (ITERATOR, "_reset", wrapped(ITERATOR._reset, lambda none: none), LISTS),
    "default_collate": (collate, "default_collate", mine, TWO),
    "default_convert": (collate, "default_convert", lambda one: ["mine", one], NONE),
    "collate": (collate, "collate", mine, TWO),
    "stack": (torch, "tensor", wrapped(torch.tensor, lambda made: made + 100), TWO),
    "name in torch.utils.data": (torch.utils.data, "default_collate", mine, TWO),
    "name in dataloader": (dataloader, "default_collate", mine, TWO),
}
"""Parts that minato uses: where they are, what is in their place, and the arguments of the loader."""

TORCHS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "iterator without workers": (dataloader, SINGLE.__name__, Single, LISTS),
    "iterator with workers": (dataloader, MULTI.__name__, Multi, LISTS),
    **{
        f"method of the iterator {kind} workers": (
            iterator,
            "_next_data",
            wrapped(iterator._next_data, noted),
            LISTS,
        )
        for kind, iterator in (("without", SINGLE), ("with", MULTI))
    },
    "worker loop": (worker, "_worker_loop", marked, LISTS),
    "next index": (ITERATOR, "_next_index", wrapped(ITERATOR._next_index, lambda i: i[:1]), LISTS),
    "choice of the iterator": (
        TorchLoader,
        "_get_iterator",
        wrapped(TorchLoader._get_iterator, lambda batches: (noted(each) for each in batches)),
        LISTS,
    ),
}
"""Parts that only torch's engine uses."""

LOADERS = loaders("inline", "fork", "compat", "threads", "batch")


def put(part: tuple[Any, str, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace a part; returns the arguments of the loader."""
    owner, name, value, arguments = part
    monkeypatch.setattr(owner, name, value)
    return arguments


def expected(dataset: Any, arguments: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Batches of torch's loader, as text; without workers for threads."""
    known = ("num_workers", "multiprocessing_context")
    torchs = {} if "workers" in options else {k: v for k, v in options.items() if k in known}
    return [str(batch) for batch in TorchLoader(dataset, **arguments, **torchs)]


@mostly_slow("loader", LOADERS, quick=2)
@pytest.mark.parametrize("part", USED)
def test_what_a_program_has_put_in_the_place_of_a_part_is_used(
    part: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, options = put(USED[part], monkeypatch), LOADERS[loader]
    batches = [str(batch) for batch in DataLoader(Numbers(6), **arguments, **options)]
    wanted = expected(Numbers(6), arguments, options)
    if loader == "batch":
        batches, wanted = sorted(batches), sorted(wanted)
    assert batches == wanted


def told(is_told: bool) -> Any:
    if is_told:
        return pytest.warns(RuntimeWarning, match=TORCHS_ENGINE)
    return warnings.catch_warnings(action="error", category=RuntimeWarning)


@mostly_slow("loader", ["inline", "fork"], ["compat"])
@pytest.mark.parametrize("part", TORCHS)
def test_torchs_engine_uses_the_other_parts(
    part: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, options = put(TORCHS[part], monkeypatch), LOADERS[loader]
    has_workers = "num_workers" in options
    needed = not (
        ("without" in part and has_workers)
        or (("with workers" in part or part == "worker loop") and not has_workers)
    )
    ours = DataLoader(Marks(6), **arguments, **options)
    wanted = expected(Marks(6), arguments, options)
    with told(needed):
        assert [str(batch) for batch in ours] == wanted
    with told(False):  # once
        assert [str(batch) for batch in ours] == wanted
    if needed:
        words = "about batches of minato's engine.*has replaced"
        for name, error in {"state_dict": AttributeError, "headroom": ValueError}.items():
            with pytest.raises(error, match=words):
                getattr(ours, name)()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("transforms", [double]), ("errors", "skip"), ("errors", ErrorPolicy(on_error="skip"))),
        *(("seed", 3), ("order", "arrival"), ("workers", "thread"), ("fetch_concurrency", 4)),
        *(("num_workers", "auto"), ("pin_memory", "in_place")),
    ],
)
def test_arguments_that_torchs_engine_does_without_are_refused(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchLoader, "_get_iterator", lambda self: iter(()))
    options = {"num_workers": 2, name: value}
    loader = DataLoader(Numbers(6), **options)
    with pytest.raises(ValueError, match=f"DataLoader._get_iterator.*does without {name}="):
        iter(loader)


def test_the_fetcher_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    method = fetch._IterableDatasetFetcher.fetch
    monkeypatch.setattr(fetch._IterableDatasetFetcher, "fetch", wrapped(method, noted))
    with pytest.warns(RuntimeWarning, match=f"_IterableDatasetFetcher.*{TORCHS_ENGINE}"):
        assert list(DataLoader(Stream(4), 2, collate_fn=list)) == [[0, 1, "noted"], [2, 3, "noted"]]
    assert list(DataLoader(Numbers(2), 2, collate_fn=list)) == [[0, 1]]


def test_transforms_and_states_with_a_replaced_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_MapDatasetFetcher", Bins)
    for options in ({}, forked(2)):
        loader, resumed = (
            DataLoader(Numbers(6), transforms=[double], **BINS, **options) for _ in range(2)
        )
        iterator = iter(loader)
        assert next(iterator) == [2, 4]
        resumed.load_state_dict(loader.state_dict())
        assert list(iterator) == list(resumed) == [[24]]


class Lists(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index + 100 for index in indices]


def test_transforms_of_a_dataset_that_takes_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAP, "fetch", wrapped(MAP.fetch, noted))
    loader = DataLoader(Lists(4), transforms=[double], **LISTS)
    assert list(loader) == [[200, 202, "noted"], [204, 206, "noted"]]


@pytest.mark.parametrize("options", [{"errors": "skip"}, {"fetch_concurrency": 2}])
def test_single_samples_are_refused_with_a_replaced_fetcher(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_MapDatasetFetcher", Bins)
    with pytest.raises(ValueError, match="about single samples.*replaced torch's fetcher"):
        iter(DataLoader(Numbers(6), **BINS, **options))


def test_an_order_that_mixes_batches_keeps_them_with_a_replaced_fetcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MAP, "fetch", wrapped(MAP.fetch, noted))
    loader = DataLoader(Numbers(6), **LISTS, **forked(2), order="arrival")
    assert sorted(loader) == [[0, 1, "noted"], [2, 3, "noted"], [4, 5, "noted"]]


def test_a_program_may_replace_a_part_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Numbers(4), **LISTS)
    assert list(loader) == [[0, 1], [2, 3]]
    with monkeypatch.context() as patch:
        patch.setattr(MAP, "fetch", wrapped(MAP.fetch, noted))
        assert list(loader) == [[0, 1, "noted"], [2, 3, "noted"]]
    assert list(loader) == [[0, 1], [2, 3]]


def test_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_memory, "_pin_memory_loop", lambda *arguments: None)
    found = functools.partial(replaced_parts, streams=False, worker_processes=True)
    assert found(workers=2, pins=True) == ["torch.utils.data._utils.pin_memory._pin_memory_loop"]
    assert found(workers=2, pins=False) == []


def test_torchs_own_parts_are_known() -> None:
    assert not fetcher_is_replaced()
    assert not torch_looks_on()
    for workers, streams in itertools.product((0, 2), (False, True)):
        options = {"streams": streams, "worker_processes": workers > 0, "workers": workers}
        assert replaced_parts(**options, pins=True) == []
