"""Whether order changes what a model learns, where dear samples are of other classes than cheap ones: figure 11."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, RandomSampler

from bench.macro.report import table
from bench.papers.page import COLOURS, Section, Settings
from bench.papers.trial import LOADERS, build, check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS, SHORT_SEEDS = 8, 2
EPOCHS, SHORT_EPOCHS = 8, 2
WORKERS, BATCH_SIZE = 12, 32
SLOW_CLASSES = (8, 9)
SLOW_S, FAST_S = 0.010, 0.0005
HELD_OUT = 360
FAST_FIRST = "minato, fast_first"
_CONFIDENCE = 0.95
_TEXT = """\
The 1797 handwritten digits of scikit-learn, {held_out} of them held out. Each eight and nine takes {slow:g} ms to
load, all others {fast:g} ms: cost tells the class, the worst case for an order that prefers quick samples. A network
with one hidden layer, batches of {batch}, {epochs} epochs, {workers} workers, {seeds} seeds; a seed gives all
loaders the same first weights and the same shuffles. In brackets half the 95 % confidence interval over seeds
(Student's t); *difference* is that to torch in order with the same seed. *Early*: share of the eights and nines that
come in the first half of an epoch's batches, 50 % without bias.
"""


class Digits(Dataset[Any]):
    """``(index, image, class)``; the class makes the cost."""

    def __init__(self, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
        self.images = (images / 16).astype(np.float32)
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW_S if self.labels[index] in SLOW_CLASSES else FAST_S)
        return index, self.images[index], self.labels[index]


class Learned(NamedTuple):
    """What a training ended with; shares from 0 to 1.

    Attributes:
        accuracy: On what was held out, after each epoch.
        slow_accuracy: The same at the end for slow classes alone.
        early: Share of their samples that came in the first half of an epoch.
    """

    accuracy: list[float]
    slow_accuracy: float
    early: float


def run(settings: Settings) -> Section:
    """Train with each loader and seed."""
    seeds, epochs = (SHORT_SEEDS, SHORT_EPOCHS) if settings.short else (SEEDS, EPOCHS)
    images, labels = load_digits(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(labels))
    training, held_out = (
        Digits(images[part], labels[part]) for part in (mixed[HELD_OUT:], mixed[:HELD_OUT])
    )
    names = [*LOADERS, FAST_FIRST]
    found: dict[str, list[Learned]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            found[name].append(train(name, training, held_out, seed, epochs))
    rows = [[name, *_row(found[name], found["torch"])] for name in names]
    head = ["loader", "accuracy, %", "difference", "eights and nines, %", "difference", "early, %"]
    text = _TEXT.format(
        held_out=HELD_OUT,
        slow=1e3 * SLOW_S,
        fast=1e3 * FAST_S,
        batch=BATCH_SIZE,
        epochs=epochs,
        workers=WORKERS,
        seeds=seeds,
    )

    def draw(axes: Axes) -> None:
        for name in names:
            curves = np.array([one.accuracy for one in found[name]])
            colour = COLOURS.get(name, "#d08a2e")
            axes.plot(range(1, epochs + 1), 100 * curves.mean(0), color=colour, label=name)
        axes.set_title("Accuracy on held-out digits, mean over seeds")
        axes.set_xlabel("epoch")
        axes.set_ylabel("%")
        axes.legend(fontsize=6, frameon=False)

    return Section("Accuracy (figure 11)", f"{text}\n{table(head, rows)}", (draw,))


def train(name: str, training: Digits, held_out: Digits, seed: int, epochs: int) -> Learned:
    """Train a model from one loader; each sample must come exactly once an epoch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sampler = RandomSampler(training, generator=torch.Generator().manual_seed(seed))
    options = {"order": "fast_first"} if name == FAST_FIRST else {}
    loader = build(
        "minato" if name == FAST_FIRST else name,
        training,
        [],
        sampler,
        batch_size=BATCH_SIZE,
        num_workers=WORKERS,
        **options,
    )
    accuracy, early = [], []
    for _ in range(epochs):
        came: list[int] = []
        classes: list[int] = []
        for index, image, label in loader:
            came += index.tolist()
            classes += label.tolist()
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        check("", came, range(len(training)))
        slow = np.isin(classes, SLOW_CLASSES)
        early.append(float(slow[: len(slow) // 2].sum() / slow.sum()))
        accuracy.append(_right(model, held_out).mean())
    right = _right(model, held_out)
    of_slow = float(right[np.isin(held_out.labels, SLOW_CLASSES)].mean())
    return Learned(accuracy, of_slow, statistics.fmean(early))


def _right(model: nn.Module, digits: Digits) -> Any:
    with torch.inference_mode():
        return model(torch.from_numpy(digits.images)).argmax(1).numpy() == digits.labels


def _row(ours: list[Learned], theirs: list[Learned]) -> list[str]:
    last = np.array([(one.accuracy[-1], one.slow_accuracy) for one in ours])
    apart = last - np.array([(one.accuracy[-1], one.slow_accuracy) for one in theirs])
    first_is_reference = ours is theirs
    cells = []
    for place in range(2):
        cells.append(interval(100 * last[:, place]))
        cells.append("" if first_is_reference else interval(100 * apart[:, place], sign="+"))
    return [*cells, f"{100 * statistics.fmean(one.early for one in ours):.1f}"]


def interval(values: np.ndarray[Any, Any], sign: str = "") -> str:
    """The mean, and half of its confidence interval."""
    quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)
    half = quantile * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{sign}.2f} (± {half:.2f})"
