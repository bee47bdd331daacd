"""The worker controller: the paper's formulas as printed, and the corrected law on loads with known answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato import PaperController
from minato.workers.autoscale import (
    CONTROLLERS,
    ControllerSettings,
    ControllerState,
    Measurement,
    corrected,
    formula_1,
    formula_2,
    paper,
)

LIMITS = ControllerSettings(least=1, most=32, cores=8.0)
IDLE = Measurement(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
shares = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("ready", "cpu", "alpha", "beta", "delta"),
    [
        (0.0, 0.7, 1.0, 1.0, 1.0),
        (1.0, 0.7, 1.0, 1.0, 0.0),
        (0.0, 0.1, 1.0, 1.0, 0.4),
        (0.0, 0.1, 1.0, 5.0, -2.0),
        (1.0, 1.0, 2.0, 2.0, 0.6),
    ],
)
def test_formula_2_as_printed(ready, cpu, alpha, beta, delta):
    constants = replace(LIMITS, paper=PaperController(alpha=alpha, beta=beta))
    assert formula_2(constants, ready, cpu) == pytest.approx(delta)


def test_formula_1_as_printed():
    deltas = {1.0: 13, -2.0: 10, 0.5: 13, -0.5: 11, 0.4: 12}
    assert {delta: formula_1(LIMITS, 12, delta) for delta in deltas} == deltas
    assert formula_1(LIMITS, 1, -2.0) == 1
    assert formula_1(LIMITS, 31, 2.0) == 32


def test_the_paper_clips_delta_and_averages_the_queue():
    steep = replace(LIMITS, paper=PaperController(alpha=10.0, smoothing=0.3))
    state = paper(ControllerState(12), replace(IDLE, ready_share=0.0, cpu_share=0.7), steep)
    assert (state.workers, state.ready_average, state.why) == (14, 0.0, "grow")
    state = paper(state, replace(IDLE, ready_share=1.0, cpu_share=0.7), steep)
    assert (state.workers, state.ready_average) == (16, pytest.approx(0.3))


def test_the_paper_grows_with_a_full_queue_on_a_busy_machine():
    """Why there is a corrected controller: nothing here asks for workers, and yet they go to the maximum."""
    full = Measurement(1.0, 1.0, 0.0, 1.0, 0.0, 100.0)
    state, fixed = ControllerState(12), ControllerState(12)
    for _ in range(60):
        state, fixed = paper(state, full, LIMITS), corrected(fixed, full, LIMITS)
    assert state.workers == 32
    assert fixed.workers == 12


def test_the_paper_sheds_workers_that_a_slow_disk_makes_wait():
    starving = Measurement(0.0, 0.02, 0.9, 1.0, 0.98, 100.0)
    steep = replace(LIMITS, paper=PaperController(beta=5.0))
    assert paper(ControllerState(12), starving, steep).workers < 12
    assert corrected(ControllerState(12), starving, steep).workers > 12


@dataclass
class Load:
    """A loader in equilibrium: what a period would measure with so many workers."""

    work_s: float = 0.010  # for a sample
    on_core: float = 0.0  # the part of it that needs a core
    consumer_s: float = 0.0  # for a sample
    cores: float = 2.0
    streams: float = math.inf  # samples that can run at once, whatever the workers: a store's limit

    def rate(self, workers: int) -> float:
        """Samples per second."""
        cpu = self.cores / (self.work_s * self.on_core) if self.on_core else math.inf
        supply = min(workers / self.work_s, self.streams / self.work_s, cpu)
        return min(supply, 1 / self.consumer_s if self.consumer_s else math.inf)

    def measure(self, workers: int, noise: float = 1.0) -> Measurement:
        """One period."""
        rate = self.rate(workers) * noise
        waited = 1.0 - min(rate * self.consumer_s, 1.0)
        demand = 1 / self.consumer_s if self.consumer_s else math.inf
        bound = rate < 0.999 * demand
        busy = 1.0 if bound else min(rate * self.work_s / workers, 1.0)
        runs = rate * self.work_s * self.on_core
        cpu = min(runs / self.cores, 1.0)
        # Workers that queue for a core are busy, but not blocked.
        blocked = 1.0 - self.on_core if runs < 0.999 * self.cores else max(1.0 - self.on_core, 0.0)
        return Measurement(
            ready_share=0.05 if bound else 0.9,
            cpu_share=cpu,
            waited_share=waited if bound else 0.0,
            busy_share=busy,
            blocked_share=blocked,
            samples_per_s=rate,
        )

    def run(self, start: int, periods: int, most: int = 32, noise: float = 0.0, seed: int = 0):
        """Number of workers in each period."""
        rng = np.random.default_rng(seed)
        limits = ControllerSettings(least=1, most=most, cores=self.cores)
        state, trace = ControllerState(start), []
        for _ in range(periods):
            measured = self.measure(state.workers, 1.0 + noise * rng.standard_normal())
            state = corrected(state, measured, limits)
            trace.append(state.workers)
        return trace


@pytest.mark.parametrize(
    ("load", "start", "periods", "most", "last"),
    [
        (Load(consumer_s=0.010 / 12), 2, 12, 32, {12}),  # workers that sleep
        (Load(consumer_s=0.010 / 12), 2, 30, 32, {12}),
        (Load(), 2, 20, 16, {16}),  # the consumer takes all
        (Load(streams=12), 2, 40, 32, {12, 13, 14, 15, 16}),  # a store serves twelve at a time
        (Load(on_core=1.0), 2, 40, 32, {2}),  # workers that compute
        (Load(on_core=1.0), 12, 40, 32, {2}),
        (Load(on_core=0.5), 2, 40, 32, {4}),
        (Load(consumer_s=0.010), 12, 40, 32, {1, 2}),  # a slow consumer makes workers leave
    ],
)
def test_workers_are_as_many_as_help(load, start, periods, most, last):
    assert load.run(start, periods, most)[-1] in last


def test_a_slow_consumer_waits_for_none_of_those_that_leave():
    load = Load(consumer_s=0.010)
    assert min(map(load.rate, load.run(start=12, periods=40))) == pytest.approx(100)


def test_an_almost_balanced_consumer_keeps_its_workers():
    load = Load(consumer_s=0.010 / 12)
    trace = load.run(start=12, periods=200)
    assert np.mean([load.rate(n) for n in trace]) > 0.97 * load.rate(12)


@pytest.mark.parametrize("load", [Load(consumer_s=0.010 / 12), Load(on_core=1.0), Load(streams=12)])
def test_noise_does_not_cost_throughput(load):
    for seed in range(5):
        trace = load.run(start=2, periods=300, noise=0.05, seed=seed)
        settled = [load.rate(n) for n in trace[30:]]
        best = max(load.rate(n) for n in range(1, 33))
        assert np.mean(settled) > 0.95 * best


def test_a_load_that_changes_is_followed():
    load = Load(consumer_s=0.010 / 12)
    limits = ControllerSettings(least=1, most=32, cores=2.0)
    state = ControllerState(2)
    for consumer_s, expected in ((0.010 / 12, 12), (0.010 / 3, 4), (0.010 / 20, 20)):
        load = replace(load, consumer_s=consumer_s)
        for _ in range(60):
            state = corrected(state, load.measure(state.workers), limits)
        assert abs(state.workers - expected) <= 1


def test_idle_workers_of_a_waiting_consumer_are_no_reason_to_grow():
    behind_a_straggler = Measurement(0.7, 0.1, 0.9, 0.3, 1.0, 100.0)
    assert corrected(ControllerState(4), behind_a_straggler, LIMITS).workers == 4


@settings(max_examples=100)
@given(
    periods=st.lists(
        st.builds(Measurement, shares, shares, shares, shares, shares, st.floats(0, 1e6)),
        max_size=40,
    ),
    name=st.sampled_from(sorted(CONTROLLERS)),
    least=st.integers(1, 4),
    room=st.integers(0, 40),
    cores=st.floats(1.0, 64.0),
)
def test_no_measurement_leads_out_of_the_limits(periods, name, least, room, cores):
    limits = ControllerSettings(least=least, most=least + room, cores=cores)
    state = ControllerState(least)
    for measured in periods:
        state = CONTROLLERS[name](state, measured, limits)
        assert least <= state.workers <= least + room
