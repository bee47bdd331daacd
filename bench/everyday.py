"""Jobs that people have, with torch's loader and minato in turn: time for each batch, and every row that is lost."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from bench.harness import report
from bench.harness.datasets import Held, compute
from bench.harness.loaders import MINATO, TORCH
from bench.harness.suite import Spread, in_turn, ratios
from bench.harness.trial import WrongDeliveryError, same, unwarned

SHORT_EPOCH = 10
"""Batches."""
TIMED_S, MOST_EPOCHS = 0.2, 1000
"""A run goes through as many epochs as torch's loader ends in this time, but through one at least."""
TINY_US, TINY_LIMIT = 15.0, 0.9
"""A batch that costs torch less may cost minato this much more, before the row counts as lost."""
CAUSES = {
    "wait-*-w0-*": "each sample is timed by stage; after a wait this code is no longer in the processor's caches",
    "wait-*-w[1-9]-*": "after a wait a worker's steps are no longer in the processor's caches: about 50 µs a sample",
    "*-w0-short": "an epoch's records, states to resume and search for generators take 50 to 300 µs, more for pictures",
    "*-single-w0-*": "there is no copy to save, and the bookkeeping of a batch is for one sample",
    "*-flipped-*-w0-*": "a sample that draws is bound to its index, which takes 1 µs, and more with cold caches",
    "texts-*-w0-*": "there is no copy to save, and each batch and epoch is recorded",
    "list-*-w0-*": "its batches are faster; each epoch is recorded, as short ones are",
    "ints-*-w0-*": "its batches are faster; each epoch is recorded, as short ones are",
    "padded-*-w0-*": "`collate_fn` does the copy; each epoch is recorded, as short ones are",
    "stream-collated-*-w0-*": "`collate_fn` does the copy; each epoch is recorded, as short ones are",
    "texts-*-w[1-9]-*": "its batches are faster; workers that do not persist take 1 ms more each to start and end",
}
"""Why torch is faster, by patterns of the names of jobs; the first that fits counts."""
HEAD = f"""\
# Everyday jobs

Written by `python -m bench.everyday`. Jobs as people have them, each with torch's loader and minato in turn. Both have
the same dataset object and the same arguments, everything else at its default. *Short* epochs have {SHORT_EPOCH}
batches, and the time of a batch includes its share of `iter()`. *Long* epochs have thousands of samples and are
shuffled, but for streams. All times are those of whole epochs, with the start and end of workers that do not persist.
*Any order* is `in_order=False` for both loaders.

A first epoch warms up, and each of its batches is compared with torch's collation of its samples: types, structure and
values. Strict orders of both loaders must be equal, sample by sample; other orders must have each sample once.

*Speed* is torch's time divided by minato's in the same repeat: the median of {{repeats}} repeats, with the minimum and
maximum in brackets. A row is lost where the median is below 1.0, or below {TINY_LIMIT} where a batch costs torch less
than {TINY_US:g} µs.
"""


class Job(NamedTuple):
    """One way to load a dataset; without a batch size samples come as they are."""

    batch_size: int | None
    workers: int
    epoch: Literal["short", "long"]
    persistent: bool = False
    in_order: bool = True

    @property
    def order(self) -> str:
        return "strict" if self.in_order else "any"

    @property
    def name(self) -> str:
        """As in ``b16-w2-long-persistent-any``."""
        size = "single" if self.batch_size is None else f"b{self.batch_size}"
        stays = ["persistent"] * self.persistent + ["any"] * (not self.in_order)
        return "-".join([size, f"w{self.workers}", self.epoch, *stays])


FIRST = (
    Job(1, 0, "short"),
    Job(4, 0, "long"),
    Job(16, 0, "short"),
    Job(32, 2, "long", persistent=True),
    Job(64, 4, "short", in_order=False),
    Job(256, 1, "long"),
    Job(1024, 0, "long"),
    Job(None, 0, "long"),
)
SECOND = (
    Job(1, 0, "long"),
    Job(4, 0, "short"),
    Job(16, 0, "long"),
    Job(32, 4, "long", in_order=False),
    Job(64, 2, "short", persistent=True),
    Job(256, 0, "long"),
    Job(1024, 1, "long"),
    Job(None, 1, "long", persistent=True, in_order=False),
)
STORED = (
    *SECOND,
    Job(256, 2, "long", persistent=True),
    Job(1024, 2, "long", persistent=True, in_order=False),
)
WAITING = (
    Job(1, 0, "short"),
    Job(4, 0, "short"),
    Job(16, 0, "short"),
    Job(32, 4, "long", persistent=True),
    Job(64, 2, "long"),
    Job(256, 4, "long", in_order=False),
    Job(1024, 4, "long"),
    Job(None, 1, "short"),
)
LARGE = (
    *(Job(1, 0, "short"), Job(4, 0, "long"), Job(16, 0, "short"), Job(32, 0, "long")),
    *(Job(64, 0, "short"), Job(256, 0, "long"), Job(None, 0, "long")),
)


