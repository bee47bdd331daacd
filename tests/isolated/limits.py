"""Use loaders within narrow limits: ``limits.py descriptors|address-space``."""

from __future__ import annotations

import resource
import sys

import numpy as np
import psutil

from minato import DataLoader
from tests.datasets import Numbers
from tests.isolated.shared import KINDS


class Arrays(Numbers):
    """Arrays of float32 that hold nothing but their index."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"a": np.full(5000, index, np.float32), "b": np.full(3, index)}


def main(limit: str) -> None:
    if limit == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    else:
        size = psutil.Process().memory_info().vms + (3 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for options in (KINDS["inline"], KINDS["processes"], KINDS["threads"]):
        kept = [list(DataLoader(Arrays(160), 2, **options)) for _ in range(2)]
        for epoch in kept:
            assert len(epoch) == 80
            for number, batch in enumerate(epoch):
                assert batch["a"].unique().tolist() == [2 * number, 2 * number + 1]
        lists = list(DataLoader(Arrays(160), 2, collate_fn=list, **options))
        assert [batch[0]["b"][0] for batch in lists] == list(range(0, 160, 2))
        print("held", len(kept[0]) + len(kept[1]) + len(lists), "batches")


if __name__ == "__main__":
    main(sys.argv[1])
