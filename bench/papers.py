"""The MinatoLoader and SpeedyLoader papers' experiments that the documentation cites, without a GPU."""

from __future__ import annotations

import inspect
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import Sampler

from bench.harness import record, report
from bench.harness.datasets import Counted, SleepingWork
from bench.harness.loaders import STANDARD, Contender, minato_as, named
from bench.harness.ranks import run_ranks, wait_for_all
from bench.harness.trial import Consumer, Run, check_labels, first, second, unwarned
from bench.workloads.detection import Photographs, detection_chain, padded_pictures
from bench.workloads.packages import FOLDER, SCANS
from bench.workloads.segmentation import Scans, segmentation_chain
from bench.workloads.speech import LightStep, Recordings, speech_chain
from minato import DataLoader, PadCollate

Times = npt.NDArray[np.float64]
SCALE = 0.06
"""Of the speech workload's light and heavy steps, where they are slept."""
SLEPT = ("LightStep", "HeavyStep")
SLOW = 0.75
"""A sample is slow above this quantile of all costs, as in the paper."""
HEAD = """\
# The papers' experiments

Written by `python -m bench.papers`, with the data that `make data` fetches. The workloads are the MinatoLoader paper's,
in `bench/workloads`, on other data: volumes of the head, photographs and spoken phrases that packages ship. A loop that
sleeps replaces the GPU. All loaders get the same dataset object, transforms, workers and order. Each sample must come
exactly once, and in order where that is promised. Times are medians of {repeats} runs, loaders in turn, with the
minimum and maximum in brackets.
"""


@dataclass(frozen=True)
class Settings:
    """How to run, on data in a folder that ``make data`` has filled."""

    short: bool
    repeats: int
    data: Path
    page: report.Page


@dataclass(frozen=True)
class Workload:
    """Real data with their transforms.

    Attributes:
        dataset: real samples; it knows their files by ``path_of``.
        collate: a ``collate_fn`` where samples have no common shape.
        batch_size: smaller than the paper's, so that a short epoch has many.
        draws: how often each sample's cost is measured.
        printed: the paper's mean, median, P75, P90, minimum, maximum and deviation, ms.
    """

    dataset: Any
    transforms: list[Callable[[Any], Any]]
    collate: Callable[[list[Any]], Any] | None
    batch_size: int
    workers: int
    draws: int
    printed: tuple[int, ...]


@cache
def workloads(settings: Settings) -> dict[str, Workload]:
    cores = record.usable_cores()
    return {
        "segmentation": Workload(
            *(Scans(settings.data / SCANS), segmentation_chain(), None, 3, cores, 16),
            printed=(500, 470, 630, 750, 10, 2230, 197),
        ),
        "detection": Workload(
            *(Photographs(settings.data / "photographs"), detection_chain(), padded_pictures),
            *(4, cores, 3),
            printed=(31, 28, 30, 35, 11, 176, 19),
        ),
        "speech-3s": Workload(
            *(
                Recordings(settings.data / "speech"),
                speech_chain(3.0, SCALE),
                PadCollate(),
                12,
                6,
                2,
            ),
            printed=(998, 508, 509, 3008, 502, 3017, 992),
        ),
    }


class Costs(NamedTuple):
    """Seconds of processor time of samples, of one thread; slept steps count with their unscaled time.

    Attributes:
        times_s: ``(draws, samples, steps)``; the first step is reading.
        slept: ``(steps,)``: whether a step sleeps.
        stored: bytes of each sample's file.
    """

    times_s: Times
    slept: npt.NDArray[np.bool_]
    stored: Times


