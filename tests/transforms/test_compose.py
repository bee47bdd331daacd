from __future__ import annotations

import functools
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minato.transforms.compose import Transforms


def double(value: int) -> int:
    return 2 * value


class Add:
    def __init__(self, what: int) -> None:
        self.what = what

    def __call__(self, value: int) -> int:
        return value + self.what

    def method(self, value: int) -> int:
        return value - self.what


_TORCHVISION = """
import torch

class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value

class ModuleCompose(torch.nn.Module):
    def __init__(self, transforms):
        super().__init__()
        self.transforms = transforms

    forward = Compose.__call__
"""
"""Stands for torchvision, whose two classes call their transforms in turn."""

_STAND_IN: dict[str, Any] = {"__name__": "torchvision.transforms.transforms"}
exec(_TORCHVISION, _STAND_IN)
Compose: Any = _STAND_IN["Compose"]
ModuleCompose: Any = _STAND_IN["ModuleCompose"]


@pytest.fixture(autouse=True)
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix, kind in (("", Compose), (".v2", ModuleCompose)):
        name = f"torchvision.transforms{suffix}"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Compose=kind))


class RandomApply(Compose):  # type: ignore[misc]  # a stand-in
    def __call__(self, value: Any) -> Any:
        return super().__call__(value) if random.random() < 0.5 else value


class StopsAtNone:
    """As the ``Compose`` of OpenMMLab's packages."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = None if value is None else transform(value)
        return value


StopsAtNone.__name__ = StopsAtNone.__qualname__ = "Compose"


def with_setting(kind: Any = Compose, **settings: Any) -> Any:
    compose = kind([double, double])
    vars(compose).update(settings)
    return compose


def with_hook() -> Any:
    compose = ModuleCompose([double, double])
    compose.register_forward_hook(lambda module, inputs, output: output + 1)
    return compose


def test_no_transforms_leave_the_value() -> None:
    value = object()
    for chain in (Transforms(), Transforms.of(None), Transforms.of([]), Transforms.of(())):
        assert len(chain) == 0
        assert chain.run(value) is value


@pytest.mark.parametrize(
    "container", [list, tuple, lambda steps: SimpleNamespace(transforms=steps)]
)
def test_transforms_run_in_order(container: Any) -> None:
    chain = Transforms.of(container([double, Add(3), double]))
    assert chain.steps[0] is double
    assert chain.run(5) == 26


def test_names_tell_what_runs() -> None:
    steps = {
        "double": double,
        "Add": Add(1),
        "Add.method": Add(1).method,
        "double 2": functools.partial(double),
        "test_names_tell_what_runs.<lambda>": lambda v: v,
        "len": len,
        "ReLU": torch.nn.ReLU(),
    }
    assert Transforms.of([*steps.values()]).names == tuple(steps)
    assert repr(Transforms.of([double, Add(1)])) == "Transforms(double -> Add)"


def test_a_plain_compose_is_replaced_by_its_transforms_at_any_depth() -> None:
    module = ModuleCompose([Add(1), double])
    inner = Compose((double, module))
    for transforms in (Compose([Add(3), inner]), [Add(3), inner], (Compose([Add(3)]), inner)):
        chain = Transforms.of(transforms)
        assert chain.names == ("Add", "double", "Add 2", "double 2")
        assert chain.run(1) == 18


NOT_PLAIN = {
    "RandomApply": RandomApply([double, double]),
    "probability": with_setting(p=0.5),
    "lazy": with_setting(lazy=True, map_items=True),
    "iterator": with_setting(transforms=iter([double])),
    "subclass": type("Compose", (Compose,), {})([double, double]),
    "another library's": StopsAtNone([double, double]),
    "hook": with_hook(),
    "own forward": with_setting(ModuleCompose, forward=double),
}


@pytest.mark.parametrize("element", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_callable_that_is_not_a_plain_compose_stays_one_step(element: Any) -> None:
    assert Transforms.of(element).steps == (element,)
    assert Transforms.of([double, element]).steps == (double, element)


@pytest.mark.parametrize(("kind", "method"), [(Compose, "__call__"), (ModuleCompose, "forward")])
def test_a_compose_whose_method_a_program_has_replaced_stays_one_step(
    kind: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, method, lambda self, value: None)
    element = kind([double, double])
    assert Transforms.of(element).steps == (element,)


def test_a_chain_keeps_its_steps_when_the_users_list_changes() -> None:
    transforms: list[Any] = [double]
    chain = Transforms.of(transforms)
    transforms.append(Add(1))
    assert chain.run(1) == 2


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([double, 3], r"transforms\[1\] is not callable: 3 of type int; pass the instance"),
        ([None], r"transforms\[0\] is not callable: None of type NoneType; leave it out"),
        ([[double]], r"transforms\[0\] is not callable: \[<function double .*of type list"),
        (
            Compose([double, "x"]),
            r"transforms\[0\].transforms\[1\] is not callable: 'x' of type str",
        ),
        (SimpleNamespace(transforms=[1]), r"transforms\[0\] is not callable: 1 of type int"),
        (5, r"must be a list of callables.*not 5 of type int; .*transforms=\[it\]"),
        ("abc", r"not 'abc' of type str"),
        ({"a": double}, r"of type dict"),
        (SimpleNamespace(transforms=3), r"of type SimpleNamespace"),
        (["x" * 10_000], r"is not callable: 'x{76}\.\.\. of type str"),
    ],
)
def test_what_is_not_callable_is_refused_by_name(transforms: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Transforms.of(transforms)
