"""A training run that is killed at random moments and goes on from its last saved state.

Arguments: how many kills, a seed, and a directory. Each life is forked from this process, so that torch is imported
once. Prints how many lives were killed and how many samples were trained.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from minato import DataLoader
from tests.datasets import ORDERS, Numbers

SIZE, BATCH, EPOCHS = 90, 4, 2


class Data(Numbers):
    """Samples with draws, a few of them slow."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        time.sleep(0.01 if index % 30 == 7 else 0.0005)
        return index, random.random()


def make(dice: random.Random, seeded: bool, order: str, drop_last: bool) -> DataLoader[Any]:
    """A loader whose workers differ from life to life, and nothing else."""
    return DataLoader(
        Data(SIZE),
        BATCH,
        shuffle=True,
        order=order,
        drop_last=drop_last,
        num_workers=dice.choice([0, 1, 2, 3]),
        workers=dice.choice(["process", "process", "thread"]),
        seed=11 if seeded else None,
        generator=None if seeded else torch.Generator().manual_seed(5),
    )


def save(path: Path, loader: DataLoader[Any], trained: list[list[Any]]) -> None:
    """Replace the checkpoint, all of it or nothing."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"loader": loader.state_dict(), "trained": trained}))
    os.replace(new, path)


def live(path: Path, dice: random.Random, **fixed: Any) -> None:
    """Train from the checkpoint to the end."""
    loader, trained = make(dice, **fixed), []
    if path.exists():
        checkpoint = json.loads(path.read_text())
        loader.load_state_dict(checkpoint["loader"])
        trained = checkpoint["trained"]
    while True:
        state = loader.state_dict()
        epoch = state["epoch"] + state["finished"]
        if epoch == EPOCHS:
            return
        for step, (indices, _) in enumerate(loader):
            trained.append([epoch, indices.tolist()])
            if step % 2:
                save(path, loader, trained)
        save(path, loader, trained)


def kill_often(path: Path, kills: int, within_s: float, dice: random.Random) -> tuple[int, int]:
    """Run lives until one comes to the end; returns how many were killed, and how many samples trained.

    Args:
        path: The checkpoint.
        kills: At most so many lives are killed.
        within_s: Each is killed before it is so old, unless it has come to its end.
        dice: Decides everything.
    """
    fixed = {
        "seeded": dice.random() < 0.5,
        "order": dice.choice(ORDERS),
        "drop_last": dice.random() < 0.5,
    }
    path.unlink(missing_ok=True)
    killed = 0
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                live(path, dice, **fixed)
            except BaseException as error:
                print(fixed, repr(error), flush=True)
                os._exit(3)
            os._exit(0)
        dice.random()  # else all lives would throw the same
        if killed < kills:
            time.sleep(dice.uniform(0.0, within_s))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert os.WEXITSTATUS(status) == 0
        break
    trained = json.loads(path.read_text())["trained"]
    for epoch in range(EPOCHS):
        batches = [batch for number, batch in trained if number == epoch]
        counts = Counter(index for batch in batches for index in batch)
        expected = SIZE // BATCH * BATCH if fixed["drop_last"] else SIZE
        assert (counts.total(), len(counts)) == (expected, expected), (fixed, epoch, counts)
        assert len(batches) == -(-expected // BATCH), (fixed, epoch, len(batches))
    return killed, sum(len(batch) for _, batch in trained)


def main() -> None:
    kills, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dice = random.Random(seed)
    checkpoint = folder / "checkpoint.json"
    begin = time.monotonic()
    _, trained = kill_often(checkpoint, 0, 0, dice)
    within_s = (time.monotonic() - begin) / 2  # so that lives are hit at work on any machine
    done = 0
    while done < kills:
        killed, samples = kill_often(checkpoint, min(8, kills - done), within_s, dice)
        done += killed
        trained += samples
    print(done, trained)


if __name__ == "__main__":
    main()
