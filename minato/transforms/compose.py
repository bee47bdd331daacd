"""The transforms of a sample, as one list: a worker can stop between any two of them, and resume there.

Programs that build loaders from a loader's parts see them as a part of its ``collate_fn``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, default_convert

from minato._support.values import short, text_of, type_name

Step = Callable[[Any], Any]
_STAGES = ("dataset", "samples", "collate and copy")
"""Stages that are no transforms, whose names are taken."""
_MOST_PARTIALS = 16

_COMPOSES = {"torchvision.transforms": "__call__", "torchvision.transforms.v2": "forward"}
"""Modules whose ``Compose`` is known, and the method that calls its transforms."""


class Transforms:
    """Transforms applied, in order, to what ``dataset[i]`` returned.

    Args:
        steps: The transforms, each a callable of one argument. Use :meth:`of` for user input.
        names: Those of another list, of which these are a part; None: made here.

    Attributes:
        names: A readable name of each, different from all others and from those of the other stages. Workers, reports,
            metrics, failures and slow samples all have these names.
    """

    __slots__ = ("names", "steps")

    def __init__(self, steps: tuple[Step, ...] = (), names: tuple[str, ...] | None = None) -> None:
        self.steps = steps
        self.names = _names(steps) if names is None else names

    @classmethod
    def of(cls, transforms: Any) -> Transforms:
        """Make the list from the argument ``transforms=``; TypeError: an element is not callable.

        Args:
            transforms: ``None``; a list or tuple of callables; a plain container with a list ``.transforms``; or one
                callable. Torchvision's two ``Compose``, at any depth, are replaced by their transforms. Any other
                callable is one transform, whatever its name and attributes are: a subclass, or the ``Compose`` of
                another library.
        """
        if transforms is None:
            return cls()
        elements = transforms
        if not isinstance(elements, (list, tuple)):
            is_one = callable(transforms)
            elements = [transforms] if is_one else getattr(transforms, "transforms", None)
        if not isinstance(elements, (list, tuple)):
            raise TypeError(
                "transforms must be a list of callables, or an object with a list .transforms, "
                f"not {_show(transforms)}; for one transform, pass transforms=[it]"
            )
        steps: list[Step] = []
        for position, element in enumerate(elements):
            _append(steps, element, f"transforms[{position}]")
        return cls(tuple(steps))

    @property
    def by_name(self) -> dict[str, Step]:
        """The transforms by name; the names stay the same if a cache takes over the first ones."""
        length = len(self.steps)
        return {f"transforms[{i - length}]": step for i, step in enumerate(self.steps)}

    def after(self, count: int) -> Transforms:
        """Return the transforms without the first ``count``; the others keep their names."""
        return Transforms(self.steps[count:], self.names[count:])

    def run(self, value: object) -> Any:
        """Return ``value`` after all transforms."""
        for _number, step in enumerate(self.steps):  # failed_step() reads the number
            value = step(value)
        return value

    def failed_step(self, error: BaseException) -> str | None:
        """Return the name of the transform that raised an exception; None if none of these did."""
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_code is Transforms.run.__code__ and frame.f_locals["self"] is self:
                name: str = self.names[frame.f_locals["_number"]]
                return name
            trace = trace.tb_next
        return None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"Transforms({' -> '.join(self.names)})"


def _append(steps: list[Step], element: Any, where: str) -> None:
    if _is_plain_compose(element):
        for position, inner in enumerate(element.transforms):
            _append(steps, inner, f"{where}.transforms[{position}]")
    elif callable(element):
        steps.append(element)
    else:
        remedy = "pass the instance or function that transforms a sample"
        if element is None:
            remedy = "leave it out of the list"
        raise TypeError(f"{where} is not callable: {_show(element)}; {remedy}")


def _is_plain_compose(element: object) -> bool:
    """Return whether ``element`` is one of torchvision's ``Compose``, which call their transforms in order.

    A name or an attribute is no proof: other libraries stop at None, draw, or wrap the calls. Whatever the program has
    added to torchvision's own (hooks, methods, settings) counts, too.
    """
    kind = type(element)
    for module, method in _COMPOSES.items():
        if kind is not getattr(sys.modules.get(module), "Compose", None):
            continue
        function = vars(kind).get(method)
        state = vars(element)
        # An nn.Module has `training`, and attributes with an underscore, hooks among them.
        settings = {name for name in state if name != "training" and not name.startswith("_")}
        return (
            getattr(function, "__module__", "").partition(".")[0] == "torchvision"
            and settings == {"transforms"}
            and isinstance(state["transforms"], (list, tuple))
            and not any(hooks for name, hooks in state.items() if name.endswith("_hooks"))
        )
    return False


def _names(steps: tuple[Step, ...]) -> tuple[str, ...]:
    """Return a name of each transform; those that repeat have a number: Resize, Resize 2."""
    names: dict[str, None] = dict.fromkeys(_STAGES)
    for step in steps:
        name = unique = _name(step)
        number = 1
        while unique in names:
            number += 1
            unique = f"{name} {number}"
        names[unique] = None
    return tuple(names)[len(_STAGES) :]


def _name(step: object) -> str:
    for _ in range(_MOST_PARTIALS):
        if type(step) is not functools.partial:
            break
        step = step.func
    name: object = None
    with contextlib.suppress(Exception):  # the attributes of a user's object
        name = getattr(step, "__qualname__", None)
    if not isinstance(name, str) or not name:
        return type_name(step, full=True).replace("<locals>.", "")
    return short(name.replace("<locals>.", ""))


def _show(value: object) -> str:
    return f"{short(text_of(value), 80)} of type {type_name(value)}"


CollateFn = Callable[[Any], Any]


class _State(threading.local):
    transformed = False  # what is being collated went through the transforms


_state = _State()


class TransformingCollate:
    """Applies a loader's transforms, then its ``collate_fn``: torch's loader knows no ``transforms=``.

    Programs take ``loader.dataset`` and ``loader.collate_fn`` and make another loader from them, which would
    otherwise return samples without transforms. Inside the loader itself, :attr:`inside` takes its place: it collates
    samples that went through the transforms, even if ``collate_fn`` calls another such object.
    """

    def __init__(self, transforms: Transforms, collate_fn: CollateFn, batched: bool) -> None:
        self.transforms, self.collate_fn, self.batched = transforms, collate_fn, batched
        known = collate_fn is default_collate or collate_fn is default_convert
        self.inside = collate_fn if known else _Inside(collate_fn)

    def __call__(self, samples: Any) -> Any:
        """Collate what the dataset returned."""
        if _state.transformed:
            return self.collate_fn(samples)
        run = self.transforms.run
        return self.inside([run(each) for each in samples] if self.batched else run(samples))


class _Inside:
    def __init__(self, collate_fn: CollateFn) -> None:
        self.__qualname__ = getattr(collate_fn, "__qualname__", type(collate_fn).__qualname__)
        self.__self__ = getattr(collate_fn, "__self__", None)  # whose method it is
        self.collate_fn = collate_fn

    def __call__(self, samples: object) -> Any:
        before, _state.transformed = _state.transformed, True
        try:
            return self.collate_fn(samples)
        finally:
            _state.transformed = before
