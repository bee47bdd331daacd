"""Other projects' loaders on rows of the macro benchmark, each in an environment and a process of its own.

A peer's loader is the one that its own documentation gives for a map-style dataset. Builders import the peer late: the
process that makes the report has none of them.
"""

from __future__ import annotations

import importlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.dlpack import from_dlpack

from bench import macro
from bench.harness import loaders, record, report
from bench.harness.datasets import Counted, Mapped, Sample, SleepingWork, add_to_tar, written_whole
from bench.harness.environments import (
    PeerMissingError,
    TrialFailedError,
    call,
    interpreter,
    versions_in,
)
from bench.harness.loaders import Contender, minato_as, named, torch_as
from bench.harness.suite import Row, RowResult, chosen, ideal_of, run_trial
from bench.harness.trial import Trial

SHARD_FOLDER = record.ROOT / "build" / "shards"
SHARD_COUNT, SHAPE = 16, (3, 64, 64)
_TRIAL_S = 180.0
HEAD = """\
# Other loaders

Written by `make bench-peers`; `bench/peers.py` has a few lines for each loader, with the setting that its own
documentation gives for a dataset like this. Each runs in an environment and a process of its own, with as many workers
(processes or threads) as the others. Rows, bounds, clocks and checks are those of the [engine benchmark](engine.md):
every sample must come exactly once and unchanged. Within a repeat the loaders run one after the other, each time
starting with a different one. Figures are medians of {repeats} repeats, with the minimum and maximum in brackets.

The samples of the first rows sleep, as if they waited for a network. That releases the interpreter's lock, so threads
are as good as processes there, and start immediately. On work that holds the lock they would wait for each other. In
`image` there is almost no work, and the figures show the loader itself: threads move nothing between processes. The
quick start is most of the gain of loaders with threads over minato's processes: with twelve forked workers the [first
batch](growth.md) takes longer. minato also has threads. It uses processes by default, as torch does, because most
transforms hold the lock.

WebDataset and LitData read formats of their own through the worker processes of torch's `DataLoader` and schedule as it
does. For a map-style dataset there is nothing of theirs to measure. `shards` is WebDataset's format, tar files that it
reads from front to back. The others ask for single samples of the same files, so that they can shuffle them. Only
LitData reads its format, so it would be measured on other files. Ray Data is not measured: it starts a process per
worker that imports everything again, which takes minutes on two cores.
"""


class Shards(Counted):
    """``(array, index)`` from tar files with ``000001.npy`` and ``000001.cls``, written where they are missing."""

    def __init__(self, count: int, folder: Path = SHARD_FOLDER) -> None:
        super().__init__(count)
        home = folder / str(count)
        self.paths = [home / f"{number:02}.tar" for number in range(SHARD_COUNT)]
        if not home.exists():
            with written_whole(home) as folder:
                _write(folder, [path.name for path in self.paths], count // SHARD_COUNT)
        self._places = [place for path in self.paths for place in _places(path)]

    def __getitem__(self, index: int) -> Sample:
        path, offset, nbytes = self._places[index]
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return np.load(io.BytesIO(file.read(nbytes))), index

    def content(self, index: int) -> Sample:
        return _array(index), index


def _array(index: int) -> Any:
    return np.random.default_rng(index).random(SHAPE, np.float32)


def _write(folder: Path, names: list[str], each: int) -> None:
    for number, name in enumerate(names):
        with tarfile.open(folder / name, "w") as file:
            for index in range(number * each, (number + 1) * each):
                stored = io.BytesIO()
                np.save(stored, _array(index))
                add_to_tar(file, f"{index:06}.npy", stored.getvalue())
                add_to_tar(file, f"{index:06}.cls", str(index).encode())


def _places(path: Path) -> list[tuple[Path, int, int]]:
    with tarfile.open(path) as file:
        members = [member for member in file if member.name.endswith(".npy")]
    return [(path, member.offset_data, member.size) for member in members]


@dataclass
class Epochs:
    """Gives a peer that has one object per epoch the shape of a loader: ``begin(epoch)`` gives the epoch's batches."""

    begin: Any
    epoch: int = 0

    def __iter__(self) -> Iterator[Any]:
        batches: Iterable[Any] = self.begin(self.epoch)
        self.epoch += 1
        return iter(batches)


def order_of(work: Any, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """The indices of an epoch, for peers that take an order and do not make one."""
    if not shuffle:
        return list(range(len(work)))
    generator = torch.Generator().manual_seed((seed << 16) + epoch)
    return torch.randperm(len(work), generator=generator).tolist()


def as_tensors(batch: Any) -> list[torch.Tensor]:
    """What default_collate would give, of a peer's two arrays; nothing is copied."""
    return [torch.as_tensor(part) for part in batch]


def _fetch(work: Any, indices: list[int]) -> Any:
    return default_collate([work[index] for index in indices])


def _torchdata(
    work: Any, arguments: dict[str, Any], seed: int, *, threads: bool, in_order: bool = True
) -> Any:
    from torchdata import nodes

    workers, batch_size = arguments["num_workers"], arguments["batch_size"]

    def begin(epoch: int) -> Any:
        node: Any = nodes.IterableWrapper(order_of(work, arguments["shuffle"], seed, epoch))
        if threads:
            node = nodes.ParallelMapper(
                node, work.__getitem__, workers, in_order=in_order, method="thread"
            )
            node = nodes.Mapper(nodes.Batcher(node, batch_size, drop_last=False), default_collate)
        else:
            node = nodes.ParallelMapper(
                nodes.Batcher(node, batch_size, drop_last=False),
                partial(_fetch, work),
                workers,
                in_order=in_order,
                method="process",
                multiprocessing_context="fork",
            )
        return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2))

    return Epochs(begin)


