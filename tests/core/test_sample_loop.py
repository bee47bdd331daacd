"""Running samples and their transforms, and the lease that says which: both halves alike."""

from __future__ import annotations

import contextlib
import time
from array import array
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato._core import codes, now_ns

TWIN = "sample_loop"
FAR_NS = 2**62


def run(twin: ModuleType, fetch: Any, keys: list[Any], **given: Any) -> tuple[Any, Any, Any]:
    lease, durations = twin.Lease(), array("q", [-1] * len(keys))
    arguments = {"bind": None, "epoch": 0, "catches": Exception, **given}
    found = twin.run_samples(fetch, keys, 100, lease, durations, **arguments)
    return found, lease, durations


def test_samples_in_order_with_their_times(twin: ModuleType) -> None:
    before = now_ns()
    (samples, error), lease, durations = run(twin, str, [3, "b", None])
    assert (samples, error) == (["3", "b", "None"], None)
    assert all(0 <= lap <= now_ns() - before for lap in durations)
    assert lease.position == 100 + 2
    assert before <= lease.started_ns <= now_ns()
    assert lease.step == -1


def test_lease_names_the_sample_that_runs(twin: ModuleType) -> None:
    lease = twin.Lease()
    lease.enter(codes.STARTING, 1)
    given = array("q", [0, 0]), None, 0, Exception
    seen, _ = twin.run_samples(lambda key: (key, *lease.state()), [7, 8], 40, lease, *given)
    assert [(key, position, step) for key, position, _, step in seen] == [(7, 40, -1), (8, 41, -1)]


def test_each_sample_is_bound_just_before_it(twin: ModuleType) -> None:
    journal: list[Any] = []

    def add(*what: Any) -> None:
        journal.append(what)

    run(twin, partial(add, "fetch"), ["a", "b"], bind=add, epoch=5)
    assert journal == [(5, "a"), ("fetch", "a"), (5, "b"), ("fetch", "b")]


def test_an_error_ends_the_run_and_is_returned(twin: ModuleType) -> None:
    called = []

    def fetch(key: int) -> int:
        called.append(key)
        return 10 // key

    (samples, error), lease, durations = run(twin, fetch, [5, 0, 2])
    assert isinstance(error, ZeroDivisionError)
    assert (samples, called, lease.position) == ([2], [5, 0], 101)
    assert durations[1] >= 0
    assert durations[2] == -1


