"""Figures of the first pages are those of the reports that they link to, and a report names a commit of this history.

A figure may be rounded. ``CLAIMS`` says for each one which cell of which report it repeats, or how it follows from
cells; what looks like a gain and is in no claim fails.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.pages import ROOT, slug

REPORTS = sorted({*(ROOT / "docs/benchmarks").glob("*.md")} - {ROOT / "docs/benchmarks/index.md"})
FOLDER, PIL, STRAGGLERS = "imagenet.md#float32", "jpegs.md#pil", "engine.md#stragglers"
IMAGE, INLINE, TABULAR = "engine.md#image", "engine.md#image-inline", "engine.md#tabular"
BALANCED, SMALL = "engine.md#balanced", "engine.md#small-inline"
FIGURE_9 = "papers.md#scaling-over-consumers-figure-9"
SPEEDY = "papers.md#costs-that-decisions-make-speedyloaders-comparison"
VARIABILITY = "papers.md#variability-of-preprocessing-figure-2-table-2"
ROUND_TRIP, READS = "remote.md#round-trip-20-ms", "minato, 16 reads"
HEDGING = "hedging.md#20-ms-one-request-in-a-hundred-travels-a-second-later"
UNORDERED = "torch, in_order=False"
GAIN = "× torch"
Numbers = Callable[[], list[float]]


def section(place: str) -> str:
    """The text below a heading: ``page.md#anchor``, up to the next heading of its level or above."""
    name, _, anchor = place.partition("#")
    text = (ROOT / "docs/benchmarks" / name).read_text(encoding="utf-8")
    headings = [*re.finditer(r"^(#+) (.*)$", text, re.MULTILINE)]
    for found, after in zip(headings, [*headings[1:], None], strict=True):
        if slug(found[2]) == anchor:
            return text[found.end() : after.start() if after else None]
    raise LookupError(place)


def cell(place: str, row: str, column: str) -> list[float]:
    """A cell of the first table in a section: a number, and often its range.

    ``row`` is the text of its first cells, joined by ``/``.
    """
    lines = re.findall(r"^\|(.*)\|$", section(place), re.MULTILINE)
    header, _, *rows = ([one.strip() for one in line.split("|")] for line in lines)
    words = row.split("/")
    [cells] = (cells for cells in rows if cells[: len(words)] == words)
    found = re.fullmatch(r"([\d.]+)(?: %)?(?: \(([\d.]+)–([\d.]+)\))?", cells[header.index(column)])
    assert found, (place, row, column)
    return [float(part) for part in found.groups() if part]


def value(place: str, row: str = "minato", column: str = GAIN) -> Numbers:
    return lambda: cell(place, row, column)[:1]


def spread(place: str, row: str = "minato", column: str = GAIN) -> Numbers:
    """Median, minimum and maximum."""
    return lambda: cell(place, row, column)


def ratio(place: str, above: str, below: str, column: str) -> Numbers:
    return lambda: [cell(place, above, column)[0] / cell(place, below, column)[0]]


def against_unordered(place: str, column: str) -> Numbers:
    """How much faster minato is than torch with ``in_order=False``, by seconds or by samples per second."""
    rows = ("minato", UNORDERED) if column == "samples/s" else (UNORDERED, "minato")
    return ratio(place, *rows, column)


def times(place: str, ranks: int, torch: str = "torch") -> Numbers:
    """How much longer torch takes than minato, in order."""
    return ratio(place, f"{ranks}/{torch}", f"{ranks}/minato", "s")


def whole_run(place: str) -> Numbers:
    """How much faster minato is with the first epoch, and with it the start of the workers."""
    return ratio(place, "torch", "minato", "whole run, s")


def scaling() -> list[float]:
    found = [times(FIGURE_9, ranks)()[0] for ranks in (1, 2, 4)]
    return [min(found), max(found)]


def everyday() -> list[float]:
    """How many jobs, the mean over all, how many are lost, and the worst."""
    pattern = r"Over (\d+) of \1 jobs minato is ([\d.]+) ×.*, ([\d.]+) ×\..*: (\d+)\."
    found = re.search(pattern, section("everyday.md#in-short"))
    assert found
    jobs, mean, worst, lost = map(float, found.groups())
    return [jobs, mean, lost, worst]


