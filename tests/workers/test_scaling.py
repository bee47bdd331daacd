"""A number of workers that changes: nothing is lost, and it goes where it helps."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import warnings

import pytest

from minato import AutoScale, DataLoader, PaperController
from minato.workers.autoscale import ControllerState
from tests.datasets import Numbers, Sleepy, flat, indices, worker_number
from tests.selection import mostly_slow

METHODS = ("process", "thread")
both_methods = pytest.mark.parametrize("method", METHODS)
PATIENCE_S = 60.0
"""For what never comes, however busy the machine."""


def workers_of(loader: DataLoader[object]) -> int:
    assert loader._minato_history.autoscale is not None
    return loader._minato_history.autoscale.state.workers


def endless(seconds: float) -> Sleepy:
    """So many samples that a test ends before they do."""
    return Sleepy(1_000_000, seconds)


@both_methods
@mostly_slow("order", ["strict", "arrival", "batch", "fast_first"])
def test_nothing_is_lost_while_workers_come_and_go(method, order, forced):
    forced(5, 1, 3, 6, 2)
    dataset = Sleepy(400, 0.002, dict.fromkeys(range(0, 400, 17), 0.02))
    options = {"workers": method, "order": order, "persistent_workers": True}
    loader = DataLoader(dataset, 7, num_workers=AutoScale(start=2, max=6), **options)
    seen: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(seen) < 800 or len(set(seen)) < 3:  # a change waits until all have had a sample
        assert time.monotonic() < deadline, loader._minato_history.autoscale
        delivered = []
        for batch in loader:
            delivered += batch.tolist()
            seen += [workers_of(loader)] * len(batch)
        assert (delivered if order == "strict" else sorted(delivered)) == list(range(400))
    del loader


@both_methods
def test_workers_that_wait_become_more_while_the_loop_waits(method, caplog):
    caplog.set_level(logging.INFO, "minato")
    loader = DataLoader(endless(0.01), 4, num_workers=AutoScale(start=1, max=6), workers=method)
    deadline = time.monotonic() + PATIENCE_S
    delivered = []
    for batch in loader:
        delivered += batch.tolist()
        if workers_of(loader) == 6:
            break
        assert time.monotonic() < deadline, loader._minato_history.autoscale
    assert delivered == list(range(len(delivered)))
    assert any(re.fullmatch(r"\d workers instead of 1: grow", each) for each in caplog.messages)


@both_methods
def test_workers_that_idle_become_fewer(method):
    loader = DataLoader(endless(0.001), 4, num_workers=AutoScale(start=5, min=1), workers=method)
    deadline = time.monotonic() + PATIENCE_S
    for _ in loader:
        time.sleep(0.02)
        if workers_of(loader) <= 2:
            break
        assert time.monotonic() < deadline, loader._minato_history.autoscale


def test_forked_workers_are_all_there_before_the_first_batch(forced):
    forced(1, 4, 2, 4)
    workers = {"num_workers": AutoScale(start=1, max=4), "multiprocessing_context": "fork"}
    iterator = iter(DataLoader(endless(0.001), 4, **workers))
    at_first = [process.pid for process in loader_processes(iterator)]
    assert None not in at_first
    for _ in range(200):
        next(iterator)
    assert [process.pid for process in loader_processes(iterator)] == at_first
    assert len(at_first) == 4


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_other_workers_are_started_when_they_are_wanted(start_method, forced):
    forced(2)
    workers = {"num_workers": AutoScale(start=1, max=3), "multiprocessing_context": start_method}
    iterator = iter(DataLoader(Numbers(100_000), 4, **workers))
    delivered: list[list[int]] = []
    processes = loader_processes(iterator)
    assert [process.pid is not None for process in processes] == [True, False, False]
    deadline = time.monotonic() + PATIENCE_S
    while processes[1].pid is None:
        delivered.append(next(iterator).tolist())
        assert time.monotonic() < deadline
    assert processes[2].pid is None
    delivered += [next(iterator).tolist() for _ in range(50)]
    assert flat(delivered) == list(range(4 * len(delivered)))


def loader_processes(iterator):
    return iterator._source._pool.processes


class Marks(Numbers):
    """Which worker ran the sample."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return worker_number()


