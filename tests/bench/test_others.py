"""The benchmarks by others run, check what comes, and write their tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.selection import mostly_slow

pytest.importorskip("psutil")

from bench import artifact, dlio, others, spdl
from bench.harness import environments
from bench.harness.suite import Spread
from bench.workloads import payloads

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.mark.parametrize("given", [["--artifact", "nowhere"], []])
def test_a_missing_checkout_of_the_artifact_is_named(given: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        artifact.main(["--short", *given])
    said = capsys.readouterr().err
    assert "give a checkout of https://github.com/Rahm-no/MinatoLoader" in said or not given
    assert "--artifact" in said


@pytest.mark.parametrize(
    ("epochs", "lost", "repeated", "same_order"),
    [
        ([[0, 1, 2, 3], [3, 2, 1, 0]], 0, 0, False),
        ([[0, 1, 2, 4], [4, 2, 1, 0]], 0, 0, False),  # an incomplete batch of 5 samples is left out
        ([[0, 1, 1, 1], [0, 1, 2, 3]], 2, 2, False),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 0, 0, True),
        ([[0, 1, -1, 3], [0, 1, 2, 3]], 1, 0, False),
    ],
)
def test_faults_of_a_loader_are_counted(
    epochs: list[list[int]], lost: int, repeated: int, same_order: bool
) -> None:
    assert artifact.Faults.of(epochs, 5) == (lost, repeated, same_order)


def test_volumes_carry_their_index(tmp_path: Path) -> None:
    paths = artifact.store(tmp_path, 3)
    for index, path in enumerate(paths):
        assert np.unique(np.load(artifact.label_of(path))).tolist() == [0, index + 1]
        assert min(np.load(path).shape[1:]) >= min(artifact.PATCH)


def test_a_program_that_fails_keeps_its_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    with pytest.raises(environments.TrialFailedError, match="No module named bench.nothing"):
        environments.run_in(python, "bench.nothing", [], 60)
    assert environments.versions(("torch", "no-such-package")) == {"torch": torch.__version__}


def test_settings_of_dlio_name_the_files_and_the_prefetch(tmp_path: Path) -> None:
    for workload in dlio.WORKLOADS.values():
        settings = workload.settings(tmp_path, 2, 8)
        assert settings["reader"]["prefetch_size"] == 8
        assert settings["dataset"]["data_folder"] == str(tmp_path / "data")
        assert workload.files * workload.per_file >= 3 * workload.batch_size
        short = dlio.sized(workload, short=True)
        assert short.files * short.per_file >= 3 * short.batch_size
        assert short.files * short.per_file <= workload.files * workload.per_file


def test_a_run_of_dlio_with_too_few_steps_has_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dlio.sized(dlio.WORKLOADS["cosmoflow"], short=True).files
    steps = {"files": [], "torch": [whole, whole], "minato-patch": [whole, whole - 1]}

    def run_in(python: Path, module: str, arguments: list[str], limit_s: float) -> list[Any]:
        assert arguments[2] == "cosmoflow"
        return [{"used": [90.0, 80.0], "rate": 1.0, "steps": steps[arguments[1]], "versions": {}}]

    monkeypatch.setattr(dlio, "interpreter", lambda *given: Path(sys.executable))
    monkeypatch.setattr(dlio, "run_in", run_in)
    loaders = "torch,minato-patch"
    arguments = ["--short", "--rows", "cosmoflow", "--loaders", loaders, "--out", str(tmp_path)]
    assert dlio.main(arguments) == 0
    page = (tmp_path / "dlio.md").read_text()
    assert "| 85.0 | failed |" in page
    assert f"minato.patch(), prefetch_size=2: steps [{whole}, {whole - 1}]" in page


@pytest.mark.parametrize("name", mostly_slow(["minato", "torch", "minato-share"]))
def test_start_up_is_measured(name: str) -> None:
    reading = spdl.startup(name, "fork", 1, 1, 1)
    assert reading["cold_s"] > 0
    assert len(reading["next_s"]) == 1
    assert (reading["share_s"] > 0) == (name == "minato-share")


@pytest.mark.parametrize("name", ["torch", "minato", "minato-threads"])
def test_hand_offs_are_measured(name: str) -> None:
    assert len(spdl.handoff(name, 0, 30)["us"]) == 30


@pytest.mark.parametrize("kind", ["bytes", "numpy", "torch"])
@pytest.mark.parametrize("name", ["torch", "minato"])
def test_transport_is_measured(name: str, kind: str) -> None:
    reading = spdl.transport(name, kind, 1, 3, 2)
    assert len(reading["rates"]) == 2
    assert reading["peak_mb"] > 50


def test_payloads_that_are_lost_or_cut_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    short = payloads.Payloads("numpy", 1 << 20, 2)
    monkeypatch.setattr(spdl, "_transport_source", lambda name, dataset: short)
    with pytest.raises(ValueError, match="2 payloads of 3"):
        spdl.transport("torch", "numpy", 1, 3, 1)
    with pytest.raises(ValueError, match="a payload of 262144 elements"):
        spdl.transport("torch", "numpy", 2, 2, 1)


def test_items_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spdl, "_handoff_source", lambda name, count: iter([0, 2, 1]))
    with pytest.raises(ValueError, match="torch delivered 2 as item 1"):
        spdl.handoff("torch", 0, 1)


def test_a_loader_of_spdls_rows_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: dict[str, Any] = {
        "startup": {"cold_s": 2.0, "next_s": [1.0], "share_s": 0.5},
        "handoff": {"us": [1.0, 2.0, 3.0]},
        "transport": {"rates": [100.0], "cpu_s": 0.25, "peak_mb": 300.0},
    }

    def run_in(python: Path, module: str, arguments: list[str], limit_s: float) -> list[Any]:
        if '"spdl-pool"' in arguments[2]:
            raise environments.TrialFailedError("it is full")
        return [{**readings[arguments[1]], "versions": {"spdl": "0.8.0"}}]

    monkeypatch.setattr(spdl, "interpreter", lambda *given: Path(sys.executable))
    monkeypatch.setattr(spdl, "run_in", run_in)
    assert spdl.main(["--short", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "spdl.md").read_text()
    assert "| spawn | 1 MiB | 1 | 2.00, 1.00 | 2.00, 1.00 |" in page
    assert "| 2 ms | 2, 3 |" in page
    assert "| 100, 0.25 s, 300 MB | failed |" in page


@pytest.mark.parametrize("name", others.CHARTS)
def test_a_chart_is_drawn_from_the_page(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert others.main(["--rows", name, "--out", str(tmp_path)]) == 0
    assert 5_000 < (tmp_path / f"others-{name}.png").stat().st_size < 60_000
    assert f"(others-{name}.png)" in others.PAGE.read_text()


def test_cells_of_tables_become_bars() -> None:
    page = """
after
| row | `torch` | x |
| --- | --- | --- |
| a, b | 1.0 (0.5–2.0), 3 s |  |
| c |  | 4 |
"""
    panel = others.Panel("", ("after",), shown=lambda figure: 10 - figure)
    assert others.cells(page, panel) == {
        "a\nb": {"torch": Spread(8.0, 9.0, 9.5), "x": None},
        "c": {"torch": None, "x": Spread(6.0, 6.0, 6.0)},
    }
    with pytest.raises(ValueError, match="no table after 'nowhere'"):
        others.cells(page, others.Panel("", ("nowhere",)))
