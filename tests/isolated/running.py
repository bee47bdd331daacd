"""Iterate until somebody ends this process: ``running.py KIND WHERE``; writes the pids of its workers."""

from __future__ import annotations

import sys
import time

import psutil

from minato import DataLoader
from tests.datasets import Sleepy
from tests.isolated.shared import KINDS


def main(kind: str, where: str) -> None:
    seconds = {"waiting": 0.5, "computing": 0.001, "busy": 0.001, "far ahead": 0.1}[where]
    ahead = {"prefetch_factor": 200} if where == "far ahead" else {}
    dataset = Sleepy(100_000, seconds, dict.fromkeys(range(11), 0.001))
    for number, _ in enumerate(DataLoader(dataset, 2, **ahead, **KINDS[kind])):
        if number == 2:
            children = [child.pid for child in psutil.Process().children()]
            print(*children, "are at work", flush=True)
        if number > 2 and where == "computing":
            time.sleep(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
