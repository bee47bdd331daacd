"""Pinning: torch's rules, and its warnings where nothing can be pinned.

There need not be an accelerator: the functions that torch asks for one are replaced, and a note is taken of each
tensor that would be pinned.
"""

from __future__ import annotations

import collections
import copy
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.delivery import device as copiers
from tests.datasets import Pair, Samples, wait_until
from tests.delivery.recorder import pretend_accelerator
from tests.pairwise import pairwise
from tests.parity.harness import (
    AS_TORCH_IS_NOW,
    WORKERS,
    describe,
    drain,
    each,
    recorded,
    same_for_both,
)
from tests.parity.material import Failing, Mixed, Stream, Tensors, identity
from tests.parity.test_collation import Steps, Stubborn, Words
from tests.selection import mostly_slow

PINNED: list[Any] = []


MOMENTS = ("when their turn has come", "ahead")


@pytest.fixture(params=MOMENTS)
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch believes that it has one; batches of any size, or none of these small ones, are pinned ahead."""
    if request.param == "ahead":
        monkeypatch.setattr(copiers, "_WORTH_A_THREAD_BYTES", 0)

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        PINNED.append((type(tensor).__name__, tensor.dtype, tuple(tensor.shape)))
        return tensor.clone()

    pretend_accelerator(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    # torch's thread for pinning limits its own threads; that is not to be seen here
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def pinned(make: Any, *arguments: Any, **options: Any) -> Any:
    """All batches, and what was pinned for them."""
    PINNED.clear()
    batches = [*make(*arguments, pin_memory=True, **options)]
    return batches, sorted(PINNED, key=str)  # torch pins what arrives first


# ---- without an accelerator -----------------------------------------------------------------


@AS_TORCH_IS_NOW
@each
@mostly_slow("device", ["", "cuda", "sideways", "xpu"], quick=3)
def test_without_an_accelerator_a_warning_says_so(device: str, workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        loader = make(Tensors(5), 2, pin_memory=True, pin_memory_device=device, **workers)
        return [[*loader] for _ in range(2)]  # it comes with each iterator

    same_for_both(case, **own)
    texts = [text for _, text in recorded(case, minato.DataLoader)["warnings"]]
    assert sum("no accelerator is found" in text for text in texts) == 2


def test_without_pinning_its_device_is_of_no_concern() -> None:
    same_for_both(lambda make: [*make(Tensors(3), pin_memory_device="cuda")])


# ---- with one -------------------------------------------------------------------------------


class Slotted:
    """It can be pinned, and remembers that it was."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.pinned = 0

    def pin_memory(self) -> Any:
        self.pinned += 1
        return self


class Other(Slotted):
    """Another object stands for it when it is pinned."""

    def pin_memory(self) -> Any:
        return ["in its place", self.value]


class PinnedDict(dict):
    def pin_memory(self) -> Any:
        return {"by itself": sorted(self)}


RESULTS: dict[str, Any] = {
    "tensor": torch.ones(2, 3),
    "list": [torch.ones(1), torch.zeros(2)],
    "tuple": (torch.ones(1), 3, "text"),
    "named tuple": Pair(torch.ones(1), [torch.ones(2)]),
    "dict": {"a": torch.ones(1), "b": {"c": torch.ones(2, dtype=torch.int16)}},
    "ordered dict": collections.OrderedDict(x=torch.ones(1)),
    "default dict": collections.defaultdict(list, x=[torch.ones(1)]),
    "counter": collections.Counter("abca"),
    "frozen mapping": Stubborn(items={"a": torch.ones(1)}),
    "list with an attribute": Words([torch.ones(1), "text"], "kept"),
    "sequence of the user's": Steps([torch.ones(1), 2]),
    "range": range(3),
    "texts": ["a", b"b"],
    "number": 7,
    "none": None,
    "set": {1, 2},
    "own method": Slotted(torch.ones(1)),
    "own method, another object": Other(5),
    "own method of a dict": PinnedDict(a=1),
    "nested": [{"a": Slotted(1), "b": (Other(2), torch.ones(1))}],
    "sparse": torch.eye(2).to_sparse(),
    "empty": torch.ones(0, 3),
}


class Given:
    def __init__(self, results: list[Any]) -> None:
        self.results = results

    def __call__(self, samples: list[Any]) -> Any:
        return copy.deepcopy(self.results[samples[0]])


@each
def test_everything_is_pinned_by_torchs_rules(accelerator: None, workers: Any, own: Any) -> None:
    names = [name for name in RESULTS if not (name == "sparse" and workers["num_workers"])]
    collate_fn = Given([RESULTS[name] for name in names])

    def case(make: Any) -> Any:
        batches, notes = pinned(make, range(len(names)), collate_fn=collate_fn, **workers)
        return dict(zip(names, batches, strict=True)), notes

    same_for_both(case, **own)


DATASETS: dict[str, Any] = {
    "tensors": Tensors(5),
    "mixed": Mixed(5),
    "texts": Samples(RESULTS["texts"]),
    "stream": Stream(7),
}


