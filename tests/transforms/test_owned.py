"""Generators that objects own: which are found, by which path, and that each is bound to samples by any means."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pickle
import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from minato._support.objects import Search
from minato.transforms import rng_memory
from minato.transforms.owned import OwnedGenerators
from minato.transforms.rng import SampleRandomness


class Holder:
    """Any object."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Shifted(random.Random):
    """A subclass that draws as its base does."""

    def shifted(self) -> float:
        return self.random() + 1


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random.Random": (random.Random, lambda it: [it.random(), it.gauss(0, 1), it.getrandbits(70)]),
    "a subclass": (Shifted, lambda it: [it.shifted(), it.gauss(0, 1)]),
    "RandomState": (
        np.random.RandomState,
        lambda it: [it.rand(), it.randn(), *it.permutation(5), it.randint(1 << 40)],
    ),
    "RandomState of PCG64": (
        lambda: np.random.RandomState(np.random.PCG64()),
        lambda it: [it.rand(), it.randn()],
    ),
    **{
        name: (
            functools.partial(lambda name: np.random.Generator(getattr(np.random, name)()), name),
            lambda it: [it.random(), *it.normal(size=3), it.integers(99), it.random(dtype="f4")],
        )
        for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    },
    "a bare PCG64": (
        np.random.PCG64,
        lambda it: [it.random_raw(), np.random.Generator(it).normal()],
    ),
    "torch": (
        torch.Generator,
        lambda it: [*torch.randn(3, generator=it).tolist(), it.initial_seed()],
    ),
}


@pytest.fixture(params=["memory", "calls"])
def means(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where states are kept is known, or not."""
    if request.param == "calls":
        for name in ("_python_position_offset", "_numpy_gauss_offset", "_pcg64_order"):
            monkeypatch.setattr(rng_memory, name, lambda: None)
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_bound(kind: str, means: str) -> None:
    make, draw = KINDS[kind]
    drawn = []
    for history in (0, 3):
        holder = Holder(inner=make())
        if kind == "torch":
            holder.inner.manual_seed(7)
        for _ in range(history):
            draw(holder.inner)
        before = draw_state(holder.inner)
        randomness = bound_to(holder)
        found = []
        with randomness.saved():
            for sample in (0, 1, 0, 2):
                randomness.bind(1, sample)
                found.append(draw(holder.inner))
            state = pickle.dumps(randomness.capture())
            following = draw(holder.inner)
            randomness.bind(1, 9)
            randomness.mark()
            marked = draw_state(holder.inner)
            assert not randomness.drawn()
            draw(holder.inner)
            assert randomness.drawn()
            randomness.rewind()
            assert draw_state(holder.inner) == marked
            randomness.restore(pickle.loads(state))
            assert draw(holder.inner) == following
        assert draw_state(holder.inner) == before
        assert found[0] == found[2]
        assert len({tuple(each) for each in found}) == 3
        drawn.append(found)
    assert drawn[0] == drawn[1]
    KNOWN.setdefault(kind, drawn[0])
    assert KNOWN[kind] == drawn[0]  # by either means


KNOWN: dict[str, Any] = {}


def draw_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    if isinstance(generator, np.random.BitGenerator):
        return pickle.dumps(generator.state)
    return generator.get_state().tolist()


def bound_to(holder: Any) -> SampleRandomness:
    return SampleRandomness(5, owned=OwnedGenerators({"dataset": holder}))


MODULES_OWN = np.random.default_rng(0)


class Slotted:
    __slots__ = ("generator", "unset")
    shared = random.Random(0)

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def draw(self) -> float:
        return sum(MODULES_OWN.random() for _ in range(2))


def closing_over(generator: Any) -> Callable[[], float]:
    def draw(more: Any = generator) -> float:
        return float(generator.random()) + float(MODULES_OWN.random())

    return draw


def path_names(owned: OwnedGenerators) -> list[str]:
    return [name.split(" ")[0] for name in owned.names]


def paths(thing: Any) -> list[str]:
    return path_names(OwnedGenerators({"it": thing}))


def test_where_generators_are_found() -> None:
    one = random.Random(0)
    here = __name__
    assert paths(one) == ["it"]
    assert paths(Holder(a=[0, {"b": (Holder(c=one), one)}])) == ["it.a[1]['b'][1]"]
    assert paths(OrderedDict(a=deque([one]))) == ["it['a'][0]"]
    assert paths(functools.partial(print, 1, key=one)) == ["it.keywords['key']"]
    assert paths(defaultdict(functools.partial(print, one))) == ["it.default_factory.args[0]"]
    assert paths(SimpleNamespace(a=one)) == ["it.a"]
    assert paths(functools.partial(one.random)) == ["it.func.__self__"]
    assert paths([math.sqrt, dict.fromkeys, print]) == []
    here_only = threading.local()
    here_only.rng = one
    assert paths(Holder(a=here_only)) == ["it.a.rng"]
    assert paths(Holder(rng=one).__init__) == ["it.__self__.rng"]
    assert paths(closing_over(one)) == ["it.generator", f"{here}.MODULES_OWN"]
    assert paths(Slotted()) == [f"{here}.Slotted.shared", f"{here}.MODULES_OWN", "it.generator"]
    assert paths(torch.nn.ModuleList([Wrapped(one)])) == ["it._modules['0'].rng"]
    cycle = Holder(rng=one)
    cycle.itself = cycle
    assert paths(cycle) == ["it.rng"]
    globals_ = [random._inst, np.random.mtrand._rand, torch.default_generator]
    assert paths([*globals_, random.SystemRandom(), "rng", None]) == []


_MADE_LATER: Any = None


class Pipeline:
    """What a glance looks at again: attributes, items, a class's own attributes, functions and what these name."""

    shared: Any = None

    def __init__(self) -> None:
        self.rng: Any = None
        self.items: list[Any] = [0, "a", [1.5]]
        self.steps: Any = (lambda index: _MADE_LATER, functools.partial(print, 1), Holder(a={}))


LATER: list[tuple[Callable[[Pipeline], None], list[str]]] = [
    (lambda it: setattr(it, "rng", random.Random(0)), ["it.rng"]),
    (lambda it: it.items.append({"rng": random.Random(0)}), ["it.items[3]['rng']"]),
    (lambda it: it.items[2].append(np.random.default_rng(0)), ["it.items[2][1]"]),
    (lambda it: setattr(it.steps[2], "a", torch.Generator()), ["it.steps[2].a"]),
    (lambda it: setattr(it, "rng", SimpleNamespace(of=random.Random(0))), ["it.rng.of"]),
    (
        lambda it: setattr(it, "rng", closing_over(random.Random(0))),
        ["it.rng.generator", f"{__name__}.MODULES_OWN"],
    ),
]


@pytest.mark.parametrize(("change", "found"), LATER)
def test_a_generator_that_comes_later_is_found(
    change: Callable[[Pipeline], None], found: list[str]
) -> None:
    it = Pipeline()
    owned = OwnedGenerators({"it": it})
    assert not owned.look()
    change(it)
    assert owned.look()
    assert path_names(owned) == found


def test_a_generator_that_a_class_or_a_module_gets_later_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owned = OwnedGenerators({"it": Pipeline()})
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "shared", random.Random(0))
        assert owned.look()
        assert path_names(owned) == [f"{__name__}.Pipeline.shared"]
    assert owned.look()  # it is gone
    assert path_names(owned) == []
    assert not owned.look()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "_MADE_LATER", random.Random(0))
        assert owned.look()
        assert path_names(owned) == [f"{__name__}._MADE_LATER"]


