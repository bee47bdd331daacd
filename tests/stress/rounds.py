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

import minato
from minato import AutoScale, DataLoader, ErrorPolicy
from tests.datasets import ORDERS

METHODS = (*["fork"] * 6, "forkserver", "forkserver", "spawn", "thread", "thread")
STUCK_S = 60.0
SAMPLE_TIMEOUT_S = 1.0


class Quiet:
    """Samples that say their index and hold what was drawn for them.

    Args:
        in_threads: Worker threads share the global generators, so these samples draw from their own.
    """

    def __init__(self, length: int, in_threads: bool) -> None:
        self.length = length
        self.in_threads = in_threads

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = minato.torch_rng() if self.in_threads else None
        drawn = torch.rand(3, generator=generator)
        return {"index": index, "drawn": drawn, "text": f"sample {index}"}


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

    def __getitem__(self, index: int) -> dict[str, Any]:
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


def substitute(failure: minato.SampleFailure) -> dict[str, Any]:
    return {"index": failure.index, "drawn": torch.zeros(3), "text": "substitute"}


def collated(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """As the default, by a function of the user's."""
    return {
        "index": torch.tensor([sample["index"] for sample in samples]),
        "drawn": torch.stack([sample["drawn"] for sample in samples]),
        "text": [sample["text"] for sample in samples],
    }


class Round:
    """One loader and a few epochs, all drawn from a seed."""

    def __init__(self, seed: int, directory: str) -> None:
        self.draw = draw = random.Random(seed)
        method = draw.choice(METHODS)
        in_threads = method == "thread"
        self.spawns = method == "spawn"  # slow: each worker imports torch
        length = draw.randint(20, 40 if self.spawns else 300)
        kinds = "sf" if in_threads else "sfd"
        ways = {i: draw.choice(kinds) for i in range(length) if draw.random() < 0.03}
        policy: Any = draw.choice(["raise", "raise", "skip", substitute])
        if policy != "raise":
            ways.update((i, "b") for i in range(length) if draw.random() < 0.02)
        if not in_threads and draw.random() < 0.2:
            ways[draw.randrange(length)] = "h"
        self.dataset = Eventful(length, in_threads, ways, directory)
        stay = draw.random() < 0.6
        self.workers: dict[str, Any] = (
            {"workers": "thread"}
            if in_threads
            else {"multiprocessing_context": method, "persistent_workers": stay}
        )
        if stay and not in_threads:
            self.workers["persistent_workers"] = "next_epoch"
        self.arguments: dict[str, Any] = {
            "batch_size": draw.randint(1, 12),
            "shuffle": draw.random() < 0.7,
            "seed": seed,
            "order": draw.choice(ORDERS),
            "errors": ErrorPolicy(
                on_error=policy,
                retries=5,  # a machine under load may make samples seem to hang
                sample_timeout=SAMPLE_TIMEOUT_S if "h" in ways.values() else None,
            ),
            "collate_fn": collated if draw.random() < 0.3 else None,
        }
        self.epochs = 1 if self.spawns else draw.randint(1, 3)
        self.truth = DataLoader(Quiet(length, in_threads), seed=seed)

    def __str__(self) -> str:
        ways = Counter(self.dataset.ways.values())
        return f"{len(self.dataset)} samples, {ways}, {self.workers}, {self.arguments}"

    def loader(self) -> DataLoader[Any]:
        """A loader of this round; the number of workers differs each time."""
        number = self.draw.randint(1, 2 if self.spawns else 4)
        numbers: dict[str, Any] = {"num_workers": number}
        if self.draw.random() < 0.3:
            numbers |= {"num_workers": AutoScale(start=number, min=1, max=number + 2)}
        return DataLoader(self.dataset, **numbers, **self.workers, **self.arguments)

    def run(self, disturber: Any, figures: Counter[str]) -> None:
        """Iterate while the disturber does what it likes to the workers."""
        loader = self.loader()
        for epoch in range(self.epochs):
            found: set[int] = set()
            leave = self.draw.randint(1, 10) if self.draw.random() < 0.4 else None
            if self.pass_over(loader, epoch, found, leave, disturber):
                figures["epochs to the end"] += 1
            elif self.draw.random() < 0.5:
                figures["epochs left early"] += 1
            else:
                state = json.loads(json.dumps(loader.state_dict()))
                loader = self.loader()
                loader.load_state_dict(state)
                self.pass_over(loader, epoch, found, None, disturber)
                figures["epochs left early and resumed"] += 1
            figures["samples"] += len(found)
        figures["samples that ended their worker"] += self.times("d")
        figures["samples that hung"] += self.times("h")
        figures["samples that raised"] += self.times("f") + self.times("b")
        figures["loaders"] += 1

    def times(self, way: str) -> int:
        return sum(one == way for one in self.dataset.ways.values())

    def pass_over(
        self,
        loader: DataLoader[Any],
        epoch: int,
        found: set[int],
        leave: int | None,
        disturber: Any,
    ) -> bool:
        """Iterate; returns whether the end was reached, and then everything has been found."""
        iterator = iter(loader)
        with disturber.at(iterator):
            for number, batch in enumerate(iterator):
                disturber.delivered()
                self.take(batch, epoch, found)
                if number == leave:
                    return False
        skipped = self.arguments["errors"].on_error == "skip"
        wanted = {i for i in range(len(self.dataset)) if not (skipped and self.way(i) == "b")}
        assert found == wanted, f"lost {wanted - found}"
        return True

    def take(self, batch: dict[str, Any], epoch: int, found: set[int]) -> None:
        for index, drawn, text in zip(
            batch["index"].tolist(), batch["drawn"], batch["text"], strict=True
        ):
            assert index not in found, f"repeated {index}"
            found.add(index)
            if self.way(index) == "b":
                assert self.arguments["errors"].on_error is substitute
                assert (drawn.tolist(), text) == ([0, 0, 0], "substitute")
            else:
                true = self.truth.reproduce(index, epoch)
                assert torch.equal(drawn, true["drawn"]), (index, epoch, drawn, true)
                assert text == true["text"]

    def way(self, index: int) -> str | None:
        return self.dataset.ways.get(index)
