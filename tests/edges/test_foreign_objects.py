"""Objects of the user's that raise wherever they are asked: what torch's loader does with them, minato's does.

Each object raises in one of its special methods, by an exception or by a recursion without end. It is the dataset, the
sampler, the batch sampler, ``collate_fn``, a sample, or an attribute of one of these.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import minato
from minato import DataLoader
from minato._support.objects import nbytes_of
from minato.engine.pools import large_containers
from minato.transforms.owned import OwnedGenerators
from tests.behaviour.states import plain
from tests.datasets import TOO_MANY_WORKERS, Numbers
from tests.pairwise import pairwise
from tests.selection import mostly_slow

pytestmark = pytest.mark.filterwarnings(TOO_MANY_WORKERS)

TorchLoader = torch.utils.data.DataLoader


class Strange(Exception):
    """No exception that anybody expects."""


def raises(self: Any, *arguments: Any, **named: Any) -> Any:
    raise Strange


def recurses(self: Any, *arguments: Any, **named: Any) -> Any:
    return recurses(self, *arguments, **named)


def but_for_python(refuse: Callable[..., Any]) -> Callable[..., Any]:
    """As ``__getattribute__``: refuses names but those that Python itself asks for."""

    def get(self: Any, name: str) -> Any:
        if name in ("__class__", "__dict__", "__reduce_ex__", "__reduce__", "__getstate__"):
            return object.__getattribute__(self, name)
        return refuse(self, name)

    return get


def missing(refuse: Callable[..., Any]) -> Callable[..., Any]:
    """As ``__getattr__``: refuses names, but for those with underscores, as pickle and copy need it."""

    def get(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse(self, name)

    return get


def class_that(name: str, how: str) -> type:
    """A class whose instances raise in one special method."""
    refuse: Any = raises if how == "raises" else recurses
    members: dict[str, Any] = {name: refuse}
    kind: type = type
    if name in ("__class__", "__dict__"):
        members = {name: property(refuse)}
    elif name == "__getattribute__":
        members = {name: but_for_python(refuse)}
    elif name == "__getattr__":
        members = {name: missing(refuse)}
    elif name == "__eq__":
        members["__hash__"] = object.__hash__
    elif name == "metaclass":
        names = "__instancecheck__ __subclasscheck__ __eq__ __hash__ __repr__"
        kind, members = type("Metaclass", (type,), dict.fromkeys(names.split(), refuse)), {}
    elif name == "properties":
        names = "state_dict epoch generator sampler batch_sampler rank transforms nbytes to pin_memory size"
        members = {each: property(refuse) for each in names.split()}
    return kind("Odd", (), {"__module__": __name__, **members})  # type: ignore[no-any-return]


SPECIAL = """
    repr str class dict eq hash len bool getattr getattribute del reduce iter sizeof getitem format contains index call
"""
NAMES = ["metaclass", "properties", *(f"__{name}__" for name in SPECIAL.split())]


class Holds(Numbers):
    """A dataset with an object in each of its containers."""

    def __init__(self, odd: Any) -> None:
        super().__init__(6)
        self.odd = odd
        self.listed = [odd, {"key": odd}, (odd, [odd])]
        self.named = {"one": odd, 2: [odd]}


class Gives(Numbers):
    """Its samples are, or hold, an object."""

    def __init__(self, make: type) -> None:
        super().__init__(6)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return {"odd": self.make(), "index": index}


def indices(samples: list[Any]) -> list[Any]:
    return [sample["index"] for sample in samples]


def with_base(odd: type, base: type) -> Any:
    """An instance of a class that raises, and that otherwise is like another one."""
    kind: Any = type(odd)("Odd", (odd, base), {"__module__": __name__})
    return kind


class Order:
    """A sampler, which asks itself nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter([3, 1, 2])

    def __len__(self) -> int:
        return 3


class Batches(Order):
    def __iter__(self) -> Iterator[Any]:
        return iter([[3, 1], [2]])


class Collates:
    def __call__(self, samples: list[Any]) -> list[Any]:
        return [samples]


ROLES: dict[str, Callable[[type], tuple[Any, dict[str, Any]]]] = {
    "attribute": lambda odd: (Holds(odd()), {}),
    "class of an attribute": lambda odd: (Holds(odd), {}),
    "dataset": lambda odd: (with_base(odd, Numbers)(6), {}),
    "sampler": lambda odd: (Numbers(6), {"sampler": with_base(odd, Order)()}),
    "batch sampler": lambda odd: (Numbers(6), {"batch_sampler": with_base(odd, Batches)()}),
    "collate_fn": lambda odd: (Numbers(6), {"collate_fn": with_base(odd, Collates)()}),
    "sample": lambda odd: (Gives(odd), {"collate_fn": indices}),
}
LOADERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "compat": {"compat": "torch"},
    "threads": {"num_workers": 1, "workers": "thread"},
    "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
}


def outcome(make: Any, odd: type, role: str, **options: Any) -> Any:
    """The batches of an epoch, or the type of the error."""
    try:
        dataset, arguments = ROLES[role](odd)
        if "batch_sampler" not in arguments:
            options["batch_size"] = 2
        return plain(make(dataset, **arguments, **options))
    except Exception as error:
        return type(error).__name__