N = r"([\d.]+)"
X = rf"\*{{0,2}}{N} ×\*{{0,2}}"
RANGE = rf"{X} \({N}–{N}\)"
IN_WORDS = rf"{N} times as fast"
RANGE_IN_WORDS = rf"{IN_WORDS} \({N} to {N}\)"
README, PERFORMANCE = "README.md", "docs/explanation/performance.md"
PHOTOS, WORKERS, REMOTE, SOURCES = (
    f"docs/how-to/{name}.md" for name in ("photos", "workers", "remote-data", "sources")
)
PIL_EPOCHS = [
    ratio(FOLDER, "minato, PIL", "torch, PIL", epochs) for epochs in ("later epochs", "first epoch")
]
ROWS = {
    r"of a stream\]": ("streams.md#transforms", "s per epoch"),
    r"stream of token ids\]": ("streams.md#hugging-face-tokens", "s per epoch"),
    r"\[3-D segmentation ": ("papers.md#segmentation", "s"),
    r"\[Object detection ": ("papers.md#detection", "s"),
    r"\[JPEGs in memory": (PIL, "samples/s"),
}
KINDS = {"of 600 kB": IMAGE, "16 numbers": TABULAR, "600 kB, without workers": INLINE}
DECODERS = {
    "PIL, float32": "PIL decodes and resizes, float32",
    "PIL with `draft`": "the same with Image.draft before decoding",
    "libjpeg-turbo and OpenCV, float32": "simplejpeg decodes, OpenCV resizes, float32",
    "the same, uint8": "the same as uint8, colors last",
}
IN_THREADS = {
    "Python code with objects of its own": "own",
    "the same, short epochs": "short",
    "Python code that uses strings and a dictionary of the dataset": "shared",
    "small calls of NumPy": "patches",
}

CLAIMS: list[tuple[str, str, list[Numbers]]] = [
    (
        README,
        rf"\[1 % of samples take 200 × longer\].*?\| {X} \| {X} \|",
        [value(STRAGGLERS), against_unordered(STRAGGLERS, "s per epoch")],
    ),
    *(
        (
            README,
            rf"{row}.*?\| {RANGE} \| {X} \|",
            [spread(place), against_unordered(place, column)],
        )
        for row, (place, column) in ROWS.items()
    ),
    (README, rf"\[A folder of JPEGs.*?\| {X} \| – \|", PIL_EPOCHS[:1]),
    (
        README,
        rf"folder: {X}\. Whole runs of 4 epochs: tensors {X}, without workers {X}, rows {X}\.",
        [PIL_EPOCHS[1], *map(whole_run, (IMAGE, INLINE, TABULAR))],
    ),
    (
        README,
        rf"`fetch_concurrency=16`\].*?\| {X} \| {X} \|",
        [value(ROUND_TRIP, READS), ratio(ROUND_TRIP, READS, UNORDERED, "samples/s")],
    ),
    (
        README,
        rf"\[The same, one read per worker\].*?\| {X} \| {X} \|",
        [value(ROUND_TRIP), against_unordered(ROUND_TRIP, "samples/s")],
    ),
    (README, rf"\[{N} everyday jobs.*?\| {X}; {N} of them lose, down to {X} \|", [everyday]),
    (README, rf"ready-made 600 kB tensors\].*?\| {RANGE} \|", [spread(IMAGE)]),
    (README, rf"rows of 16 numbers\].*?\| {RANGE} \|", [spread(TABULAR)]),
    (README, rf"without workers\].*?\| {RANGE} \|", [spread(INLINE)]),
    (PERFORMANCE, rf"takes 200 times longer \| {IN_WORDS}", [value(STRAGGLERS)]),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS}; the loop waits {N} % of its time instead of {N} %",
        [value(BALANCED), *(value(BALANCED, name, "waiting") for name in ("minato", "torch"))],
    ),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS}; {N} with `seed=`",
        [value("engine.md#lognormal", name) for name in ("minato", "minato, seed=")],
    ),
    (
        PERFORMANCE,
        rf"\| {RANGE_IN_WORDS}, {N} out of order \({N} to {N}\)",
        [spread(PIL), spread(PIL, "minato, in_order=False")],
    ),
    (PERFORMANCE, rf"OpenCV \| {RANGE_IN_WORDS}", [spread("jpegs.md#simplejpeg")]),
    (PERFORMANCE, rf"\| {IN_WORDS} in later epochs; the first epoch {N} times", PIL_EPOCHS),
    *(
        (
            PERFORMANCE,
            rf"{row} \| {RANGE_IN_WORDS}; the whole run {N} times",
            [spread(place), whole_run(place)],
        )
        for row, place in KINDS.items()
    ),
    (PERFORMANCE, rf"one read per worker \| {IN_WORDS}", [value(ROUND_TRIP)]),
    (PERFORMANCE, rf"`fetch_concurrency=16` \| {IN_WORDS}", [value(ROUND_TRIP, READS)]),
    (PERFORMANCE, rf"of 256, without workers \| {IN_WORDS}", [value("engine.md#tabular-inline")]),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS}: {N} µs per sample instead of {N}",
        [value(SMALL), *(value(SMALL, name, "µs per sample") for name in ("minato", "torch"))],
    ),
    (PERFORMANCE, rf"\[{N} to {N} times as long\]", [scaling]),
    (PERFORMANCE, rf"torch takes \[{N} times as\s+long\]", [times(SPEEDY, 2)]),
    (PERFORMANCE, rf"`in_order=False` it takes {N} times\s+as long", [times(SPEEDY, 2, UNORDERED)]),
    *(
        (PERFORMANCE, rf"\* {N} times {words}", [value(VARIABILITY, row, "P90 / median")])
        for words, row in {
            "the median for volumes": "segmentation",
            "for photographs": "detection",
            "for speech": "speech-3s",
        }.items()
    ),
    (
        PERFORMANCE,
        rf"\[{N} % of them\]",
        [value("papers.md#accuracy-figure-11", "minato, order='fast_first'", "early, %")],
    ),
    *(
        (
            PHOTOS,
            rf"^\| {re.escape(how)} \| {N} \| {N} \| {N} \|",
            [
                value("jpegs.md#images-per-second", row, one)
                for one in ("torch", UNORDERED, "minato")
            ],
        )
        for how, row in DECODERS.items()
    ),
    *(
        (
            WORKERS,
            rf"^\| {re.escape(samples)} \| {N} \({N}–{N}\) \| {N} \({N}–{N}\) \|",
            [
                spread(f"threads.md#{row}", name, "efficiency")
                for name in ("minato, threads", "minato")
            ],
        )
        for samples, row in IN_THREADS.items()
    ),
    (
        WORKERS,
        rf"takes {N} s instead of {N} s\.",
        [
            value("ablation.md#rare", f"minato, in_order=False, {how}", "s per epoch")
            for how in ("auto", "without deferral")
        ],
    ),
    (
        REMOTE,
        rf"\[{IN_WORDS}\]",
        [ratio(HEDGING, "minato, 32 reads, hedged", "minato, 32 reads", "samples/s")],
    ),
    *(
        (
            SOURCES,
            rf"^\| {trip} ms \| {N} \| {N} \| {N} \|",
            [
                value(f"cassandra.md#round-trip-{trip}-ms-{rows}-rows", row, "later epochs")
                for row in ("torch, `__getitems__`", "minato", "minato, in_order=False")
            ],
        )
        for trip, rows in ((0, 2000), (20, 1000), (150, 400))
    ),
]
"""``(page, pattern of its text, the numbers that its groups must be)``."""
NO_GAIN = {"200 ×", "200 times", "1.0 ×"}
"""What describes a workload, or says that there is no gain."""


