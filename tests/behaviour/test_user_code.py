"""Functions of the user's that raise, once or always: no batch is lost, and the error is the one that was raised."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from minato import DataLoader, ErrorPolicy, MinatoWarning
from minato.errors import SampleTimeoutError
from tests.datasets import ORDERS, Failing, Numbers, Stream, drain, flat, indices, raising
from tests.selection import WORKERS, each, mostly_slow, sweep
from tests.threads import run_together


class OddError(Exception):
    """No library raises it."""


# ---- StopIteration --------------------------------------------------------------------------


def first_of_nothing(sample: Any) -> Any:
    """A usual mistake, for one sample."""
    return next(iter(())) if sample == 5 else sample


class Empty(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(first_of_nothing(index))


def collate_nothing(samples: list[int]) -> torch.Tensor:
    return torch.tensor([first_of_nothing(sample) for sample in samples])


@sweep(workers=WORKERS, order=ORDERS, on_error=["raise", "retry"])
def test_stop_iteration_of_a_sample_is_an_error_that_names_it(
    workers: dict[str, Any], order: str, on_error: str
) -> None:
    loader = DataLoader(Empty(24), 4, order=order, errors=on_error, **workers)
    found, (error,) = drain(loader)
    assert len(found) == 20
    assert isinstance(error, RuntimeError)
    assert "the sample with index 5 raised StopIteration" in str(error)


@each
def test_stop_iteration_of_a_sample_can_be_skipped(workers: dict[str, Any]) -> None:
    loader = DataLoader(Empty(24), 4, errors="skip", **workers)
    with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
        found, raised = drain(loader)
    assert (len(found), raised) == (23, [])


@each
@pytest.mark.parametrize("order", ORDERS)
def test_stop_iteration_of_collate_fn_is_an_error_that_names_the_batch(
    workers: dict[str, Any], order: str
) -> None:
    loader = DataLoader(Numbers(24), 4, collate_fn=collate_nothing, order=order, **workers)
    found, (error,) = drain(loader)
    assert isinstance(error, RuntimeError)
    missing = sorted({*range(24)} - {*found})
    assert len(missing) == 4
    assert "collate_fn, called for the batch of indices " in str(error)
    named = str(error).split("batch of indices ")[1].split(", raised StopIteration")[0]
    assert sorted(map(int, named.split(", "))) == missing


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_ends_by_stop_iteration_of_its_iterator_alone(num_workers: int) -> None:
    assert drain(DataLoader(Stream(8), 2, num_workers=num_workers)) == ([*range(8)], [])
    for broken in ({"transforms": [first_of_nothing]}, {"collate_fn": collate_nothing}):
        found, (error,) = drain(DataLoader(Stream(8), 2, num_workers=num_workers, **broken))
        assert found == [0, 1, 2, 3, 6, 7]
        assert isinstance(error, RuntimeError)
        assert "raised StopIteration" in str(error)


class Unpinnable:
    """A batch whose ``pin_memory`` has a fault."""

    def __init__(self, samples: list[int]) -> None:
        pass

    def pin_memory(self) -> Unpinnable:
        raise StopIteration


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_iteration_while_a_batch_is_pinned_is_an_error(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Numbers(4), 2, collate_fn=Unpinnable, num_workers=num_workers)
    iterator = iter(loader)
    iterator._pin_memory = True
    iterator._pin = Unpinnable.pin_memory
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"pin_memory\(\) of a batch raised StopIteration"):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


# ---- samplers -------------------------------------------------------------------------------


class Shaky(Sampler[Any]):
    """Gives batches, but raises at some of its calls, and is no generator: it can be asked again."""

    def __init__(
        self, batches: list[list[Any]], raises: Callable[[int], BaseException | None]
    ) -> None:
        self._batches = batches
        self._raises = raises

    def __iter__(self) -> Iterator[Any]:
        self._left = iter(self._batches)
        self.calls = 0
        return self

    def __next__(self) -> Any:
        self.calls += 1
        error = self._raises(self.calls)
        if error is not None:
            raise error
        return next(self._left)

    def __len__(self) -> int:
        return len(self._batches)


PAIRS = [[2 * i, 2 * i + 1] for i in range(20)]


@sweep(
    workers=WORKERS,
    order=["strict", "batch"],
    kind=[OddError, KeyboardInterrupt],
    call=[2, 5, 20, 21],
)
def test_a_sampler_that_raises_once_loses_nothing(
    workers: dict[str, Any], order: str, kind: type[BaseException], call: int
) -> None:
    sampler = Shaky(PAIRS, lambda number: kind("odd") if number == call else None)
    ahead = {"prefetch_factor": 2} if workers["num_workers"] else {}
    loader = DataLoader(Numbers(40), batch_sampler=sampler, order=order, **ahead, **workers)
    try:
        iterator = iter(loader)
    except kind:
        return  # asked when the epoch begins: then there is none
    found, raised = drain(iterator)
    assert [type(error) for error in raised] == [kind]
    assert sorted(found) == [*range(40)]


@each
def test_a_sampler_that_always_raises_ends_with_its_error(workers: dict[str, Any]) -> None:
    sampler = Shaky(PAIRS, lambda number: OddError(number) if number > 4 else None)
    prefetch = 2 if workers["num_workers"] else None
    loader = DataLoader(Numbers(40), batch_sampler=sampler, prefetch_factor=prefetch, **workers)
    assert_eight_come_among_errors(iter(loader))


def assert_eight_come_among_errors(iterator: Iterator[Any]) -> None:
    """Each call raises, also while batches are under way."""
    found: list[int] = []
    while len(found) < 8:
        more, raised = drain(iterator, most=1)
        found += more
        assert [type(error) for error in raised] == [OddError]
        time.sleep(0.01)
    assert found == [*range(8)]


class Key:
    """A key that cannot always be sent."""

    fails = False

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        if Key.fails and self.number == 9:
            raise OddError
        return Key, (self.number,)


class ByKey(Numbers):
    def __getitem__(self, key: Any) -> int:
        return int(key.number)


@pytest.mark.parametrize("compat", [None, "torch"])
def test_keys_that_cannot_be_sent_for_a_while_are_not_lost(
    compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Key, "fails", True)
    sampler = [[Key(number) for number in pair] for pair in PAIRS]
    loader = DataLoader(
        ByKey(40), batch_sampler=sampler, num_workers=2, prefetch_factor=1, compat=compat
    )
    iterator = iter(loader)
    assert_eight_come_among_errors(iterator)
    monkeypatch.setattr(Key, "fails", False)
    assert drain(iterator) == ([*range(8, 40)], [])


# ---- collate_fn, worker_init_fn, on_error ----------------------------------------------------


class Flaky:
    """A ``collate_fn`` that raises at its n-th call, or always."""

    def __init__(self, call: int) -> None:
        self._call = call
        self._numbers = [*range(100, 0, -1)]  # from which threads take each once

    def __call__(self, samples: list[int]) -> torch.Tensor:
        if self._call in (0, self._numbers.pop()):
            raise OddError
        return torch.tensor(samples)


@each
@pytest.mark.parametrize("order", ORDERS)
def test_collate_fn_that_raises_costs_its_batch(workers: dict[str, Any], order: str) -> None:
    once = DataLoader(Numbers(24), 4, collate_fn=Flaky(2), order=order, **workers)
    found, raised = drain(once)
    # Each worker process has a copy of the function.
    assert 1 <= len(raised) <= max(workers["num_workers"], 1)
    assert len(found) == 24 - 4 * len(raised)
    found, raised = drain(iter(DataLoader(Numbers(24), 4, collate_fn=Flaky(0), **workers)))
    assert (found, len(raised)) == ([], 6)
    assert {type(error) for error in raised} == {OddError}


@pytest.mark.parametrize("workers", [WORKERS["2-processes"], WORKERS["2-threads"]])
def test_worker_init_fn_that_raises_is_the_error_of_each_batch(workers: dict[str, Any]) -> None:
    for raised, kind in ((OddError, OddError), (StopIteration, RuntimeError)):
        loader = DataLoader(Numbers(24), 4, worker_init_fn=raising(raised), **workers)
        found, errors = drain(loader)
        assert (found, len(errors)) == ([], 6)
        assert {type(error) for error in errors} == {kind}
        assert not any(hasattr(error, "__notes__") for error in errors)  # which would name a sample
    assert "worker_init_fn raised StopIteration" in str(errors[0])


@each
@pytest.mark.parametrize("order", ORDERS)
def test_on_error_that_raises_costs_its_batch(workers: dict[str, Any], order: str) -> None:
    dataset = Failing(24, {5: ValueError})
    for raised, kind in ((OddError, OddError), (StopIteration, RuntimeError)):
        loader = DataLoader(dataset, 4, errors=raising(raised), order=order, **workers)
        found, errors = drain(loader)
        assert len(found) == 20
        assert [type(error) for error in errors] == [kind]


# ---- an iterator in other threads ------------------------------------------------------------


@each
@pytest.mark.parametrize("order", ORDERS)
def test_several_threads_may_share_an_iterator(workers: dict[str, Any], order: str) -> None:
    loader = DataLoader(Numbers(400), 2, order=order, **workers)
    for _ in range(2):
        iterator = iter(loader)
        found: list[int] = []

        def consume(iterator: Any = iterator, found: Any = found) -> None:
            for batch in iterator:
                found.extend(batch.tolist())

        run_together(*[consume] * 4, limit_s=60)
        assert sorted(found) == [*range(400)]


# ---- what would end a worker process --------------------------------------------------------


class Ending(Failing):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__(24, {5: kind})

    def collate(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor([self[sample] for sample in samples])


BASE = [GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit]


@pytest.mark.filterwarnings("error", "ignore:.* use of fork:DeprecationWarning")
@sweep(workers=WORKERS, kind=BASE, on_error=["raise", "skip"])
def test_what_would_end_a_process_is_the_error_of_its_sample(
    workers: dict[str, Any], kind: type[BaseException], on_error: str
) -> None:
    dataset = Ending(kind)
    collating: dict[str, Any] = {"dataset": Numbers(24), "collate_fn": dataset.collate}
    for options in ({"dataset": dataset}, collating):
        loader = DataLoader(batch_size=4, errors=on_error, **options, **workers)
        in_process = workers == WORKERS["2-processes"]
        if in_process and kind is KeyboardInterrupt:  # nobody can tell it from a Ctrl-C
            is_skipped = on_error == "skip" and options is not collating
            lost = pytest.raises(RuntimeError, match="exited unexpectedly")
            messages = "after a KeyboardInterrupt|1 sample .* skipped"
            with (
                pytest.warns(RuntimeWarning, match=messages),
                nullcontext() if is_skipped else lost,
            ):
                assert sum(map(len, loader)) == 23
            continue
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        if kind is KeyboardInterrupt and workers == WORKERS["inline"]:
            with pytest.raises(kind):
                next(iterator)  # it may be a Ctrl-C: the batch is made again
        with pytest.raises(RuntimeError if in_process else kind) as caught:
            next(iterator)
        if in_process:
            assert f"{kind.__name__} was raised, as if to end the worker" in str(caught.value)
        if "collate_fn" not in options and (in_process or kind is not KeyboardInterrupt):
            assert caught.value.__notes__ == ["raised by the sample with index 5"]
        assert [batch.tolist()[0] for batch in iterator] == [8, 12, 16, 20]


@pytest.mark.filterwarnings("error")
def test_an_on_error_function_that_exits_is_an_error() -> None:
    exits = raising(SystemExit, 3)
    iterator = iter(DataLoader(Failing(8, {5: ValueError}), 4, num_workers=1, errors=exits))
    with pytest.raises(RuntimeError, match="SystemExit was raised"):
        [next(iterator) for _ in range(2)]


def test_a_sample_that_raises_keyboard_interrupt_is_named() -> None:
    with (
        pytest.warns(RuntimeWarning, match="after a KeyboardInterrupt .* index 5") as warned,
        pytest.raises(RuntimeError, match="exited unexpectedly") as caught,
    ):
        list(DataLoader(Ending(KeyboardInterrupt), 4, num_workers=2))
    assert [each.category for each in warned].count(MinatoWarning) == 2
    assert "index 5. 3 workers died there" in str(caught.value.__cause__)


class Interrupted(Numbers):
    """One sample sends its own worker a SIGINT, once, as a Ctrl-C does."""

    def __init__(self, size: int, mark: Path) -> None:
        super().__init__(size)
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        return index


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_interrupted_is_replaced(tmp_path: Path, method: str) -> None:
    dataset = Interrupted(24, tmp_path / "mark")
    loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=method)
    with pytest.warns(RuntimeWarning, match="exit code 0, as after a KeyboardInterrupt .* index 5"):
        found, raised = drain(loader)
    assert (found, raised) == ([*range(24)], [])


def deadly(samples: list[int]) -> torch.Tensor:
    if 9 in samples:
        os._exit(7)
    return torch.tensor(samples)


@mostly_slow("order", ORDERS)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_collate_fn_that_ends_its_process_is_named(order: str, on_error: str) -> None:
    options = {"num_workers": 2, "order": order, "errors": on_error}
    loader = DataLoader(Numbers(200), 4, collate_fn=deadly, **options)
    with pytest.warns(RuntimeWarning) as warned, pytest.raises(RuntimeError) as caught:
        list(loader)
    assert "exited unexpectedly" in str(caught.value)
    cause = str(caught.value.__cause__)
    assert cause.endswith("3 workers died there: it is the likely cause.")
    texts = [str(warning.message) for warning in warned]
    deaths = [text for text in texts if "DataLoader worker" in text]
    assert len(deaths) == 2
    for text in (*deaths, cause):
        found = re.search(r"in collate_fn, for the batch of indices ([0-9, ]+)\.", text)
        assert found is not None
        assert "9" in found[1].split(", ")


def stuck(number: int) -> None:
    time.sleep(60)


def stuck_once(number: int) -> None:
    if not Path(os.environ["MINATO_TEST_MARK"]).exists():
        Path(os.environ["MINATO_TEST_MARK"]).touch()
        time.sleep(60)


@mostly_slow("method", ["fork", "spawn"])
def test_a_worker_init_fn_that_hangs_is_ended(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 3600.0)  # it answers

    def loader(function: Any, **policy: Any) -> Any:
        started = {"num_workers": 1, "multiprocessing_context": method}
        errors = ErrorPolicy(**policy)
        return DataLoader(Numbers(8), 4, worker_init_fn=function, errors=errors, **started)

    iterator = iter(loader(stuck, sample_timeout=0.5))
    for _ in range(2):
        with pytest.raises(SampleTimeoutError, match="worker_init_fn took more") as caught:
            next(iterator)
        assert "in stuck" in str(caught.value)
    monkeypatch.setenv("MINATO_TEST_MARK", str(tmp_path / "mark"))
    again = loader(stuck_once, sample_timeout=1, retries=5)  # its successors may get no time
    assert flat(indices(again)) == [*range(8)]


def stuck_at_nine(samples: list[int]) -> torch.Tensor:
    time.sleep(60 if 9 in samples else 0)
    return torch.tensor(samples)


def test_a_collate_fn_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 3600.0)  # it answers
    policy = ErrorPolicy(sample_timeout=0.5, on_error="skip")
    loader = DataLoader(Numbers(40), 4, collate_fn=stuck_at_nine, num_workers=2, errors=policy)
    with pytest.raises(SampleTimeoutError, match="collate_fn took more") as caught:
        list(loader)
    assert "in stuck_at_nine" in str(caught.value)
