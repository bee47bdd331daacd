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

from minato import _fork_safety, shared_pool
from tests.datasets import Numbers, indices
from tests.edges.test_interruptions import Interrupter
from tests.shared_pool.jobs import in_turn, pooled, pretended_device, run

POOL = os.path.dirname(shared_pool.__file__)
WHOLE = in_turn(240, 2)


class AtLines(Interrupter):
    """Raises where the handler of a signal may: not while signals wait, nor at the ``with`` that ends a block.

    Python handles no signal between the end of a block and the release of its lock, and reports a line there.
    """

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if _fork_safety._deferred or name == _fork_safety.__file__:
            return self._line
        if linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            return self._line
        return super()._line(frame, event, argument)


@pytest.mark.parametrize("has_device", [False, True])
def test_any_line(has_device: bool) -> None:
    def program(rank: int, together: Any) -> Any:
        device = pretended_device() if has_device else None
        interrupter, epochs = AtLines(0.3, seed=rank), []
        for _ in range(2):
            batches: Any = iter(pooled(Numbers(240), 2, device=device))
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
        assert epochs == [WHOLE[rank]] * 2


def test_any_line_of_iter() -> None:
    """The next ``iter()`` begins the epoch of the interrupted one, which others may have ended."""
    traced = POOL, os.path.join(os.path.dirname(POOL), "delivery")

    def program(rank: int, together: Any) -> Any:
        interrupter, epochs = AtLines(0.4, traced=traced, seed=rank), []
        kept: list[KeyboardInterrupt] = []
        loader = pooled(Numbers(12), 2)
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
    assert [epochs for _, epochs in found] == [[batches] * 4 for batches in in_turn(12, 2)]


class AtTheMeeting(AtLines):
    """Raises where the first ``iter()`` of local rank 0 begins to listen."""

    def _trace(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_name in ("_pool_server", "__init__", "listen"):
            return super()._trace(frame, event, argument)
        return self._trace


def test_a_meeting_that_is_interrupted() -> None:
    def program(rank: int, together: Any) -> Any:
        interrupter = AtTheMeeting(traced=(POOL,))
        loader = pooled(Numbers(12), 2)
        while True:
            try:
                batches: Any = iter(loader) if rank else interrupter.call(lambda: iter(loader))
            except KeyboardInterrupt:
                continue
            return interrupter.raised, indices(batches)

    (raised, first), (_, second) = run(program)
    assert raised > 5
    assert [first, second] == in_turn(12, 2)


class Alarm(BaseException):
    """What the handler raises."""


def test_a_signal_at_any_time() -> None:
    def program(rank: int, together: Any) -> Any:
        def interrupt(number: int, frame: object) -> None:
            raise Alarm

        signal.signal(signal.SIGALRM, interrupt)
        draws, raised, epochs = random.Random(rank), 0, []
        for _ in range(4):
            batches: Any = iter(pooled(Numbers(240), 2))
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
