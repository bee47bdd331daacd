"""Errors: type and text as torch gives them, wherever in the user's code they begin; and going on after them."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import threading
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import minato
from tests.datasets import Numbers, raising
from tests.parity.harness import (
    AS_TORCH_IS_NOW,
    TORCH_IS_UNTIDY,
    TorchLoader,
    attempt,
    drain,
    each,
    recorded,
    same_for_both,
)
from tests.parity.material import (
    BadSample,
    Failing,
    Holding,
    LyingStream,
    NoLength,
    TwoArguments,
    Unpicklable,
    identity,
)
from tests.selection import mostly_slow

# ---- what is raised -------------------------------------------------------------------------


class OnlyByName(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)
        self.code = code


class WithMessage(Exception):
    """It has the attribute that torch's wrapper passes by name."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Silent(Exception):
    def __str__(self) -> str:
        return ""


class Treacherous(Exception):
    """Neither its text can be had, nor its traceback replaced."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def with_traceback(self, _: Any) -> Any:
        raise ValueError("no traceback")


def chained() -> Any:
    try:
        return 1 / 0
    except ZeroDivisionError as error:
        raise ValueError("afterwards") from error


def endless() -> Any:
    return endless()


ACTIONS: dict[str, Callable[[], Any]] = {
    "value": raising(ValueError, "bad"),
    "no text": raising(ValueError),
    "lines": raising(RuntimeError, "two\nlines"),
    "key": raising(KeyError, "a key"),
    "index": raising(IndexError, "out of range"),
    "asynchronous stop": raising(StopAsyncIteration, "a text"),
    "file": raising(FileNotFoundError, 2, "No such file", "picture.png"),
    "decoding": lambda: b"\xff".decode(),
    "syntax": lambda: compile("a b", "somewhere", "exec"),
    "json": lambda: json.loads("{"),
    "import": raising(ImportError, "no module", name="absent"),
    "assertion": raising(AssertionError),
    "not implemented": raising(NotImplementedError),
    "memory": raising(MemoryError, "too much"),
    "end of file": raising(EOFError, "the end"),
    "pipe": raising(BrokenPipeError, "broken"),
    "timeout": raising(TimeoutError, "late"),
    "program": raising(subprocess.CalledProcessError, 3, "program"),
    "skip": raising(unittest.SkipTest, "skipped"),
    "accelerator": raising(torch.OutOfMemoryError, "no memory"),
    "torch": lambda: torch.ones(2) @ torch.ones(3),
    "chained": chained,
    "recursion": endless,
    "two arguments": raising(TwoArguments, 3, "reason"),
    "only by name": raising(OnlyByName, code=3),
    "with a message": raising(WithMessage, "a message"),
    "silent": raising(Silent, "not shown"),
    "holds a generator": raising(Unpicklable, "held"),
    "warning": raising(UserWarning, "as an error"),
}
ENDING: dict[str, Callable[[], Any]] = {
    "exit": raising(SystemExit, 3),
    "interrupt": raising(KeyboardInterrupt, "a text"),
    "generator": raising(GeneratorExit),
}
"""What ends a worker process, so that only loaders without one can go on."""


# ---- where it is raised ---------------------------------------------------------------------


class BadBatch(BadSample):
    """The call that fetches one batch does something."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.action() if 2 in indices else indices


class BadStream(IterableDataset[Any]):
    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __iter__(self) -> Iterator[Any]:
        yield from range(3)
        self.action()
        yield 3


class BadIterator(BadStream):
    def __iter__(self) -> Iterator[Any]:
        self.number = -1
        return self

    def __next__(self) -> Any:
        self.number += 1
        if self.number == 2:
            self.action()
        if self.number > 5:
            raise StopIteration
        return self.number


class BadBeginning(BadStream):
    def __iter__(self) -> Iterator[Any]:
        self.action()
        return iter(())