# ---- datasets -------------------------------------------------------------------------------


class Listed(Held):
    """The same, and a list of indices is answered with a list of samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.samples[index] for index in indices]


class Flipped(Held):
    """Pictures as floats, half of them mirrored at random."""

    def __getitem__(self, index: int) -> Any:
        pixels, label = self.samples[index]
        if torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return pixels.float() / 255, label


class Working(Held):
    """Samples that need a core for 300 µs."""

    def __getitem__(self, index: int) -> Any:
        compute(300e-6)
        return self.samples[index]


class Waiting(Held):
    """Samples that wait for 2 ms, as for a network."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.samples[index]


class Stream(IterableDataset[Any]):
    """Samples one after the other; each worker has its share of them."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            return iter(self.samples)
        return iter(self.samples[worker.id :: worker.num_workers])


def _floats(count: int) -> list[float]:
    return [float(index) for index in range(count)]


def _rows(count: int) -> list[Any]:
    table = np.random.default_rng(0).random((count, 16), np.float32)
    return [(row, index) for index, row in enumerate(table)]


def _tokens(count: int) -> list[Any]:
    return [
        {
            "text": f"a sentence with the number {index}",
            "input_ids": [(7 * index + place) % 30_000 for place in range(32)],
            "attention_mask": [1] * 32,
            "label": index,
        }
        for index in range(count)
    ]


def _records(count: int) -> list[Any]:
    return [
        {"title": f"number {index}", "text": text, "label": index}
        for index, text in enumerate(_texts(count))
    ]


def _uneven(count: int) -> list[Any]:
    ids = [torch.arange(8 + index % 25) for index in range(count)]
    return [{"input_ids": each, "label": torch.tensor(i)} for i, each in enumerate(ids)]


def _padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "label": torch.stack([sample["label"] for sample in samples])}


def _texts(count: int) -> list[str]:
    return [
        f"{index} is the number of this text" + " and of its words" * 8 for index in range(count)
    ]


def _images(count: int, side: int, dtype: torch.dtype = torch.uint8) -> list[Any]:
    pool = torch.randint(256, (64, 3, side, side), generator=torch.Generator().manual_seed(0))
    pool = pool.to(dtype)
    return [(pool[index % len(pool)], index) for index in range(count)]


def _tensors(count: int) -> TensorDataset:
    return TensorDataset(torch.rand(count, 16), torch.arange(count))


def _mixed(samples: Any) -> Subset[Any]:
    return Subset(samples, np.random.default_rng(0).permutation(len(samples)).tolist())


def _stacked(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(np.stack([row for row, _ in samples]))
    return rows, torch.tensor([label for _, label in samples])


def _labels(batch: Any) -> list[int]:
    """The indices of a batch's samples, or of a single sample."""
    if isinstance(batch, dict):
        batch = batch["label"]
    elif isinstance(batch, (tuple, list)) and not isinstance(batch[0], str):
        batch = batch[1]
    if isinstance(batch, (str, tuple, list)):
        texts = [batch] if isinstance(batch, str) else batch
        return [int(text.split()[0]) for text in texts]
    found: list[int] = torch.as_tensor(batch).reshape(-1).long().tolist()
    return found


def _same_but_flipped(found: Any, expected: Any) -> bool:
    """Whether each picture is the expected one or its mirror image."""
    if not same(found[1], expected[1]):
        return False
    single = not isinstance(found[1], torch.Tensor)
    pairs = [(found[0], expected[0])] if single else zip(found[0], expected[0], strict=True)
    for picture, pixels in pairs:
        plain = pixels.float() / 255
        if not (torch.equal(picture, plain) or torch.equal(picture, plain.flip(-1))):
            return False
    return True


class Data(NamedTuple):
    """A dataset of ``samples(number)``, and the jobs on it; ``same`` tells whether a batch is the expected one."""

    title: str
    jobs: Sequence[Job]
    samples: Callable[[int], Any]
    dataset: Callable[[Any], Any] = Held
    collate: Callable[[list[Any]], Any] | None = None
    length: int = 4096
    same: Callable[[Any, Any], bool] = same