@pytest.mark.parametrize(
    ("accelerator", "name", "how"),
    pairwise(itertools.product(MOMENTS, DATASETS, WORKERS)),
    indirect=["accelerator"],
)
def test_batches_of_default_collate(accelerator: None, name: str, how: str) -> None:
    dataset, (workers, own) = DATASETS[name], WORKERS[how]

    def case(make: Any) -> Any:
        return [
            pinned(make, dataset, 2, persistent_workers=persistent, **workers)
            for persistent in {False, workers["num_workers"] > 0}
        ]

    same_for_both(case, **({} if name == "stream" else own))


class Refuses(Slotted):
    def pin_memory(self) -> Any:
        raise LookupError("cannot be pinned")


def refusing(samples: list[Any]) -> Any:
    return Refuses(samples) if samples[0] % 2 else samples


def test_error_of_a_pin_memory_method_and_going_on(accelerator: None) -> None:
    def found(make: Any, **options: Any) -> Any:
        return drain(iter(make(range(5), collate_fn=refusing, pin_memory=True, **options)))

    same_for_both(found)
    # With workers torch says "in pin memory thread" and sends the traceback as text.
    failed = ("raised", "LookupError", "cannot be pinned")
    expected = [failed if number % 2 else describe([number]) for number in range(5)]
    for options in ({}, {"workers": "thread"}):
        assert found(minato.DataLoader, num_workers=2, **options)[:-2] == expected


@each
def test_errors_of_samples_are_not_pinned(accelerator: None, workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        loader = make(Failing(9), 3, collate_fn=identity, pin_memory=True, **workers)
        return drain(iter(loader))

    same_for_both(case, **own)


class Images(Tensors):
    """Larger tensors: two of them are a mebibyte."""

    def __getitem__(self, index: int) -> torch.Tensor:
        # No forked thread pool of torch's.
        return torch.from_numpy(np.full(1 << 17, index, np.float32))


def wait_for_ready_batches(iterator: Any, count: int = 1) -> None:
    """Wait until the next ``count`` batches are complete: not only later ones."""
    wait_until(lambda: len(iterator._source._dispatcher.upcoming(count)) == count)


@pytest.mark.parametrize("dataset", [Tensors(12), Images(12)])
@pytest.mark.parametrize("accelerator", ["when their turn has come"], indirect=True)
def test_who_pins(accelerator: None, monkeypatch: pytest.MonkeyPatch, dataset: Any) -> None:
    """A thread pins large batches before they are asked for, and who asks for them all others."""
    threads: list[str] = []

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    here = threading.current_thread().name
    for workers in (0, 2):
        threads.clear()
        iterator = iter(minato.DataLoader(dataset, 2, num_workers=workers, pin_memory=True))
        for number in range(6):
            if workers:  # the next one is ready, too
                wait_for_ready_batches(iterator, min(2, 6 - number))
            batch = next(iterator)
            assert [int(sample.flatten()[0]) for sample in batch] == [2 * number, 2 * number + 1]
        if workers and isinstance(dataset, Images):
            # The turn of the first one was there before.
            assert sorted(threads) == sorted([here, *["minato-pin_0"] * 5])
        else:
            assert threads == [here] * 6


@pytest.mark.parametrize("accelerator", ["ahead"], indirect=True)
def test_batches_are_pinned_where_there_can_be_no_more_threads(
    accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the main thread has ended, and training goes on in another."""

    def submit(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(copiers.ThreadPoolExecutor, "submit", submit)
    iterator = iter(minato.DataLoader(Tensors(8), 2, num_workers=2, pin_memory=True))
    for number in range(4):
        wait_for_ready_batches(iterator)
        batch = next(iterator)
        assert [int(sample.flatten()[0]) for sample in batch] == [2 * number, 2 * number + 1]


def test_what_is_pinned_ahead_has_not_been_delivered(accelerator: None) -> None:
    loader = minato.DataLoader(Tensors(20), 2, num_workers=2, pin_memory=True)
    iterator = iter(loader)
    for _ in range(3):
        wait_for_ready_batches(iterator)
        next(iterator)
    state = loader.state_dict()
    del iterator  # with a batch that is pinned, or about to be
    again = minato.DataLoader(Tensors(20), 2, num_workers=2, pin_memory=True)
    again.load_state_dict(state)
    assert [int(batch.flatten(1)[0, 0]) for batch in again] == list(range(6, 20, 2))


def test_the_slot_is_free_once_its_batch_is_pinned(accelerator: None) -> None:
    """What is delivered is the pinned copy: holding it keeps no memory of the arena."""
    loader = minato.DataLoader(Tensors(64), 2, num_workers=2, pin_memory=True)
    iterator: Any = iter(loader)
    arena = iterator._source.arena
    kept = [*iterator]
    assert arena.num_leased == 0
    assert [batch[:, 0, 0].tolist() for batch in kept] == [[i, i + 1.0] for i in range(0, 64, 2)]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
@pytest.mark.parametrize(("workers", "own"), WORKERS.values(), ids=WORKERS.keys())
def test_batches_really_are_pinned(workers: Any, own: Any) -> None:
    loader = minato.DataLoader(Mixed(5), 2, pin_memory=True, **workers, **own)
    for batch in loader:
        assert batch["image"].is_pinned()
        assert batch["pair"].image.is_pinned()
