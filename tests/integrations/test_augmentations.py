"""Libraries of augmentations whose transforms own generators: a seeded run gives the same with any workers.

They are no requirement of the tests: what they do is mimicked in ``tests/behaviour/test_owned_generators.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minato import DataLoader
from tests.datasets import TOO_MANY_WORKERS, Numbers

pytestmark = [
    pytest.mark.filterwarnings(TOO_MANY_WORKERS),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning"),
]


class Images(Numbers):
    def __init__(self, transform: Callable[[Any], Any], *shape: int) -> None:
        super().__init__(24)
        self.transform, self.shape = transform, shape

    def __getitem__(self, index: int) -> Any:
        image = np.random.default_rng(index).random(self.shape).astype(np.float32)
        return index, float(np.asarray(self.transform(image)).sum())


def uncollated(samples: list[Any]) -> list[Any]:
    return samples


def check(make: Callable[[], Any], **options: Any) -> None:
    def epochs(num_workers: int) -> tuple[Any, Any]:
        loader = DataLoader(
            make(), 4, True, num_workers=num_workers, seed=5, collate_fn=uncollated, **options
        )
        found = [dict(sample for batch in loader for sample in batch) for _ in range(2)]
        assert loader.reproduce(3)[1] == found[1][3]
        return found[0], found[1]

    first, second = epochs(0)
    assert len(set(first.values())) == 24
    assert sum(first[index] == second[index] for index in first) < 5
    assert epochs(2) == epochs(5) == (first, second)


def monai_transforms() -> Any:
    transforms = pytest.importorskip("monai.transforms")
    return transforms.Compose(
        [
            transforms.RandFlip(prob=0.5),
            transforms.RandGaussianNoise(prob=0.9),
            transforms.RandScaleIntensity(factors=0.3, prob=0.8),
            transforms.RandSpatialCrop([8, 8], random_size=False),
        ]
    )


@pytest.mark.parametrize("seed", [None, 3])
def test_monai(seed: int | None) -> None:
    def make() -> Any:
        compose = monai_transforms()
        if seed is not None:
            compose.set_random_state(seed=seed)
        return Images(compose, 1, 16, 16)

    check(make)


def test_monai_with_its_own_seeds_of_workers() -> None:
    utils = pytest.importorskip("monai.data.utils")
    check(lambda: Images(monai_transforms(), 1, 16, 16), worker_init_fn=utils.worker_init_fn)


def test_monais_datasets() -> None:
    data = pytest.importorskip("monai.data")

    class Labelled(Numbers):
        def __init__(self) -> None:
            super().__init__(24)
            images = [np.random.default_rng(i).random((1, 16, 16), np.float32) for i in range(24)]
            self.pairs = data.ArrayDataset(images, monai_transforms(), list(range(24)))

        def __getitem__(self, index: int) -> Any:
            image, label = self.pairs[index]
            return label, float(np.asarray(image).sum())

    check(Labelled)


@pytest.mark.parametrize("seed", [None, 137])
def test_albumentations(seed: int | None) -> None:
    albumentations = pytest.importorskip("albumentations")

    class Augment:
        def __init__(self) -> None:
            self.compose = albumentations.Compose(
                [
                    albumentations.HorizontalFlip(p=0.5),
                    albumentations.RandomCrop(12, 12),
                    albumentations.RandomBrightnessContrast(p=0.8),
                    albumentations.GaussNoise(p=1.0),
                    albumentations.OneOf(
                        [albumentations.Blur(p=1), albumentations.MotionBlur(p=1)], p=0.5
                    ),
                ],
                seed=seed,
            )

        def __call__(self, image: Any) -> Any:
            return self.compose(image=image)["image"]

    check(lambda: Images(Augment(), 16, 16, 3))
