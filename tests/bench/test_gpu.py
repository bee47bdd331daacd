"""The benchmark on a GPU: without one it says so and trains on the processor."""

from __future__ import annotations

import math

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu.watch import overlap_of
from bench.gpu.work import ON_CPU


def event(cat: str, name: str, start: float, end: float) -> dict[str, object]:
    return {"cat": cat, "name": name, "ts": start, "dur": end - start}


def test_overlap_is_the_share_of_copying_beside_kernels():
    copy = "Memcpy HtoD (Pinned -> Device)"
    kernels = [event("kernel", "one", 0, 10), event("kernel", "two", 8, 12)]
    assert overlap_of([*kernels, event("gpu_memcpy", copy, 10, 14)]) == pytest.approx(0.5)
    assert overlap_of([*kernels, event("gpu_memcpy", copy, 2, 9)]) == pytest.approx(1)
    assert overlap_of([*kernels, event("gpu_memcpy", copy, 20, 30), {"name": "mark"}]) == 0
    assert math.isnan(overlap_of([*kernels, event("gpu_memcpy", "Memcpy DtoH", 0, 9)]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "ON_CPU", (ON_CPU[0]._replace(shape=(1, 8, 8, 8)),))
    assert gpu.main(["--short", "--workers", "1", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "There was no GPU" in page
    rows = [line for line in page.splitlines() if line.startswith("| 3D U-Net |")]
    assert [row.split("|")[2].strip() for row in rows] == [each.name for each in gpu.CONTENDERS]
    assert all(float(row.split("|")[3]) > 0 for row in rows)
    assert rows[0] in capsys.readouterr().out
