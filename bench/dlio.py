"""Workloads of DLIO, scaled to a small machine: torch's loader, minato by DLIO's plug and minato by patch()."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import report
from bench.harness.environments import TrialFailedError, call, interpreter, versions_in

REQUIREMENTS = (
    *("h5py==3.16.0", "mpi4py==4.1.2", "mpich==5.0.2", "hydra-core==1.3.8", "omegaconf==2.3.1"),
    *("pandas==3.1.1", "psutil==7.2.2", "pillow==13.0.0", "PyYAML==6.0.3"),
)
VERSION = "2.0.0"
ITSELF = (f"dlio-benchmark=={VERSION}",)
"""Without its requirements: they name TensorFlow and DALI, which these workloads do not use."""
PACKAGES = ("dlio_benchmark", "torch", "numpy", "h5py", "mpi4py")
THREADS, EPOCHS = 4, 5
_TRIAL_S = 120.0


@dataclass(frozen=True)
class Workload:
    """Settings of DLIO.

    Args:
        per_file: Samples in a file.
        record: Bytes of a sample on the disk, and their standard deviation.
        resized: Bytes of a sample in memory.
        compute_s: What the accelerator takes for a batch.
    """

    title: str
    file_format: str
    files: int
    per_file: int
    record: tuple[int, int]
    resized: int
    batch_size: int
    compute_s: float

    def settings(self, folder: Path, epochs: int, prefetch: int) -> dict[str, Any]:
        """As in a configuration file of DLIO."""
        length, deviation = self.record
        return {
            "model": "scaled",
            "framework": "pytorch",
            "workflow": {"generate_data": False, "train": True, "checkpoint": False},
            "dataset": {
                "data_folder": str(folder / "data"),
                "format": self.file_format,
                "num_files_train": self.files,
                "num_samples_per_file": self.per_file,
                "record_length": length,
                "record_length_stdev": deviation,
                "record_length_resize": self.resized,
                "generation_buffer_size": length * self.per_file,
            },
            "reader": {
                "data_loader": "pytorch",
                "batch_size": self.batch_size,
                "read_threads": THREADS,
                "file_shuffle": "seed",
                "sample_shuffle": "seed",
                "prefetch_size": prefetch,
            },
            "train": {"epochs": epochs, "computation_time": self.compute_s},
            "output": {"folder": str(folder / "output")},
            "metric": {"au": 0.90},
        }


WORKLOADS = {
    "unet3d": Workload(
        *("uneven files, 1/32 of DLIO's unet3d_a100", "npz", 84, 1),
        *((4_581_269, 2_135_681), 65_536, 7, 0.020),
    ),
    "retinanet": Workload(
        *("one JPEG a file, like RetinaNet's input", "jpeg", 480, 1),
        *((300_000, 60_000), 150_528, 24, 0.080),
    ),
    "resnet50": Workload(
        *("many samples a file, 1/8 of a batch of DLIO's resnet50_a100", "hdf5", 4, 300),
        *((114_660, 0), 150_528, 50, 0.054),
    ),
}
LOADERS = {
    "torch": "torch, DLIO's prefetch_size=2",
    "torch-deep": "torch, prefetch_size=8",
    "minato-plug": "minato, DLIO's plug",
    "minato-patch": "minato.patch(), prefetch_size=2",
}
PREFETCH = {"torch-deep": 8}
HEAD = f"""\
# DLIO's workloads

Written by `python -m bench.dlio`. DLIO {VERSION} generates files and runs its own training loop, in which the
accelerator is a sleep; this page changes its settings alone. *Accelerator utilisation* is DLIO's figure: the share of
an epoch, but for its first batch, that the accelerator computes; behind it the share of all steps, with the first. Per
cent: medians of {{repeats}} runs (least and greatest), each the mean of {{epochs}} epochs. One process, {THREADS} read
threads, which are worker processes. DLIO gives every loader an equal array in place of each sample that it reads, so
content cannot be checked; the number of steps is. These figures are no MLPerf results: sizes, files and times are
scaled to this machine, and the files lie in the page cache.

