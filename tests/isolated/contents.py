"""Deliver the same epochs in every way, and write a line of JSON about each: what came in which order."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import torch

import minato
from minato import DataLoader
from tests.datasets import Numbers, outcomes


class Mixed(Numbers):
    """Samples with fields, texts, and shapes that do not always fit."""

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == 17:
            raise ValueError("the seventeenth")
        return {
            "index": index,
            "noise": np.random.random(3 if index % 10 else 4).round(6),
            "text": f"{index} {random.random():.6f}",
            "draw": torch.rand(2),
        }


def plain(value: object) -> object:
    """A batch as JSON can write it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return np.asarray(value).round(6).tolist()
    return value


def raised(kind: type, text: str) -> str:
    assert issubclass(kind, (ValueError, RuntimeError)), text
    name = f"{kind.__name__}: "
    return name + text.splitlines()[-1].removeprefix(name)


def main() -> None:
    warnings.simplefilter("error")
    print(json.dumps(minato.implementation()[0]))
    for order in ("strict", "batch", "arrival", "fast_first"):
        for workers in ({"num_workers": 0}, {"num_workers": 2}):
            for collate_fn in (None, list):
                loader = DataLoader(
                    Mixed(31), 3, shuffle=True, seed=4, order=order, collate_fn=collate_fn,
                    persistent_workers=workers["num_workers"] > 0, **workers,
                )  # fmt: skip
                for epoch in range(2):
                    found = [
                        plain(value) if kind == "batch" else raised(value, *text)
                        for kind, value, *text in outcomes(iter(loader))
                    ]
                    print(json.dumps([order, collate_fn is None, epoch, found]))


if __name__ == "__main__":
    main()
