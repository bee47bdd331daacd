"""What a step of training waits for: the ConcurrentDataloader paper's median durations of its stages."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from bench.gpu.work import resnet
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.papers.far import ABOUT, Pictures, bound_per_s, far_store
from bench.papers.page import Section, Settings, prose
from bench.papers.trial import build, check

WORKERS, READS, BATCH_SIZE = 4, 16, 16
BATCHES, SHORT_BATCHES = 24, 4
WIDTH_ON_GPU, WIDTH_ON_CPU = 64, 4
_TEXT = """\
{about}. {workers} workers and {batches} batches of {batch} for a small residual network on {device}. Theirs
(tables 2 and 5): batches of 256 pictures of ImageNet, 4 workers, 16 fetchers, ResNet-18 on a GPU. Median
milliseconds of a run: *get batch*, how long `next()` took, and its *mean*, for where workers end their batches
at the same time most of them wait for nothing; *to device*, the copy{copied}; *train step*, forward, backward
and the optimiser. *Samples/s*: all samples by the runtime, start of the workers included. *Bound*: what the
requests under way bring, or the steps alone take.
"""
_NO_GPU = ", within memory, for there was no GPU"


class Stages(NamedTuple):
    """One run.

    Attributes:
        medians_ms: Of getting a batch, of copying it and of a step.
        waited_ms: For a batch, in the mean.
        steps_s: All steps together.
        whole_s: The run, from before the loader was built.
    """

    medians_ms: list[float]
    waited_ms: float
    steps_s: float
    whole_s: float


def run(settings: Settings) -> Section:
    """Train with each loader, in turn."""
    contenders: dict[str, tuple[str, int]] = {
        "torch": ("torch", 1),
        "torch, in_order=False": ("torch, in_order=False", 1),
        "minato": ("minato", 1),
        f"minato, {READS} reads": ("minato", READS),
    }
    labels = [*contenders]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = BATCH_SIZE * (SHORT_BATCHES if settings.short else BATCHES)
    found: dict[str, list[Stages]] = {label: [] for label in labels}
    with far_store() as port:
        for repeat in range(settings.repeats):
            turn = repeat % len(labels)
            for label in labels[turn:] + labels[:turn]:
                found[label].append(train(*contenders[label], Pictures(port, count), device))
    rows = [
        _row(label, found[label], count, bound_per_s(WORKERS * reads))
        for label, (_, reads) in contenders.items()
    ]
    text = prose(
        _TEXT,
        about=ABOUT,
        workers=WORKERS,
        batches=count // BATCH_SIZE,
        batch=BATCH_SIZE,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "the processor",
        copied="" if device.type == "cuda" else _NO_GPU,
    )
    head = ["loader", "get batch", "mean", "to device", "train step", "samples/s", "bound"]
    title = "Stages of a step (ConcurrentDataloader, figure 14)"
    return Section(title, f"{text}\n{table(head, rows)}")


def train(name: str, reads: int, pictures: Pictures, device: torch.device) -> Stages:
    """Train one epoch; each sample must come exactly once."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    model = resnet(WIDTH_ON_GPU if on_gpu else WIDTH_ON_CPU).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    options: dict[str, Any] = {"fetch_concurrency": reads} if reads > 1 else {}

    def now_s() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    order = range(len(pictures))
    came: list[int] = []
    spans_s: list[tuple[float, float, float]] = []
    begun_s = now_s()
    loader = build(name, pictures, [], order, batch_size=BATCH_SIZE, num_workers=WORKERS, **options)
    asked_s = now_s()
    for batch in loader:
        got_s = now_s()
        images = batch.image.to(device, copy=True)
        copied_s = now_s()
        loss = model(images.float() / 255).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        came += batch.key.tolist()
        done_s = now_s()
        spans_s.append((got_s - asked_s, copied_s - got_s, done_s - copied_s))
        asked_s = now_s()
    whole_s = now_s() - begun_s
    check(name, came, order)
    get_s, copy_s, step_s = zip(*spans_s, strict=True)
    medians_ms = [1e3 * statistics.median(each) for each in (get_s, copy_s, step_s)]
    return Stages(medians_ms, 1e3 * statistics.fmean(get_s), sum(step_s), whole_s)


def _row(label: str, runs: list[Stages], count: int, read_per_s: float) -> list[str]:
    medians = [
        spread_text(Spread.of([one.medians_ms[stage] for one in runs]), digits)
        for stage, digits in enumerate((1, 2, 1))
    ]
    bound = min(read_per_s, count / min(one.steps_s for one in runs))
    per_s = spread_text(Spread.of([count / one.whole_s for one in runs]), 0)
    waited = spread_text(Spread.of([one.waited_ms for one in runs]), 1)
    return [label, medians[0], waited, *medians[1:], per_s, f"{bound:.0f}"]
