"""What is meant to differ from torch, and what gives torch's way: the table of ``docs/reference/differences.md``.

Rows on errors, pinning, deaths, collation and main modules are tested with the rest of their subject.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

import minato
from minato.workers import runner
from tests.datasets import Numbers, assert_same, wait_until
from tests.parity.harness import TorchLoader, drain
from tests.parity.material import Drawing, Tensors
from tests.parity.test_workers import refuse
from tests.selection import mostly_slow


def test_readiness_order_mixes_batches() -> None:
    arguments = {"batch_size": 2, "num_workers": 2, "in_order": False}
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def batches(make: Any, **own: Any) -> list[list[int]]:
        return [batch.tolist() for batch in make(Head(8, 3), **arguments, **own)]

    assert sorted(batches(TorchLoader)) == whole
    mixed = batches(minato.DataLoader)
    assert sorted(map(sorted, mixed)) != whole
    assert sorted(index for batch in mixed for index in batch) == [*range(8)]
    assert sorted(batches(minato.DataLoader, order="batch")) == whole


class Busy(Numbers):
    """Who loads a sample; the first one keeps its worker busy until so many others were begun."""

    def __init__(self, size: int, others: int = 0) -> None:
        super().__init__(size)
        self.others = others
        self.begun = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> int:
        if index == 0:
            wait_until(lambda: self.begun.value >= self.others, 20)
        else:
            with self.begun:
                self.begun.value += 1
        info = get_worker_info()
        assert info is not None
        return info.id


def test_who_is_free_takes_the_next_sample() -> None:
    def workers(make: Any, others: int = 0, **own: Any) -> list[int]:
        return [*make(Busy(12, others), None, num_workers=2, **own)]

    alternating = [0, 1] * 6
    assert workers(TorchLoader) == alternating
    assert sorted(workers(minato.DataLoader, others=8)) != sorted(alternating)
    assert workers(minato.DataLoader, compat="torch") == alternating


class Owning(Numbers):
    """Draws from a generator of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rng = random.Random(0)

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


def test_generators_that_the_dataset_owns_are_bound_to_the_sample() -> None:
    def drawn(make: Any, num_workers: int = 2, **own: Any) -> list[float]:
        return [*make(Owning(12), None, num_workers=num_workers, **own)]

    assert len(set(drawn(TorchLoader))) == 6  # each of two workers has a copy
    assert len(set(drawn(minato.DataLoader))) == 12
    assert drawn(minato.DataLoader, seed=1) == drawn(minato.DataLoader, 0, seed=1)
    assert drawn(minato.DataLoader, 0, compat="torch") == drawn(TorchLoader, 0)


def test_randomness_does_not_depend_on_the_workers() -> None:
    def numbers(make: Any, workers: int, **own: Any) -> Any:
        torch.manual_seed(1)
        return [*make(Drawing(6), 2, num_workers=workers, **own)]

    assert_same(numbers(minato.DataLoader, 1), numbers(minato.DataLoader, 2))
    theirs = numbers(TorchLoader, 1)
    assert_same(numbers(minato.DataLoader, 1, compat="torch"), theirs)
    with pytest.raises(AssertionError):
        assert_same(numbers(minato.DataLoader, 1), theirs)


class Late(Numbers):
    """Cheap samples, of which only the last draws; how often one was run."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.runs = 0

    def __getitem__(self, index: int) -> float:
        self.runs += 1
        return random.random() if index == self.size - 1 else 0.0


def test_cheap_samples_that_draw_after_all_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_WORTH_BINDING_NS", 1 << 62)  # cheap on a busy machine, too
    for own, again in (({}, True), ({"compat": "torch"}, False)):
        dataset = Late(400)
        assert len([*minato.DataLoader(dataset, 50, **own)]) == 8
        assert (dataset.runs > 400) == again


class Counted(Numbers):
    """Counts, over all processes, the samples that were begun."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.begun = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> int:
        with self.begun:
            self.begun.value += 1
        return index


def test_next_epoch_begins_early_only_on_request() -> None:
    for make, stay, early in (
        (TorchLoader, True, False),
        (minato.DataLoader, True, False),
        (minato.DataLoader, "next_epoch", True),
    ):
        dataset = Counted(8)
        loader = make(dataset, 2, num_workers=1, persistent_workers=stay)
        assert len([*loader]) == 4
        if early:
            wait_until(lambda dataset=dataset: dataset.begun.value > 8, 10)
        else:
            time.sleep(0.1)
            assert dataset.begun.value == 8
        del loader


