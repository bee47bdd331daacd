"""The parts of the demo: data, chain, one tiny training run, and a report that does not flatter."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demo.__main__ import PACKAGES, main

_absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if _absent:
    pytest.skip(f"the demo needs {' '.join(_absent)}", allow_module_level=True)

from rich.console import Console  # noqa: E402  (after the skip)

from demo import chain  # noqa: E402
from demo.chart import draw  # noqa: E402
from demo.data import HELD_OUT_BOX, WINDOW, Sample, Volume, Windows, load_volume  # noqa: E402
from demo.model import Trainer, UNet  # noqa: E402
from demo.report import Conditions, table, verdict  # noqa: E402
from demo.train import Run, torch_loader, train  # noqa: E402

TINY = Conditions(num_samples=8, batch_size=4, num_epochs=2, num_workers=2, num_cores=2)


@pytest.fixture(scope="module")
def volume() -> Volume:
    return load_volume()


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_volume_is_a_labelled_brain(volume):
    assert volume.image.shape == volume.label.shape == (197, 233, 189)
    assert (volume.image.dtype, volume.label.dtype) == (np.float32, np.uint8)
    inside = volume.image[volume.label > 0]
    assert abs(inside.mean()) < 1e-3
    assert abs(inside.std() - 1) < 1e-3
    share = np.bincount(volume.label.ravel()) / volume.label.size
    assert share[1] > share[2] > 0.05  # more grey than white matter, and a fair part of both


def test_hemispheres_mirror_each_other_so_the_front_is_held_out(volume):
    assert np.array_equal(volume.label, volume.label[::-1])
    assert np.array_equal(volume.image, volume.image[::-1])


def test_no_window_reaches_the_held_out_box(volume):
    windows = Windows(volume)
    assert len(windows) == len(set(windows.corners)) == 180
    assert max(corner[1] for corner in windows.corners) + WINDOW <= HELD_OUT_BOX[1][0]


def test_windows_are_views_of_the_volume(volume):
    sample = Windows(volume, num_windows=3)[2]
    assert sample.key == 2
    assert sample.image.shape == (WINDOW,) * 3
    assert np.shares_memory(sample.image, volume.image)


def test_chain_delivers_one_shape_whatever_it_draws(volume):
    sample = Windows(volume)[90]
    costs_s = []
    for seed in range(12):
        random.seed(seed)
        np.random.seed(seed)
        done = sample
        for transform in chain.segmentation_chain():
            done = transform(done)
        assert done.image.shape == done.label.shape == chain.PATCH
        assert (done.image.dtype, done.label.dtype) == (np.float32, np.uint8)
        assert done.image.flags.c_contiguous
        assert done.label.flags.c_contiguous
        assert not np.shares_memory(done.image, volume.image)
        assert set(np.unique(done.label)) <= {0, 1, 2}
        costs_s.append(done.cost_s)
    assert min(costs_s) > 0
    assert max(costs_s) > 5 * sorted(costs_s)[len(costs_s) // 2]  # the uneven cost is real


def test_deformation_moves_image_and_label_together():
    label = np.zeros((32, 32, 32), np.uint8)
    label[8:24, 8:24, 8:24] = 2
    sample = Sample(0, label.astype(np.float32), label, 0.0)
    bent = chain.ElasticDeformation(probability=1.0)(sample)
    assert 0.01 < (bent.label != label).mean() < 0.3
    inside, outside = bent.image[bent.label == 2], bent.image[bent.label == 0]
    assert inside.mean() > 1.8
    assert outside.mean() < 0.2


def test_same_seed_gives_the_same_model():
    first, second = Trainer(seed=3, num_steps=2).model, Trainer(seed=3, num_steps=2).model
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_dice_of_a_perfect_and_of_a_blind_model(volume, monkeypatch):
    box = volume.crop(((80, 112), (160, 192), (60, 92)))
    trainer = Trainer(seed=0, num_steps=1)
    truth = torch.nn.functional.one_hot(torch.from_numpy(box.label.astype(int)), 3)
    monkeypatch.setattr(UNet, "forward", lambda self, image: truth.movedim(-1, 0)[None].float())
    assert trainer.mean_dice(box) == 1.0
    monkeypatch.setattr(UNet, "forward", lambda self, image: torch.zeros(1, 3, *image.shape[2:]))
    assert trainer.mean_dice(box) == 0.0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_training_run_with_torch(volume, one_thread):
    windows = Windows(volume, num_windows=8)
    trainer = Trainer(seed=0, num_steps=4)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    steps: list[int] = []
    run = train(
        "torch",
        lambda: torch_loader(windows, num_workers=2, seed=0, in_order=True),
        trainer,
        num_samples=8,
        num_epochs=2,
        after_step=lambda: steps.append(1),
    )
    assert (run.delivered, run.missing, run.repeated) == (16, 0, 0)
    assert len(run.waits_s) == len(run.losses) == len(steps) == 4
    assert len(run.costs_s) == 16
    assert 0 < run.first_batch_s <= run.total_s
    assert 0 < run.wait_s < run.total_s
    after = trainer.model.parameters()
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_lost_and_repeated_samples_are_noticed():
    class Still:
        def step(self, image: Any, label: Any) -> float:
            return 0.0

    def batch(*indices: int) -> Sample:
        keys = torch.tensor(indices)
        return Sample(keys, keys, keys, torch.zeros(len(indices)))

    epochs = [batch(0, 1), batch(1, 3)]  # 2 is lost and 1 comes twice
    run = train("careless", lambda: epochs, Still(), num_samples=4, num_epochs=2)
    assert (run.delivered, run.missing, run.repeated) == (8, 2, 2)
    assert "NO" in _rendered([run])
    text = " ".join(verdict([_run("torch", 1.0), run], TINY))
    assert "careless lost 2 samples and repeated 2" in text


def _run(name: str, wait_s: float, total_s: float = 10.0, others: float | None = 0.0) -> Run:
    return Run(
        name,
        total_s=total_s,
        first_batch_s=0.1,
        trainer_cpu_s=6.0,
        waits_s=[wait_s / 4] * 4,
        costs_s=[0.001] * 12 + [2.0] * 4,
        delivered=16,
        dice=0.9,
        others_share=others,
    )


def _rendered(runs: list[Run]) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(runs, TINY))
    return captured.get()


def test_bound_is_the_tightest_of_three():
    run = _run("x", wait_s=1.0)
    assert run.chain_cpu_s == pytest.approx(8.012)
    assert run.bound_s(num_workers=1, num_cores=4) == pytest.approx(8.012)
    assert run.bound_s(num_workers=2, num_cores=2) == pytest.approx(7.006)
    assert run.bound_s(num_workers=4, num_cores=8) == pytest.approx(6.0)


def test_table_fits_a_terminal_of_80_columns():
    text = _rendered([_run("torch out of order", 1.0, 1000.0), _run("minato (strict)", 0.2)])
    assert "…" not in text
    assert "torch out of order" in text
    rows = [line for line in text.splitlines() if line.strip().startswith(("torch", "minato"))]
    assert len(rows) == 2


def test_verdict_says_when_loading_is_no_bottleneck():
    idle = " ".join(verdict([_run("torch", 0.2), _run("minato", 0.1)], TINY))
    assert "not the bottleneck" in idle
    assert "do not differ beyond noise" in idle
    busy = " ".join(verdict([_run("torch", 3.0), _run("minato", 0.1, total_s=8.0)], TINY))
    assert "not the bottleneck" not in busy
    assert "20% less time" in busy
    slower = " ".join(verdict([_run("torch", 3.0), _run("minato", 4.0, total_s=12.0)], TINY))
    assert "20% more time" in slower


def test_verdict_compares_nothing_when_other_programs_ran():
    runs = [_run("torch", 3.0, others=0.4), _run("minato", 0.1, total_s=8.0)]
    text = " ".join(verdict(runs, TINY))
    assert "cannot be compared" in text
    assert "less time" not in text


def test_chart_is_a_picture(tmp_path: Path):
    path = tmp_path / "demo.png"
    runs = [_run("torch", 3.0), replace(_run("minato", 0.5), waits_s=[0.4, 0.0, 0.05, 0.05])]
    draw(runs, TINY, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_package_is_one_clear_line(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nilearn" else find(name)
    )
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error == "demo: not installed: nilearn; remedy: pip install nilearn\n"


def test_missing_file_is_one_clear_line(monkeypatch, capsys):
    monkeypatch.setattr("demo.data._FILES", "no_such_{}.nii.gz")
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: ")
    assert "no_such_t1.nii.gz is missing" in error
    assert error.count("\n") == 1