class _Pipeline:
    """A pipeline that stays from one epoch to the next, and ends with this object."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        pipeline.start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline)

    def __del__(self) -> None:
        self.pipeline.stop()


def _spdl(work: Any, arguments: dict[str, Any], seed: int, *, in_order: bool = True) -> Any:
    from spdl.pipeline import PipelineBuilder

    workers = arguments["num_workers"]
    output_order = "input" if in_order else "completion"
    # SPDL iterates over its source again for each epoch.
    source = Epochs(lambda epoch: order_of(work, arguments["shuffle"], seed, epoch + 1))
    return _Pipeline(
        PipelineBuilder()
        .add_source(source, continuous=True)
        .pipe(work.__getitem__, concurrency=workers, output_order=output_order)
        .aggregate(arguments["batch_size"])
        .pipe(default_collate)
        .add_sink(3)  # its default
        .build(num_threads=workers + 1)  # one for collating
    )


def _spdl_processes(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from spdl.dataloader import get_pytorch_dataloader

    given = {name: arguments[name] for name in ("batch_size", "shuffle", "num_workers")}
    return get_pytorch_dataloader(work, **given, in_order=True)


def _arrays(sample: Any) -> tuple[np.ndarray, ...]:
    """Grain stacks NumPy arrays."""
    return tuple(np.asarray(part) for part in sample)


def _grain(work: Any, arguments: dict[str, Any], seed: int, *, threads: bool) -> Any:
    import grain

    workers = arguments["num_workers"]
    # What lies in memory is best read without threads, says its documentation; and in processes no more samples may
    # run concurrently than elsewhere.
    slow = isinstance(work, SleepingWork) or getattr(work, "decodes", False)
    num_threads = (workers if threads else 1) if slow else 0

    def begin(epoch: int) -> Any:
        samples = grain.MapDataset.source(Mapped(work, [_arrays]))
        if arguments["shuffle"]:
            samples = samples.shuffle((seed << 16) + epoch)
        batches = samples.to_iter_dataset(
            grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=500)
        ).batch(arguments["batch_size"])
        if not threads:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return map(as_tensors, batches)

    return Epochs(begin)


def _tfdata(work: Any, arguments: dict[str, Any], seed: int, *, in_order: bool = True) -> Any:
    import tensorflow as tf

    example = [np.asarray(part) for part in work.content(0)]
    types = [tf.as_dtype(part.dtype) for part in example]

    def sample(index: Any) -> list[Any]:
        return [np.asarray(part) for part in work[int(index)]]

    def mapped(index: Any) -> Any:
        parts = tf.numpy_function(sample, [index], types)
        return [
            tf.ensure_shape(part, like.shape) for part, like in zip(parts, example, strict=True)
        ]

    def begin(epoch: int) -> Any:
        order = order_of(work, arguments["shuffle"], seed, epoch)
        batches = (
            tf.data.Dataset.from_tensor_slices(np.array(order))
            .map(mapped, num_parallel_calls=arguments["num_workers"], deterministic=in_order)
            .batch(arguments["batch_size"])
            .prefetch(tf.data.AUTOTUNE)
        )
        return ([from_dlpack(part) for part in batch] for batch in batches)

    return Epochs(begin)


def _webdataset(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    import webdataset as wds

    batches = (
        wds.WebDataset([str(path) for path in work.paths], shardshuffle=False)
        .decode()
        .to_tuple("npy", "cls")
        .batched(arguments["batch_size"], collation_fn=default_collate)
    )
    return wds.WebLoader(
        batches,
        batch_size=None,
        num_workers=arguments["num_workers"],
        persistent_workers=arguments["persistent_workers"],
    )


@dataclass
class _Samples:
    """What DALI calls in its workers, with the numbers of an epoch and of a sample in it."""

    work: Any
    shuffle: bool
    seed: int
    count: int
    epoch: int = -1
    order: list[int] = field(default_factory=list)

    def __call__(self, info: Any) -> tuple[np.ndarray, np.ndarray]:
        if info.idx_in_epoch >= self.count:
            raise StopIteration
        if info.epoch_idx != self.epoch:
            self.epoch = info.epoch_idx
            self.order = order_of(self.work, self.shuffle, self.seed, self.epoch)
        payload, label = self.work[self.order[info.idx_in_epoch % len(self.order)]]
        return np.asarray(payload), np.asarray(label)


def _dali(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from nvidia.dali import fn, pipeline_def

    batch_size, workers = arguments["batch_size"], arguments["num_workers"]
    # It takes whole batches only: the last one goes on from the beginning, and what is too much is cut off.
    samples = _Samples(work, arguments["shuffle"], seed, -(-len(work) // batch_size) * batch_size)

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=batch_size,
        num_threads=workers,
        device_id=None,
        py_num_workers=workers,
        py_start_method="fork",
        prefetch_queue_depth=2,
    )
    def pipeline() -> Any:
        return tuple(fn.external_source(samples, num_outputs=2, batch=False, parallel=True))

    running = pipeline()
    running.build()

    def begin(epoch: int) -> Iterator[Any]:
        for first in range(0, len(work), batch_size):
            kept = min(batch_size, len(work) - first)
            yield [torch.from_numpy(np.array(part.as_array()[:kept])) for part in running.run()]
        with suppress(StopIteration):
            running.run()  # which is how it learns that the epoch is over
        running.reset()

    return Epochs(begin)


SHARDS = replace(
    macro.PATCH,
    name="shards",
    title="float32 (3, 64, 64) as .npy in 16 tar files, in the page cache; batch 16, 2 workers",
    make=Shards,
    samples=2048,
    batch_size=16,
    unit="s/epoch",
)
_SHARED = ("stragglers", "lognormal", "bimodal-35", "image")
ROWS = {**{name: macro.ROWS[name] for name in _SHARED}, SHARDS.name: SHARDS}


@dataclass(frozen=True)
class Peer:
    """A project.

    Args:
        requirements: what pip installs beside torch; nothing: it runs in this environment.
        imports: imported before the clock starts.
        rows: names of the rows where it takes part; empty: all of them.
        folder: of its environment; its name when omitted.
    """

    contenders: tuple[Contender, ...]
    requirements: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    folder: str = ""


def _one(name: str, label: str, build: Any, keeps_order: bool = True, **own: Any) -> Contender:
    keeps_order = own.get("in_order", keeps_order)
    return Contender(name, label, partial(build, **own) if own else build, keeps_order)


_THREADS_ANY_ORDER = {"workers": "thread", "in_order": False}
PEERS = {
    "torch": Peer(
        (
            loaders.TORCH,
            loaders.TORCH_ANY_ORDER,
            torch_as("torch, prefetch_factor=8", "torch-deep", prefetch_factor=8),
        )
    ),
    "minato": Peer(
        (
            *(loaders.MINATO, loaders.MINATO_ANY_ORDER, loaders.MINATO_THREADS),
            minato_as(
                "minato, threads, in_order=False", "minato-threads-any-order", **_THREADS_ANY_ORDER
            ),
        ),
        imports=("minato",),
    ),
    "torchdata": Peer(
        (
            _one("torchdata", "torchdata.nodes, threads", _torchdata, threads=True),
            _one(
                *("torchdata-any-order", "torchdata.nodes, threads, in_order=False", _torchdata),
                in_order=False,
                threads=True,
            ),
            _one("torchdata-processes", "torchdata.nodes, processes", _torchdata, threads=False),
        ),
        ("torchdata==0.11.0",),
        ("torchdata.nodes",),
    ),
    "spdl": Peer(
        (
            _one("spdl", "SPDL, threads", _spdl),
            _one("spdl-any-order", "SPDL, threads, as they complete", _spdl, in_order=False),
            _one("spdl-processes", "SPDL, processes", _spdl_processes),
        ),
        ("spdl==0.8.0",),
        ("spdl.pipeline", "spdl.dataloader"),
    ),
    "grain": Peer(
        (
            _one("grain", "Grain, threads", _grain, threads=True),
            # Each process takes every n-th sample: the batches are not those of one process.
            _one("grain-processes", "Grain, processes", _grain, keeps_order=False, threads=False),
        ),
        ("grain==0.2.18",),
        ("grain",),
    ),
    "tfdata": Peer(
        (
            _one("tfdata", "tf.data", _tfdata),
            _one("tfdata-any-order", "tf.data, deterministic=False", _tfdata, in_order=False),
        ),
        ("tensorflow-cpu==2.21.0",),
        ("tensorflow",),
    ),
    # It has no use for a dataset that is asked for single samples.
    "webdataset": Peer(
        (_one("webdataset", "WebDataset", _webdataset, keeps_order=False),),
        ("webdataset==1.0.2",),
        ("webdataset",),
        (SHARDS.name,),
    ),
    "dali": Peer(
        (_one("dali", "DALI, processor only", _dali),),
        ("nvidia-dali-cuda120==2.4.0",),
        ("nvidia.dali",),
    ),
}
CONTENDERS = named(*(one for peer in PEERS.values() for one in peer.contenders))


def trial(module: str, name: str, row_name: str, seed: int, short: bool) -> dict[str, Any]:
    """In a peer's environment: the clock readings of one loader among the ``PEERS`` of a module."""
    bench: Any = importlib.import_module(module)
    row = bench.ROWS[row_name].short() if short else bench.ROWS[row_name]
    (peer,) = (each for each in bench.PEERS.values() if name in named(*each.contenders))
    for needed in peer.imports:
        importlib.import_module(needed)  # before the clock starts
    return asdict(run_trial(named(*peer.contenders)[name], row, row.make(row.samples), seed))


