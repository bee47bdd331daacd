"""Rounds of a chaos run: one loader each, whose samples have their ways, and whose every epoch is checked."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import torch
from torch.utils.data import default_collate

import minato
from minato import AutoScale, DataLoader, ErrorPolicy
from tests.datasets import ORDERS
from tests.stress.disturber import Disturber
from tests.stress.scenario import Plain, Scenario

METHODS = (*["fork"] * 6, "forkserver", "forkserver", "spawn", "thread", "thread")
STUCK_S = 60.0
SAMPLE_TIMEOUT_S = 1.0


class Quiet(Plain):
    """Samples that hold what was drawn for them, in threads by generators of their own, and a text."""

    def __init__(self, length: int, in_threads: bool) -> None:
        super().__init__(length)
        self.in_threads = in_threads

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        generator = minato.torch_rng() if self.in_threads else None
        return index, torch.rand(3, generator=generator), f"sample {index}"


class Eventful(Quiet):
    """The same samples, but some of them have their ways: a letter says which.

    Args:
        ways: Of some indices. ``d``: the first time, it ends the process that runs it; ``h``: the first time, it hangs;
            ``f``: the first time, it raises; ``b``: it always raises; ``s``: it takes long.
        directory: Where the samples keep in mind that there was a first time.
    """

    def __init__(self, length: int, in_threads: bool, ways: dict[int, str], directory: str) -> None:
        super().__init__(length, in_threads)
        self.ways = ways
        self.directory = directory

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        way = self.ways.get(index)
        time.sleep(0.03 if way == "s" else 0.0005)
        sample = super().__getitem__(index)
        if way == "d" and self.first_time(index):
            if index % 3 == 0:
                os._exit(3)
            os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSEGV)[index % 3 - 1])
        if way == "h" and self.first_time(index):
            time.sleep(STUCK_S)
        if way == "b" or (way == "f" and self.first_time(index)):
            raise ValueError(f"sample {index} is bad")
        return sample

    def first_time(self, index: int) -> bool:
        try:
            os.close(os.open(f"{self.directory}/{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def stand_in(index: int) -> tuple[Any, ...]:
    return index, torch.zeros(3), "substitute"


def substitute(failure: minato.SampleFailure) -> tuple[Any, ...]:
    assert type(failure.index) is int
    return stand_in(failure.index)


def collated(samples: list[Any]) -> Any:
    """As the default, by a function of the user's."""
    return default_collate(samples)


class Round:
    """One loader and a few epochs, all drawn from a seed."""

    def __init__(self, seed: int, directory: str, disturber: Disturber) -> None:
        self.draw = draw = random.Random(seed)
        self.disturber = disturber
        method = draw.choice(METHODS)
        in_threads = method == "thread"
        reads = draw.choice([1, 1, 1, 4])
        self.spawns = method == "spawn"  # slow: each worker imports torch
        length = draw.randint(20, 40 if self.spawns else 300)
        kinds = "sf" if in_threads else "sfd"
        ways = {i: draw.choice(kinds) for i in range(length) if draw.random() < 0.03}
        policy: Any = draw.choice(["raise", "raise", "skip", substitute])
        if policy != "raise":
            ways.update((i, "b") for i in range(length) if draw.random() < 0.02)
        if not in_threads and draw.random() < 0.2:
            ways[draw.randrange(length)] = "h"
        self.counts = Counter(ways.values())
        stay = draw.random() < 0.6
        persistent = {"persistent_workers": "next_epoch" if stay else False}
        processes = {"multiprocessing_context": method, **persistent}
        workers: dict[str, Any] = {"workers": "thread"} if in_threads else processes
        errors = ErrorPolicy(
            on_error=policy,
            retries=5,  # a machine under load may make samples seem to hang
            sample_timeout=SAMPLE_TIMEOUT_S if "h" in ways.values() else None,
        )
        options = {
            **workers,
            "batch_size": draw.randint(1, 12),
            "shuffle": draw.random() < 0.7,
            "seed": seed,
            "order": draw.choice(ORDERS),
            "errors": errors,
            "fetch_concurrency": reads,
            "collate_fn": collated if draw.random() < 0.3 else None,
        }
        self.epochs = 1 if self.spawns else draw.randint(1, 3)
        self.leave: int | None = None
        self.ways = ways
        own_draws = in_threads or reads > 1
        self.truth = DataLoader(Quiet(length, own_draws), seed=seed)
        dataset = Eventful(length, own_draws, ways, directory)
        absent = {i for i, way in ways.items() if way == "b"} if policy == "skip" else set()
        self.scenario = Scenario(dataset, self.true, options, self.disturb, self.check, absent)

    def __str__(self) -> str:
        return f"{len(self.scenario.dataset)} samples, {self.counts}, {self.scenario.options}"

    def true(self, index: int, epoch: int) -> tuple[Any, ...]:
        if self.ways.get(index) == "b":
            return stand_in(index)
        return tuple(self.truth.reproduce(index, epoch))

    def disturb(self, iterator: Any, taken: int, errors: list[Exception]) -> bool:
        assert not errors, errors
        self.disturber.watch(iterator)
        return self.leave is not None and taken > self.leave

    def check(self, missing: set[int], errors: list[Exception]) -> None:
        assert missing == self.scenario.absent, f"lost {missing}"

    def loader(self) -> DataLoader[Any]:
        """A loader of this round; the number of workers differs each time."""
        number = self.draw.randint(1, 2 if self.spawns else 4)
        scales = self.draw.random() < 0.3
        scale = AutoScale(start=number, min=1, max=number + 2)
        return self.scenario.loader(num_workers=scale if scales else number)

    def pass_over(self, loader: DataLoader[Any], epoch: int, resumed: bool = False) -> bool:
        try:
            return self.scenario.run(loader, epoch, resumed)
        finally:
            self.disturber.rest()

    def run(self, figures: Counter[str]) -> None:
        """Iterate while the disturber does what it likes to the workers."""
        loader = self.loader()
        for epoch in range(self.epochs):
            self.leave = self.draw.randint(1, 10) if self.draw.random() < 0.4 else None
            if self.pass_over(loader, epoch):
                figures["epochs to the end"] += 1
            elif self.draw.random() < 0.5:
                figures["epochs left early"] += 1
            else:
                state = json.loads(json.dumps(loader.state_dict()))
                loader = self.loader()
                loader.load_state_dict(state)
                self.leave = None
                self.pass_over(loader, epoch, resumed=True)
                figures["epochs left early and resumed"] += 1
            figures["samples"] += len(self.scenario.found)
        for way, letters in {"ended their worker": "d", "hung": "h", "raised": "fb"}.items():
            figures[f"samples that {way}"] += sum(self.counts[letter] for letter in letters)
        figures["loaders"] += 1
