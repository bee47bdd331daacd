"""End the interpreter in the middle of an epoch: ``ending.py KIND HOW``."""

from __future__ import annotations

import os
import sys
import time

from minato import DataLoader

KIND = {
    "inline": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "thread"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "large": {
        "num_workers": 2,
        "prefetch_factor": 4,
        "batch_sampler": [[0, 1], [2, 3], [4, 5], *[[*range(1000)] * 200] * 20],
    },
    "timeout": {"num_workers": 1, "timeout": 6.0, "sampler": [0, 1, 2, 3, 4, 5, -1, -1]},
}


class Slow:
    """Numbers that take a while."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.003 if index >= 0 else 9.0)
        return index


def main(kind: str, how: str) -> None:
    global iterator, kept  # they are alive when the interpreter ends
    batch_size = 1 if "batch_sampler" in KIND[kind] else 2
    iterator = iter(DataLoader(Slow(), batch_size, **KIND[kind]))
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
        kept.append(kept)
        kept.append(iterator)


if __name__ == "__main__":
    main(*sys.argv[1:])