def test_only_wanted_workers_are_initialised_and_work(tmp_path, forced):
    forced(2)

    def note(number: int) -> None:
        (tmp_path / str(number)).touch()

    scale = AutoScale(start=2, min=2, max=5)
    loader = DataLoader(Marks(60), 5, num_workers=scale, worker_init_fn=note)
    assert set(flat(indices(loader))) <= {0, 1}
    assert {path.name for path in tmp_path.iterdir()} <= {"0", "1"}


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_dies_is_replaced_whether_it_works_or_stands_by(victim):
    workers = {"num_workers": AutoScale(start=2, min=2, max=3), "multiprocessing_context": "fork"}
    loader = DataLoader(Sleepy(120, 0.005), 4, **workers)  # the one that stands by is there
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        iterator = iter(loader)
        delivered = [next(iterator).tolist()]
        os.kill(loader_processes(iterator)[victim].pid, signal.SIGKILL)
        delivered += [batch.tolist() for batch in iterator]
    assert flat(delivered) == list(range(120))


def test_the_next_pass_begins_with_what_helped_in_the_last():
    loader = DataLoader(Numbers(8), 4, num_workers=AutoScale(start=1, max=16))
    autoscale = loader._minato_history.autoscale
    assert autoscale.numbers(persistent=False) == (1, 16)
    autoscale.state, autoscale.tried = ControllerState(3), True
    assert autoscale.numbers(persistent=False) == (3, 6)
    assert autoscale.numbers(persistent=True) == (3, 16)
    iterator = iter(loader)
    assert len(loader_processes(iterator)) == 6
    assert flat(indices(iterator)) == list(range(8))


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [
        (2.0, None, (2, 1, 16)),
        (2.5, None, (2, 1, 16)),
        (6.0, None, (6, 1, 32)),
        (64.0, None, (12, 1, 64)),
        (64.0, {"max": 8}, (8, 1, 8)),
        (2.0, {"min": 4}, (4, 4, 16)),
        (2.0, {"start": 3, "max": 5}, (3, 1, 5)),
        (2.0, {"start": 3, "min": 3}, (3, 3, 16)),
        (2.0, {"start": 24, "min": 3}, (24, 3, 24)),
    ],
)
def test_limits_follow_from_the_cores(cores, given, expected, monkeypatch):
    monkeypatch.setattr("minato.options.available_cores", lambda: cores)
    scale = AutoScale(**given) if given else "auto"
    loader = DataLoader(Numbers(8), num_workers=scale)
    limits = loader._minato_options.autoscale
    assert (loader.num_workers, limits.min, limits.max) == expected


def test_limits_that_contradict_each_other_are_refused():
    for arguments, message in (
        ({"start": 0, "max": 4}, "start=0 is too small"),
        ({"start": 5, "max": 4}, "start=5 is not between min=1 and max=4"),
        ({"start": 2, "min": 3}, "start=2 is not between min=3"),
        ({"min": 9, "max": 3}, "min=9 is not between min=9 and max=3"),
        ({"min": 0}, "min=0 is too small"),
        ({"max": 5000}, "max=5000 is too large: give at most 4096"),
        ({"controller": "other"}, "controller='other' is not possible"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoScale(**arguments)
    with pytest.raises(ValueError, match="num_workers=5000 is too large: give at most 4096"):
        DataLoader(Numbers(8), num_workers=5000)
    # Its content depends on the number.
    with pytest.raises(ValueError, match="compat='torch', whose content depends on it"):
        DataLoader(Numbers(8), num_workers="auto", compat="torch")


def test_a_fixed_number_stays_fixed_and_one_that_is_assigned_later_is():
    fixed = DataLoader(Numbers(8), num_workers=2)
    assert fixed._minato_options.autoscale is fixed._minato_history.autoscale is None
    for number in (0, 2):
        loader = DataLoader(Numbers(20), 4, num_workers="auto")
        loader.num_workers = number
        iterator = iter(loader)
        processes = loader_processes(iterator) if number else []
        assert len(processes) == number
        assert flat(indices(iterator)) == list(range(20))


def test_the_papers_controller_can_be_had_and_its_constants_chosen():
    mine = PaperController(alpha=0.5, beta=3, theta=0.9, clip=1, smoothing=1.0)
    for controller, constants in (("paper", PaperController()), (mine, mine)):
        scale = AutoScale(start=2, max=4, controller=controller)
        loader = DataLoader(Numbers(200), 4, num_workers=scale)
        autoscale = loader._minato_history.autoscale
        assert autoscale.controller == "paper"
        settings = autoscale.settings
        assert (settings.least, settings.most, settings.paper) == (1, 4, constants)
        assert flat(indices(loader)) == list(range(200))
    for wrong in ({"alpha": -1}, {"clip": -1}, {"theta": 1.5}, {"smoothing": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PaperController(**wrong)