class BadCollation:
    """A ``collate_fn`` that does something in one batch."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __call__(self, samples: Any) -> Any:
        return self.action() if samples in (2, [2, 3]) else samples


PLACES: dict[str, Callable[[Callable[[], Any]], tuple[Any, dict[str, Any]]]] = {
    "sample": lambda action: (BadSample(6, action), {"batch_size": 2}),
    "sample by itself": lambda action: (BadSample(6, action), {"batch_size": None}),
    "__getitems__": lambda action: (BadBatch(6, action), {"batch_size": 2}),
    "stream": lambda action: (BadStream(action), {"batch_size": 2}),
    "stream by itself": lambda action: (BadStream(action), {"batch_size": None}),
    "iterator": lambda action: (BadIterator(action), {"batch_size": 2}),
    "collate_fn": lambda action: (
        Numbers(6),
        {"batch_size": 2, "collate_fn": BadCollation(action)},
    ),
    "collate_fn of a sample": lambda action: (
        Numbers(6),
        {"batch_size": None, "collate_fn": BadCollation(action)},
    ),
}


def seen_in_each_place(
    make: Any, actions: dict[str, Callable[[], Any]], workers: Any, places: Iterable[str] = PLACES
) -> Any:
    """What every ``next`` gives, with each action in each place."""
    seen = {}
    for what, action in actions.items():
        for where in places:
            dataset, options = PLACES[where](action)
            seen[what, where] = drain(iter(make(dataset, **options, **workers)))
    return seen


PARTS = (
    ("value", "key", "two arguments"),
    ("file", "with a message", "holds a generator", "no text"),
    ("decoding", "only by name", "chained", "silent"),
)
"""What processes send in different ways."""


def test_in_line() -> None:
    # After a KeyboardInterrupt, which may be a Ctrl-C, the batch is made again: tests/edges/test_interruptions.py.
    actions = {**ACTIONS, **ENDING}
    alike = {name: action for name, action in actions.items() if name != "interrupt"}
    assert len(alike) < len(actions)
    same_for_both(lambda make: seen_in_each_place(make, alike, {}))


@mostly_slow("names", [(part,) for part in PARTS], ids=repr)
def test_in_a_process(names: tuple[str, ...]) -> None:
    actions = {name: ACTIONS[name] for name in names}
    same_for_both(lambda make: seen_in_each_place(make, actions, {"num_workers": 1}))


def test_in_threads() -> None:
    """torch has none; its worker processes say the same."""
    actions = {name: ACTIONS[name] for name in ("value", "two arguments", "key")}
    places = "sample", "sample by itself", "__getitems__", "collate_fn"
    same_for_both(
        lambda make: seen_in_each_place(make, actions, {"num_workers": 1}, places), workers="thread"
    )


def test_text_that_cannot_be_had(torch_looks_often: None) -> None:
    def case(make: Any) -> Any:
        iterator = iter(make(BadSample(4, raising(Treacherous)), num_workers=1))
        before = [next(iterator), next(iterator)]
        with pytest.raises(Exception) as caught:  # noqa: PT011
            next(iterator)
        return before, caught.type

    same_for_both(case)


def test_an_error_of_any_class_is_raised_later_than_it_was_caught() -> None:
    class Sampler:
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise Treacherous

    iterator = iter(minato.DataLoader(Numbers(8), 2, sampler=Sampler(), num_workers=1))
    with pytest.raises(Treacherous):
        list(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_beginning_of_a_stream(num_workers: int) -> None:
    """In line ``iter(loader)`` raises, as with torch; from workers it comes with the first batch."""
    for name in ("value", "key", "file", "two arguments", "holds a generator"):
        dataset = BadBeginning(ACTIONS[name])
        same_for_both(lambda make: next(iter(make(dataset, 2, num_workers=num_workers))))  # noqa: B023
        if not num_workers:
            same_for_both(lambda make: iter(make(dataset, 2)))  # noqa: B023


def test_every_worker_whose_stream_did_not_begin_says_so() -> None:
    dataset = BadBeginning(ACTIONS["value"])
    found = drain(iter(minato.DataLoader(dataset, 2, num_workers=2)))
    assert [outcome[1] for outcome in found] == ["ValueError", "ValueError"] + 2 * ["StopIteration"]


# ---- going on -------------------------------------------------------------------------------


@each
@pytest.mark.parametrize(
    "options",
    [{}, {"collate_fn": identity}, {"drop_last": True}],
    ids=["plain", "collate_fn", "drop_last"],
)
def test_one_error_per_bad_batch_and_a_normal_end(options: Any, workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        return drain(iter(make(Failing(23), 2, **options, **workers)))

    same_for_both(case, **own)


@pytest.mark.parametrize("own", [{}, {"compat": "torch"}], ids=repr)
def test_persistent_workers_go_on_with_the_next_pass(own: Any) -> None:
    def case(make: Any) -> Any:
        loader = make(Failing(9), 2, num_workers=2, persistent_workers=True)
        return [drain(iter(loader)) for _ in range(3)]

    same_for_both(case, **own)


@each
def test_batches_that_are_no_lists_of_indices(workers: Any, own: Any) -> None:
    """With torch it is a worker that notices; its text is of that worker."""

    class Uneven:
        def __iter__(self) -> Iterator[Any]:
            yield from (5, [0, 1], 5, 5, [2, 3], [4], 5)

    def case(make: Any) -> Any:
        loader = make(Numbers(9), batch_sampler=Uneven(), **workers)
        return [[outcome[:2] for outcome in drain(iter(loader))] for _ in range(2)]

    same_for_both(case, **own)


@each
def test_error_of_the_sampler_in_the_midst(workers: Any, own: Any) -> None:
    """torch's dispatch asks it ahead of the batch, and so the error comes ahead of those in flight."""

    class Odd:
        def __init__(self, action: Any) -> None:
            self.action = action

        def __iter__(self) -> Iterator[int]:
            for number in range(8):
                if number == 6:
                    self.action()
                yield number

    for name in ("value", "two arguments", "key"):
        sampler = Odd(ACTIONS[name])
        same_for_both(
            lambda make: drain(iter(make(Numbers(9), 2, sampler=sampler, **workers))),  # noqa: B023
            **own,
        )


