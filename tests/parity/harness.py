"""Run the same case through torch's loader and through minato's, and describe what a program sees of it.

A case is a function of the loader class. What it does is written down as plain data (a *record*), so that two runs
are compared with ``==`` and a failure shows where they part.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_sharer
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import minato

TorchLoader = torch.utils.data.DataLoader
SEED = 20_240_613

WORKERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "inline": ({"num_workers": 0}, {}),
    "processes": ({"num_workers": 2}, {}),
    "threads": ({"num_workers": 2}, {"workers": "thread"}),
}
"""Arguments for both classes, and for ours alone: torch has no threads, and runs processes where ours runs them."""
EITHER = ("process", "thread")
"""In place of one kind of workers: ours is compared with each, and torch runs once."""
each = pytest.mark.parametrize(
    ("workers", "own"),
    [WORKERS["inline"], ({"num_workers": 2}, {"workers": EITHER})],
    ids=["inline", "workers"],
)

TORCH_IS_UNTIDY = pytest.mark.filterwarnings(
    "ignore:.*_MultiProcessingDataLoaderIter.__del__:pytest.PytestUnraisableExceptionWarning"
)
"""An iterator of torch that could not be made complains when it is collected."""

_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
AS_TORCH_IS_NOW = pytest.mark.skipif(
    _TORCH < (2, 13), reason="torch has changed this since, and minato follows it"
)

_OF_VERSIONS = (
    ".* use of fork",  # Python 3.12 and later, where a thread is alive: not a matter of the loader
    "In future, it will be an error for 'np.bool_' scalars",  # NumPy 1.26, of each copy that torch makes
)
_WORKER = re.compile(r"in DataLoader worker (?:process|thread) \d+")
_FRAMES = re.compile(
    r"^(?: .*|Traceback .*|During handling .*|The above exception .*|)\n", re.MULTILINE
)
"""Lines of a traceback that are not an exception's own."""
_PIDS = re.compile(r"\(pid(?:\(s\))? [\d, ]+\)")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


# ---- describing -----------------------------------------------------------------------------


def describe(value: Any) -> Any:
    """Everything about a delivered object that a program can rely on, as nested tuples."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return (kind.__qualname__, *describe_tensor(value))
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        access = value.flags.writeable, value.flags.aligned
        return (kind.__qualname__, value.dtype.descr, value.shape, value.strides, access, content)
    if isinstance(value, np.generic):
        return (kind.__qualname__, value.dtype.str, value.tobytes())
    if isinstance(value, Mapping):
        items = [(describe(key), describe(value[key])) for key in value]
        return (kind.__qualname__, items, _extras(value))
    if isinstance(value, (str, bytes, bytearray, range)):
        return (kind.__qualname__, repr(value), _extras(value))
    if isinstance(value, Sequence):
        return (kind.__qualname__, [describe(item) for item in value], _extras(value))
    if isinstance(value, (set, frozenset)):
        return (kind.__qualname__, sorted(map(repr, value)))
    if isinstance(value, BaseException):
        return failure(value)
    if getattr(value, "__dict__", None) and not callable(value):
        return (kind.__qualname__, _extras(value))
    return (kind.__qualname__, _ADDRESS.sub("0x…", repr(value)))


def _extras(value: Any) -> Any:
    extras = {name: describe(part) for name, part in getattr(value, "__dict__", {}).items()}
    if hasattr(value, "default_factory"):
        extras["default_factory"] = value.default_factory
    return extras


def describe_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All of a tensor but its class and its attributes."""
    common: tuple[Any, ...] = (
        *(tensor.dtype, tensor.layout, tensor.device.type, tensor.requires_grad, tensor.is_leaf),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    )
    if tensor.is_meta:
        return (*common, tuple(tensor.shape), tensor.stride())
    if tensor.is_nested:
        return (*common, "nested", [describe_tensor(part) for part in tensor.unbind()])
    if tensor.layout is torch.sparse_coo:
        parts = tensor._indices().detach(), tensor._values().detach()
        shape = tuple(tensor.shape), tensor.is_coalesced()
        return (*common, *shape, *map(describe_tensor, parts))
    if tensor.layout is torch.sparse_csr:
        rows = tensor.crow_indices(), tensor.col_indices(), tensor.values().detach()
        return (*common, tuple(tensor.shape), *map(describe_tensor, rows))
    scale = ()
    if tensor.is_quantized:
        scale = (tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point())
        tensor = tensor.int_repr()
    plain = tensor.detach().as_subclass(torch.Tensor)
    flat = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return (*common, tuple(plain.shape), plain.stride(), *scale, raw)


def failure(error: BaseException) -> tuple[Any, ...]:
    """An exception: its type and its text, without what differs from run to run."""
    # torch's reraised errors hold their iterator in a cycle; it must end now, not in the midst of a later test.
    traceback.clear_frames(error.__traceback__)
    kind = type(error)
    text = str(error)
    if "Original Traceback (most recent call last):" in text:
        text = _FRAMES.sub("", text)
    if isinstance(error, RecursionError):
        text = "too deep"  # where it is noticed, is chance
    text = _WORKER.sub("in DataLoader worker N", text)
    text = _ADDRESS.sub("0x…", _PIDS.sub("(pid …)", text))
    return ("raised", kind.__qualname__, text)


ARGUMENTS = [*inspect.signature(TorchLoader.__init__).parameters][1:]