@cache
def costs(name: str, settings: Settings) -> Costs:
    workload = workloads(settings)[name]
    count = len(workload.dataset)
    indices = range(0, count, max(1, count // 4)) if settings.short else range(count)
    draws = min(workload.draws, 2) if settings.short else workload.draws
    _step_times_s(workload, indices[0])  # tables that are made once
    times_s = np.empty((draws, len(indices), 1 + len(workload.transforms)))
    for draw in range(draws):
        for place, index in enumerate(indices):
            seed = draw * 1_000_003 + index  # the random decisions depend on nothing else
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            times_s[draw, place] = _step_times_s(workload, index)
    slept = [False, *(type(step).__name__ in SLEPT for step in workload.transforms)]
    stored = [workload.dataset.path_of(index).stat().st_size for index in indices]
    return Costs(times_s, np.array(slept), np.array(stored, float))


def _step_times_s(workload: Workload, index: int) -> list[float]:
    begun_s = time.thread_time()
    sample = workload.dataset[index]
    taken_s = [time.thread_time() - begun_s]
    for step in workload.transforms:
        if isinstance(step, LightStep):
            taken_s.append(step.seconds_of(index) / SCALE)
            continue
        begun_s = time.thread_time()
        sample = step(sample)
        taken_s.append(time.thread_time() - begun_s)
    return taken_s


def variability(settings: Settings) -> str:
    """Milliseconds of processor time for a sample, reading included, of one thread that works alone; each sample
    several times, with other random decisions. The speech workload's light and heavy steps count with their unscaled
    sleep. Rows *as printed* are the paper's, for other data and another machine: compare the shape, not the size.
    """
    lines = []
    for name, workload in workloads(settings).items():
        costs_ms = 1e3 * costs(name, settings).times_s.sum(2)
        median, p75, p90 = np.quantile(costs_ms, (0.5, 0.75, 0.9))
        found = (costs_ms.mean(), median, p75, p90, costs_ms.min(), costs_ms.max(), costs_ms.std())
        draws, samples = costs_ms.shape
        cells = [f"{value:.0f}" for value in found]
        lines.append([name, f"{samples} × {draws}", *cells, f"{p90 / median:.1f}"])
        printed = workload.printed
        cells = [str(value) for value in printed]
        lines.append(["*as printed*", "", *cells, f"{printed[3] / printed[1]:.1f}"])
    head = ["workload", "samples", "mean", "median", "P75", "P90", "min", "max", "deviation"]
    return report.table([*head, "P90 / median"], lines)


def size(settings: Settings) -> str:
    """*Rank* is Spearman's correlation of a sample's bytes on disk with its cost, *R²* that of a straight line. *Found
    by size*: share of the slow samples, the most expensive quarter, that are among the largest quarter; a guess finds
    25 %. *Of the sample*: share of the variance of costs that lies between samples, not between draws of one sample
    (intraclass correlation). No prediction from a sample's size or past can explain more.
    """
    lines = []
    for name in workloads(settings):
        one = costs(name, settings)
        lines.append([name, *correlations(one.times_s.sum(2), one.stored)])
    return report.table(["workload", "rank", "R²", "found by size", "of the sample"], lines)


def correlations(costs_s: Times, stored: Times) -> list[str]:
    """Rank correlation and R² of sizes and costs, slow samples among the large ones, share between samples."""
    from scipy import stats

    means_s = costs_s.mean(0)
    rank = stats.spearmanr(stored, means_s).statistic
    straight = np.corrcoef(stored, means_s)[0, 1] ** 2
    slow, large = (each >= np.quantile(each, SLOW) for each in (means_s, stored))
    between = f"{100 * share_between(costs_s):.0f} %"
    return [f"{rank:.2f}", f"{straight:.2f}", f"{100 * large[slow].mean():.0f} %", between]


def share_between(costs_s: Times) -> float:
    """Intraclass correlation of ``(draws, samples)``: 1 where all draws of a sample cost the same."""
    draws, samples = costs_s.shape
    within = costs_s.var(0, ddof=1).sum() / samples
    between = draws * costs_s.mean(0).var(ddof=1)
    return max(0.0, float((between - within) / (between + (draws - 1) * within)))


def throughput(settings: Settings) -> str:
    """Whole epochs of the real transforms on the real data, start of the workers included. The loop sleeps for each
    batch as long as the workers need for one in the mean, where order matters most. *Ideal*: the longer of all work
    divided by workers, and all that needs a core divided by cores, as measured beforehand.
    """
    parts = []
    for name, workload in workloads(settings).items():
        one = costs(name, settings)
        means_s = one.times_s.mean((0, 1))
        cpu_s, slept_s = means_s[~one.slept].sum(), SCALE * means_s[one.slept].sum()
        each_s = max((cpu_s + slept_s) / workload.workers, cpu_s / record.usable_cores())
        batches = 2 if settings.short else max(1, int(2.5 / each_s) // workload.batch_size)
        count = batches * workload.batch_size
        usual, workload.dataset.count = workload.dataset.count, count
        order = np.random.default_rng(0).permutation(count).tolist()
        arguments = {
            "batch_size": workload.batch_size,
            "num_workers": workload.workers,
            "collate_fn": workload.collate,
            "transforms": workload.transforms,
            "sampler": order,
        }
        consumer = Consumer(_sleep(each_s * workload.batch_size), first, [order])
        epoch_s = partial(_epoch_s, name, workload.dataset, arguments, consumer)
        found = settings.page.turns(name, [*STANDARD], settings.repeats, epoch_s, SECONDS)
        workload.dataset.count = usual
        lines = report.times(found, each_s * count, STANDARD)
        parts.append(f"### {name}\n\n" + report.table(TIMES, lines))
    return "\n".join(parts)


def _epoch_s(
    row: str, dataset: Any, arguments: dict[str, Any], consumer: Consumer, loader: str, seed: int
) -> float:
    run = Run(STANDARD[loader], dataset, arguments, consumer, seed)
    run.epoch()
    return run.finish(row).whole_s


SECONDS = "{:.2f} s".format
TIMES = ["loader", "s", "efficiency", "× torch"]


def _sleep(seconds: float) -> Callable[[Any], None]:
    return lambda _: time.sleep(seconds)


class Digits(Counted):
    """``(image, index, class)``; the class makes the cost."""

    def __init__(self, images: Any, labels: Any) -> None:
        super().__init__(len(labels))
        self.images = (images / 16).astype(np.float32)
        self.labels = labels.astype(np.int64)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.010 if self.labels[index] in (8, 9) else 0.0005)
        return self.images[index], index, self.labels[index]


def accuracy(settings: Settings) -> str:
    """The handwritten digits of scikit-learn, 360 of them held out. Each eight and nine takes 10 ms to load, all others
    0.5 ms. So cost tells the class, the worst case for an order that prefers quick samples. A seed gives all loaders
    the same first weights and the same shuffles. In brackets half the 95 % confidence interval over seeds (Student's
    t); *difference* is that to torch in order with the same seed. *Early*: share of the eights and nines that come in
    the first half of an epoch, 50 % without bias.
    """
    from sklearn.datasets import load_digits

    seeds, epochs, workers = (2, 1, 2) if settings.short else (8, 8, 12)
    images, labels = load_digits(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(labels))
    held, train = mixed[:360], mixed[360 : 720 if settings.short else None]
    training, held_out = (Digits(images[part], labels[part]) for part in (train, held))
    fast_first = minato_as("minato, order='fast_first'", "fast_first", order="fast_first")
    contenders = {**STANDARD, **named(fast_first)}
    found = settings.page.turns(
        "digits",
        [*contenders],
        seeds,
        lambda name, seed: train_digits(
            contenders[name], training, held_out, seed, epochs, workers
        ),
        lambda learned: f"{learned[0]:.3f}",
    )
    lines = []
    for name, ours in found.items():
        cells = []
        for place in range(2):
            own = np.array([one[place] for one in ours])
            apart = own - np.array([one[place] for one in found["torch"]])
            cells += [interval(100 * own), "" if name == "torch" else interval(100 * apart, "+")]
        early = 100 * statistics.fmean(one[2] for one in ours)
        lines.append([contenders[name].label, *cells, f"{early:.1f}"])
    head = ["loader", "accuracy, %", "difference", "eights and nines, %", "difference", "early, %"]
    return report.table(head, lines)


def train_digits(
    contender: Contender, training: Digits, held_out: Digits, seed: int, epochs: int, workers: int
) -> tuple[float, float, float]:
    """Accuracy on the held-out digits, that of the slow classes, and the share of these that came early."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(training), generator=generator).tolist() for _ in range(epochs)]
    classes: list[int] = []

    def step(batch: Any) -> None:
        image, _, label = batch
        classes.extend(label.tolist())
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    arguments: dict[str, Any] = {
        "batch_size": 32,
        "num_workers": workers,
        "persistent_workers": True,
    }
    arguments["sampler"] = Turns(orders)
    run = Run(contender, training, arguments, Consumer(step, second, orders), seed)
    for _ in range(epochs):
        run.epoch()
    run.finish("digits")
    slow = np.isin(classes, (8, 9)).reshape(epochs, -1)
    early = slow[:, : slow.shape[1] // 2].sum() / slow.sum()
    with torch.inference_mode():
        right = model(torch.from_numpy(held_out.images)).argmax(1).numpy() == held_out.labels
    return float(right.mean()), float(right[np.isin(held_out.labels, (8, 9))].mean()), float(early)


def interval(values: Times, sign: str = "") -> str:
    """The mean, and half of its 95 % confidence interval (Student's t)."""
    from scipy import stats

    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{sign}.2f} (± {half:.2f})"


class Turns(Sampler[int]):
    """Gives each epoch an order of its own."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._orders = orders
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._orders[0])

    def __iter__(self) -> Iterator[int]:
        order = self._orders[self._epoch % len(self._orders)]
        self._epoch += 1
        return iter(order)


class Plan(NamedTuple):
    """A training on samples that sleep, in ranks with ``orders[rank][epoch]``, which take each step together."""

    work: SleepingWork
    orders: list[list[list[int]]]
    step_s: float
    batch_size: int
    workers: int

    @property
    def ideal_s(self) -> float:
        """The longest rank: in each epoch its work divided by its workers, or its longest sample, or its steps."""

        def least_s(order: list[int]) -> float:
            costs_s = [self.work.costs_s[i] for i in order]
            steps = -(-len(order) // self.batch_size)
            return max(sum(costs_s) / self.workers, max(costs_s), self.step_s * steps)

        return max(sum(map(least_s, orders)) for orders in self.orders)


def ranks_s(name: str, plan: Plan) -> float:
    """Seconds of a training with one process for each rank."""
    return max(run_ranks(_rank, [(name, plan, orders) for orders in plan.orders]))


def _rank(name: str, plan: Plan, orders: list[list[int]]) -> float:
    def step(batch: Any) -> None:
        wait_for_all()
        time.sleep(plan.step_s)

    arguments: dict[str, Any] = {"batch_size": plan.batch_size, "num_workers": plan.workers}
    arguments |= {"persistent_workers": True, "sampler": Turns(orders)}
    wait_for_all()
    run = Run(STANDARD[name], plan.work, arguments, Consumer(step, second, orders))
    for _ in orders:
        run.epoch()
    return run.finish("ranks").whole_s


def shared_s(plan: Plan) -> float:
    """Seconds of a training whose ranks are threads that share one loader (``loader.consumers``)."""
    order = [index for orders in plan.orders for index in orders[0]]
    workers = plan.workers * len(plan.orders)
    begun_s = time.perf_counter()
    with unwarned():
        loader: Any = DataLoader(plan.work, plan.batch_size, sampler=order, num_workers=workers)
        consumers = loader.consumers(len(plan.orders))
    came: list[int] = []

    def consume(consumer: Any) -> None:
        for batch in consumer:
            came.extend(batch[1].tolist())
            time.sleep(plan.step_s)

    threads = [threading.Thread(target=consume, args=(each,)) for each in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_labels(came, order, in_order=False, who="consumers")
    return time.perf_counter() - begun_s


SHARED = "minato, one loader for all"


def scaling(settings: Settings) -> str:
    """One training process for each rank, with workers that sleep as in the segmentation workload, scaled down. The
    ranks share the samples and wait for each other before each step. *One loader for all* is `loader.consumers(n)`:
    threads of one process that share all workers and take batches as they come, without that wait.
    """
    count, workers, scale = (48, 2, 0.01) if settings.short else (720, 6, 0.04)
    work = SleepingWork((scale * segmentation_costs_s(count)).tolist())
    order = np.random.default_rng(0).permutation(count).tolist()
    lines = []
    for ranks in (1, 2) if settings.short else (1, 2, 4):
        orders = [[order[rank::ranks]] for rank in range(ranks)]
        plan = Plan(work, orders, 0.125 * scale, 3, workers)
        lines += _rank_lines(settings, [*STANDARD, SHARED], plan)
    return report.table(["ranks", *TIMES], lines)


def speedy(settings: Settings) -> str:
    """Ranks with 30 workers each, as theirs. A sample sleeps for half of what its random decisions cost by their table
    1, drawn again in each epoch. The ranks share the samples and take each step together. A step takes as long as the
    workers need for a batch on average. Incomplete batches are left out; workers persist.
    """
    cases, epochs, scale = (24, 2, 0.01) if settings.short else (210, 5, 0.5)
    workers, batch_size, ranks = (4 if settings.short else 30), 4, 2
    rng = np.random.default_rng(0)
    costs_s = scale * decided_ms(cases, epochs, rng) / 1e3
    length = cases // (batch_size * ranks) * batch_size
    orders: list[list[list[int]]] = [[] for _ in range(ranks)]
    for epoch in range(epochs):
        order = epoch * cases + rng.permutation(cases)
        for rank in range(ranks):
            orders[rank].append(order[rank::ranks][:length].tolist())
    step_s = float(costs_s.mean()) * batch_size / workers
    plan = Plan(SleepingWork(costs_s.ravel().tolist()), orders, step_s, batch_size, workers)
    return report.table(["ranks", *TIMES], _rank_lines(settings, [*STANDARD], plan))


def _rank_lines(settings: Settings, names: list[str], plan: Plan) -> list[list[str]]:
    def taken_s(name: str, _: int) -> float:
        return shared_s(plan) if name == SHARED else ranks_s(name, plan)

    ranks = f"{len(plan.orders)}"
    found = settings.page.turns(f"{ranks} ranks", names, settings.repeats, taken_s, SECONDS)
    contenders = {**STANDARD, SHARED: minato_as(SHARED)}
    return [[ranks, *line] for line in report.times(found, plan.ideal_s, contenders)]


def segmentation_costs_s(count: int) -> Times:
    """Costs with the figures of the MinatoLoader paper's table 2, evenly spread over the distribution and shuffled."""
    shares, values = (0.0, 0.5, 0.75, 0.9, 1.0), (0.010, 0.470, 0.630, 0.750, 2.230)
    powers = (-3.1, 1.0, 1.0, 28.0)  # chosen so that mean and deviation are the printed ones
    drawn = np.random.default_rng(0).permutation(np.linspace(0.0, 1.0, count))
    piece = np.clip(np.searchsorted(shares, drawn, "right") - 1, 0, 3)
    low, high = np.array(shares)[piece], np.array(shares)[piece + 1]
    inside, power = (drawn - low) / (high - low), np.array(powers)[piece]
    risen = np.where(power > 0, inside ** np.abs(power), 1.0 - (1.0 - inside) ** np.abs(power))
    below, above = np.array(values)[piece], np.array(values)[piece + 1]
    found: Times = below + (above - below) * risen
    return found


def decided_ms(samples: int, epochs: int, rng: np.random.Generator) -> Times:
    """Costs by SpeedyLoader's table 1, ``(epochs, samples)``: random decisions, with 3 % of jitter."""
    shape = (epochs, samples)
    crop = np.where(rng.random(shape) < 0.4, 965.0, 0.172)
    flip = np.where((rng.random((*shape, 3)) < 1 / 3).any(2), 32.0, 0.003)
    noise = np.where(rng.random(shape) < 0.1, 149.0, 0.002)
    brightness = np.where(rng.random(shape) < 0.1, 6.0, 0.001)
    found: Times = rng.normal(1.0, 0.03, shape) * (crop + flip + noise + brightness + 3.0)
    return found


EXPERIMENTS = {
    variability: "Variability of preprocessing (figure 2, table 2)",
    size: "Size as a predictor (figure 3a)",
    throughput: "Throughput over time (figure 7)",
    scaling: "Scaling over consumers (figure 9)",
    accuracy: "Accuracy (figure 11)",
    speedy: "Costs that decisions make (SpeedyLoader's comparison)",
}
"""Heading of each; the docstring is the text below it."""
ROWS = {run.__name__: run for run in EXPERIMENTS}


def main(arguments: list[str] | None = None) -> int:
    parser = report.Parser("papers", __doc__, 3, rows=ROWS)
    parser.add_argument("--data", type=Path, default=FOLDER, help="what 'make data' has filled")
    options = parser.parse_args(arguments)
    page = report.Page("papers", options.out)
    settings = Settings(options.short, options.repeats, options.data, page)
    torch.set_num_threads(1)  # as in a worker; and threads would take the workers' cores
    page.add(HEAD.format(repeats=settings.repeats))
    for name in options.rows:
        run = ROWS[name]
        page.say(f"{name} begins")
        try:
            page.add(f"## {EXPERIMENTS[run]}\n", f"{inspect.getdoc(run)}\n", run(settings))
        except FileNotFoundError as error:
            print(f"bench.papers: {error}", file=sys.stderr)
            return 2
    page.finish()
    return 0


if __name__ == "__main__":
    report.program(main)