# ---- errors when iteration begins -----------------------------------------------------------


class NoIterator:
    def __iter__(self) -> Iterator[int]:
        raise PermissionError(1, "not now")


BEGINNINGS: dict[str, dict[str, Any]] = {
    "sampler": {"dataset": Numbers(3), "sampler": NoIterator()},
    "batch sampler": {"dataset": Numbers(3), "batch_sampler": NoIterator()},
    "sampler that is none": {"dataset": Numbers(3), "sampler": 5},
    "batch sampler that is none": {"dataset": Numbers(3), "batch_sampler": 5},
    "batches that are none": {"dataset": Numbers(3), "batch_sampler": [1, 2]},
    "no length": {"dataset": NoLength()},
    "no length, shuffled": {"dataset": NoLength(), "shuffle": True},
    "dataset that is none": {"dataset": 5, "sampler": [0]},
    "none": {"dataset": None, "sampler": [0]},
    "class as dataset": {"dataset": Numbers},
    "collate_fn that is none": {"dataset": Numbers(3), "collate_fn": 5},
    "worker_init_fn that is none": {"dataset": Numbers(3), "worker_init_fn": 5},
}


@TORCH_IS_UNTIDY
@pytest.mark.parametrize("name", BEGINNINGS)
@each
def test_what_cannot_be_begun(name: str, workers: Any, own: Any) -> None:
    if name == "batches that are none" and workers["num_workers"]:
        pytest.skip("minato reads the keys of a batch before a worker does")

    def case(make: Any) -> Any:
        loader = make(**BEGINNINGS[name], **workers)
        return [attempt(lambda: len(loader)), next(iter(loader))]

    same_for_both(case, **own)


# ---- what cannot be sent to a worker --------------------------------------------------------


HELD: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (number for number in range(3)),
}


@AS_TORCH_IS_NOW
@TORCH_IS_UNTIDY
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("held", HELD)
def test_what_cannot_be_pickled(held: str, context: str) -> None:
    """The warning is torch's, and whoever catches what Python raised catches ours, which says more."""

    def case(make: Any) -> Any:
        return next(
            iter(make(Holding(HELD[held]()), num_workers=1, multiprocessing_context=context))
        )

    theirs, ours = recorded(case, TorchLoader), recorded(case, minato.DataLoader)
    assert ours["warnings"] == theirs["warnings"]
    assert ours["generators"] == theirs["generators"]
    raised = {error.__name__ for error in minato.NotPicklableError.__mro__}
    assert ours["outcome"][1] == "NotPicklableError"
    assert theirs["outcome"][1] in raised
    assert theirs["outcome"][2].partition(" (")[0] in ours["outcome"][2]
    assert "dataset.held" in ours["outcome"][2]
    assert multiprocessing.active_children() == []


# ---- warnings as errors ---------------------------------------------------------------------


def test_warnings_of_samples_as_errors() -> None:
    class Warns(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 1:
                warnings.warn("beware", stacklevel=1)
            return index

    def case(make: Any) -> Any:
        with warnings.catch_warnings(action="error"):
            return [drain(iter(make(Warns(3), num_workers=number))) for number in (0, 1)]

    same_for_both(case)


def test_warning_about_a_length_as_an_error() -> None:
    def case(make: Any) -> Any:
        with warnings.catch_warnings(action="error"):
            found = []
            for number in (0, 1):
                loader = make(LyingStream(6), num_workers=number)
                found.append((len(loader), drain(iter(loader))))
            return found

    same_for_both(case)
