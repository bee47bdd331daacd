"""The parts of the demo: data, chain, tiny runs with each loader, and a report that does not flatter."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from functools import partial
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
from demo.data import HELD_OUT_BOX, WINDOW, Draws, Sample, Volume, Windows, load_volume  # noqa: E402
from demo.model import Trainer, UNet  # noqa: E402
from demo.report import Conditions, bars, table, verdict  # noqa: E402
from demo.train import LOADERS, Accelerator, Run, make_loader, train  # noqa: E402

TINY = Conditions(num_samples=8, batch_size=4, num_epochs=2, num_workers=2, num_cores=2)


@pytest.fixture(scope="module")
def volume() -> Volume:
    return load_volume()


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(1)


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


def test_dice_of_a_perfect_and_of_a_blind_model(volume, monkeypatch):
    box = volume.crop(((80, 112), (160, 192), (60, 92)))
    trainer = Trainer(seed=0, num_steps=1)
    truth = torch.nn.functional.one_hot(torch.from_numpy(box.label.astype(int)), 3)
    monkeypatch.setattr(UNet, "forward", lambda self, image: truth.movedim(-1, 0)[None].float())
    assert trainer.mean_dice(box) == 1.0
    monkeypatch.setattr(UNet, "forward", lambda self, image: torch.zeros(1, 3, *image.shape[2:]))
    assert trainer.mean_dice(box) == 0.0


def test_a_sample_follows_from_its_draw(volume):
    windows = Windows(volume, chain.segmentation_chain(), seed=3)
    first, again, later = windows[20], windows[20], windows[200]
    assert np.array_equal(first.image, again.image)
    assert not np.array_equal(first.image, later.image)  # the same window in the next epoch
    other = Windows(volume, chain.segmentation_chain(), seed=4)[20]
    assert not np.array_equal(first.image, other.image)


def test_draws_shuffle_each_epoch_in_its_own_way():
    draws = Draws(180, seed=0)
    orders = []
    for epoch in (0, 1, 0):
        draws.set_epoch(epoch)
        orders.append(list(draws))
    assert orders[0] == orders[2] != list(range(180))
    assert sorted(orders[1]) == list(range(180, 360))
    assert [draw - 180 for draw in orders[1]] != orders[0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_every_loader_delivers_the_same_samples(volume):
    windows = Windows(volume, chain.segmentation_chain(), num_windows=8)
    runs = []
    for name, (loader, arguments) in LOADERS.items():
        steps: list[int] = []
        make = partial(make_loader, loader, windows, 2, **arguments)
        run = train(name, make, Accelerator(0.01), 8, 2, after_step=lambda: steps.append(1))  # noqa: B023
        assert run.is_complete
        assert sorted(run.contents) == list(range(16))
        assert len(run.waits_s) == len(run.steps_s) == len(steps) == 4
        assert len(run.costs_s) == 16
        assert 0 < run.first_batch_s <= run.total_s
        assert 0 < run.wait_s + 0.02 < max(run.epochs_s) + 0.001
        runs.append(run)
    assert runs[0].contents == runs[1].contents == runs[2].contents
    assert "NO" not in _rendered(runs)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_training_gives_the_same_model_with_torch_in_order_and_minato(volume, one_thread):
    windows = Windows(volume, chain.segmentation_chain(), num_windows=8)
    models = []
    for name in ("torch", "minato"):
        loader, arguments = LOADERS[name]
        trainer = Trainer(seed=0, num_steps=2)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        run = train(name, partial(make_loader, loader, windows, 2, **arguments), trainer, 8, 1)
        assert len(run.steps_s) == 2
        assert run.step_cores == 1
        after = list(trainer.model.parameters())
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        models.append(after)
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))


def test_lost_repeated_and_altered_samples_are_noticed():
    def batch(*draws: int) -> Sample:
        keys = torch.tensor(draws)
        return Sample(keys, keys, keys, torch.zeros(len(draws)))

    class Careless:
        sampler = Draws(2, seed=0)

        def __init__(self, *epochs: list[Sample]) -> None:
            self.epochs = epochs

        def __iter__(self) -> Iterator[Any]:
            return iter(self.epochs[self.sampler.epoch])

    whole = Careless([batch(0, 1)], [batch(2, 3)])
    careless = Careless([batch(0), batch(0)], [batch(3, 2)])  # 1 is lost and 0 comes twice
    good = train("torch", lambda: whole, Accelerator(0.0), num_samples=2, num_epochs=2)
    bad = train("careless", lambda: careless, Accelerator(0.0), num_samples=2, num_epochs=2)
    assert good.is_complete
    assert (bad.missing, bad.repeated) == (1, 1)
    assert _rendered([good, bad]).count("NO") == 2
    text = " ".join(verdict([_run("torch", 1.0), bad], TINY))
    assert "careless lost 1 samples and repeated 1" in text


def _run(name: str, wait_s: float, epoch_s: float = 5.0, others: float | None = 0.0) -> Run:
    return Run(
        name,
        total_s=2 * epoch_s,
        first_batch_s=0.1,
        waits_s=[wait_s / 2] * 4,
        steps_s=[1.5] * 4,
        epochs_s=[epoch_s] * 2,
        costs_s=[0.001] * 12 + [2.0] * 4,
        contents={0: 1},
        others_share=others,
    )


def _rendered(runs: list[Run]) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(bars(runs, TINY))
        console.print(table(runs, TINY))
    return captured.get()


def test_bound_is_the_tightest_of_three():
    run = _run("x", wait_s=1.0)
    assert run.bound_s(num_workers=1, num_cores=4) == pytest.approx(8.012 / 2)
    assert run.bound_s(num_workers=4, num_cores=8) == pytest.approx(3.0)
    assert run.bound_s(num_workers=2, num_cores=1) == pytest.approx(8.012 / 2)
    run.step_cores = 1  # the step is work for a core of this machine
    assert run.bound_s(num_workers=2, num_cores=2) == pytest.approx((6.0 + 8.012) / 4)
    run.costs_s = [0.1, 0.2, 0.1, 0.1, 9.0]
    assert run.first_bound_s(batch_size=4, num_workers=2) == pytest.approx(0.25)
    assert run.first_bound_s(batch_size=4, num_workers=4) == pytest.approx(0.2)


def test_tables_fit_a_terminal_of_80_columns():
    trained = _run("torch, in_order=False", 1.0, 100.0)
    trained.dice = 0.95
    text = _rendered([trained, _run("minato", 0.2)])
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("torch, in_order=False") == text.count("\nideal ") == 2


def test_verdict_says_when_loading_is_no_bottleneck_and_when_other_programs_ran():
    def told(torch: Run, minato: Run) -> str:
        return " ".join(verdict([torch, minato], TINY))

    idle = told(_run("torch", 0.2), _run("minato", 0.1))
    assert "not the bottleneck" in idle
    assert "do not differ beyond noise" in idle
    busy = told(_run("torch", 3.0), _run("minato", 0.1, epoch_s=4.0))
    assert "not the bottleneck" not in busy
    assert "1.25 times as long as with minato" in busy
    slower = told(_run("torch", 3.0), _run("minato", 4.0, epoch_s=6.25))
    assert "0.80 times as long as with minato" in slower
    disturbed = told(_run("torch", 3.0, others=0.4), _run("minato", 0.1, epoch_s=4.0))
    assert "cannot be compared" in disturbed
    assert "times as long" not in disturbed


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
