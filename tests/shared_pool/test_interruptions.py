"""An interruption at any line of ``next()`` of a rank: no batch is lost or comes twice."""

from __future__ import annotations

import gc
import itertools
import linecache
import os
import random
import signal
from typing import Any

import pytest

from minato import DataLoader, SharedPool, _fork_safety, shared_pool
from tests.datasets import Numbers, indices
from tests.edges.test_interruptions import Interrupter
from tests.shared_pool.jobs import MARKS, run

pytestmark = MARKS
SIZE = 240


def loader_of(device: str | None) -> DataLoader[Any]:
    return DataLoader(Numbers(SIZE), 2, num_workers=1, workers=SharedPool(), device=device)


def parts(size: int) -> list[list[list[int]]]:
    """The batches of each rank."""
    return [[[i, i + 2] for i in range(rank, size, 4)] for rank in (0, 1)]


WHOLE = parts(SIZE)


class AtLines(Interrupter):
    """Raises where the handler of a signal may: not while signals wait, nor at the ``with`` that ends a block.

    Python handles no signal between the end of a block and the release of its lock, and reports a line there.
    """

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if _fork_safety._deferred or name == _fork_safety.__file__:
            return self._trace
        if linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            return self._trace
        return super()._trace(frame, event, argument)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_any_line(device: str | None) -> None:
    def program(rank: int, together: Any) -> Any:
        interrupter, epochs = AtLines(0.3, seed=rank), []
        for _ in range(3):
            batches: Any = iter(loader_of(device))
            epochs.append([])
            while True:
                try:
                    batch = interrupter.call(lambda: next(batches, None))  # noqa: B023
                except KeyboardInterrupt:
                    continue
                if batch is None:
                    break
                epochs[-1].append(batch.tolist())
        return interrupter.raised, epochs

    for rank, (raised, epochs) in enumerate(run(program)):
        assert raised > 20
        assert epochs == [WHOLE[rank]] * 3


def test_any_line_of_iter() -> None:
    """The next ``iter()`` begins the epoch of the interrupted one, which others may have ended."""
    pool = os.path.dirname(shared_pool.__file__)
    traced = pool, os.path.join(os.path.dirname(pool), "delivery")

    def program(rank: int, together: Any) -> Any:
        interrupter, epochs = AtLines(0.4, traced=traced, seed=rank), []
        kept: list[KeyboardInterrupt] = []
        loader = DataLoader(Numbers(12), 2, num_workers=1, workers=SharedPool())
        indices(loader)
        for _ in range(4):
            batches: Any = None
            while batches is None:
                try:
                    batches = interrupter.call(lambda: iter(loader)) if rank else iter(loader)
                except KeyboardInterrupt as error:
                    kept.append(error)  # and with it what iter() had made
            epochs.append([next(batches).tolist()])
            kept.clear()
            gc.collect()
            epochs[-1] += [batch.tolist() for batch in batches]
        return interrupter.raised, epochs

    found = run(program)
    assert found[1][0] > 20
    assert [epochs for _, epochs in found] == [[batches] * 4 for batches in parts(12)]


class AtTheMeeting(AtLines):
    """Raises where the first ``iter()`` of local rank 0 begins to listen."""

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_name in ("_pool_server", "__init__", "listen"):
            return super()._trace(frame, event, argument)
        return self._trace


def test_a_meeting_that_is_interrupted() -> None:
    pool = os.path.dirname(shared_pool.__file__)

    def program(rank: int, together: Any) -> Any:
        interrupter = AtTheMeeting(traced=(pool,))
        loader = DataLoader(Numbers(12), 2, num_workers=1, workers=SharedPool())
        while True:
            try:
                batches: Any = iter(loader) if rank else interrupter.call(lambda: iter(loader))
            except KeyboardInterrupt:
                continue
            return interrupter.raised, [batch.tolist() for batch in batches]

    (raised, first), (_, second) = run(program)
    assert raised > 5
    assert [first, second] == parts(12)


class Alarm(BaseException):
    """What the handler raises."""


def test_a_signal_at_any_time() -> None:
    def program(rank: int, together: Any) -> Any:
        def interrupt(number: int, frame: object) -> None:
            raise Alarm

        signal.signal(signal.SIGALRM, interrupt)
        draws, raised, epochs = random.Random(rank), 0, []
        for _ in range(4):
            batches: Any = iter(loader_of(None))
            epochs.append([])
            taken: list[Any] = []
            while True:
                try:
                    # Most come soon: a fast machine has a batch in no time.
                    signal.setitimer(signal.ITIMER_REAL, draws.random() ** 3 * 0.002 + 1e-6)
                    try:
                        # Not "batch = next()": a handler may run between its return and the assignment.
                        taken.extend(itertools.islice(batches, 1))
                        is_over = len(taken) == len(epochs[-1])
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Alarm:
                    raised += 1
                    is_over = False
                if is_over:
                    break
                epochs[-1] += [batch.tolist() for batch in taken[len(epochs[-1]) :]]
                taken[:] = epochs[-1]
        return raised, epochs

    for rank, (raised, epochs) in enumerate(run(program)):
        assert raised > 10
        assert epochs == [WHOLE[rank]] * 4
