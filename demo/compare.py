"""The demo itself: one run per loader, everything else equal, then bars and a table."""

from __future__ import annotations

import gc
import math
import statistics
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo.chain import segmentation_chain
from demo.data import HELD_OUT_BOX, Volume, Windows, load_volume
from demo.machine import OthersClock, available_cores
from demo.model import Trainer, warm_up
from demo.report import LEGEND, Conditions, bars, table, verdict
from demo.train import BATCH_SIZE, LOADERS, Accelerator, Run, Step, make_loader, train


def _mean_cost_s(windows: Windows) -> float:
    """Processor time of the transforms, per sample: a third of an epoch, in this process."""
    return statistics.fmean(windows[draw].cost_s for draw in range(0, len(windows), 3))


def _run_each(
    volume: Volume,
    windows: Windows,
    conditions: Conditions,
    step_s: float | None,
    console: Console,
) -> list[Run]:
    num_steps = conditions.num_epochs * math.ceil(len(windows) / BATCH_SIZE)
    progress = Progress(
        TextColumn("{task.description:<21}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    runs = []
    with progress:
        for name, (loader, arguments) in LOADERS.items():
            task = progress.add_task(name, total=num_steps)
            trainer = None if step_s is not None else Trainer(windows.seed, num_steps)
            step: Step = Accelerator(step_s or 0.0) if trainer is None else trainer
            others = OthersClock()
            run = train(
                name,
                partial(make_loader, loader, windows, conditions.num_workers, **arguments),
                step,
                len(windows),
                conditions.num_epochs,
                after_step=partial(progress.advance, task),
            )
            gc.collect()  # the loader and its workers go now, and not during the next run
            run.others_share = others.share()
            if trainer is not None:
                run.dice = trainer.mean_dice(volume.crop(HELD_OUT_BOX))
            runs.append(run)
    return runs


def compare(epochs: int, workers: int, seed: int, trains: bool) -> list[Run]:
    """Run once per loader and print bars and table.

    Args:
        trains: Train the model on the CPU; else a step is a sleep that stands for an accelerator's.

    Raises:
        MissingData: The volume is not there.
    """
    console = Console()
    volume = load_volume()
    # The workers need the cores too, and a second thread of the model would spin against them.
    torch.set_num_threads(1)
    windows = Windows(volume, segmentation_chain(), seed)
    conditions = Conditions(
        num_samples=len(windows),
        batch_size=BATCH_SIZE,
        num_epochs=epochs,
        num_workers=workers,
        num_cores=len(available_cores()),
    )
    console.print(
        f"Patches of the MNI152 brain, augmented for segmentation; torch {torch.__version__}\n{conditions}"
    )
    step_s: float | None = None
    if trains:
        warm_up([windows[draw] for draw in range(BATCH_SIZE)])
        console.print("Each step trains a 3D U-Net on the CPU, beside the workers.")
    else:
        step_s = _mean_cost_s(windows) * BATCH_SIZE / min(workers, conditions.num_cores)
        console.print(
            f"Each step sleeps {1e3 * step_s:.0f} ms, as long as the workers need for an average batch.\n"
            "The sleep stands for a step on an accelerator; make demo TRAIN=1 trains on the CPU."
        )
    runs = _run_each(volume, windows, conditions, step_s, console)
    console.print(bars(runs, conditions))
    console.print(table(runs, conditions))
    console.print(LEGEND, highlight=False)
    for line in verdict(runs, conditions):
        console.print(line)
    return runs