class Comparison:
    """Those of a module's ``PEERS`` whose environments are there, on one row after the other."""

    def __init__(
        self, module: str, peers: Mapping[str, Peer], options: Any, page: report.Page
    ) -> None:
        self._module, self._options, self._page = module, options, page
        self._pythons: dict[str, tuple[Peer, Path]] = {}
        self.versions: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        for name in options.peers:
            peer = peers[name]
            try:
                python = interpreter(peer.folder or name, peer.requirements)
                packages = [each.partition("==")[0] for each in peer.requirements]
                self.versions |= versions_in(python, [*packages, "torch"])
                self._pythons[name] = peer, python
            except (PeerMissingError, TrialFailedError) as error:
                self.notes[name] = str(error)
            page.say(f"{name}: {self.notes.get(name, 'ready')}")

    def measure(self, row: Row) -> RowResult:
        """All peers on one row, in turn; one that fails is left out of it, with a note."""
        known = {
            contender.name: (contender.label, python)
            for peer, python in self._pythons.values()
            if row.name in (peer.rows or (row.name,))
            for contender in peer.contenders
        }
        work: Any = row.make(row.samples)
        result = RowResult(row, getattr(work, "epoch_bytes", 0))

        def run(name: str, repeat: int) -> Trial:
            if len(result.ideals) == repeat:
                result.ideals.append(ideal_of(row, work))
            case = self._module, name, row.name, repeat, self._options.short
            python = known[name][1]
            return Trial(**call("bench.peers:trial", *case, python=python, limit_s=_TRIAL_S))

        def shown(one: Trial) -> str:
            share = result.ideals[-1].epoch_s / one.epoch_s(row.skips_first_epoch)
            return f"{share:.3f} of the ideal"

        failed: dict[str, str] = {}
        result.trials = self._page.turns(
            row.name, [*known], self._options.repeats, run, shown, failed
        )
        self.notes |= {f"{known[name][0]}, {row.name}": why for name, why in failed.items()}
        return result

    @property
    def said(self) -> list[str]:
        lines = "".join(f"* {who}: {why}\n" for who, why in self.notes.items())
        return ["## What did not run\n", lines] if lines else []


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("peers", __doc__, 3, publishes=True, rows=ROWS, peers=PEERS)
    options = parser.parse_args(arguments)
    page = report.Page("peers", options.out)
    comparison = Comparison("bench.peers", PEERS, options, page)
    results = [comparison.measure(row) for row in chosen(ROWS, options)]
    page.add(HEAD.format(repeats=options.repeats))
    faster = report.losses(results, CONTENDERS)
    page.add_rows(
        results, CONTENDERS, "## Where another loader is faster\n", faster, *comparison.said
    )
    page.finish(conditions=comparison.versions)


if __name__ == "__main__":
    report.program(main)
