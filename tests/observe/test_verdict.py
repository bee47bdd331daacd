"""The verdict names the bottleneck of workloads that were built to have it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minato import Arrival, DataLoader, FastFirst, FetchOptions, Readers, Record, Replay, SharedPool
from minato._support.values import digits, seconds
from minato.caching import MemoryCache
from minato.observe.figures import (
    Errors,
    Machine,
    Period,
    Reads,
    Setup,
    Stage,
    Stragglers,
    Throughput,
    Verdict,
    Waiting,
    WindowFigures,
    Workers,
)
from minato.observe.machine import MachineSnapshot
from minato.observe.text import format_value
from minato.observe.verdict import judge
from tests.datasets import Filled, Numbers, Sleepy, Stream

SETUP = Setup(
    *(2, "process", "strict", True, 8, 1, True, None, False),
    *(False, None, False, 8.0, "numbers", False, 1, 1, False, False, None, None, True),
)


def stages(**shares: float) -> tuple[Stage, ...]:
    kinds = {"dataset": "source", "collate": "collate"}
    return tuple(
        Stage(name, kinds.get(name, "transform"), 100, 0.0, 0.0, 0.0, 0.0, share)
        for name, share in shares.items()
    )


FIGURES: dict[str, Any] = (
    {"own_s": 1.0, "waited_s": 9.0, "pin_memory_s": 0.0, "ranks_s": 0.0, "first_s": 0.0}
    | {"device_s": (0.0, 0.0), "step_s": (0.01, 0.01), "epochs": 1, "batches": 100}
    | {"workers": 2, "busy_s": 20.0, "busy_share": 1.0, "no_work": 0.0, "window_full": 0.0}
    | {"busiest": 0.6, "end_s": 0.0}
    | {"on_core": 0.01, "cores": 0.1, "held": False, "budget_bytes": 4000, "phase": "uniform"}
    | {"parts": stages(dataset=0.2, Crop=0.7, collate=0.1), "starved_s": None, "sampler_s": 0.0}
)
"""100 batches in 10 s: 0.1 s each, of which the training step takes 0.01 s."""


def run(**given: Any) -> Period:
    assert given.keys() <= FIGURES.keys()
    it = SimpleNamespace(**{**FIGURES, **given})
    wall_s = it.own_s + it.waited_s + it.pin_memory_s + it.ranks_s
    starved_s = it.waited_s if it.starved_s is None else it.starved_s
    waited = (it.waited_s, it.waited_s / wall_s, 0, 0, 0, 0.0, it.end_s, it.first_s, starved_s)
    shares = (it.busy_s, it.busy_share, it.busiest, it.no_work, it.window_full)
    return Period(
        *("run", it.epochs, True),
        Waiting(*waited, it.pin_memory_s, *it.device_s, it.ranks_s, it.sampler_s),
        Throughput(wall_s, it.batches, 8 * it.batches, 500 * it.batches, 0, 0, 0, *it.step_s, 1.0),
        Workers(it.workers, it.workers, it.workers, *shares, it.on_core, it.cores, 0),
        WindowFigures(0.1, 2.0, 2 * it.workers, 1500, it.budget_bytes, it.held),  # at most three
        Stragglers(it.phase, 0, 0.75, 0, 0, 0, 0, 0),
        Errors(0, 0, 0, 0, 0, 0),
        Reads(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0),
        Machine(0, 0, 0, 0),
        *((), it.parts),
    )


def verdict(setup: dict[str, Any] | None = None, **figures: Any) -> Verdict:
    return judge(dataclasses.replace(SETUP, **(setup or {})), run(**figures))


def test_training_itself() -> None:
    found = verdict(own_s=9.8, waited_s=0.2)
    assert (found.bottleneck, found.changes) == ("step", None)
    assert "not the bottleneck" in found.summary
    assert found.speedup == pytest.approx(10 / 9.8)
    # But for the one start.
    assert verdict(own_s=9.0, waited_s=1.0, first_s=0.9).bottleneck == "step"


def test_too_few_workers() -> None:
    found = verdict()  # the workers' 0.2 s for each batch, against 0.01 s
    assert (found.bottleneck, found.stage) == ("workers", "Crop")
    assert found.changes == {"num_workers": 24}
    assert found.speedup == pytest.approx(0.1 / 0.01)
    assert "num_workers=24" in found.advice
    pooled = verdict({"ranks": 5})
    assert (pooled.changes, pooled.speedup) == ({"num_workers": 5}, found.speedup)
    assert "num_workers=5" in pooled.advice


def test_more_workers_of_a_stream_divide_it() -> None:
    stream = {"is_stream": True, "may_fetch_more": False}
    for num_workers in (0, 2):
        found = verdict({**stream, "num_workers": num_workers}, workers=max(num_workers, 1))
        assert found.bottleneck == "workers"
        assert "if the dataset divides itself by get_worker_info()" in found.advice
    given = verdict({**stream, "readers": 2}, parts=stages(dataset=0.2, Crop=0.8))
    assert given.bottleneck == "workers"
    assert "get_worker_info" not in given.advice


def test_workers_that_need_cores_are_no_more_than_these() -> None:
    found = verdict(on_core=0.9, cores=0.3)
    assert found.changes == {"num_workers": 8}
    assert found.speedup == pytest.approx(0.1 / (0.2 / 8))


def test_workers_in_a_cluster_do_not_take_the_cores_of_this_machine() -> None:
    found = verdict({"worker_method": "ray"}, on_core=0.9, cores=0.95)
    assert found.changes == {"num_workers": 24}
    assert "cluster" in found.evidence[-1]
    full = verdict({"worker_method": "ray", "num_workers": 24}, workers=24, cores=0.95)
    assert full.bottleneck == "transform"
    assert not any("cores" in each for each in full.evidence)


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_threads_that_take_turns(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = {"worker_method": "thread", "num_workers": workers}
    figures = {"workers": workers, "busy_s": 10.0 * workers, "on_core": 1 / workers}
    parts = stages(dataset=0.9, collate=0.1)
    found = verdict(setup, **figures, parts=parts)
    assert (found.bottleneck, found.changes) == ("workers", {"workers": "process"})
    assert found.speedup == pytest.approx(min(workers, 8))
    # They use several cores, or wait; or there is no other core, or no GIL.
    for other in ({"on_core": 2 / workers}, {"on_core": 0.1 / workers}):
        assert verdict(setup, **{**figures, **other}).changes != found.changes
    assert verdict({**setup, "cores": 1.0}, **figures).changes != found.changes
    monkeypatch.setattr("minato.observe.verdict.has_gil", lambda: False)
    assert verdict(setup, **figures, parts=parts).changes != found.changes


def test_no_workers_at_all() -> None:
    found = verdict({"num_workers": 0}, busy_s=9.0, workers=1)
    assert (found.bottleneck, found.changes) == ("workers", {"num_workers": 11})
    # What iter() takes is not the start of workers.
    period = run(busy_s=8.5, workers=1)
    period = dataclasses.replace(period, waiting=dataclasses.replace(period.waiting, start_s=0.5))
    found = judge(dataclasses.replace(SETUP, num_workers=0), period)
    assert found.speedup == pytest.approx(0.1 / (0.0101 + 0.005))
    # Workers that are slower than the training process by itself.
    waste = verdict(busy_s=2.0, busy_share=0.1)
    assert (waste.bottleneck, waste.changes) == ("transfer", {"num_workers": 0})
    assert waste.speedup == pytest.approx(0.1 / 0.03)
    given = {"prefetch_factor": 4, "persistent_workers": True}
    kept = verdict(given, busy_s=2.0, busy_share=0.1)
    assert kept.changes == {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    assert kept.advice.endswith("num_workers=0, without prefetch_factor and persistent_workers.")
    shared = ({"ranks": 2}, {"fetch_concurrency": 2}, {"worker_method": "ray"})
    for setup in (*shared, {"needs_workers": True}):
        assert verdict(setup, busy_s=2.0, busy_share=0.1).changes != waste.changes
    # To get a batch of 0.1 ms from a worker takes as long as to load it.
    cheap = verdict({"num_workers": 0}, busy_s=9.0, workers=1, batches=100_000)
    assert (cheap.bottleneck, cheap.changes) == ("transform", None)


@pytest.mark.parametrize(
    ("parts", "bottleneck", "stage"),
    [
        (stages(dataset=0.8, Crop=0.1, collate=0.1), "source", "dataset"),
        (stages(dataset=0.2, Crop=0.3, Flip=0.4, collate=0.1), "transform", "Flip"),
        (stages(dataset=0.2, Crop=0.2, collate=0.6), "collate", "collate"),
    ],
)
def test_the_dearest_stage_where_all_cores_are_in_use(
    parts: tuple[Stage, ...], bottleneck: str, stage: str
) -> None:
    found = verdict(on_core=0.9, cores=1.0, parts=parts)
    assert (found.bottleneck, found.stage) == (bottleneck, stage)
    share = max(each.share for each in parts)
    assert found.speedup == pytest.approx(1 / (1 - share / 2))
    assert stage in found.advice
    named = "dataset[i]" in found.summary
    assert named == (bottleneck == "source")
    stream = verdict({"is_stream": True}, on_core=0.9, cores=1.0, parts=parts)
    assert ("iterable" in stream.summary) == named


@pytest.mark.parametrize("largest", ["dataset", "Crop", "collate"])
def test_photographs_that_pil_decodes(largest: str) -> None:
    parts = stages(**{"dataset": 0.1, "Crop": 0.1, "collate": 0.1, largest: 0.8})
    found = verdict({"uses_pil": True}, on_core=0.9, cores=1.0, parts=parts)
    assert found.stage == largest
    for words in ("libjpeg-turbo", "photos"):
        assert (words in found.advice) == (largest != "collate")


def test_what_is_said_of_cores_is_known() -> None:
    assert "use a core for 1 %" in verdict().evidence[0]
    # Without workers, calls that load a whole batch or read items are not timed by cores.
    unknown = verdict({"num_workers": 0}, busy_s=9.0, workers=1, on_core=0.0)
    assert (unknown.changes, unknown.evidence) == ({"num_workers": 8}, ())
    crowded = verdict(on_core=0.9, cores=1.0)
    assert crowded.evidence == ("More workers would not help: 8 cores are in use.",)
    # As many as this machine is meant to run, all of which wait.
    enough = verdict({"num_workers": 32}, workers=32, busy_s=320.0)
    assert (enough.bottleneck, enough.evidence) == ("transform", ())


def test_times_and_rates_have_no_exponent() -> None:
    values = (0.0, 0.0123, 48.123, 999.6, 16612.0)
    assert list(map(digits, values)) == ["0", "0.0123", "48.1", "1000", "16600"]
    times = (0.0, 2e-9, 5e-5, 0.0399, 0.9996, 1.019, 4000.0)
    words = "0 s, 2 ns, 50 µs, 39.9 ms, 1 s, 1.02 s, 4000 s"
    assert ", ".join(map(seconds, times)) == words
    shares = [format_value(share, "share") for share in (0.0, 3e-7, 1e-6, 0.0123, 0.9996, 1.02)]
    assert shares == ["0 %", "0 %", "0.0001 %", "1.23 %", "100 %", "102 %"]


def test_a_source_that_is_waited_for() -> None:
    parts = stages(dataset=0.9, Crop=0.05, collate=0.05)
    found = verdict(parts=parts)
    assert found.bottleneck == "source"
    assert found.changes == {"fetch_concurrency": 12}
    assert found.speedup == pytest.approx(0.1 / (0.1 * (0.1 + 0.9 / 12)))
    assert verdict({"may_fetch_more": False}, parts=parts).bottleneck == "workers"


def test_transfer() -> None:
    found = verdict(waited_s=9.0, starved_s=1.0)
    assert (found.bottleneck, found.changes) == ("transfer", None)
    assert found.speedup == pytest.approx(10 / 2)
    assert "not pickled" in found.advice
    assert "larger batches" in found.advice  # where tensors are too many and too small
    found = verdict(waited_s=9.0, starved_s=1.0, cores=0.97)  # tensors, and no core to receive them
    assert (found.bottleneck, found.changes) == ("transfer", None)
    assert "97 %" in found.evidence[0]
    assert "fewer workers" in found.advice
    found = verdict(waited_s=1.0, pin_memory_s=8.0)
    assert (found.bottleneck, found.changes) == ("transfer", {"pin_memory": False})


def test_other_ranks() -> None:
    found = verdict(own_s=1.0, waited_s=0.1, ranks_s=8.9)
    assert (found.bottleneck, found.speedup) == ("ranks", 1.0)
    assert found.evidence == ("It waits 89 ms per batch for them.",)
    assert verdict(own_s=8.0, waited_s=0.1, ranks_s=1.9).bottleneck == "step"
    # No worker makes it less.
    assert verdict(own_s=1.0, waited_s=3.0, ranks_s=6.0).speedup == pytest.approx(10 / 7)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_sampler(num_workers: int) -> None:
    setup = {"num_workers": num_workers}
    few = {"busy_s": 0.1, "busy_share": 0.01, "starved_s": 0.1}
    found = verdict(setup, sampler_s=8.0, **few)
    assert (found.bottleneck, found.changes) == ("sampler", None)
    assert found.evidence == ("To draw the indices of a batch takes 80 ms.",)
    assert found.speedup == pytest.approx(10 / 6)
    # The training process draws them, with any number of workers.
    found = verdict(setup, sampler_s=4.0, **few)
    assert found.bottleneck != "sampler"
    assert found.speedup <= 10 / (1 + 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_transfer_to_a_device(num_workers: int) -> None:
    setup = {"num_workers": num_workers}
    found = verdict(setup, starved_s=1.0, device_s=(5.0, 1.0))
    assert (found.bottleneck, found.changes) == ("transfer", None)
    assert found.evidence == ("Pinning memory takes 50 ms per batch.",)
    assert found.speedup == pytest.approx(10 / 5)
    found = verdict(setup, starved_s=1.0, device_s=(1.0, 5.0))
    assert found.evidence == ("The training process needs 50 ms to queue the copies of a batch.",)
    assert found.speedup == 1.0


def test_readers_that_read_all_the_time() -> None:
    read = {"busy_s": 10.0, "busy_share": 0.5, "parts": stages(dataset=0.9, Crop=0.1)}
    found = verdict({"readers": 1}, **read)  # 0.09 s of reading in each batch, which takes 0.1 s
    assert (found.bottleneck, found.changes) == ("source", {"readers": 11, "num_workers": 11})
    assert found.speedup == pytest.approx(0.1 / 0.01)
    assert verdict({"readers": 1, "num_workers": 16}, **read).changes == {"readers": 11}
    assert verdict({"readers": 1}, **read, on_core=1.0).changes == {"readers": 8, "num_workers": 8}
    full = verdict({"readers": 1, "cores": 1.0}, **read, on_core=1.0)
    assert (full.bottleneck, full.changes) == ("source", None)
    assert full.speedup == pytest.approx(0.1 / 0.055)
    # Reading is half of the time: further workers help, but not beyond it.
    found = verdict({"readers": 1}, parts=stages(dataset=0.25, Crop=0.75))
    assert found.changes == {"num_workers": 5}
    assert found.speedup == pytest.approx(0.1 / 0.05)
    here = verdict({"readers": 1, "reads_here": True}, busy_s=1.0, busy_share=0.1)
    assert (here.bottleneck, here.changes) == ("source", None)
    # What is given is the number of readers of all ranks together.
    dealt = verdict({"readers": 1, "reader_ranks": 4}, **read)
    assert dealt.changes == {"readers": 44, "num_workers": 11}
    assert dealt.advice.startswith("readers=44 of 4 ranks together, num_workers=11, if")


IDLE = {"busy_s": 10.0, "busy_share": 0.5}


@pytest.mark.parametrize("budget_bytes", [500, 4000, 100_000])
def test_too_little_memory(budget_bytes: int) -> None:
    found = verdict(**IDLE, held=True, budget_bytes=budget_bytes)
    assert found.bottleneck == "memory"
    assert found.changes == {"memory_budget": max(4000, 2 * budget_bytes)}
    pooled = verdict({"ranks": 4}, **IDLE, held=True, budget_bytes=budget_bytes)
    assert pooled.changes == {"memory_budget": max(1000, budget_bytes // 2)}
    assert found.speedup == pytest.approx(0.1 / 0.05)


def test_workers_that_idle() -> None:
    """Advice on the order or on a prefetch factor only where it can help."""
    cases = itertools.product(
        *(("strict", "batch"), (None, 1, 2, 20), (1, 2), ("uniform", "following")),
        *((0.1, 0.4), (1, 4), (0.04, 0.001)),
    )
    for order, prefetch_factor, workers, phase, full, own_s, median_s in cases:
        found = verdict(
            {"order": order, "in_order": order == "strict", "prefetch_factor": prefetch_factor},
            **{**IDLE, "phase": phase, "workers": workers, "window_full": full, "own_s": own_s},
            no_work=0.5 - full,
            waited_s=10 - own_s,
            step_s=(median_s, own_s / 100),
        )
        slow = order == "strict" and workers > 1 and phase != "uniform"
        expected: tuple[str, Any] = ("unknown", None)
        # Steps that take a tenth of the time fill no window.
        if full == 0.4 and (not slow or (own_s == 4 and median_s < own_s / 200)):
            assert "Uneven steps" in found.summary
            expected = ("memory", {"prefetch_factor": 8})
        elif prefetch_factor in (1, 2):
            expected = ("memory", {"prefetch_factor": None})
        elif slow:
            expected = ("order", {"order": "batch"})
        assert (found.bottleneck, found.changes) == expected


def test_one_reader_that_all_wait_for() -> None:
    found = verdict({"is_stream": True}, **IDLE, phase="following", busiest=0.9)
    assert (found.bottleneck, found.changes, found.stage) == ("source", None, "dataset")
    assert found.speedup == pytest.approx(0.9 / 0.5)
    assert "order='batch'" in found.advice
    mixing = verdict({"is_stream": True, "in_order": False}, **IDLE, busiest=0.9)
    assert "order=" not in mixing.advice
    assert verdict({}, **LATE, busiest=0.9).bottleneck == "order"
    assert verdict({"is_stream": True}, **LATE).bottleneck == "order"


CHEAP = {"busy_s": 2.0, "busy_share": 0.1}
LATE = {**IDLE, "phase": "following", "no_work": 0.5}
UNEVEN = {**IDLE, "window_full": 0.5}
HEDGED = FetchOptions(2, max_in_flight=4, hedge_percentile=90)


@pytest.mark.parametrize(
    ("arguments", "figures", "changes"),
    [
        ({"workers": SharedPool()}, CHEAP, None),
        ({"timeout": 5}, CHEAP, None),
        ({"num_workers": 0, "cache": MemoryCache(1000)}, {}, None),
        ({"cache": MemoryCache(1000), "persistent_workers": True}, {}, None),
        ({"fetch_concurrency": HEDGED}, {}, {"num_workers": 3}),
        ({"recording": Replay}, LATE, None),
        ({"order": "arrival"}, UNEVEN, {"prefetch_factor": 8}),
        ({"order": Arrival(8)}, UNEVEN, {"prefetch_factor": 8, "order": Arrival(16)}),
        ({"order": FastFirst(1)}, UNEVEN, {"prefetch_factor": 8}),
        ({"compat": "torch", "prefetch_factor": 2}, IDLE, {"prefetch_factor": 8}),
        ({"prefetch_factor": 2}, IDLE, {"prefetch_factor": None}),
    ],
)
def test_advice_goes_with_the_other_arguments(
    arguments: dict[str, Any],
    figures: dict[str, Any],
    changes: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    list(DataLoader(Numbers(8), 4, recording=Record("order")))
    given = {"num_workers": 2, **arguments}
    if "recording" in given:
        given["recording"] = given["recording"]("order")
    setup = DataLoader(Numbers(8), 4, **given).report().setup
    found = judge(setup, run(**figures))
    assert found.changes == changes
    DataLoader(Numbers(8), 4, **{**given, **(changes or {})})


def test_the_start() -> None:
    found = verdict(first_s=2.0, epochs=4)
    assert (found.bottleneck, found.changes) == ("start", {"persistent_workers": True})
    assert found.speedup == pytest.approx(10 / (10 - 6))
    assert verdict({"persistent_workers": True}, first_s=2.0, epochs=4).bottleneck != "start"
    ended = verdict(first_s=0.5, end_s=1.5, epochs=4)
    assert (ended.bottleneck, ended.speedup) == ("start", found.speedup)
    assert "500 ms for the first batch of an epoch, and 1.5 s for the end" in ended.evidence[0]


def test_too_little_was_seen() -> None:
    assert verdict(batches=7).bottleneck == "unknown"


# ---- real loaders ---------------------------------------------------------------------------


def burn(sample: Any) -> Any:
    end = time.thread_time() + 0.003
    while time.thread_time() < end:
        pass
    return sample


def nap(sample: Any) -> Any:
    """So long that a process which waits for a core adds little to the time of a batch."""
    time.sleep(0.02)
    return sample


def pass_on(sample: Any) -> Any:
    return sample


class Burning(Numbers):
    __getitem__ = staticmethod(burn)  # type: ignore[assignment]


class Trickle(Stream):
    def __iter__(self) -> Iterator[int]:
        return map(nap, super().__iter__())


class Heavy:
    """A batch that takes long to unpickle."""

    def __init__(self, samples: list[Any]) -> None:
        pass

    def __reduce__(self) -> Any:
        return time.sleep, (0.01,)


def burning_batch(samples: list[Any]) -> int:
    return len([burn(sample) for sample in samples])


class Pausing(list[list[int]]):
    """A batch sampler that sorts its batches first."""

    def __iter__(self) -> Iterator[list[int]]:
        time.sleep(0.3)
        return super().__iter__()


class Held(Filled):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def slow_start(number: int) -> None:
    time.sleep(0.3)


PASS, NAP, BURN = ({"transforms": [pass_on, *more]} for more in ([], [nap], [burn]))
FEW = {"num_workers": 2, "cores": 16.0}
"""Workers on a machine with many cores that no other program uses."""
ONE_CORE = {"num_workers": 1, "cores": 1.0}


@pytest.mark.parametrize(
    ("expected", "dataset", "arguments"),
    [
        # Long enough steps that a worker which gets no core for a while still keeps up; a thread starts at once.
        (
            ("step", None, None),
            Numbers(40),
            {"num_workers": 1, "workers": "thread", "steps_s": [0.3]},
        ),
        (("workers", "nap", None), Numbers(40), {**FEW, **NAP}),
        (("workers", "nap", None), Numbers(40), {**FEW, **NAP, "num_workers": 0}),
        (
            ("source", None, {"readers": 1, "num_workers": 1}),
            Trickle(60),
            {**FEW, **PASS, "readers": 1},
        ),
        (("source", None, {}), Trickle(60), {**FEW, **PASS, "readers": Readers(where="main")}),
        (("source", None, {"fetch_concurrency": 2}), Sleepy(40, 0.02), {**FEW, **PASS}),
        (("transform", "burn", None), Numbers(100), {**ONE_CORE, **BURN}),
        (("source", "dataset", None), Burning(100), {**ONE_CORE, **PASS}),
        (
            ("collate", "collate and copy", None),
            Numbers(100),
            {**ONE_CORE, **PASS, "collate_fn": burning_batch},
        ),
        (("transfer", None, None), Numbers(100), {"num_workers": 1, "collate_fn": Heavy}),
        # More than there are cores: they sleep.
        (
            ("workers", "collate and copy", {"num_workers": 17}),
            Numbers(160),
            {**FEW, **PASS, "collate_fn": nap},
        ),
        (
            ("workers", "dataset", {"num_workers": 3}),
            Burning(100),
            {**FEW, **PASS, "fetch_concurrency": 2},
        ),
        (("sampler", None, None), Numbers(100), {"sampler": map(nap, range(40))}),
        (
            ("sampler", None, None),
            Numbers(100),
            {"batch_size": 1, "batch_sampler": Pausing([[1]] * 20), "num_workers": 1, "epochs": 3},
        ),
        (
            ("memory", None, {"memory_budget": 1_000_001}),
            Held(80, 100_000),
            {"batch_size": 1, "num_workers": 4, "memory_budget": 500_000, "workers": "thread"},
        ),
        (
            ("memory", None, {"prefetch_factor": 3}),
            Sleepy(60, 0.01),
            {"batch_size": 1, "num_workers": 1, "steps_s": [0] * 14 + [0.3]},
        ),
        (
            ("start", None, None),
            Numbers(40),
            {"num_workers": 1, "worker_init_fn": slow_start, "workers": "thread", "epochs": 3},
        ),
    ],
)
def test_real_loaders(
    expected: tuple[str, str | None, dict[str, int] | None],
    dataset: Any,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the arguments to change, the least values are expected; None: whatever it says."""
    bottleneck, stage, changes = expected
    options = {"batch_size": 4, **arguments}
    steps_s, epochs = options.pop("steps_s", [0.0]), options.pop("epochs", 1)
    if cores := options.pop("cores", None):
        monkeypatch.setattr("minato.engine.inspector.available_cores", lambda whole_node: cores)
    if cores == FEW["cores"]:
        usage = "minato.observe.machine.machine_usage"
        monkeypatch.setattr(usage, lambda: (0.0, time.monotonic()))
        monkeypatch.setattr("minato.observe.machine.MachineMonitor._of_all", (0, MachineSnapshot()))
    for _ in range(5):  # other programs may hold up a part of a run
        loader = DataLoader(dataset, **options)
        for _ in range(epochs):
            for _, step_s in zip(loader, itertools.cycle(steps_s), strict=False):
                time.sleep(step_s)
        found = loader.report().verdict
        told = found.changes or {}
        if (
            found.bottleneck == bottleneck
            and stage in (None, found.stage)
            and (changes is None or told.keys() == changes.keys())
            and all(told[name] >= least for name, least in (changes or {}).items())
        ):
            return
    pytest.fail(f"{found}")
