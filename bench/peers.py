"""Other projects' loaders on rows of the macro benchmark, each in an environment and a process of its own.

A peer's loader is the one that its own documentation gives for a map-style dataset. Builders import the peer late: the
process that makes the report has none of them.
"""

from __future__ import annotations

import importlib
import io
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate
from torch.utils.dlpack import from_dlpack

from bench import macro
from bench.harness import record, report
from bench.harness.datasets import Sample, SleepingWork
from bench.harness.environments import (
    PeerMissingError,
    TrialFailedError,
    call,
    interpreter,
    versions_in,
)
from bench.harness.loaders import (
    MINATO,
    MINATO_ANY_ORDER,
    TORCH,
    TORCH_ANY_ORDER,
    Contender,
    minato_loader,
    torch_loader,
)
from bench.harness.suite import Row, RowResult, ideal_of, in_turn, run_trial
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


class Shards(Dataset[Sample]):
    """``(array, index)`` from tar files whose members are ``000001.npy`` and ``000001.cls``.

    The files are written where they are not there yet.

    Args:
        length: Samples, a multiple of ``SHARD_COUNT``.
        folder: Where folders of files are.

    Attributes:
        paths: The files; each holds as many samples as any other, in the order of their indices.
    """

    def __init__(self, length: int, folder: Path = SHARD_FOLDER) -> None:
        self.length = length
        home = folder / str(length)
        self.paths = [home / f"{number:02}.tar" for number in range(SHARD_COUNT)]
        if not home.exists():
            _write(home, self.paths, length // SHARD_COUNT)
        self._places = [place for path in self.paths for place in _places(path)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        path, offset, nbytes = self._places[index]
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return np.load(io.BytesIO(file.read(nbytes))), index

    def content(self, index: int) -> Sample:
        """Return ``self[index]`` without reading it."""
        return _array(index), index


def _array(index: int) -> Any:
    return np.random.default_rng(index).random(SHAPE, np.float32)


def _write(home: Path, paths: list[Path], each: int) -> None:
    partial = home.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for number, path in enumerate(paths):
        with tarfile.open(partial / path.name, "w") as file:
            for index in range(number * each, (number + 1) * each):
                stored = io.BytesIO()
                np.save(stored, _array(index))
                _add(file, f"{index:06}.npy", stored.getvalue())
                _add(file, f"{index:06}.cls", str(index).encode())
    partial.rename(home)


def _add(file: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    file.addfile(member, io.BytesIO(content))


def _places(path: Path) -> list[tuple[Path, int, int]]:
    with tarfile.open(path) as file:
        members = [member for member in file if member.name.endswith(".npy")]
    return [(path, member.offset_data, member.size) for member in members]


@dataclass
class Epochs:
    """Gives a peer that has one object per epoch the shape of a loader.

    Args:
        begin: ``begin(epoch)`` gives the epoch's batches.
    """

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
    work: Any, arguments: dict[str, Any], seed: int, *, in_order: bool, threads: bool
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


@dataclass
class _Orders:
    """The indices of one epoch after the other; SPDL iterates over it again for each."""

    work: Any
    shuffle: bool
    seed: int
    epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(order_of(self.work, self.shuffle, self.seed, self.epoch))


class _Pipeline:
    """A pipeline that stays from one epoch to the next, and ends with this object."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        pipeline.start()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline)

    def __del__(self) -> None:
        self.pipeline.stop()


def _spdl(work: Any, arguments: dict[str, Any], seed: int, *, output_order: str) -> Any:
    from spdl.pipeline import PipelineBuilder

    workers = arguments["num_workers"]
    return _Pipeline(
        PipelineBuilder()
        .add_source(_Orders(work, arguments["shuffle"], seed), continuous=True)
        .pipe(work.__getitem__, concurrency=workers, output_order=output_order)
        .aggregate(arguments["batch_size"])
        .pipe(default_collate)
        .add_sink(3)  # its default
        .build(num_threads=workers + 1)  # one for collating
    )


def _spdl_processes(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from spdl.dataloader import get_pytorch_dataloader

    return get_pytorch_dataloader(
        work,
        batch_size=arguments["batch_size"],
        shuffle=arguments["shuffle"],
        num_workers=arguments["num_workers"],
        in_order=True,
    )


@dataclass
class _Arrays:
    """A dataset whose samples are NumPy arrays, which is what Grain stacks."""

    work: Any

    def __len__(self) -> int:
        return len(self.work)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(part) for part in self.work[index])


def _grain(work: Any, arguments: dict[str, Any], seed: int, *, threads: bool) -> Any:
    import grain

    workers = arguments["num_workers"]
    # What lies in memory is best read without threads, says its documentation; and in processes no more samples may
    # run concurrently than elsewhere.
    slow = isinstance(work, SleepingWork) or getattr(work, "decodes", False)
    num_threads = (workers if threads else 1) if slow else 0

    def begin(epoch: int) -> Any:
        samples = grain.MapDataset.source(_Arrays(work))
        if arguments["shuffle"]:
            samples = samples.shuffle((seed << 16) + epoch)
        batches = samples.to_iter_dataset(
            grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=500)
        ).batch(arguments["batch_size"])
        if not threads:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return map(as_tensors, batches)

    return Epochs(begin)


def _tfdata(work: Any, arguments: dict[str, Any], seed: int, *, in_order: bool) -> Any:
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


class _Samples:
    """What DALI calls in its workers, with the numbers of an epoch and of a sample in it."""

    def __init__(self, work: Any, shuffle: bool, seed: int, count: int) -> None:
        self.work = work
        self.shuffle = shuffle
        self.seed = seed
        self.count = count
        self.epoch = -1
        self.order: list[int] = []

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
    short_samples=256,
    batch_size=16,
    unit="s/epoch",
    goals=(),
)
_SHARED = ("stragglers", "lognormal", "bimodal-35", "image")
ROWS: dict[str, Row] = {
    **{name: replace(macro.ROWS[name], goals=()) for name in _SHARED},
    SHARDS.name: SHARDS,
}


@dataclass(frozen=True)
class Peer:
    """A project.

    Args:
        contenders: its loaders.
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
    return Contender(name, label, partial(build, **own) if own else build, keeps_order)


_THREADS: dict[str, Any] = {"workers": "thread"}
PEERS = {
    "torch": Peer(
        (
            TORCH,
            TORCH_ANY_ORDER,
            _one("torch-deep", "torch, prefetch_factor=8", torch_loader(prefetch_factor=8)),
        )
    ),
    "minato": Peer(
        (
            MINATO,
            MINATO_ANY_ORDER,
            _one("minato-threads", "minato, threads", minato_loader(**_THREADS)),
            _one(
                "minato-threads-any-order",
                "minato, threads, in_order=False",
                minato_loader(**_THREADS, in_order=False),
                keeps_order=False,
            ),
        ),
        imports=("minato",),
    ),
    "torchdata": Peer(
        (
            _one("torchdata", "torchdata.nodes, threads", _torchdata, in_order=True, threads=True),
            _one(
                "torchdata-any-order",
                "torchdata.nodes, threads, in_order=False",
                _torchdata,
                keeps_order=False,
                in_order=False,
                threads=True,
            ),
            _one(
                "torchdata-processes",
                "torchdata.nodes, processes",
                _torchdata,
                in_order=True,
                threads=False,
            ),
        ),
        ("torchdata==0.11.0",),
        ("torchdata.nodes",),
    ),
    "spdl": Peer(
        (
            _one("spdl", "SPDL, threads", _spdl, output_order="input"),
            _one(
                "spdl-any-order",
                "SPDL, threads, as they complete",
                _spdl,
                keeps_order=False,
                output_order="completion",
            ),
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
            _one("tfdata", "tf.data", _tfdata, in_order=True),
            _one(
                "tfdata-any-order",
                "tf.data, deterministic=False",
                _tfdata,
                keeps_order=False,
                in_order=False,
            ),
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
CONTENDERS = {one.name: one for peer in PEERS.values() for one in peer.contenders}


def trial(contender: str, row_name: str, seed: int, short: bool) -> dict[str, Any]:
    """In a peer's environment: one trial."""
    return trial_of(PEERS, ROWS, contender, row_name, seed, short)


def trial_of(
    peers: Mapping[str, Peer],
    rows: Mapping[str, Row],
    name: str,
    row_name: str,
    seed: int,
    short: bool,
) -> dict[str, Any]:
    """The clock readings of one loader."""
    row = rows[row_name].short() if short else rows[row_name]
    (peer,) = (each for each in peers.values() if name in [one.name for one in each.contenders])
    (contender,) = (one for one in peer.contenders if one.name == name)
    for module in peer.imports:
        importlib.import_module(module)  # before the clock starts
    return asdict(run_trial(contender, row, row.make(row.samples), seed))


class Comparison:
    """The peers whose environments are there, on one row after the other.

    Args:
        peers: the projects by name.
        module: of their ``trial``.
        repeats: runs of each loader.
        short: whether it is a smoke run.
        page: says how it goes.

    Attributes:
        versions: of the packages in use.
        notes: what did not run, and why.
    """

    def __init__(
        self, peers: Mapping[str, Peer], module: str, repeats: int, short: bool, page: report.Page
    ) -> None:
        self._peers, self._module = peers, module
        self._repeats, self._short, self._page = repeats, short, page
        self._pythons: dict[str, Path] = {}
        self.versions: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        for name, peer in peers.items():
            try:
                python = self._pythons[name] = interpreter(peer.folder or name, peer.requirements)
                packages = [each.partition("==")[0] for each in peer.requirements]
                self.versions |= versions_in(python, [*packages, "torch"])
            except (PeerMissingError, TrialFailedError) as error:
                self.notes[name] = str(error)
            page.say(f"{name}: {self.notes.get(name, 'ready')}")

    def measure(self, row: Row) -> RowResult:
        """All peers on one row, in turn; one that fails is left out of it, with a note."""
        pythons = {
            contender: python
            for peer, python in self._pythons.items()
            if row.name in (self._peers[peer].rows or (row.name,))
            for contender in self._peers[peer].contenders
        }
        sized = row.short() if self._short else row
        work: Any = sized.make(sized.samples)
        result = RowResult(sized, getattr(work, "epoch_bytes", 0))
        failed: set[str] = set()
        for repeat, contender in in_turn([*pythons], self._repeats):
            if len(result.ideals) == repeat:
                result.ideals.append(ideal_of(sized, work))
            if contender.name in failed:
                continue
            case = contender.name, row.name, repeat, self._short
            try:
                found = call(
                    f"{self._module}:trial", *case, python=pythons[contender], limit_s=_TRIAL_S
                )
            except TrialFailedError as error:
                failed.add(contender.name)
                result.trials.pop(contender.name, None)
                self.notes[f"{contender.label}, {row.name}"] = str(error)
                continue
            one = Trial(**found)
            result.trials.setdefault(contender.name, []).append(one)
            share = result.ideals[-1].epoch_s / one.epoch_s(sized.skips_first_epoch)
            self._page.say(f"{row.name} {repeat + 1} {contender.name}: {share:.3f} of the ideal")
        return result

    @property
    def said(self) -> str:
        """A list of what did not run."""
        return "".join(f"* {who}: {why}\n" for who, why in self.notes.items())


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    parser = report.parser("bench.peers", __doc__ or "", 3, ROWS)
    parser.add_argument(
        "--peers", type=report.names(PEERS), default=list(PEERS), help=", ".join(PEERS)
    )
    options = parser.parse_args(arguments)
    repeats = report.repeats_of(options)
    whole = options.peers == [*PEERS] and options.rows == [*ROWS] and not options.short
    page = report.Page("peers", options.out or (record.PAGES if whole else None))
    chosen = {name: PEERS[name] for name in options.peers}
    comparison = Comparison(chosen, "bench.peers", repeats, options.short, page)
    results = [comparison.measure(ROWS[name]) for name in options.rows]
    page.add(HEAD.format(repeats=repeats))
    page.add("## Efficiency\n", report.overview(results, CONTENDERS))
    page.add("## Where another loader is faster\n", report.losses(results, CONTENDERS))
    if comparison.notes:
        page.add("## What did not run\n", comparison.said)
    page.add("## All figures\n", *(report.details(result, CONTENDERS) for result in results))
    page.finish(conditions=comparison.versions)
    return 0


if __name__ == "__main__":
    report.program(main)