def test_other_errors_propagate(twin: ModuleType) -> None:
    def interrupted(key: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(twin, interrupted, [1])
    (samples, error), _, _ = run(twin, interrupted, [1], catches=BaseException)
    assert samples == []
    assert isinstance(error, KeyboardInterrupt)


def test_no_keys_and_durations_that_are_too_short(twin: ModuleType) -> None:
    assert run(twin, str, [])[0] == ([], None)
    with pytest.raises(ValueError, match="durations needs 16 bytes, this buffer has 8"):
        twin.run_samples(str, [1, 2], 0, twin.Lease(), array("q", [0]), None, 0, Exception)


# --------------------------------------------------------------------------------------- transforms


class Recorder:
    """Transforms that append their number to the sample, count their calls, and take time."""

    def __init__(self, durations_us: list[int]) -> None:
        self.calls = [0] * len(durations_us)
        self.steps = tuple(self._step(i, us) for i, us in enumerate(durations_us))

    def _step(self, number: int, duration_us: int) -> Any:
        def step(value: tuple[int, ...]) -> tuple[int, ...]:
            self.calls[number] += 1
            end_ns = time.monotonic_ns() + 1000 * duration_us
            while time.monotonic_ns() < end_ns:
                pass
            return (*value, number)

        return step


@given(
    durations_us=st.lists(st.integers(0, 60), max_size=6),
    allowances_us=st.lists(st.integers(-5, 150), max_size=8),
)
def test_resumed_runs_compose_to_the_straight_run_and_no_step_repeats(
    twin: ModuleType, durations_us: list[int], allowances_us: list[int]
) -> None:
    recorder = Recorder(durations_us)
    value: tuple[int, ...] = ()
    index = 0
    for allowance_us in allowances_us:
        deadline_ns = max(time.monotonic_ns() + 1000 * allowance_us, 1)
        before = index
        value, index = twin.run_steps(recorder.steps, value, index, deadline_ns)
        assert index > before or before == len(durations_us)
        assert value == tuple(range(index))
        if index < len(durations_us):
            assert time.monotonic_ns() >= deadline_ns
    value, index = twin.run_steps(recorder.steps, value, index, 0)
    assert (value, index) == (tuple(range(len(durations_us))), len(durations_us))
    assert recorder.calls == [1] * len(durations_us)


@given(count=st.integers(0, 6), data=st.data())
def test_a_past_deadline_stops_after_one_step(
    twin: ModuleType, count: int, data: st.DataObject
) -> None:
    recorder = Recorder([0] * count)
    index = data.draw(st.integers(0, count))
    expected = min(index + 1, count)
    assert twin.run_steps(recorder.steps, (), index, 1) == (tuple(range(index, expected)), expected)


@pytest.mark.parametrize("deadline_ns", [0, -1, FAR_NS], ids=["none", "negative", "far"])
def test_without_a_near_deadline_all_steps_run(twin: ModuleType, deadline_ns: int) -> None:
    recorder = Recorder([50, 0, 50])
    assert twin.run_steps(recorder.steps, (), 0, deadline_ns) == ((0, 1, 2), 3)


def test_nothing_runs_past_the_end(twin: ModuleType) -> None:
    value = object()
    assert twin.run_steps((), value, 0, 1)[0] is value
    assert twin.run_steps((len, len), value, 2, 1) == (value, 2)


@pytest.mark.parametrize("make", [np.zeros, lambda n, _: bytearray(8 * n)], ids=["array", "bytes"])
def test_laps_receive_the_duration_of_each_step_that_ran(twin: ModuleType, make: Any) -> None:
    recorder = Recorder([3000, 0, 6000])
    laps = make(4, np.int64)
    words = np.frombuffer(laps, np.int64)
    words[:] = -1
    start_ns = time.monotonic_ns()
    twin.run_steps(recorder.steps, (), 1, 1, laps)
    assert words[1] >= 0
    assert words.tolist() == [-1, words[1], -1, -1]
    twin.run_steps(recorder.steps, (), 0, 0, laps)
    assert (words[:3] >= [3_000_000, 0, 6_000_000]).all()
    assert words[3] == -1
    assert words[:3].sum() <= time.monotonic_ns() - start_ns


def test_the_lease_names_the_step_being_run(twin: ModuleType) -> None:
    lease = twin.Lease()
    seen: list[int] = []

    def look(value: int) -> int:
        seen.append(lease.step)
        return value

    assert twin.run_steps((look,) * 3, 0, 1, 0, None, lease) == (0, 3)
    assert seen == [1, 2]
    assert lease.step == 3
    twin.run_steps((look,) * 3, 0, 0, 1, None, lease)
    assert lease.step == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_passes_unchanged_and_the_lease_tells_whose_it_is(
    twin: ModuleType, failing: int
) -> None:
    error = KeyError("inside")

    def fail(value: object) -> object:
        raise error

    steps: list[Any] = [lambda value: value] * 3
    steps[failing] = fail
    lease = twin.Lease()
    laps = np.full(3, -1, np.int64)
    with pytest.raises(KeyError) as caught:
        twin.run_steps(tuple(steps), 0, 0, 0, laps, lease)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert lease.step == failing
    assert [lap >= 0 for lap in laps] == [i < failing for i in range(3)]


@pytest.mark.parametrize("step", [abs, len], ids=["returns", "raises"])
def test_the_memory_is_released(twin: ModuleType, step: Any) -> None:
    laps, memory = bytearray(8), bytearray(24)
    lease = twin.Lease(memory)
    with contextlib.suppress(TypeError):
        twin.run_steps((step,), 1, 0, 0, laps, lease)
    laps.extend(b"refused while exported")
    with pytest.raises(BufferError):
        memory.extend(b"exported")
    del lease
    memory.extend(b"no more")


@pytest.mark.parametrize(
    ("kind", "words", "given"),
    [
        (IndexError, "between 0 and 2, not -1", ((len, len), [], -1, 0)),
        (IndexError, "between 0 and 2, not 3", ((len, len), [], 3, 0)),
        (TypeError, None, ([len], [], 0, 0)),
        (TypeError, None, (None, [], 0, 0)),
        (ValueError, "laps needs 16 bytes, this buffer has 8", ((abs, abs), 1, 0, 0, bytearray(8))),
        (BufferError, None, ((abs,), 1, 0, 0, bytes(8))),
    ],
)
def test_other_indices_steps_and_laps_are_refused(
    twin: ModuleType, kind: type[Exception], words: str | None, given: tuple[Any, ...]
) -> None:
    with pytest.raises(kind, match=words):
        twin.run_steps(*given)


# ------------------------------------------------------------------------------------------ the lease


def test_a_lease_says_what_a_worker_is_on(twin: ModuleType) -> None:
    memory = np.zeros(5, np.int64)
    lease, reader = twin.Lease(memory, 16), twin.Lease(memory, 16)
    assert reader.state() == (None, 0, 0)
    lease.begin(7, 1234)
    assert reader.state() == (7, 1234, -1)
    lease.step = 2
    assert (reader.position, reader.started_ns, reader.step) == (7, 1234, 2)
    lease.enter(codes.FIRST_COLLATED - 5, 99)
    assert reader.state() == (None, 99, codes.FIRST_COLLATED - 5)
    lease.begin(0, 5, 3)
    assert reader.state() == codes.LeaseState(0, 5, 3)
    assert memory.tolist() == [0, 0, 1, 5, 3]


@pytest.mark.parametrize("offset", [-8, 4, 8])
def test_a_lease_fits_its_memory(twin: ModuleType, offset: int) -> None:
    with pytest.raises(ValueError, match=f"offset {offset} is no place for a lease in 24 bytes"):
        twin.Lease(bytearray(24), offset)
    with pytest.raises(BufferError):
        twin.Lease(bytes(24))
