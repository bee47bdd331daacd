"""Load what the main module defines: ``main_module.py METHOD [without-cloudpickle]``."""

from __future__ import annotations

import sys

import minato


class Sample:
    """What the dataset gives."""

    def __init__(self, number: int) -> None:
        self.number = number


class Samples:
    """Needs another class and a function of its module."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Sample:
        return Sample(doubled(index))


def doubled(index: int) -> int:
    return 2 * index


def as_list(samples: list[Sample]) -> list[Sample]:
    return samples


def no_op(worker: int) -> None:
    """A ``worker_init_fn``."""


def main(method: str) -> None:
    loader = minato.DataLoader(
        Samples(),
        2,
        num_workers=1,
        collate_fn=as_list,
        worker_init_fn=no_op,
        multiprocessing_context=method,
    )
    for batch in loader:
        assert all(type(sample) is Sample for sample in batch)
        print(*(sample.number for sample in batch))


if __name__ == "__main__":
    if "without-cloudpickle" in sys.argv:
        sys.modules["cloudpickle"] = None  # type: ignore[assignment]
    try:
        main(sys.argv[1])
    except minato.NotPicklableError as error:
        print(type(error).__name__, error)
