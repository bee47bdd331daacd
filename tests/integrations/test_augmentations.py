"""Libraries of augmentations whose transforms own generators: a seeded run gives the same with any workers.

They are no requirement of the tests: what they do is mimicked in ``tests/behaviour/test_owned_generators.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minato import DataLoader
from tests.datasets import Numbers, flat

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning"),
]


class Images(Numbers):
    def __init__(self, transform: Callable[[Any], Any], *shape: int) -> None:
        super().__init__(24)
        self.transform, self.shape = transform, shape

    def image(self, index: int) -> Any:
        return np.random.default_rng(index).random(self.shape, np.float32)

    def __getitem__(self, index: int) -> Any:
        return index, float(np.asarray(self.transform(self.image(index))).sum())


def check(make: Callable[[], Any], **options: Any) -> None:
    def epochs(num_workers: int) -> Any:
        how: Any = {"num_workers": num_workers, "seed": 5, "collate_fn": list, **options}
        loader = DataLoader(make(), 4, True, **how)
        found = [dict(flat(loader)) for _ in range(2)]
        assert loader.reproduce(3)[1] == found[1][3]
        return found

    first, second = epochs(0)
    assert len(set(first.values())) == 24
    assert sum(first[index] == second[index] for index in first) < 5
    assert epochs(2) == epochs(5) == [first, second]


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


@pytest.mark.parametrize("seeds", ["none", "compose", "workers"])
def test_monai(seeds: str) -> None:
    """Also with a seed of its own, and with its function that seeds workers."""

    def make() -> Any:
        compose = monai_transforms()
        if seeds == "compose":
            compose.set_random_state(seed=3)
        return Images(compose, 1, 16, 16)

    utils = pytest.importorskip("monai.data.utils")
    check(make, **({"worker_init_fn": utils.worker_init_fn} if seeds == "workers" else {}))


def test_monais_datasets() -> None:
    data = pytest.importorskip("monai.data")

    class Labelled(Images):
        def __init__(self) -> None:
            super().__init__(monai_transforms(), 1, 16, 16)
            images = [self.image(i) for i in range(24)]
            self.pairs = data.ArrayDataset(images, self.transform, list(range(24)))

        def __getitem__(self, index: int) -> Any:
            image, label = self.pairs[index]
            return label, float(np.asarray(image).sum())

    check(Labelled)


@pytest.mark.parametrize("seed", [None, 137])
def test_albumentations(seed: int | None) -> None:
    made = pytest.importorskip("albumentations")

    class Augment:
        def __init__(self) -> None:
            blurs = [made.Blur(p=1), made.MotionBlur(p=1)]
            steps = [made.HorizontalFlip(p=0.5), made.RandomCrop(12, 12), made.GaussNoise(p=1.0)]
            steps += [made.RandomBrightnessContrast(p=0.8), made.OneOf(blurs, p=0.5)]
            self.compose = made.Compose(steps, seed=seed)

        def __call__(self, image: Any) -> Any:
            return self.compose(image=image)["image"]

    check(lambda: Images(Augment(), 16, 16, 3))
