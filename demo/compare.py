"""The demo itself: one training run per loader, everything else equal, then table and chart."""

from __future__ import annotations

import gc
import math
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo.chart import draw
from demo.data import HELD_OUT_BOX, Volume, Windows, load_volume
from demo.machine import OthersClock, available_cores
from demo.model import Trainer
from demo.report import LEGEND, Conditions, table, verdict
from demo.train import BATCH_SIZE, LOADERS, Run, train, warm_up


def _train_with_each(
    volume: Volume, epochs: int, workers: int, seed: int, console: Console
) -> list[Run]:
    windows = Windows(volume)
    held_out = volume.crop(HELD_OUT_BOX)
    num_steps = epochs * math.ceil(len(windows) / BATCH_SIZE)
    progress = Progress(
        TextColumn("{task.description:<21}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[score]}"),
        console=console,
    )
    runs = []
    with progress:
        for name, make_loader in LOADERS.items():
            task = progress.add_task(name, total=num_steps, score="")
            trainer = Trainer(seed, num_steps)
            others = OthersClock()
            run = train(
                name,
                partial(make_loader, windows, workers, seed),
                trainer,
                len(windows),
                epochs,
                after_step=partial(progress.advance, task),
            )
            gc.collect()  # the loader and its workers go now, and not during the next run
            run.others_share = others.share()
            run.dice = trainer.mean_dice(held_out)
            progress.update(task, score=f"dice {run.dice:.3f}")
            runs.append(run)
    return runs


def compare(epochs: int, workers: int, seed: int, output: Path) -> list[Run]:
    """Train once per loader, print the table and save the chart to ``output``.

    Raises:
        MissingData: The volume is not there.
    """
    console = Console()
    volume = load_volume()
    # The workers need the cores too, and a second thread of the model would spin against them.
    torch.set_num_threads(1)
    warm_up(volume)
    conditions = Conditions(
        num_samples=len(Windows(volume)),
        batch_size=BATCH_SIZE,
        num_epochs=epochs,
        num_workers=workers,
        num_cores=len(available_cores()),
    )
    console.print(
        f"Grey and white matter of the MNI152 brain, 3D U-Net on the CPU, torch {torch.__version__}\n"
        f"{conditions}"
    )
    runs = _train_with_each(volume, epochs, workers, seed, console)
    console.print(table(runs, conditions))
    console.print(LEGEND, highlight=False)
    for line in verdict(runs, conditions):
        console.print(line)
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, conditions, output)
    console.print(f"Chart: {output}")
    return runs
