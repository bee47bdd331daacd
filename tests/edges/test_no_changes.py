"""Methods that look at a loader change nothing: no generator, no sampler, no file, no batch that is still to come."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, get_worker_info
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

import minato
from minato import DataLoader, Record, StragglerPolicy
from tests.behaviour.states import Stateful
from tests.datasets import InOrder, Numbers, forked

SIZE, BATCH = 14, 4


class Owning(Numbers):
    """Draws from the three global generators and from two of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.torchs = torch.Generator().manual_seed(1)
        self.numpys = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        own = float(torch.rand((), generator=self.torchs)), float(self.numpys.random())
        return index, random.random(), float(np.random.random()), float(torch.rand(())), *own


class Drawing(InOrder):
    """Draws each index from another generator, as it is asked for."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.numpys = np.random.default_rng(3)
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        for number in range(SIZE):
            drawn = (
                int(self.numpys.integers(SIZE)),
                random.randrange(SIZE),
                int(np.random.randint(SIZE)),
                int(torch.randint(SIZE, (), generator=self.generator)),
                int(torch.randint(SIZE, ())),
            )
            yield drawn[number % len(drawn)]


class Going(Stateful, InOrder):
    """Goes on from where its last iterator ended, and keeps that as its state."""

    kept = ("start",)
    start = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(SIZE):
            self.start += 1
            yield (self.start + number) % SIZE


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": dict,
    "default": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": generator()},
    "seed": lambda: {"shuffle": True, "seed": 5},
    "distributed": lambda: {"sampler": DistributedSampler(range(SIZE), 1, 0)},
    "replacement": lambda: {"sampler": RandomSampler(range(SIZE), True, 20, generator())},  # type: ignore[arg-type]
    "subset": lambda: {"sampler": Subset(range(9), generator())},
    "weighted": lambda: {"sampler": Weighted([1.0] * SIZE, 9, generator=generator())},
    "drawing": lambda: {"sampler": Drawing()},
    "going": lambda: {"sampler": Going(SIZE)},
    "cost": lambda: {
        "batch_sampler": minato.CostBatchSampler(range(1, SIZE + 1), 30, seed=2, pool=6)
    },
    "list": lambda: {"sampler": [3, 1, 2, 0, 7, 5]},
    "alone": lambda: {"batch_size": None, "shuffle": True, "seed": 5},
}
WORKERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "compat": {"num_workers": 0, "compat": "torch"},
    "processes": forked(2),
    "persistent": {**forked(2), "persistent_workers": True},
}


def headroom(loader: Any) -> None:
    assert len(list(loader.headroom(2))) >= 4


def refused_state(loader: Any) -> None:
    state = loader.state_dict()
    state["loader"] = {**state["loader"], "dataset_length": SIZE + 1}
    with pytest.raises(ValueError, match="belongs to another loader"):
        loader.load_state_dict(state)


def with_state(loader: Any) -> None:
    """The state that it has already; copies take it, and are iterated."""
    other = copy.deepcopy(loader)
    other.load_state_dict(other.state_dict())


LOOKS: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "repr": repr,
    "state_dict": lambda loader: loader.state_dict(),
    "report": lambda loader: str(loader.report()),
    "metrics": lambda loader: loader.metrics(),
    "metrics_url": lambda loader: loader.metrics_url,
    "coverage": lambda loader: loader.coverage(),
    "slow_samples": lambda loader: str(loader.slow_samples()),
    "reproduce": lambda loader: loader.reproduce(1, seed=3),
    "headroom": headroom,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "from_torch": DataLoader.from_torch,
    "consumers": lambda loader: loader.consumers(2),
    "refused state": refused_state,
    "state of a copy": with_state,
}


class Bench:
    """A loader of one kind, and all that must stay as it is."""

    def __init__(self, order: str, workers: str, folder: Path) -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        folder.mkdir()
        self.folder = folder
        self.dataset = Owning(SIZE)
        files = {
            "recording": Record(folder / "order.jsonl"),
            "errors": minato.ErrorPolicy(log=folder / "log.jsonl"),
            "stragglers": StragglerPolicy(history=folder / "costs"),
        }
        given = {"batch_size": 1 if order == "cost" else BATCH, **files, **ORDERS[order]()}
        if workers == "compat":
            given.pop("seed", None)
        self.loader: Any = DataLoader(self.dataset, **given, **WORKERS[workers])

    def state(self) -> Any:
        """What must not change."""
        sampler = self.loader.batch_sampler or self.loader.sampler
        inner = getattr(sampler, "sampler", sampler)
        generators = [self.loader.generator, getattr(inner, "generator", None), self.dataset.torchs]
        numpys = [self.dataset.numpys, getattr(inner, "numpys", None)]
        return (
            random.getstate(),
            pickle.dumps(np.random.get_state()),
            torch.get_rng_state().tolist(),
            [each and each.get_state().tolist() for each in generators],
            [each and each.bit_generator.state for each in numpys],
            [getattr(each, "epoch", None) for each in (sampler, inner)],
            getattr(inner, "start", None),
            {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()},
        )

    def run(self, look: Callable[[Any], Any] | None) -> list[Any]:
        """Three epochs, with a look before the first, in the middle of the second, and before the last."""
        content: list[Any] = []

        def looked() -> None:
            if look is not None:
                before = self.state()
                look(self.loader)
                assert self.state() == before

        looked()
        content += self.loader
        iterator = iter(self.loader)
        content.append(next(iterator))
        looked()
        content += iterator
        looked()
        content += self.loader
        with contextlib.suppress(AttributeError):
            self.loader.close()
        return [
            [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]
            for batch in content
        ]


def check(order: str, workers: str, looks: list[str], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    untouched = Bench(order, workers, folder / "untouched").run(None)
    for number, name in enumerate(looks):
        if order == "going" and name == "state of a copy":
            continue  # the rest of a state that is its sampler's
        if workers == "persistent" and name in ("deepcopy", "pickle", "state of a copy"):
            continue  # the iterator that it keeps can be neither, as torch's
        seen = Bench(order, workers, folder / str(number)).run(LOOKS[name])
        assert seen == untouched, name


CASES = list(itertools.product(ORDERS, WORKERS))


@pytest.mark.parametrize(("order", "workers"), random.Random(3).sample(CASES, 4))
def test_looking_changes_nothing(order: str, workers: str, tmp_path: Path) -> None:
    looks = sorted({"headroom", *random.Random(f"{order} {workers}").sample([*LOOKS], 3)})
    check(order, workers, looks, tmp_path)


@pytest.mark.parametrize("look", LOOKS)
def test_no_look_changes_anything_without_workers(look: str, tmp_path: Path) -> None:
    check("default", "inline", [look], tmp_path / "default")
    check("seed", "inline", [look], tmp_path / "seed")


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_no_look_changes_anything(workers: str, tmp_path: Path) -> None:
    for order in ORDERS:
        alone = WORKERS[workers]["num_workers"] == 0
        looks = ["headroom", *random.Random(order).sample([*LOOKS], 4 if alone else 0)]
        (tmp_path / order).mkdir()
        check(order, workers, looks, tmp_path / order)


class Rows(Numbers):
    """Numbers, and data as attributes of each kind."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.texts, self.array, self.pair = ["a text"] * 2000, np.zeros(3), (1, "a")
        self.few, self.names = [1, None, 2.0], {"a": 1, "b": "c"}


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.rows, self.names = list(range(SIZE)), {"a": 1}

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(self.rows if info is None else self.rows[info.id :: info.num_workers])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_a_dataset_gets_no_dictionary(kind: type, num_workers: int) -> None:
    """Until Python 3.12 each of its attributes would take a quarter longer from then on, also in another loader."""
    dataset: Any = kind()
    loader = DataLoader(dataset, BATCH, num_workers=num_workers)
    for _ in range(2):
        assert sum(map(len, loader)) == SIZE
        loader.state_dict()
        loader.report()
    held = [each for each in gc.get_referents(dataset) if type(each) is dict]
    assert all(each is dataset.names for each in held)


def test_headroom_refuses_a_sampler_that_it_would_change() -> None:
    class Once(Drawing):
        def __deepcopy__(self, memo: object) -> Any:
            raise RuntimeError("only one")

    loader = DataLoader(Numbers(SIZE), BATCH, sampler=Once())
    with pytest.raises(ValueError, match=r"a Once cannot be copied \(RuntimeError: only one\)"):
        list(loader.headroom())
