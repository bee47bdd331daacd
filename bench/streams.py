"""Iterable datasets: work behind the iterator and within, small items, states, skipping, Hugging Face, tar files."""

from __future__ import annotations

import heapq
import importlib.util
import io
import itertools
import shutil
import tarfile
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info

from bench.harness import record, report
from bench.harness.datasets import (
    Counted,
    Ideal,
    Sample,
    SleepingTransforms,
    SleepingWork,
    SleepsShare,
    StoredRows,
    add_to_tar,
    measured_ideal,
    straggler_costs_s,
)
from bench.harness.loaders import Build, Contender, minato_as, named
from bench.harness.suite import Row, RowResult, chosen, in_turn, measure
from bench.harness.trial import Trial, WrongDeliveryError, check_labels, unwarned
from minato.sources.tars import TarShards

BATCH = 32
SKIPPED = 150
"""Batches before the checkpoint."""
HEAD = """\
# Streams

Written by `python -m bench.streams`. Every loader gets the same iterable dataset and number of workers, and every other
argument at its default. An iterable dataset gives each reader every n-th block of {batch} items, so that strict order
is ascending. torch has as many readers as workers; so has minato where its name does not say *readers=1*. Where the
work is in *transforms=*, the other loaders get a dataset whose iterator applies the transforms.

Loaders take turns in each repeat. Every item is checked: it must come exactly once, unchanged, and in order where the
loader promises that. The clock runs from before the loader is built to the end of the epoch. Figures are medians of
{repeats} repeats, with the minimum and maximum in brackets. *Efficiency* is the ideal time divided by the measured one:

* `transforms`: all work split evenly over the workers. No loader knows what an item will cost.
  Giving each item to the worker that is free first reaches {listed:.2f} of the ideal, and {slept:.2f} with sleeps as
  long as here.
* `iterator`: the work of the reader that has the most.
* `state-…`: the same as `iterator`, without the cost of a state.
* `vectors…`, `hugging-face-…`: the iterator alone, split over the workers.
* `tar-…`: decoding alone, split over the workers, or over the cores if they are fewer.
* `skip`: the time to read up to the same place, by the same loader without transforms and without a checkpoint.
"""
SKIP_HEAD = """\
In `skip` the time is that from `iter()` to the first batch after a checkpoint behind {count} batches. *torch* has no
checkpoint: its program drops the batches.
"""


# ---- datasets -------------------------------------------------------------------------------


