"""Use loaders within narrow limits: ``limits.py descriptors|address-space``."""

from __future__ import annotations

import resource
import sys

import psutil

from minato import DataLoader
from tests.datasets import Filled
from tests.isolated.shared import KINDS


def main(limit: str) -> None:
    if limit == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    else:
        size = psutil.Process().memory_info().vms + (3 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for options in (KINDS["inline"], KINDS["processes"], KINDS["threads"]):
        kept = [list(DataLoader(Filled(160, 5000), 2, **options)) for _ in range(2)]
        for epoch in kept:
            assert len(epoch) == 80
            for number, batch in enumerate(epoch):
                assert batch.unique().tolist() == [2 * number, 2 * number + 1]
        lists = list(DataLoader(Filled(160, 5000), 2, collate_fn=list, **options))
        assert [batch[0][0] for batch in lists] == list(range(0, 160, 2))
        print("held", len(kept[0]) + len(kept[1]) + len(lists), "batches")


if __name__ == "__main__":
    main(sys.argv[1])
