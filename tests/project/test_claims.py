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
from typing import NamedTuple

import pytest

from tests.project.pages import ROOT

REPORTS = sorted(
    page for page in (ROOT / "docs/benchmarks").glob("*.md") if page.name not in ("index.md",)
)
ROUND_TRIP = "remote.md#round-trip-20-ms"
SEGMENTATION, DETECTION = "papers.md#segmentation", "papers.md#detection"
FIGURE_9 = "papers.md#scaling-over-consumers-figure-9"
SPEEDY = "papers.md#costs-that-decisions-make-speedyloaders-comparison"
VARIABILITY = "papers.md#variability-of-preprocessing-figure-2-table-2"
FOLDER = "imagenet.md#float32"


class Figure(NamedTuple):
    """A cell of a table: a number, and often the range of it."""

    value: float
    least: float | None = None
    greatest: float | None = None


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(place: str) -> str:
    """The text below a heading: ``page.md#anchor``, up to the next heading of its level or above."""
    name, _, anchor = place.partition("#")
    text = (ROOT / "docs/benchmarks" / name).read_text(encoding="utf-8")
    headings = [*re.finditer(r"^(#+) (.*)$", text, re.MULTILINE)]
    for found, after in zip(headings, [*headings[1:], None], strict=True):
        if slug(found[2]) == anchor:
            return text[found.end() : after.start() if after else None]
    raise LookupError(place)