DLIO asks for 0.90 (0.85 where its users' rules say so). `prefetch_size=2` is DLIO's default and gives torch
`prefetch_factor=1`; 8 gives torch's own default of 2. The plug, `reader.data_loader_classname`, gets minato's default
prefetch; with `minato.patch()` DLIO's own reader runs unchanged.
"""


def trial(name: str, row: str, short: bool, to: str, epochs: int) -> dict[str, Any]:
    """In DLIO's environment: run it once; ``files`` in place of a loader writes its files."""
    folder = Path(to)
    _stand_in_for_profilers()
    if name == "minato-patch":
        import minato

        minato.patch()
    from dlio_benchmark.main import DLIOBenchmark
    from dlio_benchmark.utils.utility import DLIOMPI
    from omegaconf import OmegaConf

    settings = sized(WORKLOADS[row], short).settings(folder, epochs, PREFETCH.get(name, 2))
    if name == "files":
        settings["workflow"] = {"generate_data": True, "train": False}
    if name == "minato-plug":
        settings["reader"] |= {
            "data_loader_classname": "bench.workloads.dlio_reader.MinatoReader",
            "data_loader_sampler": "index",
        }
    DLIOMPI.get_instance().initialize()
    benchmark = DLIOBenchmark(OmegaConf.create(settings))
    benchmark.initialize()
    benchmark.run()
    benchmark.finalize()
    if name == "files":
        return {}
    summary = json.loads((folder / "output" / "summary.json").read_text())
    output = json.loads((folder / "output" / "0_output.json").read_text())
    records = [output[str(epoch)] for epoch in range(1, epochs + 1)]
    # Of each step: from its start to its end, and what the accelerator took of that.
    steps, compute = (
        [record[name]["block1"] for record in records] for name in ("proc", "compute")
    )
    whole = [100 * sum(computed) / sum(step) for step, computed in zip(steps, compute, strict=True)]
    used = summary["metric"]["train_au_percentage"]
    return {"used": used, "whole": whole, "steps": list(map(len, steps))}


class _Untraced:
    """The marks that DLIO sets for its tracer, without one."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> _Untraced:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def log(self, function: Any) -> Any:
        return function

    log_init = log

    def iter(self, items: Any) -> Any:
        return items

    def update(self, **named: Any) -> None:
        pass


def _stand_in_for_profilers() -> None:
    """DLIO imports TensorFlow for a profiler that is off, and fails without its tracer, which is off as well."""
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")
    logger: Any = types.ModuleType("dftracer.logger")
    logger.dftracer, logger.dft_fn, logger.DFTRACER_ENABLE = _Untraced(), _Untraced, False
    sys.modules["dftracer"] = types.ModuleType("dftracer")
    sys.modules["dftracer.logger"] = logger


def measure(
    row: str, python: Path, options: Any, page: report.Page, failed: dict[str, str]
) -> dict[str, list[tuple[float, float]]]:
    """Mean utilisation by loader, in each run: without the first batch of an epoch, and with it."""
    workload = sized(WORKLOADS[row], options.short)
    epochs = 2 if options.short else EPOCHS
    with tempfile.TemporaryDirectory() as folder:
        given = row, options.short, folder, epochs
        run = functools.partial(call, "bench.dlio:trial", python=python, limit_s=_TRIAL_S)
        run("files", *given)

        def measured(name: str, repeat: int) -> tuple[float, float]:
            found = run(name, *given)
            steps = workload.files * workload.per_file // workload.batch_size
            if found["steps"] != [steps] * epochs:
                wrong = f"steps {found['steps']} in place of {steps} in each epoch"
                raise TrialFailedError(wrong)
            return statistics.mean(found["used"]), statistics.mean(found["whole"])

        shown = "{0[0]:.1f} % used, {0[1]:.1f} % of whole epochs".format
        return page.turns(row, options.loaders, options.repeats, measured, shown, failed)


def sized(workload: Workload, short: bool) -> Workload:
    """The workload, of a tenth of its files in a smoke run."""
    if not short:
        return workload
    files = max(workload.files // 10, 2)
    per_file = min(workload.per_file, 3 * workload.batch_size)
    return replace(
        workload, files=max(files, 3 * workload.batch_size // per_file), per_file=per_file
    )


def line(row: str, found: dict[str, list[tuple[float, float]]], loaders: list[str]) -> list[str]:
    workload = WORKLOADS[row]
    shape = f"{workload.title}; {workload.file_format}, batch {workload.batch_size}"
    cells = [
        "; ".join(report.spread_text(each, 1) for each in zip(*found[name], strict=True))
        if name in found
        else "failed"
        for name in loaders
    ]
    return [row, f"{shape}, {1e3 * workload.compute_s:g} ms a batch", *cells]


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("dlio", __doc__, 3, rows=WORKLOADS, loaders=LOADERS)
    options = parser.parse_args(arguments)
    page = report.Page("dlio", options.out)
    python = interpreter("dlio", REQUIREMENTS, ITSELF)
    lines, notes = [], []
    for row in options.rows:
        failed: dict[str, str] = {}
        lines.append(line(row, measure(row, python, options, page, failed), options.loaders))
        notes += [f"* {row}, {LOADERS[name]}: {why}\n" for name, why in failed.items()]
    page.add(HEAD.format(repeats=options.repeats, epochs=2 if options.short else EPOCHS))
    head = ["row", "workload", *(LOADERS[name] for name in options.loaders)]
    page.add("## Accelerator utilisation, %\n", report.table(head, lines))
    if notes:
        page.add("## What failed\n", "".join(notes))
    page.finish(conditions=versions_in(python, PACKAGES))


if __name__ == "__main__":
    report.program(main)
