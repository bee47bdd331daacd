"""Pecan's AutoOrder as a baseline: figure 3b."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.macro.report import table
from bench.papers.costs import Times, apply, seed, workloads
from bench.papers.page import Section, Settings
from bench.workloads.detection import (
    Normalize,
    Picture,
    RandomHorizontalFlip,
    Resize,
    ToTensor,
    detection_chain,
)
from bench.workloads.speech import speech_chain

_TEXT = """\
Transforms that make a sample larger go last, those that make it smaller go first, as the paper applied it: in
detection the resize is last for pictures that it enlarges, and stays first for the others; in speech clips are
padded at the end; the segmentation chain is in this order already. Mean milliseconds of processor time for a sample,
without reading and without steps that sleep; the same samples and random decisions for both orders, in turn.
"""


class Reordered:
    """The detection chain as one transform, with the resize where AutoOrder puts it for each picture."""

    def __init__(self) -> None:
        self.resize = Resize()
        self.others: list[Callable[[Picture], Picture]] = [
            RandomHorizontalFlip(),
            ToTensor(),
            Normalize(),
        ]

    def __call__(self, picture: Picture) -> Picture:
        enlarges = self.resize.scale(picture) > 1
        if not enlarges:
            picture = self.resize(picture)
        for step in self.others:
            picture = step(picture)
        return self.resize(picture) if enlarges else picture


def run(settings: Settings) -> Section:
    """Measure both orders, sample by sample in turn."""
    orders: dict[str, tuple[list[Callable[[Any], Any]], list[Callable[[Any], Any]]]] = {
        "detection": (detection_chain(), [Reordered()]),
        "speech-3s": (speech_chain()[:-2], speech_chain(pads_last=True)[:-2]),
    }
    rows = [["segmentation", "", "unchanged", "", ""]]
    for name, chains in orders.items():
        dataset = workloads(settings)[name].dataset
        count = len(dataset)
        taken_s: tuple[list[float], list[float]] = ([], [])
        for index in range(0, count, max(1, count // 8) if settings.short else 1):
            for chain, times_s in zip(chains, taken_s, strict=True):
                seed(0, index)
                times_s.append(sum(apply(dataset, chain, index)[1:]))
        before_s, after_s = (np.array(times_s) for times_s in taken_s)
        gain = f"{before_s.mean() / after_s.mean():.2f}"
        tails = f"{_tail(before_s):.1f} → {_tail(after_s):.1f}"
        rows.append([name, _mean(before_s), _mean(after_s), gain, tails])
    head = ["workload", "as printed", "AutoOrder", "× as fast", "P90 / median"]
    return Section("Pecan's AutoOrder (figure 3b)", f"{_TEXT}\n{table(head, rows)}")


def _mean(costs_s: Times) -> str:
    return f"{1e3 * costs_s.mean():.2f}"


def _tail(costs_s: Times) -> float:
    return float(np.quantile(costs_s, 0.9) / np.median(costs_s))
