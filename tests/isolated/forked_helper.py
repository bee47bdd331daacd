"""Fork a helper that lives on while workers are stuck: ``forked_helper.py METHOD``; writes its pid and theirs."""

from __future__ import annotations

import os
import sys
import time

from minato import DataLoader


class Stuck:
    """All samples but the first take for ever."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(3600)
        return index


def main(method: str) -> None:
    loader = DataLoader(Stuck(), 1, num_workers=2, multiprocessing_context=method)
    iterator = iter(loader)
    next(iterator)
    while len(iterator._workers) < 2:
        time.sleep(0.01)
    helper = os.fork()
    if helper == 0:
        time.sleep(3600)
    print(helper, *[worker.pid for worker in iterator._workers], flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
