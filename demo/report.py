"""The runs in words and numbers: bars, a table, and what it does and does not show."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.bar import Bar
from rich.table import Table

from demo.train import Run

# Below this share the loader is not what the training waits for.
SMALL_WAIT_SHARE = 0.05
# Single runs are too few to claim a smaller difference than this.
NOISE_SHARE = 0.05
# Above this share of the cores other programs decide the times, not the loaders.
LARGE_OTHERS_SHARE = 0.1


@dataclass(frozen=True)
class Conditions:
    """What was equal in all runs."""

    num_samples: int
    batch_size: int
    num_epochs: int
    num_workers: int
    num_cores: int

    def __str__(self) -> str:
        return (
            f"{self.num_samples} samples x {self.num_epochs} epochs, batch {self.batch_size}, "
            f"{self.num_workers} workers, {self.num_cores} cores"
        )

    def bound_s(self, run: Run) -> float:
        """Time of an epoch that no loader could beat with the work of this run."""
        return run.bound_s(self.num_workers, self.num_cores)


def bars(runs: list[Run], conditions: Conditions) -> Table:
    """Time of an epoch, and of the ideal one, as bars: shorter is better."""
    times = [("ideal", min(conditions.bound_s(run) for run in runs))]
    times += [(run.name, run.epoch_s) for run in runs]
    longest_s = max(time_s for _, time_s in times)
    result = Table(title="time of an epoch", box=None, title_justify="left", padding=(0, 1, 0, 0))
    result.add_column(no_wrap=True)
    result.add_column(justify="right", no_wrap=True)
    result.add_column(width=40)
    for name, time_s in times:
        colour = {"ideal": "green", "minato": "blue"}.get(name, "default")
        result.add_row(name, f"{time_s:.2f} s", Bar(longest_s, 0, time_s, color=colour))
    return result


def table(runs: list[Run], conditions: Conditions) -> Table:
    """One row per run, and one for the ideal."""
    trained = any(run.dice is not None for run in runs)
    result = Table(box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    result.add_column("loader", no_wrap=True)
    headings = ["epoch\ns", "% of\nideal", "wait\ns", "first\nms", "each\nonce", "same\ndata"]
    headings += ["dice"] * trained + ["others\n%"]
    for heading in headings:
        result.add_column(heading, justify="right")
    for run in runs:
        result.add_row(
            run.name,
            f"{run.epoch_s:.2f}",
            f"{100 * conditions.bound_s(run) / run.epoch_s:.0f}",
            f"{run.wait_s:.2f}",
            f"{1e3 * run.first_batch_s:.0f}",
            "yes" if run.is_complete else "[red]NO",
            "yes" if run.contents == runs[0].contents else "[red]NO",
            *([f"{run.dice or 0.0:.3f}"] if trained else []),
            "?" if run.others_share is None else f"{100 * run.others_share:.0f}",
        )
    result.add_section()
    best = min(runs, key=conditions.bound_s)
    bound_s = conditions.bound_s(best)
    result.add_row(
        "ideal",
        f"{bound_s:.2f}",
        "100",
        f"{max(0.0, bound_s - best.step_s):.2f}",
        f"{1e3 * best.first_bound_s(conditions.batch_size, conditions.num_workers):.0f}",
    )
    return result


LEGEND = """\
epoch      median time of an epoch
ideal      the steps one after the other, or the transforms divided evenly among
           the workers, whichever takes longer: no loader can be faster
wait       time of an epoch in which the training loop waited for a batch
first      time to the first batch, start of the workers included
each once  every epoch delivered every sample, none twice (checked)
same data  every sample has the same content as with torch (checked)
others     share of the cores that other programs took during the run"""


def verdict(runs: list[Run], conditions: Conditions) -> list[str]:
    """Plain sentences about the runs; the first run is the reference, the last one minato."""
    torch_run, minato_run = runs[0], runs[-1]
    lines = [
        f"[red]{run.name} lost {run.missing} samples and repeated {run.repeated}."
        for run in runs
        if not run.is_complete
    ]
    wait_share = torch_run.wait_s * len(torch_run.epochs_s) / torch_run.total_s
    if wait_share < SMALL_WAIT_SHARE:
        lines.append(
            f"Loading is not the bottleneck here: with torch's loader the training waited "
            f"{wait_share:.1%} of the time, so another loader has little to save."
        )
    waits = f"waits {torch_run.wait_s:.2f} s an epoch with torch and {minato_run.wait_s:.2f} s"
    lines.append(f"The training loop {waits} with minato. {_compare(torch_run, minato_run)}")
    return lines


def _compare(torch_run: Run, minato_run: Run) -> str:
    others = max(torch_run.others_share or 0.0, minato_run.others_share or 0.0)
    if others > LARGE_OTHERS_SHARE:
        return (
            f"Other programs took up to {others:.0%} of the cores: "
            "the times cannot be compared; run again on an idle machine."
        )
    ratio = torch_run.epoch_s / minato_run.epoch_s
    if abs(ratio - 1) < NOISE_SHARE:
        return f"The epochs do not differ beyond noise (torch / minato: {ratio:.2f})."
    return f"An epoch with torch takes {ratio:.2f} times as long as with minato."