def text_of(page: str) -> str:
    """A page, without the commas in its numbers."""
    return re.sub(r"(?<=\d),(?=\d{3})", "", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "pattern", "numbers"),
    [pytest.param(*claim, id=f"{claim[0]}: {claim[1][:40]}") for claim in CLAIMS],
)
def test_a_figure_is_that_of_its_report(page: str, pattern: str, numbers: list[Numbers]) -> None:
    [found] = re.finditer(pattern, text_of(page), re.MULTILINE)
    measured = [number for read in numbers for number in read()]
    assert len(found.groups()) == len(measured)
    for written, exact in zip(found.groups(), measured, strict=True):
        decimals = len(written.partition(".")[2])
        assert abs(float(written) - exact) <= 0.5 * 10**-decimals + 1e-9, (written, exact)


@pytest.mark.parametrize("page", [README, PERFORMANCE, "docs/index.md"])
def test_every_gain_is_claimed(page: str) -> None:
    text = text_of(page)
    for claimed, pattern, _ in CLAIMS:
        if claimed == page:
            text = re.sub(pattern, "", text, flags=re.MULTILINE)
    gains = re.findall(r"\d[\d.]* (?:×|times)", text)
    assert [gain for gain in gains if gain not in NO_GAIN] == []


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )


def has_history() -> bool:
    """Tell whether this is a whole clone: no sdist, no shallow clone, no copy with a history of its own."""
    if not (ROOT / ".git").exists():
        return False
    is_shallow = git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"
    return not is_shallow and int(git("rev-list", "--count", "HEAD").stdout) > len(REPORTS)


@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.name)
def test_a_report_names_its_date_and_a_commit_of_this_history(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"^\| date \| 2\d{3}-\d\d-\d\d", text, re.MULTILINE)
    rows = re.findall(r"^\| commit \| (.*) \|$", text, re.MULTILINE)
    hashes = [re.findall(r"\b[0-9a-f]{12}\b", row) for row in rows]
    assert rows
    assert all(hashes)
    if not has_history():
        pytest.skip("the history is not here")
    for each in itertools.chain(*hashes):
        assert git("merge-base", "--is-ancestor", each, "HEAD").returncode == 0, each
