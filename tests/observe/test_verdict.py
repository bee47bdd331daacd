"""The verdict names the bottleneck of workloads that were built to have it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from minato import DataLoader
from minato._support.text import digits, seconds
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
from minato.observe.verdict import judge
from tests.datasets import Filled, Numbers, Sleepy

SETUP = Setup(2, "process", "strict", True, 8, 1, True, None, False, False, 8.0, "numbers", False)


def stages(**shares: float) -> tuple[Stage, ...]:
    kinds = {"dataset": "source", "collate": "collate"}
    return tuple(
        Stage(name, kinds.get(name, "transform"), 100, 0.0, 0.0, 0.0, 0.0, share)
        for name, share in shares.items()
    )


def run(
    *,
    own_s: float = 1.0,
    waited_s: float = 9.0,
    starved_s: float | None = None,
    pin_memory_s: float = 0.0,
    busy_s: float = 20.0,
    busy_share: float = 1.0,
    on_core: float = 0.01,
    cores: float = 0.1,
    first_s: float = 0.0,
    epochs: int = 1,
    batches: int = 100,
    held: bool = False,
    workers: int = 2,
    parts: tuple[Stage, ...] = stages(dataset=0.2, Crop=0.7, collate=0.1),
) -> Period:
    """100 batches in 10 s: 0.1 s each, of which the training step takes 0.01 s."""
    wall_s = own_s + waited_s + pin_memory_s
    starved_s = waited_s if starved_s is None else starved_s
    return Period(
        "run",
        epochs,
        True,
        Waiting(waited_s, waited_s / wall_s, 0, 0, 0, 0.0, first_s, starved_s, pin_memory_s),
        Throughput(wall_s, batches, 8 * batches, 1000, 0, 0, 0, 0, 0, 1.0),
        Workers(workers, workers, workers, busy_s, busy_share, 0, 0, on_core, cores, 0),
        WindowFigures(0.1, 2.0, 4, 1000, 4000, held),
        Stragglers("uniform", 0, 0.75, 0, 0, 0, 0, 0),
        Errors(0, 0, 0, 0, 0, 0),
        Reads(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0),
        Machine(0, 0, 0, 0),
        (),
        parts,
    )


def verdict(setup: dict[str, Any] | None = None, **figures: Any) -> Verdict:
    return judge(dataclasses.replace(SETUP, **(setup or {})), run(**figures))


def test_training_itself() -> None:
    found = verdict(own_s=9.8, waited_s=0.2)
    assert found.bottleneck == "step"
    assert "not the bottleneck" in found.summary
    assert found.speedup == pytest.approx(10 / 9.8)
    assert found.changes is None
    # But for the one start.
    assert verdict(own_s=9.0, waited_s=1.0, first_s=0.9).bottleneck == "step"


def test_too_few_workers() -> None:
    found = verdict()  # the workers' 0.2 s for each batch, against 0.01 s
    assert (found.bottleneck, found.stage) == ("workers", "Crop")
    assert found.changes == {"num_workers": 24}
    assert found.speedup == pytest.approx(0.1 / 0.01)
    assert "num_workers=24" in found.advice


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


def test_no_workers_at_all() -> None:
    found = verdict({"num_workers": 0}, busy_s=9.0, workers=1)
    assert found.bottleneck == "workers"
    assert found.changes == {"num_workers": 11}


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


@pytest.mark.parametrize("largest", ["dataset", "Crop", "collate"])
def test_photographs_that_pil_decodes(largest: str) -> None:
    parts = stages(**{"dataset": 0.1, "Crop": 0.1, "collate": 0.1, largest: 0.8})
    found = verdict({"uses_pil": True}, on_core=0.9, cores=1.0, parts=parts)
    assert found.stage == largest
    assert ("libjpeg-turbo" in found.advice) == (largest != "collate")
    assert ("photos" in found.advice) == (largest != "collate")


def test_times_and_rates_have_no_exponent() -> None:
    values = (0.0, 0.0123, 48.123, 999.6, 16612.0)
    assert list(map(digits, values)) == ["0", "0.0123", "48.1", "1000", "16600"]
    times = (0.0, 2e-9, 5e-5, 0.0399, 0.9996, 1.019, 4000.0)
    assert list(map(seconds, times)) == [
        "0 s",
        "2 ns",
        "50 µs",
        "39.9 ms",
        "1 s",
        "1.02 s",
        "4000 s",
    ]


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
    found = verdict(waited_s=9.0, starved_s=1.0, cores=0.97)  # tensors, and no core to receive them
    assert (found.bottleneck, found.changes) == ("transfer", None)
    assert "97%" in found.evidence[0]
    assert "fewer workers" in found.advice
    found = verdict(waited_s=1.0, pin_memory_s=8.0)
    assert (found.bottleneck, found.changes) == ("transfer", {"pin_memory": False})


def test_too_little_memory() -> None:
    found = verdict(busy_s=10.0, busy_share=0.5, held=True)
    assert found.bottleneck == "memory"
    assert found.changes is not None
    assert found.changes["memory_budget"] > 1000
    assert found.speedup == pytest.approx(0.1 / 0.05)
    found = verdict({"prefetch_factor": 1}, busy_s=10.0, busy_share=0.5)
    assert (found.bottleneck, found.changes) == ("memory", {"prefetch_factor": None})


def test_slow_samples_in_strict_order() -> None:
    assert verdict(busy_s=10.0, busy_share=0.5).changes == {"order": "batch"}
    assert (
        verdict({"order": "batch", "in_order": False}, busy_s=10.0, busy_share=0.5).bottleneck
        == "unknown"
    )


def test_the_start() -> None:
    found = verdict(first_s=2.0, epochs=4)
    assert (found.bottleneck, found.changes) == ("start", {"persistent_workers": True})
    assert found.speedup == pytest.approx(10 / (10 - 6))
    assert verdict({"persistent_workers": True}, first_s=2.0, epochs=4).bottleneck != "start"


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
    def __getitem__(self, index: int) -> int:
        return int(burn(index))


class Heavy:
    """Takes long to unpickle."""

    def __reduce__(self) -> Any:
        return unpickled, ()


def unpickled() -> Heavy:
    time.sleep(0.01)
    return Heavy()


def heavy_batch(samples: list[Any]) -> Heavy:
    return Heavy()


def burning_batch(samples: list[Any]) -> int:
    for _ in samples:
        burn(0)
    return len(samples)


class Held(Filled):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def judged(
    dataset: Any, size: int, *, step_s: float = 0.0, epochs: int = 1, **arguments: Any
) -> Verdict:
    loader = DataLoader(dataset, size, **arguments)
    for _ in range(epochs):
        for _ in loader:
            time.sleep(step_s)
    return loader.report().verdict


def test_a_loop_that_takes_its_time() -> None:
    # Long enough steps that a worker which gets no core for a while still keeps up.
    assert judged(Numbers(80), 4, num_workers=1, step_s=0.1).bottleneck == "step"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sleeping_transforms_on_few_workers(num_workers: int) -> None:
    found = judged(Numbers(40), 4, num_workers=num_workers, transforms=[pass_on, nap])
    assert (found.bottleneck, found.stage) == ("workers", "nap")


def test_a_sleeping_source() -> None:
    found = judged(Sleepy(40, 0.02), 4, num_workers=2, transforms=[pass_on])
    assert found.bottleneck == "source"
    assert found.changes is not None
    assert found.changes["fetch_concurrency"] > 1


@pytest.mark.parametrize(
    ("bottleneck", "stage", "arguments"),
    [
        ("transform", "burn", {"dataset": Numbers(160), "transforms": [pass_on, burn]}),
        ("source", "dataset", {"dataset": Burning(160), "transforms": [pass_on]}),
        (
            "collate",
            "collate and copy",
            {"dataset": Numbers(160), "collate_fn": burning_batch, "transforms": [pass_on]},
        ),
    ],
)
def test_work_on_all_cores(
    bottleneck: str, stage: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.engine.inspector.available_cores", lambda whole_node: 1.0)
    found = judged(size=4, num_workers=1, **arguments)
    assert (found.bottleneck, found.stage) == (bottleneck, stage)


def test_batches_that_take_long_to_unpickle() -> None:
    found = judged(Numbers(100), 4, num_workers=1, collate_fn=heavy_batch)
    assert found.bottleneck == "transfer"


def test_a_budget_for_one_batch() -> None:
    found = judged(Held(80, 100_000), 1, num_workers=4, memory_budget=500_000, workers="thread")
    assert found.bottleneck == "memory"
    assert found.changes is not None
    assert found.changes["memory_budget"] > 1_000_000


def slow_start(number: int) -> None:
    time.sleep(0.3)


def test_short_epochs_with_slow_starts() -> None:
    arguments = {"num_workers": 1, "worker_init_fn": slow_start, "workers": "thread"}
    assert judged(Numbers(40), 4, epochs=3, **arguments).bottleneck == "start"