def seen_attributes(loader: Any) -> dict[str, Any]:
    """All attributes of torch's loader; samplers and contexts by their type, as each loader has its own."""
    names = {*ARGUMENTS, "_dataset_kind", "_auto_collation", "_index_sampler", "_iterator"}
    kinds = {"sampler", "batch_sampler", "multiprocessing_context", "generator"}
    seen = {name: getattr(loader, name) for name in sorted(names - {"shuffle"})}
    return {
        name: type(value).__qualname__ if name in kinds else describe_part(value)
        for name, value in seen.items()
    }


def describe_part(value: Any) -> Any:
    is_number = type(value) is not bool and type(value).__mro__[-2] is int
    return int(value) if is_number else describe(value)


def attempt(action: Callable[[], Any]) -> Any:
    """What an action gave, or what it raised."""
    try:
        return describe(action())
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        return failure(error)


def drain(iterator: Iterator[Any], most: int = 64) -> list[Any]:
    """What each ``next`` gave, until the iterator says twice in a row that it is at its end."""
    found: list[Any] = []
    ended = 0
    while ended < 2:
        assert len(found) < most, "the iterator does not end"
        outcome = attempt(lambda: next(iterator))
        ended = ended + 1 if outcome == ("raised", "StopIteration", "") else 0
        found.append(outcome)
    return found


# ---- surroundings ---------------------------------------------------------------------------


def seed_everything(seed: int = SEED) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def generator_states(*others: torch.Generator | None) -> tuple[Any, ...]:
    """The states of the three global generators and of some more, in short."""
    numpy_state: Any = np.random.get_state()
    return (
        hash(random.getstate()),
        hash((numpy_state[1].tobytes(), *numpy_state[2:])),
        hash(torch.get_rng_state().numpy().tobytes()),
        *(None if other is None else hash(other.get_state().numpy().tobytes()) for other in others),
    )


def record_warnings() -> None:
    """Record each warning, except those that depend on versions, and of what torch leaves out silently."""
    warnings.simplefilter("always")
    # torch says nothing of shares that are missing, empty or the same.
    for text in (
        r"reader \d+ ended by an exception",
        r".* readers received nothing",
        r".* the same items",
    ):
        warnings.filterwarnings("ignore", text, minato.MinatoWarning)
    # torch's fake tensors import Triton, once in a process.
    warnings.filterwarnings("ignore", "The global interpreter lock", RuntimeWarning)
    for text in _OF_VERSIONS:
        warnings.filterwarnings("ignore", text, DeprecationWarning)


def recorded_warnings(caught: list[warnings.WarningMessage]) -> list[tuple[str, str]]:
    return [(each.category.__name__, _ADDRESS.sub("0x…", str(each.message))) for each in caught]


# ---- comparing ------------------------------------------------------------------------------


def same_for_both(case: Callable[[Any], Any], **own: Any) -> Any:
    """Run a case with both classes, in the same state of all generators; returns what it gave, which was the same.

    Compared are what the case returns or raises, its warnings, and the states of the generators afterwards.

    Args:
        case: Gets what makes a loader: torch's class, then ours.
        own: Arguments that only ours is given, with EITHER for both kinds of workers.
    """
    theirs = recorded(case, TorchLoader)
    resource_sharer.stop()  # a thread that torch's tensors leave behind
    kinds = EITHER if own.get("workers") is EITHER else (own.get("workers"),)
    for kind in kinds:
        given = own if kind is None else {**own, "workers": kind}
        make = functools.partial(minato.DataLoader, **given) if given else minato.DataLoader
        ours = recorded(case, make)
        assert ours == theirs, f"{given}: {where_they_part(ours, theirs)}"
    return theirs["outcome"]


def recorded(case: Callable[[Any], Any], make: Any) -> dict[str, Any]:
    seed_everything()
    with warnings.catch_warnings(record=True) as caught:
        record_warnings()
        outcome = attempt(lambda: case(make))
    return {
        "outcome": outcome,
        "warnings": recorded_warnings(caught),
        "generators": generator_states(),
    }


def without_worker(record: Any) -> Any:
    """A record as it would be without workers: of what a worker raised only the text itself remains."""
    if isinstance(record, dict):
        return {key: without_worker(part) for key, part in record.items()}
    if isinstance(record, list):
        return [without_worker(part) for part in record]
    if isinstance(record, tuple) and len(record) == 3 and record[0] == "raised":
        _, kind, text = record
        text = re.sub(r"^Caught .*\nOriginal Traceback .*\n(?:[\w.]+: )?", "", text)
        return ("raised", kind, text.rstrip("\n"))
    if isinstance(record, tuple):
        return tuple(without_worker(part) for part in record)
    return record


def where_they_part(ours: Any, theirs: Any, where: str = "record") -> str:
    """The first place where two records differ, in words."""
    if type(ours) is type(theirs) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        pairs = [(f"[{key!r}]", ours[key], theirs[key]) for key in ours]
    elif (
        type(ours) is type(theirs) and isinstance(ours, (list, tuple)) and len(ours) == len(theirs)
    ):
        pairs = [
            (f"[{i}]", one, other) for i, (one, other) in enumerate(zip(ours, theirs, strict=True))
        ]
    else:
        pairs = []
    for step, one, other in pairs:
        if one != other:
            return where_they_part(one, other, where + step)
    return f"{where}\n  ours:   {str(ours)[:600]}\n  torch:  {str(theirs)[:600]}"
