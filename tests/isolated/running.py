"""Iterate until somebody ends this process: ``running.py KIND WHERE``; writes the pids of its workers."""

from __future__ import annotations

import sys
import time

import psutil

from minato import DataLoader

KIND = {
    "inline": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "workers": "thread"},
}


class Slow:
    """Numbers that take a while; the longer, the later."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds if index > 10 else 0.001)
        return index


def main(kind: str, where: str) -> None:
    seconds = {"waiting": 0.5, "computing": 0.001, "busy": 0.001, "far ahead": 0.1}[where]
    ahead = {"prefetch_factor": 200} if where == "far ahead" else {}
    iterator = iter(DataLoader(Slow(seconds), 2, **ahead, **KIND[kind]))
    for number, _ in enumerate(iterator):
        if number == 2:
            children = [child.pid for child in psutil.Process().children()]
            print(*children, "are at work", flush=True)
        if number > 2 and where == "computing":
            time.sleep(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