def test_a_generator_that_a_closure_of_a_class_gets_later_is_found() -> None:
    generator: Any = None

    class Closing(Pipeline):
        def draw(self) -> Any:
            return generator

    it = Closing()
    owned = OwnedGenerators({"it": it})
    assert not owned.look()
    generator = random.Random(0)
    assert owned.look()
    assert path_names(owned) == paths(it) != []


def structure(draw: random.Random, depth: int = 0) -> Any:
    """Containers and objects in each other, some of them large."""
    size = draw.choice((0, 1, 2, 3, 40, 1030) if depth < 2 else (1, 2))
    kind = draw.choice((list, tuple, dict, Holder, deque, None) if depth < 4 else (None,))
    if kind is None:
        return draw.choice((1, 2.5, "text", None, np.zeros(2)))
    part = structure(draw, depth + 1)
    parts = [structure(draw, depth + 1) for _ in range(min(size, 3))] + [part] * max(size - 3, 0)
    if kind is Holder:
        return Holder(**{f"a{k}": each for k, each in enumerate(parts[:5])})
    return kind(enumerate(parts) if kind is dict else parts)


def put_somewhere(draw: random.Random, thing: Holder, value: Any) -> None:
    """Put a value into a list, dictionary or object somewhere in a structure."""
    places: dict[int, Any] = {}
    waiting: list[Any] = [thing]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Holder):
            each = vars(each)
        if id(each) not in places and isinstance(each, (list, tuple, dict, deque)):
            places[id(each)] = each
            waiting += each.values() if isinstance(each, dict) else each
    place = draw.choice([each for each in places.values() if not isinstance(each, tuple)])
    if isinstance(place, dict):
        place["later"] = value
    else:
        place.append(value)


