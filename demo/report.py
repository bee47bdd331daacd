"""The runs in words and numbers: a table, and what it does and does not show."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
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
            f"{self.num_workers} workers and 1 training thread, {self.num_cores} cores"
        )

    def bound_s(self, run: Run) -> float:
        """Time that no loader could beat with the work of this run."""
        return run.bound_s(self.num_workers, self.num_cores)


def table(runs: list[Run], conditions: Conditions) -> Table:
    """One row per run and one for the bound, which is the mean of the runs' own."""
    result = Table(box=box.SIMPLE_HEAVY, padding=(0, 1, 0, 0))
    result.add_column("loader", no_wrap=True)
    headings = (
        "time\ns",
        "first\nms",
        "wait\n%",
        "chain\ns",
        "bound\n%",
        "each\nonce",
        "dice",
        "others\n%",
    )
    for heading in headings:
        result.add_column(heading, justify="right")
    for run in runs:
        result.add_row(
            run.name,
            f"{run.total_s:.1f}",
            f"{1e3 * run.first_batch_s:.0f}",
            f"{100 * run.wait_s / run.total_s:.1f}",
            f"{run.chain_cpu_s:.1f}",
            f"{100 * conditions.bound_s(run) / run.total_s:.0f}",
            "yes" if run.is_complete else "[red]NO",
            f"{run.dice:.3f}",
            "?" if run.others_share is None else f"{100 * run.others_share:.0f}",
        )
    result.add_section()
    bound_s = sum(conditions.bound_s(run) for run in runs) / len(runs)
    result.add_row("bound, any loader", f"{bound_s:.1f}")
    return result


LEGEND = """\
first      time to the first batch, start of the workers included
wait       share of the time spent in the loader's next()
chain      processor time of the chain; each run draws its own random numbers
bound      least time for the run's own work, spread perfectly, over its time
each once  all indices of every epoch were delivered, none twice (checked)
dice       mean of grey and white matter on the held-out front of the brain;
           the order of the samples alone moves it by 0.02
others     share of the cores that other programs took during the run"""


def verdict(runs: list[Run], conditions: Conditions) -> list[str]:
    """Plain sentences about the runs; the first run is the reference, the last one minato."""
    torch_run, minato_run = runs[0], runs[-1]
    lines = [
        f"The work of {torch_run.name}: training {torch_run.trainer_cpu_s:.1f} s, chain "
        f"{torch_run.chain_cpu_s:.1f} s. On {conditions.num_cores} cores with "
        f"{conditions.num_workers} workers this takes at least "
        f"{conditions.bound_s(torch_run):.1f} s."
    ]
    lines += [
        f"[red]{run.name} lost {run.missing} samples and repeated {run.repeated}."
        for run in runs
        if not run.is_complete
    ]
    wait_share = torch_run.wait_s / torch_run.total_s
    if wait_share < SMALL_WAIT_SHARE:
        lines.append(
            f"Loading is not the bottleneck here: with torch's loader the training waited "
            f"{wait_share:.1%} of the time, so another loader has little to save."
        )
    waits = f"waited {torch_run.wait_s:.1f} s with torch in order, {minato_run.wait_s:.1f} s"
    lines.append(f"The training {waits} with minato. {_compare_totals(torch_run, minato_run)}")
    return lines


def _compare_totals(torch_run: Run, minato_run: Run) -> str:
    others = max(torch_run.others_share or 0.0, minato_run.others_share or 0.0)
    if others > LARGE_OTHERS_SHARE:
        return (
            f"Other programs took up to {others:.0%} of the cores: "
            "the total times cannot be compared; run again on an idle machine."
        )
    change = minato_run.total_s / torch_run.total_s - 1
    if abs(change) < NOISE_SHARE:
        return f"The total times do not differ beyond noise ({change:+.0%})."
    word = "less" if change < 0 else "more"
    return f"In all minato took {abs(change):.0%} {word} time."