_SMALL = functools.partial(_images, side=64)
_MEDIUM = functools.partial(_images, side=224)
_FLOATS = functools.partial(_images, side=224, dtype=torch.float32)
DATA = {
    "list": Data("a list of floats", SECOND, _floats, list),
    "ints": Data("integers", FIRST, range),
    "rows": Data("NumPy rows of 16 numbers and a label", SECOND, _rows),
    "tokens": Data("dicts of a text, two lists of 32 integers and a label", FIRST, _tokens),
    "padded": Data("dicts of tensors, padded by `collate_fn`", SECOND, _uneven, collate=_padded),
    "texts": Data("texts of 170 characters", FIRST, _texts),
    "records": Data("dicts of two texts and a label", STORED, _records),
    "image12": Data("pictures of 12 kB", FIRST, _SMALL, length=2048),
    "image12-flipped": Data(
        *("the same, flipped and converted to floats", SECOND, _SMALL, Flipped),
        length=2048,
        same=_same_but_flipped,
    ),
    "image150": Data("pictures of 150 kB", FIRST, _MEDIUM, length=2048),
    "image150-flipped": Data(
        "the same, flipped and converted to floats",
        [job for job in FIRST if job.batch_size != 1024],  # a batch would have 600 MB
        *(_MEDIUM, Flipped),
        length=2048,
        same=_same_but_flipped,
    ),
    "image600": Data("float32 pictures of 600 kB", LARGE, _FLOATS, length=2048),
    "tensors": Data("`TensorDataset` of 16 numbers and a label", FIRST, _tensors, Held),
    "subset": Data("`Subset` of it", SECOND, _tensors, _mixed),
    "getitems": Data("the rows, with `__getitems__`", FIRST, _rows, Listed),
    "stream": Data("the rows as a stream", SECOND, _rows, Stream),
    "stream-collated": Data("the same, stacked by `collate_fn`", FIRST, _rows, Stream, _stacked),
    "work": Data("the rows, 300 µs of work each", SECOND, _rows, Working, length=2048),
    "wait": Data("the rows, 2 ms of waiting each", WAITING, _rows, Waiting, length=2048),
}


# ---- measurement ----------------------------------------------------------------------------


class Result(NamedTuple):
    """The runs of one job: µs for each batch, in each repeat."""

    name: str
    data: str
    job: Job
    torch_us: list[float]
    minato_us: list[float]

    @property
    def speed(self) -> Spread:
        """torch's time divided by minato's."""
        return Spread.of(ratios(self.torch_us, self.minato_us))

    @property
    def is_lost(self) -> bool:
        tiny = statistics.median(self.torch_us) < TINY_US
        return self.speed.median < (TINY_LIMIT if tiny else 1.0)

    @property
    def times(self) -> list[str]:
        """Cells: median times of both, and the speed."""
        medians = (statistics.median(self.torch_us), statistics.median(self.minato_us))
        return [*(f"{value:,.1f}" for value in medians), report.spread_text(self.speed, 2)]


