"""What the samples of the real workloads cost, transform by transform, measured by the processor time of one thread."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.papers.page import Settings
from bench.simulate.workloads import DETECTION, SEGMENTATION, SPEECH_3S, Figures
from bench.workloads.detection import Photographs, detection_chain, padded_pictures
from bench.workloads.packages import SCANS
from bench.workloads.segmentation import Scans, segmentation_chain
from bench.workloads.speech import LightStep, Recordings, speech_chain
from minato import PadCollate

Times = npt.NDArray[np.float64]

SCALE = 0.06
"""Of the paper's light and heavy steps, where they are slept."""
READING = "reading"
SLEPT = ("LightStep", "HeavyStep")


@dataclass(frozen=True)
class Workload:
    """Data with their chain, and how they are loaded.

    Attributes:
        name: As the page has it.
        dataset: Real samples, which know their files by ``path_of``.
        chain: Transforms.
        collate: A ``collate_fn`` where samples have no common shape.
        batch_size: Smaller than the paper's, so that a short epoch has many.
        sleeps: Whether most of its work is sleeping, so that it can have more workers than there are cores.
        draws: How often each sample's cost is measured.
        printed: The paper's row of table 2.
    """

    name: str
    dataset: Any
    chain: list[Callable[[Any], Any]]
    collate: Callable[[list[Any]], Any] | None
    batch_size: int
    sleeps: bool
    draws: int
    printed: Figures | None = None


@dataclass(frozen=True)
class Measured:
    """Seconds of processor time that samples took.

    Attributes:
        steps: What took them: reading, and each transform.
        times_s: ``(draws, samples, steps)``.
        stored: Bytes of each sample's file.
    """

    steps: list[str]
    times_s: Times
    stored: Times

    @property
    def costs_s(self) -> Times:
        """Of whole samples, ``(draws, samples)``."""
        return self.costs_at(1.0)

    def costs_at(self, scale: float) -> Times:
        """Of whole samples whose slept steps take so many times as long."""
        factors = [scale if step in SLEPT else 1.0 for step in self.steps]
        costs_s: Times = self.times_s @ np.array(factors)
        return costs_s


@cache
def workloads(settings: Settings) -> dict[str, Workload]:
    """The real workloads, by name.

    Raises:
        FileNotFoundError: The data are not there.
    """
    scans = Scans(settings.data / SCANS)
    photographs = Photographs(settings.data / "photographs")
    clips = Recordings(settings.data / "speech")
    found = (
        Workload(
            "segmentation", scans, segmentation_chain(), None, 3, False, 16, SEGMENTATION.printed
        ),
        Workload(
            "detection",
            photographs,
            detection_chain(),
            padded_pictures,
            4,
            False,
            3,
            DETECTION.printed,
        ),
        Workload(
            "speech-3s",
            clips,
            speech_chain(3.0, SCALE),
            PadCollate(),
            12,
            True,
            2,
            SPEECH_3S.printed,
        ),
        Workload(
            "speech-3s-random",
            clips,
            speech_chain(3.0, SCALE, drawn=True),
            PadCollate(),
            12,
            True,
            1,
        ),
    )
    return {each.name: each for each in found}


@cache
def measured(name: str, settings: Settings) -> Measured:
    """Measure a workload's samples one after the other; slept steps count with what they would take unscaled."""
    workload = workloads(settings)[name]
    count = len(workload.dataset)
    indices = range(0, count, max(1, count // 8)) if settings.short else range(count)
    draws = min(workload.draws, 2) if settings.short else workload.draws
    apply(workload.dataset, workload.chain, indices[0])  # tables that are made once
    times_s = np.empty((draws, len(indices), 1 + len(workload.chain)))
    for draw in range(draws):
        for place, index in enumerate(indices):
            seed(draw, index)
            times_s[draw, place] = apply(workload.dataset, workload.chain, index)
    stored = [workload.dataset.path_of(index).stat().st_size for index in indices]
    steps = [READING, *(type(step).__name__ for step in workload.chain)]
    return Measured(steps, times_s, np.array(stored, float))


def seed(draw: int, index: int) -> None:
    """Let the random decisions of a sample depend on nothing else."""
    random.seed(draw * 1_000_003 + index)
    np.random.seed(draw * 1_000_003 + index)
    torch.manual_seed(draw * 1_000_003 + index)


def apply(dataset: Any, chain: list[Callable[[Any], Any]], index: int) -> list[float]:
    """Seconds that reading and each transform of a sample take."""
    begun_s = time.thread_time()
    sample = dataset[index]
    taken_s = [time.thread_time() - begun_s]
    for step in chain:
        if isinstance(step, LightStep):
            taken_s.append(step.seconds_of(index) / SCALE)
            continue
        begun_s = time.thread_time()
        sample = step(sample)
        taken_s.append(time.thread_time() - begun_s)
    return taken_s
