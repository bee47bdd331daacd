from __future__ import annotations

import contextlib
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

TWIN = "steps"
FAR_NS = 2**62


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


def test_a_sample_that_is_complete_but_late_is_complete(twin: ModuleType) -> None:
    recorder = Recorder([0, 200])
    soon_ns = time.monotonic_ns() + 100_000_000
    _, index = twin.run_steps(recorder.steps[:1], (), 0, soon_ns)
    assert index == 1
    assert twin.run_steps(recorder.steps, (0,), index, 1) == ((0, 1), 2)


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
    assert words[0] >= 3_000_000
    assert words[1] >= 0
    assert words[2] >= 6_000_000
    assert words[3] == -1
    assert words[:3].sum() <= time.monotonic_ns() - start_ns


def test_the_cursor_names_the_step_being_run(twin: ModuleType) -> None:
    cursor = np.full(1, -1, np.int64)
    seen: list[int] = []

    def look(value: int) -> int:
        seen.append(int(cursor[0]))
        return value

    assert twin.run_steps((look,) * 3, 0, 1, 0, None, cursor) == (0, 3)
    assert seen == [1, 2]
    assert cursor[0] == 3
    twin.run_steps((look,) * 3, 0, 0, 1, None, cursor)
    assert cursor[0] == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_passes_unchanged_and_the_cursor_tells_whose_it_is(
    twin: ModuleType, failing: int
) -> None:
    error = KeyError("inside")

    def fail(value: object) -> object:
        raise error

    steps: list[Any] = [lambda value: value] * 3
    steps[failing] = fail
    cursor = np.full(1, -1, np.int64)
    laps = np.full(3, -1, np.int64)
    with pytest.raises(KeyError) as caught:
        twin.run_steps(tuple(steps), 0, 0, 0, laps, cursor)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert cursor[0] == failing
    assert [lap >= 0 for lap in laps] == [i < failing for i in range(3)]


@pytest.mark.parametrize("step", [abs, len], ids=["returns", "raises"])
def test_the_memory_is_released(twin: ModuleType, step: Any) -> None:
    laps, cursor = bytearray(8), bytearray(8)
    with contextlib.suppress(TypeError):
        twin.run_steps((step,), 1, 0, 0, laps, cursor)
    laps.extend(b"refused while")
    cursor.extend(b"exported")


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_is_refused(twin: ModuleType, index: int) -> None:
    with pytest.raises(IndexError, match=f"between 0 and 2, not {index}"):
        twin.run_steps((len, len), [], index, 0)


@pytest.mark.parametrize("steps", [[len], None])
def test_steps_are_a_tuple(twin: ModuleType, steps: object) -> None:
    with pytest.raises(TypeError):
        twin.run_steps(steps, [], 0, 0)


@pytest.mark.parametrize(("name", "words"), [("laps", 1), ("cursor", 0)])
def test_memory_that_is_too_small_is_refused(twin: ModuleType, name: str, words: int) -> None:
    with pytest.raises(ValueError, match=f"{name} needs"):
        twin.run_steps((abs, abs), 1, 0, 0, **{name: bytearray(8 * words)})


@pytest.mark.parametrize("name", ["laps", "cursor"])
def test_read_only_memory_is_refused(twin: ModuleType, name: str) -> None:
    with pytest.raises(BufferError):
        twin.run_steps((abs,), 1, 0, 0, **{name: bytes(8)})
