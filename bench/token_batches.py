"""Batches of texts of different length under a budget of tokens: torch, ODB and minato in turn."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchLoader

from bench.harness import report
from bench.harness.datasets import Counted
from minato import CostBatches, CostBatchSampler, DataLoader, PadCollate

SAMPLES, SHORT_SAMPLES = 4000, 200
WORKERS, MAX_TOKENS, LONGEST = 4, 16_384, 2048
BASE_S, TOKEN_S, SLOW_S, SLOW_SHARE = 0.0005, 3e-6, 0.05, 0.01
COLLATE = PadCollate(masks={"attention_mask": "input_ids"})
HEAD = f"""\
# Batches by tokens

Written by `python -m bench.token_batches`. {{samples}} texts, whose lengths are log-normal: the median is 120 tokens,
the longest {LONGEST}. A text takes {1e3 * BASE_S:g} ms and {1e6 * TOKEN_S:g} µs for each token; {SLOW_SHARE:.0%} take
{1e3 * SLOW_S:g} ms more. All of it is waiting. {WORKERS} workers, which start in each epoch, as ODB refuses persistent
ones; shuffled. Loaders in turn; each text must come once in each epoch. Medians of {{repeats}} epochs after one that
warms up, with the minimum and maximum in brackets.

A batch costs its number of texts times the longest of them; ODB, *CostBatches* and *known lengths* have a budget of
{MAX_TOKENS:,} tokens. *Fixed*: as many texts as fit the budget if all have the mean length. *Known lengths* are given
to the sampler in advance. *Ideal*: all work divided by the workers. *Padding*: share of all tokens in an epoch.
*Largest*: cost of the largest batch.
"""


class Texts(Counted):
    """Token ids; making them takes time."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        draw = random.Random(0)
        self.lengths = [
            min(max(int(draw.lognormvariate(4.8, 0.9)), 1), LONGEST) for _ in range(size)
        ]
        slow = set(draw.sample(range(size), int(size * SLOW_SHARE)))
        self.costs_s = [
            BASE_S + TOKEN_S * length + (SLOW_S if index in slow else 0.0)
            for index, length in enumerate(self.lengths)
        ]

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.costs_s[index])
        return {"input_ids": torch.full((self.lengths[index],), index)}


Make = Callable[[Texts, dict[str, Any]], Iterable[dict[str, Any]]]
"""Of the texts, and the arguments that all loaders share."""


def length_of(text: dict[str, Any]) -> int:
    return len(text["input_ids"])


def _fixed(texts: Texts) -> int:
    return max(int(MAX_TOKENS / statistics.fmean(texts.lengths)), 1)


def _odb(texts: Texts, common: dict[str, Any]) -> Iterable[dict[str, Any]]:
    import odb

    found: Iterable[dict[str, Any]] = odb.ODBDataLoader(
        texts,
        token_budget=MAX_TOKENS,
        loss_scaling=False,
        prefetch_factor=64,
        **{**common, "collate_fn": COLLATE},
    )
    return found


def _budget(order: Any) -> Make:
    plan = CostBatches(MAX_TOKENS, length_of)
    return lambda texts, common: DataLoader(texts, plan, order=order, **common)


def _known(texts: Texts, common: dict[str, Any]) -> Iterable[dict[str, Any]]:
    rest = {name: value for name, value in common.items() if name != "shuffle"}
    return DataLoader(texts, batch_sampler=CostBatchSampler(texts.lengths, MAX_TOKENS), **rest)


CONTENDERS: dict[str, Make] = {
    "torch, fixed": lambda texts, common: TorchLoader(texts, _fixed(texts), **common),
    "minato, fixed": lambda texts, common: DataLoader(texts, _fixed(texts), **common),
    "ODB": _odb,
    "minato, CostBatches": _budget("strict"),
    "minato, CostBatches, order='arrival'": _budget("arrival"),
    "minato, known lengths": _known,
}


class Epoch(NamedTuple):
    """What an epoch gave: its seconds, batches, share of padding, and the cost of its largest batch."""

    seconds: float
    batches: int
    padding: float
    largest: int


def run(loader: Iterable[dict[str, Any]], size: int) -> Epoch:
    """One epoch, in which each text must come once."""
    begun_s, seen, costs, tokens = time.perf_counter(), list[int](), list[int](), 0
    for batch in loader:
        mask = batch["attention_mask"]
        seen += batch["input_ids"][:, 0].tolist()
        costs.append(mask.numel())
        tokens += int(mask.sum())
    seconds = time.perf_counter() - begun_s
    if sorted(seen) != [*range(size)]:
        raise AssertionError(f"{len(seen)} texts came, {len(set(seen))} of {size} are different")
    return Epoch(seconds, len(costs), 1 - tokens / sum(costs), max(costs))


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("token_batches", __doc__, 3).parse_args(arguments)
    texts = Texts(SHORT_SAMPLES if options.short else SAMPLES)
    page = report.Page("token_batches", options.out)
    page.add(HEAD.format(samples=len(texts), repeats=options.repeats))
    has_odb = importlib.util.find_spec("odb") is not None
    common = {"shuffle": True, "num_workers": WORKERS, "collate_fn": COLLATE}
    loaders = {
        label: make(texts, common)
        for label, make in CONTENDERS.items()
        if has_odb or label != "ODB"
    }
    for label, loader in loaders.items():
        run(loader, len(texts))
        page.say(f"{label}: warm")
    found = page.turns(
        "epoch",
        [*loaders],
        options.repeats,
        lambda label, _: run(loaders[label], len(texts)),
        lambda epoch: f"{epoch.seconds:.2f} s",
    )
    least_s = sum(texts.costs_s) / WORKERS
    lines = [["*ideal*", f"{least_s:.2f}", "", "", "", ""]]
    for label, epochs in found.items():
        seconds = [each.seconds for each in epochs]
        cells = [
            report.spread_text(seconds, 2),
            report.share_text(least_s / statistics.median(seconds)),
            f"{statistics.median(each.batches for each in epochs):.0f}",
            f"{100 * statistics.median(each.padding for each in epochs):.1f}",
            f"{max(each.largest for each in epochs):,}",
        ]
        lines.append([label, *cells])
    head = ["loader", "epoch (s)", "efficiency", "batches", "padding (%)", "largest (tokens)"]
    page.add(report.table(head, lines))
    version = importlib.metadata.version("online-dynamic-batching") if has_odb else "not installed"
    page.finish(conditions={"ODB (online-dynamic-batching)": version})


if __name__ == "__main__":
    report.program(main)
