"""What the programs that attack loaders share: samples, the check of every byte, the turns of both cores, the command.

A scenario is a loader, what happens to it meanwhile, and what its epochs must be nevertheless.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minato import DataLoader
from tests import subprocesses

PAGE = "docs/benchmarks/chaos.md"
TITLE = "# Chaos run\n\n"
HANG_S = 100.0
"""A loader that delivers nothing for so long hangs: the stacks of all threads are printed, and the process ends."""
MOST_ERRORS = 9
"""In one epoch."""
Array = np.ndarray[Any, Any]


def content(index: int) -> Array:
    """A sample: 512 numbers that no other sample has. Shape (512,), int64."""
    return np.arange(512, dtype=np.int64) * 4099 + index


class Plain:
    """Samples that hold their index and their content; each takes ``takes_s`` seconds."""

    def __init__(self, length: int, takes_s: float = 0.0) -> None:
        self.length = length
        self.takes_s = takes_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        time.sleep(self.takes_s)
        return index, content(index)

    def true(self, index: int, epoch: int) -> tuple[Any, ...]:
        """The sample that must arrive."""
        return index, content(index)


def samples_of(batch: Any) -> Iterator[tuple[Any, ...]]:
    """The samples of a batch, however it was collated."""
    if isinstance(batch[0], tuple):
        return iter(batch)
    return zip(np.asarray(batch[0]).tolist(), *batch[1:], strict=True)


@dataclass
class Scenario:
    """A loader under attack, and what its epochs must be.

    Attributes:
        true: What the sample of an index in an epoch must be; samples begin with their index.
        fault: Called before each batch with the iterator, the number of batches so far and the errors; a true answer
            leaves the epoch.
        check: Called at the end of an epoch with the samples that did not come and the errors.
        absent: Samples that come in no batch.
    """

    dataset: Any
    true: Callable[[int, int], tuple[Any, ...]]
    options: dict[str, Any]
    fault: Callable[[Any, int, list[Exception]], object]
    check: Callable[[set[int], list[Exception]], None]
    absent: Collection[int] = ()
    found: Counter[int] = field(default_factory=Counter)

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.dataset, **{**self.options, **options})

    def run(self, loader: DataLoader[Any], epoch: int = 0, resumed: bool = False) -> bool:
        """Iterate, with every byte compared; returns whether the epoch came to its end."""
        if not resumed:
            self.found = Counter()
        errors: list[Exception] = []
        taken = 0
        iterator = iter(loader)
        while not self.fault(iterator, taken, errors):
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                errors.append(error)
                assert len(errors) < MOST_ERRORS, errors
                continue
            self.take(batch, epoch)
            taken += 1
        else:
            return False
        self.check(set(range(len(self.dataset))) - set(self.found), errors)
        return True

    def take(self, batch: Any, epoch: int = 0) -> None:
        """Compare a batch, every byte."""
        samples = list(samples_of(batch))
        indices = [sample[0] for sample in samples]
        for sample in samples:
            true = self.true(sample[0], epoch)
            for value, expected in zip(sample, true, strict=True):
                same = np.array_equal(np.asarray(value), np.asarray(expected))
                assert same, f"altered: {sample}, not {true}"
        self.found.update(indices)
        assert all(self.found[index] == 1 for index in indices), f"repeated: {self.found}"
        if self.options["order"] in ("strict", "batch") and not self.options.get("shuffle"):
            size = self.options.get("batch_size") or len(indices)
            first = indices[0] // size * size
            whole = range(first, min(first + size, len(self.dataset)))
            assert indices == [index for index in whole if index not in self.absent], indices


# ------------------------------------------------------------------------------ turns of both cores


def play(seconds: float, seed: int, one: Callable[[random.Random], None]) -> None:
    """Play one scenario after another with this process's form of the core."""
    warnings.simplefilter("ignore")
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        one(draw)


def watch() -> None:
    """Whoever does not watch again in time hangs."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)


def turn(program: str, seconds: float, seed: int, pure: bool) -> Any:
    """Let another process take a turn; returns what it found."""
    arguments = "-m", program, "--turn", seconds, "--seed", seed
    variables = {"MINATO_NO_EXTENSIONS": str(int(pure))}
    done = subprocesses.python(*arguments, timeout_s=seconds + 600, **variables)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}\nseed {seed}, {pure=}"
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------- the programs


def parser(program: str) -> argparse.ArgumentParser:
    """The options that all programs have."""
    found = argparse.ArgumentParser(prog=f"python -m {program}")
    found.add_argument("--seconds", type=float, default=40.0)
    found.add_argument("--seed", type=int, default=None, help="default: another one each time")
    found.add_argument("--figures", type=Path, help="write the section to this page as well")
    return found


def main(
    options: argparse.Namespace,
    section: Callable[[argparse.Namespace], str],
    take_turn: Callable[[argparse.Namespace], Any] | None = None,
) -> int:
    """Print a section of figures, or what a turn found."""
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 20)
    if take_turn is not None and options.turn is not None:
        print(json.dumps(take_turn(options)))
        return 0
    text = section(options)
    print(text)
    if options.figures is not None:
        write_section(options.figures, text)
    return 0


def section(
    title: str, about: list[str], program: str, seconds: float, seed: int, lines: list[str]
) -> str:
    """A section of the page, in Markdown: what was done, by which command, and the figures."""
    command = f"    python -m {program} --seconds {seconds:.0f} --seed {seed} --figures {PAGE}"
    return "\n".join([f"## {title}", "", *about, "", command, "", *lines]) + "\n"


def machine() -> str:
    return f"on {os.cpu_count()} cores (load average {os.getloadavg()[2]:.0f})"


def write_section(page: Path, section: str) -> None:
    """Replace the section with the same heading, or append it."""
    text = page.read_text() if page.exists() else TITLE
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    named = {one.split("\n", 1)[0]: one.strip() for one in sections}
    named[section.split("\n", 1)[0]] = section.strip()
    page.write_text("\n\n".join([head.strip(), *named.values()]) + "\n")
