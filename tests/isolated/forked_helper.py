"""Fork a helper that lives on while workers are stuck: ``forked_helper.py METHOD``; writes its pid and theirs."""

from __future__ import annotations

import os
import sys
import time

from minato import DataLoader
from tests.datasets import Sleepy


def main(method: str) -> None:
    stuck = Sleepy(8, 3600, {0: 0})  # in all samples but the first
    iterator = iter(DataLoader(stuck, 1, num_workers=2, multiprocessing_context=method))
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
