"""The benchmark on a GPU: without one it says so and trains on the processor."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bench.gpu import __main__ as gpu
from bench.gpu.watch import copies_among
from bench.workloads import segmentation
from bench.workloads.packages import SCANS


def event(cat: str, name: str, start: float, end: float, nbytes: int = 0) -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"bytes": nbytes}}


def test_copies_have_a_rate_and_run_beside_kernels_or_not():
    copy = "Memcpy HtoD (Pinned -> Device)"
    kernels = [event("kernel", "one", 0, 10), event("kernel", "two", 8, 12)]
    copies = copies_among([*kernels, event("gpu_memcpy", copy, 10, 14, 8000)])
    assert copies == (pytest.approx(0.5), pytest.approx(2e9))
    assert copies_among([*kernels, event("gpu_memcpy", copy, 2, 9)]).beside == pytest.approx(1)
    apart = copies_among([*kernels, event("gpu_memcpy", copy, 20, 30), {"name": "mark"}])
    assert apart == (0, 0)
    none = copies_among([*kernels, event("gpu_memcpy", "Memcpy DtoH", 0, 9)])
    assert all(map(math.isnan, none))


def made_up(folder: Path) -> Path:
    """A volume and a photograph, where ``make data`` has real ones."""
    rng = np.random.default_rng(0)
    volume = segmentation.Volume(
        rng.random((40, 40, 40), np.float32), rng.integers(0, 2, (40,) * 3), (1.6, 1.2, 1.2)
    )
    segmentation.store([("made-up", volume)], folder / SCANS, (32, 32, 32))
    (folder / "photographs").mkdir()
    picture = Image.fromarray(rng.integers(0, 255, (90, 130, 3), np.uint8))
    picture.save(folder / "photographs" / "made-up.png")
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("real", [True, False])
def test_without_a_gpu_it_says_so(real, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "CONTENDERS", gpu.CONTENDERS[2 * real :: 2])
    data = made_up(tmp_path) if real else tmp_path
    options = ["--short", "--workers", "1", "--data", str(data), "--out", str(tmp_path)]
    assert gpu.main(options) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "There was no GPU" in page
    assert ("The papers' chains" in page, "random arrays" in page) == (real, not real)
    printed = capsys.readouterr().out
    for network in ("3D U-Net", "ResNet"):
        rows = [line for line in page.splitlines() if line.startswith(f"| {network} |")]
        assert [row.split("|")[2].strip() for row in rows] == [each.name for each in gpu.CONTENDERS]
        assert all(float(row.split("|")[3]) > 0 for row in rows)
        assert rows[0] in printed
