"""SpeedyLoader's comparison: random decisions make the costs, in virtual time and with processes that sleep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from bench.in_step import run_ranks, wait_for_all
from bench.macro.report import spread_text, table
from bench.macro.suite import Spread
from bench.macro.trial import WrongDeliveryError
from bench.papers.costs import Times
from bench.papers.decisions import decided_ms
from bench.papers.naps import Naps
from bench.papers.page import Section, Settings, prose
from bench.papers.trial import LOADERS, build, check
from bench.simulate.clock import Clock
from bench.simulate.loader import Costs, Training
from bench.simulate.speedy_loader import SpeedyLoader
from bench.simulate.trials import CONTENDERS, Make

CASES, EPOCHS, BATCH_SIZE = 210, 5, 4
WORKERS = 30
"""Of each consumer."""
RANKS = (2, 4, 8)
LONGER = 20
"""One epoch with so many times as many cases is simulated, too, for the first number of ranks."""
RANKS_HERE = 2
SCALE, SHORT_SCALE = 0.5, 0.01
SEEDS, SHORT_SEEDS = 5, 1
PRINTED_MIN = {"torch": (62, 29, 15), "SpeedyLoader": (44, 20, 9)}
MAKERS: dict[str, Make] = {
    "SpeedyLoader": SpeedyLoader,
    **{
        name: CONTENDERS[name]
        for name in (
            "torch",
            "torch, in_order=False",
            "minato strict",
            "minato batch",
            "minato arrival",
            "minato arrival, deferral",
            "minato fast_first, deferral",
        )
    },
}
Shares = list[npt.NDArray[np.int64]]
_TEXT = """\
{cases} volumes for {epochs} epochs in batches of {batch}, {workers} workers for each consumer, as theirs. A
sample costs what its random decisions cost by their table 1, drawn anew in each epoch: {mean:.0f} ms in the
mean, {share:.0f} % of them more than 900 ms. The consumers share the samples and take each step together; a
step takes as long as {workers} workers need for a batch in the mean, {step:.0f} ms. Batches that would be
incomplete are left out; workers persist, and no epoch begins before the last one is over. *Bound*: in each
epoch the work of a rank divided by its workers, or its dearest sample, with the last step after it; or all
steps.
"""
_VIRTUAL = """\
*In virtual time* (simulated, nothing was measured), seconds for all epochs, with {seeds} draws of the
decisions. SpeedyLoader is a model of it, with a perfect prediction and 20 batches in flight, as theirs; the
others may have as many as they always have. The minutes as printed are those of real training on GPUs; the
costs of their table 1 do not add up to them, so that only the ratios can be compared. A consumer's epoch has no
more than {batches} batches for {workers} workers: where a worker loads whole batches, as torch's do, the rest
of them has nothing to do, and that is most of the difference. In the last column one epoch has {longer} times
as many volumes; there torch in order waits for slow batches at the head of the line, and otherwise little but
the start and the end remains.
"""
_HERE = """\
*Here*: {ranks} consumers, processes with {workers} workers each that sleep {scale:g} of these times; seconds of
the whole run, start of the workers included.
"""


class Decided(NamedTuple):
    """A training.

    Attributes:
        costs_s: ``(epochs, cases, steps)``: what each transform of each sample takes.
        order: ``(epochs, cases)``: shuffles.
        step_s: What a consumer takes for a batch.
    """

    costs_s: Times
    order: npt.NDArray[np.int64]
    step_s: float

    def shares(self, epoch: int, ranks: int) -> Shares:
        """The cases that each rank gets in an epoch, in whole batches."""
        length = self.costs_s.shape[1] // (BATCH_SIZE * ranks) * BATCH_SIZE
        return [self.order[epoch, rank::ranks][:length] for rank in range(ranks)]

    def bound_s(self, ranks: int, workers: int) -> float:
        """The least time of all epochs."""
        total_s = 0.0
        for epoch, costs_s in enumerate(self.costs_s.sum(2)):
            shares = self.shares(epoch, ranks)
            work_s = max(max(costs_s[each].sum() / workers, costs_s[each].max()) for each in shares)
            steps = len(shares[0]) // BATCH_SIZE
            total_s += max(work_s + self.step_s, steps * self.step_s)
        return total_s


def decided(seed: int, scale: float = 1.0, longer: int = 1) -> Decided:
    """Draw the decisions and shuffles of a training.

    Args:
        seed: Of the draw.
        scale: Times are multiplied by this.
        longer: If more than 1, there is one epoch with so many times as many cases.
    """
    rng = np.random.default_rng(seed)
    cases, epochs = CASES * longer, EPOCHS if longer == 1 else 1
    costs_s = scale * decided_ms(cases, epochs, rng) / 1000
    order = np.array([rng.permutation(cases) for _ in range(epochs)])
    step_s = float(costs_s.sum(2).mean()) * BATCH_SIZE / WORKERS
    return Decided(costs_s, order, step_s)


def run(settings: Settings) -> Section:
    """Simulate, and time processes that sleep."""
    one = decided(0)
    totals_s = one.costs_s.sum(2)
    text = prose(
        _TEXT,
        cases=CASES,
        epochs=EPOCHS,
        batch=BATCH_SIZE,
        workers=WORKERS,
        mean=1e3 * totals_s.mean(),
        share=100 * (totals_s > 0.9).mean(),
        step=1e3 * one.step_s,
    )
    parts = [text, virtual(SHORT_SEEDS if settings.short else SEEDS), here(settings)]
    title = "Costs that decisions make (SpeedyLoader's comparison)"
    return Section(title, "\n".join(parts))


def virtual(seeds: int) -> str:
    """The table of the simulation."""
    usual, longer = ([decided(seed, 1.0, times) for seed in range(seeds)] for times in (1, LONGER))
    columns = [*((usual, ranks) for ranks in RANKS), (longer, RANKS[0])]
    bounds = [[one.bound_s(ranks, WORKERS) for one in trainings] for trainings, ranks in columns]
    rows = [["*bound*", *(spread_text(Spread.of(each), 1) for each in bounds)]]
    for name, make in MAKERS.items():
        taken_s = [
            [virtual_s(make, one, ranks) for one in trainings] for trainings, ranks in columns
        ]
        rows.append([name, *(spread_text(Spread.of(each), 1) for each in taken_s)])
    rows += [
        [f"*{name}, minutes as printed*", *(f"{each}" for each in printed), ""]
        for name, printed in PRINTED_MIN.items()
    ]
    head = ["loader", *(f"{ranks} consumers" for ranks in RANKS), f"{RANKS[0]}, longer epoch"]
    batches = ", ".join(str(CASES // (BATCH_SIZE * ranks)) for ranks in RANKS)
    about = prose(_VIRTUAL, seeds=seeds, batches=batches, longer=LONGER, workers=WORKERS)
    return f"{about}\n{table(head, rows)}"


def virtual_s(make: Make, one: Decided, ranks: int) -> float:
    """Virtual seconds of all epochs; each rank must get all of its batches."""
    total_s = 0.0
    for epoch, costs_s in enumerate(one.costs_s):
        clock = Clock()
        shares = [costs_s[share] for share in one.shares(epoch, ranks)]
        batches = len(shares[0]) // BATCH_SIZE
        loaders = [
            make(
                clock,
                Costs(each.sum(1).tolist(), each.cumsum(1).tolist()),
                BATCH_SIZE,
                WORKERS,
                batches,
            )
            for each in shares
        ]
        Training(clock, loaders, one.step_s, batches).run()
        if any(len(loader.record.delivered_s) != batches for loader in loaders):
            raise WrongDeliveryError("not every batch was delivered")
        total_s += clock.now_s
    return total_s


def here(settings: Settings) -> str:
    """The table of processes that sleep."""
    scale = SHORT_SCALE if settings.short else SCALE
    one = decided(0, scale)
    names = [*LOADERS]
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(settings.repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(here_s(name, one, RANKS_HERE))
    bound_s = one.bound_s(RANKS_HERE, WORKERS)
    rows = [["*bound*", f"{bound_s:.2f}", ""]]
    for name in names:
        spread = Spread.of(found[name])
        rows.append([name, spread_text(spread, 2), f"{bound_s / spread.median:.2f}"])
    about = prose(_HERE, ranks=RANKS_HERE, workers=WORKERS, scale=scale)
    return f"{about}\n{table(['loader', 's', 'of the bound'], rows)}"


class Turns(Sampler[int]):
    """Gives each epoch an order of its own."""

    def __init__(self, orders: list[list[int]]) -> None:
        self._orders = orders
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._orders[0])

    def __iter__(self) -> Iterator[int]:
        order = self._orders[self._epoch % len(self._orders)]
        self._epoch += 1
        return iter(order)


def here_s(name: str, one: Decided, ranks: int) -> float:
    """Seconds that all epochs take in so many processes; each sample must come once, in one of them."""
    naps = Naps(one.costs_s.sum(2).ravel().tolist())
    orders: list[list[list[int]]] = [[] for _ in range(ranks)]
    for epoch in range(len(one.order)):
        for rank, share in enumerate(one.shares(epoch, ranks)):
            orders[rank].append((epoch * CASES + share).tolist())
    found = run_ranks(_rank, [(each, name, naps, one.step_s) for each in orders])
    for wanted, (came, _) in zip(orders, found, strict=True):
        for order, delivered in zip(wanted, came, strict=True):
            check(name, delivered, order)
    return max(taken_s for _, taken_s in found)


def _rank(
    orders: list[list[int]], name: str, naps: Naps, step_s: float
) -> tuple[list[list[int]], float]:
    wait_for_all()
    begun_s = time.perf_counter()
    came = []
    loader = build(name, naps, [], Turns(orders), batch_size=BATCH_SIZE, num_workers=WORKERS)
    for _ in orders:
        epoch: list[int] = []
        for batch in loader:
            epoch += batch[0].tolist()
            wait_for_all()
            time.sleep(step_s)
        came.append(epoch)
    return came, time.perf_counter() - begun_s
