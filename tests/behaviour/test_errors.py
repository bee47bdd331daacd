"""What goes wrong: exceptions of samples, dead workers, timeouts and wrong arguments."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import re
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data

import minato
from minato import DataLoader, ErrorPolicy, Readers
from tests.datasets import ORDERS, Failing, Numbers, Samples, drain, forked, indices, wait_until
from tests.parity.material import Deadly
from tests.selection import WORKERS, each, mostly_slow

TorchLoader = torch.utils.data.DataLoader

PROCESSES = WORKERS["2-processes"]
NO_SUCCESSORS = ErrorPolicy(on_worker_death="raise")


def test_an_exception_that_is_raised_again_and_again_is_noted_once() -> None:
    error = ValueError("the store is gone")
    for options in ({}, {"errors": "retry"}, {"num_workers": 1, "workers": "thread"}):
        loader = DataLoader(Failing(4, {1: lambda: error}), 2, **options)  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(ValueError, match="the store is gone"):
                list(loader)
    assert error.__notes__ == ["raised by the sample with index 1"]


class Torn:
    fails = True

    def __iter__(self) -> Iterator[int]:
        yield from range(20)
        if self.fails:
            raise LookupError


def test_what_a_sampler_raised_in_an_epoch_that_was_broken_off_is_not_told_in_the_next() -> None:
    torn = Torn()
    ahead = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
    loader = DataLoader(Numbers(100), 2, sampler=torn, **ahead)
    iterator = iter(loader)
    for _ in range(7):  # four batches ahead, the sampler has failed
        next(iterator)
    torn.fails = False
    assert indices(loader) == [[i, i + 1] for i in range(0, 20, 2)]


def reciprocal(sample: int) -> float:
    return 1 / sample


def broken() -> ValueError:
    return ValueError("no good")


RAISES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"dataset": Failing(12, {7: broken})}, "no good", "7", "raise self.raises[index]()"),
    ({"dataset": {"a": 1}, "sampler": ["a", "b"]}, "'b'", "'b'", ""),
    ({"dataset": Numbers(6), "transforms": [reciprocal]}, "division by zero", "0", "in reciprocal"),
]


@each
@pytest.mark.parametrize(
    ("arguments", "text", "index", "line"), RAISES, ids=["sample", "key", "transform"]
)
def test_error_names_the_sample_and_shows_the_workers_traceback(
    arguments: dict[str, Any], text: str, index: str, line: str, workers: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, KeyError, ZeroDivisionError), match=text) as caught:
        list(DataLoader(batch_size=2, **arguments, **workers))
    assert caught.value.__notes__ == [f"raised by the sample with index {index}"]
    if workers["num_workers"]:
        told = str(caught.value.args[0])
        where = rf"Caught {caught.type.__name__} in DataLoader worker (process|thread) [01]\.\n"
        assert re.match(where, told)
        assert "Original Traceback (most recent call last):" in told
        assert line in told
    else:
        assert str(caught.value) == text


@pytest.mark.parametrize("order", ORDERS)
@each
def test_one_bad_sample_costs_one_batch(order: str, workers: dict[str, Any]) -> None:
    dataset = Failing(200, {77: broken, 140: lambda: KeyError("a\nb")})
    loader = DataLoader(dataset, 5, order=order, **workers)
    for _ in range(2):
        delivered, raised = drain(loader)
        assert sorted(type(error).__name__ for error in raised) == ["KeyError", "ValueError"]
        assert len(delivered) == len(set(delivered)) == 190
        assert not {77, 140} & set(delivered)


# ---- workers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("SIGKILL", "killed by signal: Killed"),
        ("SIGTERM", "killed by signal: Terminated"),
        ("exit", "exited with code 3"),
    ],
)
@pytest.mark.parametrize("order", ["strict", "arrival"])
def test_dead_worker_ends_iteration_with_torchs_error(
    order: str, how: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end of a worker wakes the loop, which need not look from time to time.
    monkeypatch.setattr("minato.scheduling.dispatcher._LIVENESS_S", 3600.0)
    loader = DataLoader(Deadly(400, 6, how), 2, order=order, errors=NO_SUCCESSORS, **PROCESSES)
    iterator = iter(loader)
    with pytest.raises(
        RuntimeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"
    ) as caught:
        list(iterator)
    assert told in str(caught.value.__cause__)
    # Whoever asks again is told again.
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(iterator)
    del iterator


INSIDE = multiprocessing.RawValue("b", 0)
"""Whether a function of the program waits; then the loop asks for its batch."""
RELEASED = threading.Event()
"""Ends the waiting of threads; processes are killed."""


def wait_inside(_: object = None) -> None:
    """Wait in a method of another module."""
    INSIDE.value = 1
    RELEASED.wait(60)


class Waits(Numbers):
    def __getitem__(self, index: int) -> int:
        wait_inside()
        return index


class Waiting(torch.utils.data.IterableDataset[int]):
    def __init__(self, waits: bool = True) -> None:
        self.waits = waits

    def __iter__(self) -> Iterator[int]:
        if self.waits:
            wait_inside()
        yield 1


TIMED_OUT: dict[str, tuple[dict[str, Any], str, str]] = {
    "process": ({}, "worker 0 runs the sample with index 0", ", line .* in __getitem__"),
    "thread": ({"workers": "thread"}, "runs the sample with index 0", " in __getitem__"),
    "transform": (
        {"dataset": Numbers(4), "transforms": [wait_inside]},
        *("runs the sample with index 0.*", " in wait_inside"),
    ),
    "collation": (
        {"dataset": Numbers(4), "collate_fn": wait_inside},
        *("collates the batch of indices 0, 1", " in wait_inside"),
    ),
    "stream": (
        {"dataset": Waiting()},
        "worker 0 reads item 0 of reader 0",
        ", line .* in __iter__",
    ),
    "stream-transform": (
        {"dataset": Waiting(False), "transforms": [wait_inside]},
        *("worker 0 runs item 0 of reader 0.*", " in wait_inside"),
    ),
    "stream-main": (
        {"dataset": Waiting(), "readers": Readers(1, where="main")},
        *("the thread of the dataset reads item 0 of reader 0", " in __iter__"),
    ),
    "torch": ({"compat": "torch"}, "runs the sample with index 0", " in __getitem__"),
    "start": ({"worker_init_fn": wait_inside}, "runs worker_init_fn", " in wait_inside"),
}


@mostly_slow("name", TIMED_OUT, quick=2)
def test_a_timeout_says_what_runs_and_where(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker answers, however busy the machine; nor does the end wait for it.
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 3600.0)
    monkeypatch.setattr("minato.workers.supervision._GRACE_S", 0.0)
    INSIDE.value = 0
    RELEASED.clear()
    arguments, what, where = TIMED_OUT[name]
    arguments = {"dataset": Waits(4), "batch_size": 2, **forked(1), **arguments}
    iterator: Any = iter(DataLoader(timeout=0.5, **arguments))
    wait_until(lambda: bool(INSIDE.value))
    asked_s = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="timed out after 0.5 seconds") as caught:
            next(iterator)
        assert time.monotonic() - asked_s >= 0.5
    finally:
        RELEASED.set()
        iterator.shut_down()
    (note,) = caught.value.__notes__
    assert re.search(f"{what} for .* s: .*{where}, at", note)
    assert ("sample_timeout" in note) == (name not in ("thread", "stream-main", "torch"))
    assert "threading.py, line" in note
    assert len(note.splitlines()) <= 5


@pytest.mark.filterwarnings("error")
def test_tracebacks_and_warnings_name_the_lines_of_the_program() -> None:
    def frames(error: BaseException) -> set[str]:
        return {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}

    for workers in WORKERS.values():
        with pytest.raises(ValueError, match="no good") as caught:
            list(DataLoader(Failing(12, {7: broken}), 2, **workers))
        found = frames(caught.value)
        assert __file__ in found
        assert found <= {__file__, Failing.__getitem__.__code__.co_filename}
        # A worker's traceback is text.
        files = re.findall('File "(.*)"', str(caught.value))
        assert set(files) <= {__file__, Failing.__getitem__.__code__.co_filename}
        assert bool(files) == bool(workers["num_workers"])
    with warnings.catch_warnings(record=True, action="always") as told:
        DataLoader("/data/train")
        list(DataLoader(Samples([torch.zeros(100)] * 4), memory_budget=100, num_workers=1))
    # Python 3.12 and later warn of forks beside threads; pytest has some.
    places = [each.filename for each in told if each.category is not DeprecationWarning]
    assert places == [__file__] * 2


# ---- what cannot be sent to workers ---------------------------------------------------------


class Holder(Numbers):
    """A dataset with attributes of which one cannot be pickled."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(4)
        self.__dict__.update(attributes)