def test_what_is_found_later_is_what_a_search_finds() -> None:
    num_found = 0
    for seed in range(300):
        draw = random.Random(seed)
        thing = Holder(root=structure(draw))
        owned = OwnedGenerators({"it": thing})
        assert not owned.look()
        put_somewhere(draw, thing, draw.choice((random.Random(0), 7, Holder(a=1), [thing])))
        changed = owned.look()
        assert path_names(owned) == paths(thing)
        assert changed == bool(owned.names)
        num_found += changed
    assert num_found > 20


def test_what_stays_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_others = 300
    for number in range(num_others):  # other datasets of the program
        other = type(f"Other{number}", (), {"named": lambda self: MODULES_OWN})
        plain = type(f"Plain{number}", (), {"named": lambda self: paths})
        assert (paths(other()), paths(plain())) == ([f"{__name__}.MODULES_OWN"], [])

    class Later(Pipeline):
        """A class that no search has met, with functions that have variables of their own."""

        def __init__(self) -> None:
            super().__init__()

        @torch.no_grad()
        def step(self) -> None: ...

        @functools.cached_property
        def size(self) -> int:
            return len(str(num_others))

    it = dataclasses.dataclass(Later)()
    owned = OwnedGenerators({"it": it})

    monkeypatch.setattr(Search, "run", Mock(side_effect=AssertionError("a search began")))
    it.items, it.rng = [1, 2, "b", [2.5, 3]], 7  # other values of kinds that were there
    assert not owned.look()
    it.rng = FastRandom()
    with pytest.raises(AssertionError, match="a search began"):
        owned.look()


def test_many_objects_that_stay_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are alike a search looks into some; others that come in their place are looked into."""
    # Not getLogger(): that knows all loggers of this process, whose number depends on what was imported.
    it = Holder(parts=[Holder(a=[k]) for k in range(200)], log=logging.Logger("it"))
    it.layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(100)))
    owned = OwnedGenerators({"it": it})
    with monkeypatch.context() as patch:
        patch.setattr(Search, "run", Mock(side_effect=AssertionError("a search began")))
        assert not owned.look()
        it.parts[3].a[0] = it.parts[150].a[0] = "other"
        assert not owned.look()
    del it.parts[150:]
    it.parts += [Holder(a=random.Random(0)) for _ in range(50)]
    del it.parts[:140]
    assert owned.look() == bool(paths(it))
    assert path_names(owned) == paths(it) != []


class Wrapped(torch.nn.Module):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng


def test_long_lists_of_data_are_not_walked() -> None:
    data = Holder(samples=[("path", i) for i in range(100_000)], rng=random.Random(0))
    assert paths(data) == ["it.rng"]
    assert paths([Holder(rng=random.Random(i)) for i in range(100)]) == [
        f"it[{i}].rng" for i in range(100)
    ]


class Watchful(dict):  # type: ignore[type-arg]
    """A container and an object that must not be asked anything."""

    def __refuse(self, *args: Any) -> Any:
        raise AssertionError("code of the user's ran")

    items = values = keys = __iter__ = __len__ = __bool__ = __getitem__ = __refuse  # type: ignore[assignment]
    __getattr__ = __eq__ = __hash__ = __refuse  # type: ignore[assignment]


def test_the_walk_runs_no_code_of_the_objects() -> None:
    watchful = Watchful(a=random.Random(0))
    vars(watchful)["b"] = random.Random(0)
    assert paths(watchful) == ["it['a']", "it.b"]


class FastRandom:
    """As a library's generator in C++: without attributes."""

    __slots__ = ()


class Rolled(random.Random):
    """Its state is none that ``random`` knows."""

    def random(self) -> float:
        return 0.5


def test_what_cannot_be_bound_is_named() -> None:
    owned = OwnedGenerators({"it": Holder(a=FastRandom(), b=Rolled(), c=random.Random(0))})
    assert owned.others == [f"it.a ({__name__}.FastRandom)", f"it.b ({__name__}.Rolled)"]
    assert len(owned.generators) == 1


def test_an_attribute_that_holds_another_generator_is_followed() -> None:
    holder = Holder(rng=np.random.default_rng(0))
    randomness = bound_to(holder)
    with randomness.saved():
        randomness.bind(0, 1)
        expected = holder.rng.random()
        holder.rng = np.random.default_rng(9)
        randomness.bind(0, 1)
        assert holder.rng.random() == expected
        holder.rng = None
        randomness.bind(0, 1)
        holder.rng = np.random.default_rng(8)
        assert randomness.look()
        randomness.bind(0, 1)
        assert holder.rng.random() == expected
        assert not randomness.look()
