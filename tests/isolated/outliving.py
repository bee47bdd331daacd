"""Train in a thread that is left when the main one has ended, with worker threads that wait for a while."""

from __future__ import annotations

import threading
import time

from minato import DataLoader

LONGER_THAN_PATIENCE_S = 1.3


def train() -> None:
    threading.main_thread().join()
    total = 0
    loader = DataLoader(range(40), 2, num_workers=2, workers="thread", prefetch_factor=1)
    for number, batch in enumerate(loader):
        if number == 0:
            time.sleep(LONGER_THAN_PATIENCE_S)
        total += int(batch.sum())
    print(total)


if __name__ == "__main__":
    threading.Thread(target=train).start()