CASES = list(itertools.product(NAMES, ("raises", "recurses"), ROLES))


def differing(cases: list[Any], loaders: list[str]) -> list[Any]:
    found = []
    for name, how, role in cases:
        odd = class_that(name, how)
        expected = outcome(TorchLoader, odd, role)
        seen = {each: outcome(DataLoader, odd, role, **LOADERS[each]) for each in loaders}
        if any(each != expected for each in seen.values()):
            found.append((name, how, role, seen, expected))
    return found


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``__del__`` raises is not of interest."""
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)


SOME = random.Random(3).sample(CASES, 70)


@mostly_slow(
    ("cases", "few"),
    [(SOME, SOME[:5]), (pairwise(CASES), random.Random(4).sample(CASES, 60))],
    ids=["some", "all"],
)
def test_what_raises_is_torchs_affair(cases: list[Any], few: list[Any]) -> None:
    assert differing(cases, ["inline", "threads"]) == []
    assert differing(few, ["fork", "compat"]) == []


@pytest.mark.parametrize("how", ["raises", "recurses"])
@pytest.mark.parametrize("name", NAMES)
def test_no_search_asks_an_object(name: str, how: str) -> None:
    """Whatever raises, the generator beside it is found."""
    odd = class_that(name, how)
    dataset: Any = Holds(odd())
    dataset.known = [odd, odd(), {"rng": random.Random(0)}]
    assert OwnedGenerators({"it": dataset}).names == ["it.known[2]['rng'] (random.Random)"]
    dataset.words = ["word"] * 60_000
    assert [path for *_, path in large_containers(dataset)] == ["dataset.words"]
    minato.share(dataset)
    assert isinstance(dataset.words, minato.SharedList)
    assert nbytes_of([odd(), {"odd": odd(), "one": 1}]) == 8


WRAPS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda made: [made],
    "tuples": lambda made: (made, 1),
    "dictionaries": lambda made: {"within": made},
    "partial functions": functools.partial(functools.partial, print),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_depth_and_cycles_end_no_search(wrap: Callable[[Any], Any]) -> None:
    made: Any = random.Random(0)
    for _ in range(100_000):
        made = wrap(made)
    dataset: Any = Holds(made)
    dataset.rng = random.Random(0)
    dataset.cycle = [dataset, {"cycle": dataset.listed}]
    dataset.cycle.append(dataset.cycle)
    assert OwnedGenerators({"it": dataset}).names == ["it.rng (random.Random)"]
    assert large_containers(dataset) == []
    nbytes_of([dataset.odd, dataset.cycle])
    dataset.rng = None  # which threads would share
    for options in LOADERS.values():
        assert len(list(DataLoader(dataset, 3, **options))) == 2


class Changing(Numbers):
    """Threads change what it holds."""

    def __init__(self) -> None:
        super().__init__(4)
        self.cache: dict[int, Any] = {}
        self.queue: deque[Any] = deque()
        self.rng = random.Random(0)
        self.over = threading.Event()

    def change(self) -> None:
        for k in itertools.count():
            self.cache[k] = self.__dict__[f"kept{k % 50}"] = [k]
            self.queue.append(k)
            if k > 300:
                del self.cache[k - 300]
                self.queue.popleft()
                self.__dict__.pop(f"kept{(k + 25) % 50}", None)
            if self.over.is_set():
                return


def test_threads_that_change_the_dataset_meanwhile_end_no_loader() -> None:
    dataset = Changing()
    thread = threading.Thread(target=dataset.change)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(40):
            assert "it.rng (random.Random)" in OwnedGenerators({"it": dataset}).names
            assert large_containers(dataset) == []
            nbytes_of([dataset.cache, dataset.queue])
            assert [batch.tolist() for batch in DataLoader(dataset, 2)] == [[0, 1], [2, 3]]
    finally:
        dataset.over.set()
        sys.setswitchinterval(before)
        thread.join()


REPLACED = """
    random.random random.seed random.getrandbits builtins.open numpy.random.rand numpy.random.default_rng torch.rand
    os.path.exists os.listdir time.sleep time.time builtins.print pathlib.Path.read_text
"""


class Draws(Numbers):
    def __init__(self) -> None:
        super().__init__(6)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> int:
        return index + int(self.rng.integers(1))


@pytest.mark.parametrize("name", REPLACED.split())
def test_functions_that_a_test_replaces(name: str) -> None:
    dataset = Draws()

    def found(make: Any, **options: Any) -> Any:
        return [batch.tolist() for batch in make(dataset, 2, **options)]

    with mock.patch(name, mock.MagicMock()):
        assert found(DataLoader) == found(TorchLoader) == [[0, 1], [2, 3], [4, 5]]
        assert found(DataLoader, seed=1, shuffle=False) == [[0, 1], [2, 3], [4, 5]]
        assert found(DataLoader, **LOADERS["fork"]) == [[0, 1], [2, 3], [4, 5]]
