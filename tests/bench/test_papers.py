"""The papers' experiments run on tiny data, and their figures follow from what was measured."""

from __future__ import annotations

import importlib.util
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

_absent = [
    name
    for name in ("scipy", "nibabel", "PIL", "sklearn")
    if importlib.util.find_spec(name) is None
]
if _absent:
    pytest.skip(f"the experiments need {' '.join(_absent)}", allow_module_level=True)

from PIL import Image  # noqa: E402  (after the skip)

from bench.macro.trial import WrongDeliveryError  # noqa: E402
from bench.papers import __main__ as papers  # noqa: E402
from bench.papers import (  # noqa: E402
    accuracy,
    costs,
    memory,
    naps,
    prefetch,
    scaling,
    size,
    throughput,
    trial,
)
from bench.papers.autoorder import Reordered  # noqa: E402
from bench.papers.costs import Measured  # noqa: E402
from bench.papers.naps import Naps, Scaled  # noqa: E402
from bench.papers.page import Settings  # noqa: E402
from bench.simulate.workloads import SEGMENTATION  # noqa: E402
from bench.workloads.detection import Picture, RandomHorizontalFlip  # noqa: E402

TINY = Scaled(SEGMENTATION, 0.001, 96)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make data`` leaves behind, in small."""
    folder: Path = tmp_path_factory.mktemp("data")
    for name in ("scans", "photographs", "speech"):
        (folder / name).mkdir()
    rng = np.random.default_rng(0)
    for number in range(2):
        image = rng.random((128, 130 + number, 128)).astype(np.float32)
        np.save(folder / "scans" / f"{number}_x.npy", image)
        label = np.zeros(image.shape, np.uint8)
        label[20:60, 30:90, 40:50] = 1
        np.save(folder / "scans" / f"{number}_y.npy", label)
    for number in range(4):
        picture = Image.new("RGB", (70 + 200 * number, 90), (255, 0, 0))
        picture.save(folder / "photographs" / f"{number}.png")
    for number in range(48):
        with wave.open(str(folder / "speech" / f"{number:02}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            tone = rng.integers(-9000, 9000, 2000 + 100 * number)
            file.writeframes(tone.astype("<i2").tobytes())
    return folder


def two_workloads(settings: Settings) -> dict[str, costs.Workload]:
    found = costs.workloads(settings)
    return {name: found[name] for name in ("detection", "speech-3s")}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The experiments set how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments of a second, with two loaders."""
    for experiment in (throughput, scaling, memory, accuracy):
        two = {name: trial.LOADERS[name] for name in ("torch", "minato")}
        monkeypatch.setattr(experiment, "LOADERS", two)
    monkeypatch.setattr(costs, "SCALE", 0.001)
    monkeypatch.setattr(throughput, "SCALE", 0.001)
    monkeypatch.setattr(prefetch, "SCALED", (TINY,))
    monkeypatch.setattr(prefetch, "FACTORS", (2,))
    monkeypatch.setattr(prefetch, "WORKERS", 2)
    monkeypatch.setattr(throughput, "SLEEPERS", 2)
    monkeypatch.setattr(throughput, "workloads", two_workloads)
    monkeypatch.setattr(scaling, "SCALED", (TINY,))
    monkeypatch.setattr(scaling, "RANKS", (1, 2))
    monkeypatch.setattr(scaling, "WORKERS", 1)
    monkeypatch.setattr(scaling, "VIRTUAL_RANKS", (1, 2))
    monkeypatch.setattr(scaling, "_SHORT_STEPS", 8)
    monkeypatch.setattr(memory, "WORKERS", 1)
    monkeypatch.setattr(memory, "EPOCHS", 1)
    monkeypatch.setattr(accuracy, "WORKERS", 1)
    monkeypatch.setattr(accuracy, "SHORT_EPOCHS", 1)
    monkeypatch.setattr(accuracy, "HELD_OUT", 1700)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", papers.EXPERIMENTS)
def test_an_experiment_is_reported(name, data, tmp_path, capsys):
    arguments = ["--short", "--experiment", name, "--data", str(data), "--out", str(tmp_path)]
    assert papers.main(arguments) == 0
    page = (tmp_path / "papers.md").read_text()
    assert "## Conditions" in page
    table = [line for line in page.partition("## Conditions")[0].splitlines() if line[:2] == "| "]
    assert len(table) > 2
    assert "nan" not in page
    assert table[2] in capsys.readouterr().out
    assert (tmp_path / f"papers-{name}.png").exists() == (f"papers-{name}.png" in page)


