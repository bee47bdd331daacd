"""One list of stages: workers, report, metrics, failures and slow samples give each transform the same, unique name."""

from __future__ import annotations

import functools
import json
import pickle
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minato import DataLoader, ErrorPolicy, Observe, StragglerPolicy
from minato.caching import DiskCache, MemoryCache
from minato.observe.report import Report
from minato.transforms.compose import Transforms
from tests.datasets import Lists, Numbers, events_of, metrics_of
from tests.selection import loaders

SIZE = 24


class Resize:
    """Takes some time, far more than other stages on a busy machine, or raises for some samples."""

    def __init__(self, takes_s: float = 0.0, bad: int = -1) -> None:
        self.takes_s, self.bad = takes_s, bad

    def __call__(self, value: int) -> int:
        if value == self.bad:
            raise ValueError("bad")
        if self.takes_s:
            time.sleep(self.takes_s)
        return value


class Crop(Resize):
    pass


def dataset(value: int) -> int:
    return value


LISTS: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "different": (lambda: [Resize(), Crop()], ["Resize", "Crop"]),
    "twins": (lambda: [Resize(), Resize(), Resize()], ["Resize", "Resize 2", "Resize 3"]),
    "one object": (lambda: [Resize()] * 2, ["Resize", "Resize 2"]),
    "partials": (lambda: [functools.partial(dataset)] * 2, ["dataset 2", "dataset 3"]),
    "stages": (lambda: [named("collate and copy"), dataset], ["collate and copy 2", "dataset 2"]),
    "numbered": (
        lambda: [Resize(), named("Resize 2"), Resize()],
        ["Resize", "Resize 2", "Resize 3"],
    ),
    "other way": (
        lambda: [named("Resize 2"), Resize(), Resize()],
        ["Resize 2", "Resize", "Resize 3"],
    ),
}
WORKERS = loaders("inline", "threads", "fork")


def named(name: str) -> Callable[[int], int]:
    def step(value: int) -> int:
        return value

    step.__qualname__ = name
    return step


@pytest.mark.parametrize("kind", LISTS)
def test_names_are_unique(kind: str) -> None:
    make, names = LISTS[kind]
    transforms = Transforms.of(make())
    assert list(transforms.names) == names
    for count in range(len(names) + 1):
        assert list(transforms.after(count).names) == names[count:]
        assert transforms.after(count).steps == transforms.steps[count:]
    for number, name in enumerate(names):
        failed = Transforms.of([*make()[:number], Resize(bad=1)])
        assert failed.failed_step(raised_by(failed)) is not None
        assert name in transforms.names


def raised_by(transforms: Transforms) -> BaseException:
    with pytest.raises(ValueError, match="bad") as raised:
        transforms.run(1)
    return raised.value


def test_the_twin_that_failed_is_named() -> None:
    for number in range(3):
        steps = [Resize(), Resize(), Resize()]
        steps[number] = Resize(bad=1)
        transforms = Transforms.of(steps)
        assert transforms.failed_step(raised_by(transforms)) == transforms.names[number]
    twice = Transforms.of([Resize(), Crop(bad=2), lambda value: value + 1, Resize(), Crop(bad=2)])
    error = raised_by(twice)
    assert twice.failed_step(error) == "Crop 2"
    assert Transforms.of(list(twice.steps)).failed_step(error) is None


def test_names_travel() -> None:
    transforms = Transforms.of([Resize(), Crop(), Resize()])
    copied, rest = pickle.loads(pickle.dumps((transforms, transforms.after(1))))
    assert copied.names == transforms.names
    assert rest.names == ("Crop", "Resize 2")


# ---- what a loader shows ---------------------------------------------------------------------


CACHES: dict[str, Callable[[Path, int], Any]] = {
    "none": lambda folder, after: None,
    "memory": lambda folder, after: MemoryCache(1 << 20, after=after),
    "disk": lambda folder, after: DiskCache(folder / "cache", 1 << 20, after=after),
}


def stages_of(report: Report) -> dict[str, float]:
    return {stage.name: stage.mean_s for stage in report.run.stages}


def served(loader: DataLoader[Any]) -> list[str]:
    return re.findall(
        '^minato_stage_seconds_total{.*stage="([^"]*)"', metrics_of(loader), re.MULTILINE
    )


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("cache", "after"), [("none", 0), ("memory", 0), ("memory", 1), ("memory", 3), ("disk", 2)]
)
def test_all_views_have_the_same_stages(
    cache: str, after: int, workers: str, tmp_path: Path
) -> None:
    if cache == "memory" and workers == "fork":
        pytest.skip("it belongs to one process")
    pytest.importorskip("prometheus_client")
    names = ["Resize", "Crop", "Resize 2"][after:]
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.json"
    loader = DataLoader(
        Numbers(SIZE),
        4,
        transforms=[Resize(), Crop(), Resize(0.01, bad=7)],
        cache=CACHES[cache](tmp_path, after),
        observe=Observe(metrics=0, trace=trace),
        errors=ErrorPolicy("skip", log=log),
        stragglers=StragglerPolicy(after_s=0.001),
        **WORKERS[workers],
    )
    with warnings.catch_warnings(action="ignore"):
        while_running = [(served(loader), dict(loader.live().rows())) for _ in loader]
    assert all(stages == ["dataset", *names] for stages, _ in while_running)
    slowest = {rows["slowest"].partition(",")[0] for _, rows in while_running}
    assert slowest <= {"–", "dataset", *names}
    report = loader.report()
    assert list(stages_of(report)) == ["dataset", *names, "collate and copy"]
    assert {each.stage for each in report.slowest} <= {"dataset", *names}
    if cache != "disk":  # whose writes may take longer
        slow = "Resize 2" if "Resize 2" in names else "dataset"
        assert max(["dataset", *names], key=stages_of(report).__getitem__) == slow
        assert Counter(each.stage for each in report.slowest).most_common(1)[0][0] == slow
    (failure,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert failure["transform"] == ("Resize 2" if "Resize 2" in names else None)
    slices = {event["name"] for event in events_of(trace)}
    assert slices & {"Resize", "Crop", "Resize 2"} == set(names)
    loader.close()


@pytest.mark.parametrize("kind", LISTS)
def test_each_transform_has_its_own_figures(kind: str) -> None:
    pytest.importorskip("prometheus_client")
    make, names = LISTS[kind]
    loader = DataLoader(Numbers(SIZE), 4, transforms=make(), observe=Observe(metrics=0))
    assert [served(loader) for _ in loader] == [["dataset", *names]] * 6
    assert list(stages_of(loader.report())) == ["dataset", *names, "collate and copy"]
    assert f"{names[0]} " in loader.report().details()
    loader.close()


def test_samples_that_come_together_are_one_stage() -> None:
    loader = DataLoader(Lists(SIZE), 4, transforms=[named("samples")])
    list(loader)
    assert list(stages_of(loader.report())) == ["samples", "collate and copy"]
    assert Transforms.of([named("samples")]).names == ("samples 2",)


def test_samples_that_were_skipped_were_not_returned() -> None:
    for order in ("strict", "batch", "arrival"):
        for workers in WORKERS.values():
            options = {"transforms": [Resize(bad=7)], "errors": "skip", "order": order, **workers}
            loader = DataLoader(Numbers(SIZE), 4, **options)
            with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
                count = sum(len(batch) for batch in loader)
            assert count == SIZE - 1
            assert loader.metrics()["samples_total"] == count
            assert loader.report().run.throughput.samples == count
            assert f"{count}" in loader.report().details()