def share_of(count: int, reader: int, readers: int) -> list[int]:
    """The items of one reader: every n-th block of the size of a batch."""
    return [index for index in range(count) if index // BATCH % readers == reader]


class Blocks(IterableDataset[Sample]):
    """The samples of a map-style dataset as a stream; its work can be split evenly if the iterator ``is_shared``."""

    def __init__(self, work: Any, is_shared: bool = False) -> None:
        self.work = work
        self.is_shared = is_shared

    def __len__(self) -> int:
        return len(self.work)

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        own = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in share_of(len(self), *own):
            yield self.work[index]

    def content(self, index: int) -> Sample:
        found: Sample = self.work.content(index)
        return found

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        """All work split evenly, or that of the reader that has the most."""
        if self.is_shared or not hasattr(self.work, "costs_s"):
            found: Ideal = self.work.ideal(batch_size, workers)
            return found
        costs_s, count = self.work.costs_s, max(workers, 1)
        shares = (share_of(len(self), reader, count) for reader in range(count))
        return Ideal(max(sum(costs_s[index] for index in share) for share in shares))


class Stateful(Blocks):
    """The same, with a state of ``nbytes``, as a shuffle buffer has."""

    def __init__(self, work: Any, nbytes: int) -> None:
        super().__init__(work)
        self.ballast = np.random.default_rng(0).integers(256, size=nbytes, dtype=np.uint8)
        self.at = 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in super().__iter__():
            self.at += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "ballast": self.ballast.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("this benchmark saves states only")


class Applied(IterableDataset[Any]):
    """A stream whose iterator applies transforms, for loaders that take no ``transforms=``."""

    def __init__(self, stream: Any, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.stream = stream
        self.transforms = transforms

    def __iter__(self) -> Iterator[Any]:
        for item in self.stream:
            for transform in self.transforms:
                item = transform(item)
            yield item


class HuggingFace(Counted):
    """A stream of the package ``datasets`` from a table in memory; one shard for each of two workers."""

    def __init__(self, count: int, tokenised: bool) -> None:
        import datasets

        super().__init__(count)
        rows = [index for reader in range(2) for index in share_of(count, reader, 2)]
        columns: dict[str, Any] = {"label": rows}
        if tokenised:
            ids = np.random.default_rng(0).integers(50_000, size=(count, 256))
            columns |= {"input_ids": list(ids), "attention_mask": [np.ones(256, np.int64)] * count}
        else:
            columns["text"] = [
                f"{index} is the number of this text" + " and" * 240 for index in rows
            ]
        self.stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=2)
        if tokenised:
            self.stream = self.stream.with_format("torch")

    @staticmethod
    def labels(batch: Any) -> Any:
        return batch["label"]

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        begun = time.perf_counter()
        for _ in self.stream:
            pass
        return Ideal((time.perf_counter() - begun) / max(workers, 1))


class TarPictures(Counted):
    """JPEGs and their numbers in tar files of sizes in proportion; WebDataset reads these by itself."""

    def __init__(self, count: int, shares: Sequence[int]) -> None:
        from PIL import Image

        super().__init__(count)
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        self._pictures: list[bytes] = []
        generator = np.random.default_rng(0)
        for _ in range(16):
            rough = Image.fromarray(generator.integers(256, size=(64, 64, 3), dtype=np.uint8))
            written = io.BytesIO()
            rough.resize((512, 512)).save(written, "jpeg", quality=90)
            self._pictures.append(written.getvalue())
        ends = [round(count * each / sum(shares)) for each in itertools.accumulate(shares)]
        self.files = [str(Path(folder) / f"{i}.tar") for i in range(len(shares))]
        for file, first, end in zip(self.files, [0, *ends], ends, strict=False):
            with tarfile.open(file, "w") as archive:
                for index in range(first, end):
                    for suffix, data in self._members(index).items():
                        add_to_tar(archive, f"{index}.{suffix}", data)
        self.stream = TarShards(self.files)

    def _members(self, index: int) -> dict[str, bytes]:
        return {"jpg": self._pictures[index % len(self._pictures)], "cls": b"%d" % index}

    def content(self, index: int) -> Sample:
        return decoded(self._members(index))

    def ideal(self, batch_size: int, workers: int) -> Ideal:
        return measured_ideal(self.content, range(self.count), workers, record.usable_cores())


def decoded(sample: dict[str, Any]) -> Sample:
    from PIL import Image

    picture = Image.open(io.BytesIO(sample["jpg"])).resize((224, 224))
    return np.array(picture), int(sample["cls"])


# ---- loaders --------------------------------------------------------------------------------


def _stream_of(work: Any, given: dict[str, Any]) -> Any:
    """What a loader without ``transforms=`` reads."""
    stream, transforms = getattr(work, "stream", work), given.pop("transforms", ())
    return Applied(stream, transforms) if transforms else stream


def _torch(**own: Any) -> Build:
    def build(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        given = {**arguments, **own}
        return TorchLoader(_stream_of(work, given), **given)

    return build


def _torchdata(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    given = {**arguments}
    return StatefulDataLoader(_stream_of(work, given), **given)


def _webdataset(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    from webdataset import WebDataset, WebLoader

    given = {**arguments}
    if not hasattr(work, "files"):
        return WebLoader(_stream_of(work, given), **given)
    stream = WebDataset(work.files, shardshuffle=False)
    for transform in given.pop("transforms"):
        stream = stream.map(transform)
    return WebLoader(stream, **given)


def _minato(label: str, name: str = "", **own: Any) -> Contender:
    made = minato_as(label, name, **own)
    return replace(
        made, build=lambda work, *given: made.build(getattr(work, "stream", work), *given)
    )


CONTENDERS = named(
    Contender("torch", "torch", _torch(), True),
    Contender("torch-any-order", "torch, in_order=False", _torch(in_order=False), False),
    Contender("torchdata", "torchdata", _torchdata, True),
    Contender("webdataset", "WebDataset", _webdataset, True),
    _minato("minato"),
    _minato("minato, readers=1", "minato-one-reader", readers=1),
    _minato("minato, order='batch'", "minato-batch", order="batch"),
    _minato("minato, order='arrival'", "minato-arrival", order="arrival"),
)
PACKAGES = ("torchdata", "webdataset")
"""Those of loaders that need not be installed, and the names of these loaders."""


# ---- rows -----------------------------------------------------------------------------------


def _stragglers(count: int) -> list[float]:
    return straggler_costs_s(count, 0.001, 0.2, share=0.01)


def listed_s(costs_s: Iterable[float], workers: int) -> float:
    """Seconds for items in this order, each for the worker that is free first; nothing else takes time."""
    free_s = [0.0] * workers
    for cost_s in costs_s:
        heapq.heappush(free_s, heapq.heappop(free_s) + cost_s)
    return max(free_s)


def _with_state(nbytes: int) -> Callable[[int], Any]:
    return lambda count: Stateful(SleepingWork([0.0002] * count), nbytes)


def _tars(*shares: int) -> Callable[[int], Any]:
    return lambda count: TarPictures(count, shares)


def _hugging_face(tokenised: bool) -> Callable[[int], Any]:
    return lambda count: HuggingFace(count, tokenised)


TRANSFORMS = Row(
    "transforms",
    "2400 items of 1 ms, 1 % of them 200 ms, in transforms=; batch 32, 4 workers",
    lambda count: Blocks(SleepingTransforms(_stragglers(count)), is_shared=True),
    *(2400, BATCH, 4, 1),
    loaders=tuple(CONTENDERS),
    transforms=(SleepsShare(1.0),),
)
ITERATOR = replace(
    TRANSFORMS,
    name="iterator",
    title="the same work within the iterator",
    make=lambda count: Blocks(SleepingWork(_stragglers(count))),
    loaders=tuple(name for name in CONTENDERS if name != "minato-one-reader"),
    transforms=(),
)
VECTORS = Row(
    "vectors",
    "a NumPy vector of 16 floats and a label; batch 32, 2 workers",
    lambda count: Blocks(StoredRows(count)),
    *(65536, BATCH, 2, 4),
    loaders=ITERATOR.loaders,
    unit="us/sample",
    persistent=True,
    skips_first_epoch=True,
)
VECTORS_INLINE = replace(
    VECTORS,
    name="vectors-inline",
    title="the same in the main process (num_workers=0)",
    workers=0,
    persistent=False,
    loaders=("torch", "torchdata", "webdataset", "minato"),
)
STATE_5 = Row(
    "state-5",
    "items of 0.2 ms, and 5 MB of state; batch 32, 2 workers",
    _with_state(5_000_000),
    *(16384, BATCH, 2, 1),
    loaders=("torch", "torchdata", "minato"),
)
STATE_16 = replace(
    STATE_5, name="state-16", title="the same with 16 MB of state", make=_with_state(16_000_000)
)
SKIP = Row(
    "skip",
    f"{SKIPPED} batches are skipped: 0.1 ms in the iterator, 1 ms in transforms=; batch 32, 2 workers",
    lambda count: Blocks(SleepingWork([0.0001] * count)),
    *((SKIPPED + 6) * BATCH, BATCH, 2, 1),
    loaders=("torch", "torchdata", "minato"),
    transforms=(SleepsShare(10.0),),
)
HUGGING_FACE = Row(
    "hugging-face-text",
    "a Hugging Face stream of texts of 1000 characters; batch 32, 2 workers",
    _hugging_face(tokenised=False),
    *(32768, BATCH, 2, 1),
    loaders=("torch", "torch-any-order", "torchdata", "webdataset", "minato", "minato-batch"),
)
HUGGING_FACE_TOKENS = replace(
    HUGGING_FACE,
    name="hugging-face-tokens",
    title="a Hugging Face stream of 256 token ids and their mask; batch 32, 2 workers",
    make=_hugging_face(tokenised=True),
)
TAR_EVEN = Row(
    "tar-even",
    "1280 JPEGs of 512 × 512 in four tar files, decoded and made smaller by Pillow; batch 32, 4 workers",
    _tars(1, 1, 1, 1),
    *(1280, BATCH, 4, 1),
    loaders=("torch", "torch-any-order", "webdataset", "minato", "minato-arrival"),
    transforms=(decoded,),
)
TAR_UNEVEN = replace(
    TAR_EVEN,
    name="tar-uneven",
    title="the same where one of the four files is ten times as large as the others",
    make=_tars(10, 1, 1, 1),
)
ROWS = {
    row.name: row
    for row in (
        *(TRANSFORMS, ITERATOR, VECTORS, VECTORS_INLINE, STATE_5, STATE_16, SKIP),
        *(HUGGING_FACE, HUGGING_FACE_TOKENS, TAR_EVEN, TAR_UNEVEN),
    )
}


# ---- skipping -------------------------------------------------------------------------------


def _first_batch_s(loader: Any, dropped: int, who: str) -> float:
    """Seconds from ``iter()`` to the first batch after some; it and all that follow are checked."""
    with unwarned():
        begun = time.perf_counter()
        batches = iter(loader)
        for _ in range(dropped):
            next(batches)
        labels = next(batches)[1].tolist()
        taken_s = time.perf_counter() - begun
        for batch in batches:
            labels += batch[1].tolist()
    check_labels(labels, range(SKIPPED * BATCH, SKIP.samples), in_order=True, who=who)
    return taken_s


def skipping(say: Callable[[str], None], names: Sequence[str], repeats: int) -> RowResult:
    """Measure ``skip``; all that is not skipped must come once and in order."""
    row = SKIP
    result = RowResult(row, trials={name: [] for name in names})
    work: Any = row.make(row.samples)
    plain = {name: value for name, value in row.arguments.items() if name != "transforms"}
    states: dict[str, Any] = {}
    for repeat, name in in_turn(names, repeats):
        build = CONTENDERS[name].build
        if len(result.ideals) == repeat:
            alone = CONTENDERS["minato"].build(work, plain, repeat)
            result.ideals.append(Ideal(_first_batch_s(alone, SKIPPED, "reading")))
        if name != "torch" and name not in states:
            states[name] = _state_of(build(work, row.arguments, repeat))
        loader = build(work, row.arguments, repeat)
        if name in states:
            loader.load_state_dict(states[name])
        taken_s = _first_batch_s(loader, 0 if name in states else SKIPPED, name)
        result.trials[name].append(Trial(name, taken_s, taken_s, (taken_s,), (taken_s,)))
        say(f"skip {repeat + 1}/{repeats} {name}: {taken_s:.3f} s")
    return result


def _state_of(loader: Any) -> Any:
    """A checkpoint behind the batches to skip."""
    with unwarned():
        for number, _ in enumerate(loader, 1):
            if number == SKIPPED:
                return loader.state_dict()
    raise WrongDeliveryError(f"the stream ended before {SKIPPED} batches")


# ---- the page -------------------------------------------------------------------------------


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("streams", __doc__, 5, publishes=True, rows=ROWS)
    options = parser.parse_args(arguments)
    repeats, page = options.repeats, report.Page("streams", options.out)
    absent = [package for package in PACKAGES if not is_installed(package)]
    contenders = {name: one for name, one in CONTENDERS.items() if name not in absent}
    # Which file comes first is up to the loader.
    unordered = {name: replace(one, keeps_order=False) for name, one in contenders.items()}
    results, notes = list[RowResult](), [f"Not installed here: {name}.\n" for name in absent]
    for row in chosen(ROWS, options):
        if row.name.startswith("hugging-face") and not is_installed("datasets"):
            notes.append(f"`{row.name}` was left out: the package `datasets` is not installed.\n")
        elif row.name == SKIP.name:
            names = [name for name in row.loaders if name in contenders]
            results.append(skipping(page.say, names, repeats))
        else:
            taking_part = unordered if row.name.startswith("tar-") else contenders
            results += measure([row], taking_part, repeats, page.say)
    costs_s, excess_s = _stragglers(TRANSFORMS.samples), record.sleep_cost_s(0.001) - 0.001
    ideal_s = sum(costs_s) / TRANSFORMS.workers
    listed, slept = (
        ideal_s / listed_s([cost + each for cost in costs_s], TRANSFORMS.workers)
        for each in (0.0, excess_s)
    )
    head = HEAD.format(batch=BATCH, repeats=repeats, listed=listed, slept=slept)
    page.add(head, SKIP_HEAD.format(count=SKIPPED), *notes)
    faster = report.losses(results, contenders)
    page.add_rows(results, contenders, "## Where another loader is faster\n", faster)
    page.finish()


if __name__ == "__main__":
    report.program(main)
