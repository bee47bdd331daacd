"""End the interpreter in the middle of an epoch: ``ending.py KIND HOW``."""

from __future__ import annotations

import os
import sys

from minato import DataLoader
from tests.datasets import Sleepy
from tests.isolated.shared import KINDS

MORE = {
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "large": {
        "num_workers": 2,
        "prefetch_factor": 4,
        "batch_sampler": [[0, 1], [2, 3], [4, 5], *[[*range(1000)] * 200] * 20],
    },
    "timeout": {"num_workers": 1, "timeout": 6.0, "sampler": [0, 1, 2, 3, 4, 5, -1, -1]},
}


def main(kind: str, how: str) -> None:
    global iterator, kept  # they are alive when the interpreter ends
    options = (KINDS | MORE)[kind]
    batch_size = 1 if "batch_sampler" in options else 2
    iterator = iter(DataLoader(Sleepy(1000, 0.003, {-1: 9.0}), batch_size, **options))
    kept = [next(iterator) for _ in range(3)]
    print([batch.tolist() for batch in kept], flush=True)
    if how == "sys.exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    if how == "after an error":
        try:
            next(iterator)
        except RuntimeError as error:
            kept.append(error)
            print(error)
    if how == "reference cycle":
        kept += [kept, iterator]


if __name__ == "__main__":
    main(*sys.argv[1:])