def figure(place: str, row: str, column: str) -> Figure:
    """The cell of the first table in a section; ``row`` is the text of its first cells, joined by ``/``."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in section(place).splitlines()
        if line.startswith("|")
    ]
    words = row.split("/")
    header = lines[0]
    for cells in lines[2:]:
        if cells[: len(words)] == words:
            found = re.fullmatch(
                r"([\d.]+)(?: %)?(?: \(([\d.]+)–([\d.]+)\))?", cells[header.index(column)]
            )
            assert found, (place, row, column)
            return Figure(*(float(part) if part else None for part in found.groups()))  # type: ignore[arg-type]
    raise LookupError((place, row))


def value(place: str, row: str, column: str) -> Callable[[], list[float]]:
    return lambda: [figure(place, row, column).value]


def spread(place: str, row: str, column: str) -> Callable[[], list[float]]:
    """Median, minimum and maximum."""

    def read() -> list[float]:
        median, least, greatest = figure(place, row, column)
        assert least is not None
        assert greatest is not None
        return [median, least, greatest]

    return read


def ratio(place: str, above: str, below: str, column: str) -> Callable[[], list[float]]:
    def read() -> list[float]:
        return [figure(place, above, column).value / figure(place, below, column).value]

    return read


def times(place: str, ranks: int) -> Callable[[], list[float]]:
    """How much longer torch takes than minato, in order."""
    return ratio(place, f"{ranks}/torch", f"{ranks}/minato", "s")


def whole_run(place: str) -> Callable[[], list[float]]:
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


def both(*parts: Callable[[], list[float]]) -> Callable[[], list[float]]:
    return lambda: [number for part in parts for number in part()]


N = r"([\d.]+)"
X = rf"\*{{0,2}}{N} ×\*{{0,2}}"
RANGE = rf"{X} \({N}–{N}\)"
IN_WORDS = rf"{N} times as fast"
RANGE_IN_WORDS = rf"{IN_WORDS} \({N} to {N}\)"
STRAGGLERS = "engine.md#stragglers"
README, PERFORMANCE = "README.md", "docs/explanation/performance.md"

CLAIMS: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        README,
        rf"\[1 % of samples take 200 × longer\].*?\| {X} \| {X} \|",
        both(
            value(STRAGGLERS, "minato", "× torch"),
            ratio(STRAGGLERS, "torch, in_order=False", "minato", "s per epoch"),
        ),
    ),
    *(
        (
            README,
            rf"{row}\].*?\| {RANGE} \| {X} \|",
            both(
                spread(place, "minato", "× torch"),
                ratio(place, "torch, in_order=False", "minato", "s per epoch"),
            ),
        )
        for row, place in (
            ("of a stream", "streams.md#transforms"),
            ("stream of token ids", "streams.md#hugging-face-tokens"),
        )
    ),
    (
        README,
        rf"\[3-D segmentation .*?\| {RANGE} \| {X} \|",
        both(
            spread(SEGMENTATION, "minato", "× torch"),
            ratio(SEGMENTATION, "torch, in_order=False", "minato", "s"),
        ),
    ),
    (
        README,
        rf"\[Object detection .*?\| {RANGE} \| {X} \|",
        both(
            spread(DETECTION, "minato", "× torch"),
            ratio(DETECTION, "torch, in_order=False", "minato", "s"),
        ),
    ),
    (
        README,
        rf"\[JPEGs in memory.*?\| {RANGE} \| {X} \|",
        both(
            spread("jpegs.md#pil", "minato", "× torch"),
            ratio("jpegs.md#pil", "minato", "torch, in_order=False", "samples/s"),
        ),
    ),
    (
        README,
        rf"\[A folder of JPEGs.*?\| {X} \| – \|",
        ratio(FOLDER, "minato, PIL", "torch, PIL", "later epochs"),
    ),
    (
        README,
        rf"folder: {X}\. Whole runs of 4 epochs: tensors {X}, without workers {X}, rows {X}\.",
        both(
            ratio(FOLDER, "minato, PIL", "torch, PIL", "first epoch"),
            whole_run("engine.md#image"),
            whole_run("engine.md#image-inline"),
            whole_run("engine.md#tabular"),
        ),
    ),
    (
        README,
        rf"`fetch_concurrency=16`\].*?\| {X} \| {X} \|",
        both(
            value(ROUND_TRIP, "minato, 16 reads", "× torch"),
            ratio(ROUND_TRIP, "minato, 16 reads", "torch, in_order=False", "samples/s"),
        ),
    ),
    (
        README,
        rf"\[The same, one read per worker\].*?\| {X} \| {X} \|",
        both(
            value(ROUND_TRIP, "minato", "× torch"),
            ratio(ROUND_TRIP, "minato", "torch, in_order=False", "samples/s"),
        ),
    ),
    (README, rf"\[{N} everyday jobs.*?\| {X}; {N} of them lose, down to {X} \|", everyday),
    (
        README,
        rf"ready-made 600 kB tensors\].*?\| {RANGE} \|",
        spread("engine.md#image", "minato", "× torch"),
    ),
    (
        README,
        rf"rows of 16 numbers\].*?\| {RANGE} \|",
        spread("engine.md#tabular", "minato", "× torch"),
    ),
    (
        README,
        rf"without workers\].*?\| {RANGE} \|",
        spread("engine.md#image-inline", "minato", "× torch"),
    ),
    (
        PERFORMANCE,
        rf"takes 200 times longer \| {IN_WORDS}",
        value(STRAGGLERS, "minato", "× torch"),
    ),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS}; the loop waits {N} % of its time instead of {N} %",
        both(
            value("engine.md#balanced", "minato", "× torch"),
            value("engine.md#balanced", "minato", "waiting"),
            value("engine.md#balanced", "torch", "waiting"),
        ),
    ),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS}; {N} with `seed=`",
        both(
            value("engine.md#lognormal", "minato", "× torch"),
            value("engine.md#lognormal", "minato, seed=", "× torch"),
        ),
    ),
    (
        PERFORMANCE,
        rf"\| {RANGE_IN_WORDS}, {N} out of order \({N} to {N}\)",
        both(
            spread("jpegs.md#pil", "minato", "× torch"),
            spread("jpegs.md#pil", "minato, in_order=False", "× torch"),
        ),
    ),
    (
        PERFORMANCE,
        rf"OpenCV \| {RANGE_IN_WORDS}",
        spread("jpegs.md#simplejpeg", "minato", "× torch"),
    ),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS} in later epochs; the first epoch {N} times",
        both(
            ratio(FOLDER, "minato, PIL", "torch, PIL", "later epochs"),
            ratio(FOLDER, "minato, PIL", "torch, PIL", "first epoch"),
        ),
    ),
    *(
        (
            PERFORMANCE,
            rf"{row} \| {RANGE_IN_WORDS}; the whole run {N} times",
            both(spread(place, "minato", "× torch"), whole_run(place)),
        )
        for row, place in (
            ("of 600 kB", "engine.md#image"),
            ("16 numbers", "engine.md#tabular"),
            ("600 kB, without workers", "engine.md#image-inline"),
        )
    ),
    (
        PERFORMANCE,
        rf"one read per worker \| {IN_WORDS}",
        value(ROUND_TRIP, "minato", "× torch"),
    ),
    (
        PERFORMANCE,
        rf"`fetch_concurrency=16` \| {IN_WORDS}",
        value(ROUND_TRIP, "minato, 16 reads", "× torch"),
    ),
    (
        PERFORMANCE,
        rf"of 256, without workers \| {IN_WORDS}",
        value("engine.md#tabular-inline", "minato", "× torch"),
    ),
    (
        PERFORMANCE,
        rf"\| {IN_WORDS}: {N} µs per sample instead of {N}",
        both(
            value("engine.md#small-inline", "minato", "× torch"),
            value("engine.md#small-inline", "minato", "µs per sample"),
            value("engine.md#small-inline", "torch", "µs per sample"),
        ),
    ),
    (PERFORMANCE, rf"\[{N} to {N} times as long\]", scaling),
    (PERFORMANCE, rf"torch takes \[{N} times as\s+long\]", times(SPEEDY, 2)),
    (
        PERFORMANCE,
        rf"`in_order=False` it takes {N} times\s+as long",
        ratio(SPEEDY, "2/torch, in_order=False", "2/minato", "s"),
    ),
    (
        PERFORMANCE,
        rf"\* {N} times the median for volumes",
        value(VARIABILITY, "segmentation", "P90 / median"),
    ),
    (
        PERFORMANCE,
        rf"\* {N} times for photographs",
        value(VARIABILITY, "detection", "P90 / median"),
    ),
    (
        PERFORMANCE,
        rf"\[{N} % of them\]",
        value("papers.md#accuracy-figure-11", "minato, order='fast_first'", "early, %"),
    ),
    (PERFORMANCE, rf"\* {N} times for speech", value(VARIABILITY, "speech-3s", "P90 / median")),
    *(
        (
            "docs/how-to/photos.md",
            rf"^\| {re.escape(how)} \| {N} \| {N} \| {N} \|",
            both(
                *(
                    value("jpegs.md#images-per-second", row, loader)
                    for loader in ("torch", "torch, in_order=False", "minato")
                )
            ),
        )
        for how, row in {
            "PIL, float32": "PIL decodes and resizes, float32",
            "PIL with `draft`": "the same with Image.draft before decoding",
            "libjpeg-turbo and OpenCV, float32": "simplejpeg decodes, OpenCV resizes, float32",
            "the same, uint8": "the same as uint8, colors last",
        }.items()
    ),
    *(
        (
            "docs/how-to/workers.md",
            rf"^\| {re.escape(samples)} \| {N} \({N}–{N}\) \| {N} \({N}–{N}\) \|",
            both(
                spread(f"threads.md#{row}", "minato, threads", "efficiency"),
                spread(f"threads.md#{row}", "minato", "efficiency"),
            ),
        )
        for samples, row in {
            "Python code with objects of its own": "own",
            "the same, short epochs": "short",
            "Python code that uses strings and a dictionary of the dataset": "shared",
            "small calls of NumPy": "patches",
        }.items()
    ),
    (
        "docs/how-to/workers.md",
        rf"takes {N} s instead of {N} s\.",
        both(
            value("ablation.md#rare", "minato, in_order=False, auto", "s per epoch"),
            value("ablation.md#rare", "minato, in_order=False, without deferral", "s per epoch"),
        ),
    ),
    (
        "docs/how-to/remote-data.md",
        rf"\[{IN_WORDS}\]",
        ratio(
            "hedging.md#20-ms-one-request-in-a-hundred-travels-a-second-later",
            "minato, 32 reads, hedged",
            "minato, 32 reads",
            "samples/s",
        ),
    ),
    *(
        (
            "docs/how-to/sources.md",
            rf"^\| {trip} ms \| {N} \| {N} \| {N} \|",
            both(
                *(
                    value(f"cassandra.md#round-trip-{trip}-ms-{rows}-rows", row, "later epochs")
                    for row in ("torch, `__getitems__`", "minato", "minato, in_order=False")
                )
            ),
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
def test_a_figure_is_that_of_its_report(
    page: str, pattern: str, numbers: Callable[[], list[float]]
) -> None:
    [found] = re.finditer(pattern, text_of(page), re.MULTILINE)
    measured = numbers()
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