LOCKED = functools.partial(print, threading.RLock())
UNPICKLABLE = {
    "dataset.transform.args[0]": {"dataset": Holder(transform=LOCKED)},
    "dataset.files['a'][1]": {"dataset": Holder(files={"a": [1, open(os.devnull, "rb")]})},  # noqa: SIM115
    "dataset.inner.lock": {"dataset": Holder(inner=Holder(lock=threading.RLock()))},
    "collate_fn.args[0]": {"collate_fn": LOCKED},
    "worker_init_fn.args[0]": {"worker_init_fn": LOCKED},
    "errors.args[0]": {"errors": LOCKED},
    "transforms[1].args[0]": {"transforms": [abs, LOCKED]},
}


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
@pytest.mark.parametrize("where", UNPICKLABLE)
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_what_cannot_be_pickled_is_named(context: str, where: str) -> None:
    arguments = {"dataset": Numbers(4), **UNPICKLABLE[where]}
    loader = DataLoader(**arguments, num_workers=1, multiprocessing_context=context)
    with pytest.raises(
        minato.NotPicklableError, match=f"^{re.escape(where)} cannot be pickled"
    ) as caught:
        list(loader)
    assert isinstance(caught.value, TypeError)
    assert "open or create it at its first use in the worker" in str(caught.value)
    assert multiprocessing.active_children() == []


@pytest.mark.skipif(not importlib.util.find_spec("cloudpickle"), reason="needs cloudpickle")
@pytest.mark.filterwarnings("ignore:0 samples of this epoch were skipped")
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_lambdas_and_local_classes_go_by_cloudpickle(
    context: str, caplog: pytest.LogCaptureFixture
) -> None:
    added = 5

    class Local(Holder):
        pass

    loader = DataLoader(
        Local(transform=lambda x: x + added),
        2,
        num_workers=1,
        multiprocessing_context=context,
        transforms=[lambda x: x + added, lambda x: x if x != 7 else 1 // 0],
        collate_fn=lambda samples: [int(sample) for sample in samples],
        errors=lambda failure: failure.index * added,
    )
    with caplog.at_level("INFO", "minato"):
        assert list(loader) == [[5, 6], [10, 8]]
    assert "<locals>.Local goes to the workers by cloudpickle" in caplog.text