class Bench:
    def __init__(self, data: Data, job: Job) -> None:
        self._data, self._job = data, job
        short = SHORT_EPOCH * (job.batch_size or 1)
        self._samples = data.samples(short if job.epoch == "short" else data.length)
        self._dataset = data.dataset(self._samples)
        self._epochs = 0
        self._orders: dict[int, list[int]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        job = self._job
        shuffle = job.epoch == "long" and not isinstance(self._dataset, IterableDataset)
        return {
            "batch_size": job.batch_size,
            "num_workers": job.workers,
            "in_order": job.in_order,
            **({"shuffle": True} if shuffle else {}),
            **({"persistent_workers": True} if job.persistent else {}),
            **({"collate_fn": self._data.collate} if self._collates else {}),
        }

    @property
    def _collates(self) -> bool:
        return self._job.batch_size is not None and self._data.collate is not None

    def run(self, contender: Any, repeat: int) -> float:
        """Build the loader, check an epoch, time others: µs for each batch."""
        torch.manual_seed(repeat)
        gc.collect()
        loader = contender.build(self._dataset, self.arguments, repeat)
        batches = self._checked(loader, contender.label, repeat)
        taken_s = _epoch_s(loader, batches)
        self._epochs = self._epochs or max(1, min(int(TIMED_S / taken_s), MOST_EPOCHS))
        for _ in range(self._epochs - 1):
            taken_s += _epoch_s(loader, batches)
        return 1e6 * taken_s / (self._epochs * batches)

    def _checked(self, loader: Any, who: str, repeat: int) -> int:
        """Compare all of an epoch; return the number of its batches."""
        order: list[int] = []
        number = 0
        for number, batch in enumerate(loader, 1):
            labels = _labels(batch)
            order += labels
            if not self._data.same(batch, self._expected(labels)):
                raise WrongDeliveryError(f"{who}: batch {number} differs from torch's collation")
        if Counter(order) != Counter(range(len(self._samples))):
            raise WrongDeliveryError(f"{who}: not each sample once")
        if self._job.in_order and self._orders.setdefault(repeat, order) != order:
            raise WrongDeliveryError(f"{who}: not in the order of the other loader")
        return number

    def _expected(self, labels: list[int]) -> Any:
        samples = [self._samples[label] for label in labels]
        if self._job.batch_size is None:
            return default_convert(samples[0])
        return self._data.collate(samples) if self._data.collate else default_collate(samples)


def _epoch_s(loader: Any, batches: int) -> float:
    begun_s = time.perf_counter()
    number = 0
    for _ in loader:
        number += 1
    taken_s = time.perf_counter() - begun_s
    if number != batches:
        raise WrongDeliveryError(f"{number} batches of {batches}")
    return taken_s


def measure(data: str, job: Job, repeats: int) -> Result:
    bench = Bench(DATA[data], job)
    times: dict[str, list[float]] = {TORCH.name: [], MINATO.name: []}
    with unwarned():
        for repeat, contender in in_turn((TORCH, MINATO), repeats):
            times[contender.name].append(bench.run(contender, repeat))
    return Result(f"{data}-{job.name}", data, job, times[TORCH.name], times[MINATO.name])


# ---- the page -------------------------------------------------------------------------------


def cause_of(name: str) -> str:
    found = (cause for pattern, cause in CAUSES.items() if fnmatchcase(name, pattern))
    return next(found, "**no cause found**")


def headline(results: Sequence[Result]) -> str:
    """Geometric mean, worst row, and every lost one with its cause."""
    speeds = {result.name: result.speed.median for result in results}
    worst = min(speeds, key=speeds.__getitem__)
    lost = sorted((each for each in results if each.is_lost), key=lambda each: each.speed.median)
    lines = [[f"`{each.name}`", *each.times, cause_of(each.name)] for each in lost]
    mean = statistics.geometric_mean(speeds.values())
    jobs = sum(len(data.jobs) for data in DATA.values())
    text = f"Over {len(results)} of {jobs} jobs minato is {mean:.2f} × as fast as torch's loader (geometric mean). "
    text += f"The worst row is `{worst}`, {speeds[worst]:.2f} ×. Lost rows: {len(lost)}.\n"
    if not lost:
        return text
    head = ["job", "torch, µs per batch", "minato, µs per batch", "speed", "cause"]
    return f"{text}\n## Where torch is faster\n\n{report.table(head, lines)}"


def section(data: str, results: Sequence[Result]) -> str:
    head = ["batch", "workers", "epoch", "order", "torch, µs per batch", "minato, µs per batch"]
    lines = []
    for each in results:
        job = each.job
        workers = f"{job.workers}, persistent" if job.persistent else f"{job.workers}"
        size = "single samples" if job.batch_size is None else f"{job.batch_size}"
        lines.append([size, workers, job.epoch, job.order, *each.times])
    title = DATA[data].title
    text = f"{title[:1].upper()}{title[1:]}; {DATA[data].length} samples in a long epoch."
    return f"### {data}\n\n{text}\n\n{report.table([*head, 'speed'], lines)}"


def main(arguments: list[str] | None = None) -> None:
    parser = report.Parser("everyday", __doc__, 5, publishes=True)
    about = "names of jobs, as in 'rows-b16-w0-*'"
    parser.add_argument("--rows", default="*", metavar="PATTERN", help=about)
    options = parser.parse_args(arguments)
    chosen = [
        (data, job)
        for data, of in DATA.items()
        for job in of.jobs
        if fnmatchcase(f"{data}-{job.name}", options.rows)
    ]
    if not chosen:
        parser.error(f"--rows: no job is named {options.rows!r}")
    if options.short:
        chosen = [each for each in chosen if each[1].epoch == "short"]
    page = report.Page("everyday", options.out)
    results = []
    for number, (data, job) in enumerate(chosen, 1):
        results.append(measure(data, job, options.repeats))
        page.say(f"{number}/{len(chosen)} {results[-1].name}: {' '.join(results[-1].times)}")
    page.add(HEAD.format(repeats=options.repeats))
    page.add("## In short\n", headline(results), "## All figures\n")
    for data in dict.fromkeys(each.data for each in results):
        page.add(section(data, [each for each in results if each.data == data]))
    page.finish()


if __name__ == "__main__":
    report.program(main)