def test_loading_ahead_is_bounded_by_bytes() -> None:
    for own, most in (({}, 40), ({"prefetch_factor": 2}, 2 * 2 + 1)):
        dataset = Head(40, 39 if most == 40 else 3)
        iterator = iter(minato.DataLoader(dataset, 1, num_workers=2, **own))
        wait_until(lambda dataset=dataset, most=most: dataset.begun.value >= min(most, 4), 10)
        assert next(iterator).tolist() == [0]
        assert (dataset.begun.value > 5) == (most == 40)
        del iterator


class Head(Counted):
    """The first sample takes until so many others were begun."""

    def __init__(self, size: int, others: int) -> None:
        super().__init__(size)
        self.others = others

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        if index == 0:
            wait_until(lambda: self.begun.value > self.others, 20)
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_of_a_delivered_tensor(workers: int) -> None:
    theirs = next(iter(TorchLoader(Tensors(2), 2, num_workers=workers)))
    ours = next(iter(minato.DataLoader(Tensors(2), 2, num_workers=workers)))
    assert theirs.is_shared() == (workers > 0)
    assert theirs.untyped_storage().resizable() == (workers == 0)
    assert not ours.is_shared()
    # Without workers, a small batch has memory of its own, as with torch.
    assert ours.untyped_storage().resizable() == (workers == 0)
    assert torch.equal(ours, theirs)
    assert ours.clone().resize_(9, 9).shape == (9, 9)
    assert ours.share_memory_().is_shared()


def test_worker_that_could_not_begin() -> None:
    for make, second in (
        (TorchLoader, "UnboundLocalError"),
        (minato.DataLoader, "PermissionError"),
    ):
        iterator = iter(make(Numbers(4), 2, num_workers=1, worker_init_fn=refuse))
        assert [outcome[1] for outcome in drain(iterator)[:2]] == ["PermissionError", second]


def test_batch_that_is_no_iterable() -> None:
    theirs = drain(iter(TorchLoader(Numbers(4), batch_sampler=[[0], 1], num_workers=1)))
    assert [outcome[:2] for outcome in theirs[1:2]] == [("raised", "TypeError")]
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        iter(minato.DataLoader(Numbers(4), batch_sampler=[[0], 1], num_workers=1))


def test_note_about_the_sample(torch_looks_often: None) -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("bad")

    for make, notes in (
        (TorchLoader, None),
        (minato.DataLoader, ["raised by the sample with index 0"]),
    ):
        with pytest.raises(ValueError, match="bad") as caught:
            next(iter(make(Bad(2), num_workers=1)))
        assert getattr(caught.value, "__notes__", None) == notes


class Called(Numbers):
    """What the process is called that loads a sample."""

    def __getitem__(self, index: int) -> str:
        return multiprocessing.current_process().name


def test_iterators_and_processes_go_by_other_names() -> None:
    for make, has_queues, name in (
        (TorchLoader, True, "Process"),
        (minato.DataLoader, False, "Fork"),
    ):
        iterator = iter(make(Called(1), None, num_workers=1))
        assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
        assert hasattr(iterator, "_index_queues") == has_queues
        assert len(iterator._workers) == 1
        assert next(iterator).startswith(name)


class Stopping(Numbers):
    """A sample that ends an iteration of its own, by mistake."""

    def __getitem__(self, index: int) -> int:
        return next(iter(())) if index == 3 else index


@pytest.mark.parametrize("workers", mostly_slow([0, 1]))
def test_stop_iteration_of_a_sample_does_not_end_the_epoch(workers: int) -> None:
    theirs = [*TorchLoader(Stopping(8), 2, num_workers=workers)]
    assert [batch.tolist() for batch in theirs] == [[0, 1]]
    with pytest.raises(RuntimeError, match="the sample with index 3 raised StopIteration"):
        list(minato.DataLoader(Stopping(8), 2, num_workers=workers))


class Interrupting:
    """Is interrupted while it is finalized."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("make", [TorchLoader, minato.DataLoader], ids=["torch", "minato"])
def test_python_ignores_interrupts_of_finalizers(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: ignored.append(seen.exc_type))
    next(iter(make(Numbers(4))))
    thing = [Interrupting()]
    thing.clear()
    assert ignored == [KeyboardInterrupt]


class Leaving(Numbers):
    """A sample that would end its worker."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            sys.exit(3)
        return index


def test_what_would_end_a_worker_is_the_error_of_its_sample() -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        # Not further ahead: torch could not fetch the first batch's memory from a worker that is leaving.
        list(TorchLoader(Leaving(8), 2, num_workers=1, prefetch_factor=1))
    iterator = iter(minato.DataLoader(Leaving(8), 2, num_workers=1))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="SystemExit was raised, as if to end the worker"):
        next(iterator)
    assert next(iterator).tolist() == [4, 5]