def test_without_data_the_remedy_is_named(tmp_path, capsys):
    assert papers.main(["--short", "--experiment", "size", "--data", str(tmp_path)]) == 2
    assert "run 'make data'" in capsys.readouterr().err


@pytest.mark.parametrize("name", trial.LOADERS)
def test_every_loader_delivers_the_naps_once(name):
    order = [3, 0, 2, 1, 5, 4]
    run = trial.timed(name, Naps([0.0] * 6), [], order, 0.0, 2, batch_size=2, num_workers=1)
    assert len(run.arrivals) == len(run.waits_s) == 6
    assert 0 < run.waited <= 1
    assert run.arrivals[-1][0] <= run.whole_s
    assert all(size == 2 * (8 + 8) for _, size in run.arrivals)


@pytest.mark.parametrize(
    ("name", "came", "fault"),
    [
        ("torch", [0, 2, 1], "order"),
        ("minato, arrival", [0, 1, 1], "exactly once"),
        ("minato, arrival", [0, 1], "exactly once"),
    ],
)
def test_a_wrong_delivery_is_refused(name, came, fault):
    trial.check("minato, arrival", [2, 0, 1], [0, 1, 2])
    with pytest.raises(WrongDeliveryError, match=fault):
        trial.check(name, came, [0, 1, 2])


def _measured(costs_s: Any, stored: Any) -> Measured:
    return Measured(["reading"], np.asarray(costs_s, float)[..., None], np.asarray(stored, float))


def test_a_cost_that_follows_size_is_found_by_it():
    sizes = np.arange(1, 41)
    assert size.correlations(_measured([sizes, sizes], sizes)) == ["1.00", "1.00", "100 %", "100 %"]
    rank, _, found, _ = size.correlations(_measured([sizes, sizes], sizes[::-1]))
    assert (rank, found) == ("-1.00", "0 %")


def test_chance_is_no_property_of_a_sample():
    drawn = np.random.default_rng(0).random((20, 200))
    assert size.share_between(drawn) < 0.05
    assert size.share_between(np.arange(200) + 0 * drawn) == pytest.approx(1)
    assert size.share_between(10 * np.arange(200) / 200 + drawn) > 0.9


def test_decisions_cost_what_the_table_says():
    costs_ms = size.decision_costs_ms(1000, 20, np.random.default_rng(0))
    assert (costs_ms > 900).mean() == pytest.approx(0.4, abs=0.02)
    assert 2.5 < costs_ms.min() < 3.2
    assert 1100 < costs_ms.max() < 1.15 * (965 + 32 + 149 + 6 + 3)
    assert "| beyond a timeout at the mean | 100 % | 100 % |" in size.decided(100, 20)


def test_naps_have_their_workloads_costs():
    scaled = Scaled(SEGMENTATION, 0.5, 30)
    slept = scaled.naps()
    assert len(slept) == 30
    assert np.mean(slept.costs_s) == pytest.approx(0.25, rel=0.1)
    assert slept.costs_s == scaled.naps().costs_s
    assert scaled.bound_s(slept, 1) == pytest.approx(sum(slept.costs_s))
    assert scaled.bound_s(slept, 1000) == pytest.approx(10 * 0.5 * SEGMENTATION.step_s)
    assert len(naps.SCALED) == 3


@pytest.mark.parametrize("side", [100, 2000])
def test_autoorder_changes_nothing_but_the_order(side):
    chain = Reordered()
    chain.others[0] = RandomHorizontalFlip(1.0)
    picture = Picture(
        0, Image.new("RGB", (side, side)), np.array([[0, 0, side / 2, side]], np.float32)
    )
    done = chain(picture)
    assert done.image.shape == (3, 800, 800)
    assert done.boxes.tolist() == [[400, 0, 800, 800]]


def test_intervals_are_students():
    assert accuracy.interval(np.array([1.0, 2.0, 3.0])) == "2.00 (± 2.48)"
    assert accuracy.interval(np.array([1.0, 1.0]), sign="+") == "+1.00 (± 0.00)"
