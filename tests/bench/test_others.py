"""The benchmarks by others run, check what comes, and write their tables."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.selection import mostly_slow

pytest.importorskip("psutil")

from bench import artifact, dlio, spdl
from bench.harness import environments
from bench.workloads import payloads

pytestmark = [
    pytest.mark.large,
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def test_a_missing_checkout_of_the_artifact_is_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        artifact.main(["--short", "--artifact", "nowhere"])
    assert "give a checkout of https://github.com/Rahm-no/MinatoLoader" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("epochs", "lost", "repeated", "same_order"),
    [
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
    for index, path in enumerate(artifact.store(tmp_path, 2)):
        assert np.unique(np.load(artifact.label_of(path))).tolist() == [0, index + 1]
        assert min(np.load(path).shape[1:]) >= min(artifact.PATCH)


def test_a_call_returns_its_result_or_says_why_not() -> None:
    found = environments.call("bench.harness.environments:versions", ["torch", "no-such-package"])
    assert found == {"torch": importlib.metadata.version("torch")}
    with pytest.raises(environments.TrialFailedError, match="No module named 'bench.nothing'"):
        environments.call("bench.nothing:main")


def test_a_run_of_dlio_with_too_few_steps_has_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = dlio.sized(dlio.WORKLOADS["unet3d"], short=True)
    whole = workload.files * workload.per_file // workload.batch_size
    steps = {"files": [], "torch": [whole, whole], "minato-patch": [whole, whole - 1]}

    def call(target: str, name: str, row: str, *given: Any, **how: Any) -> dict[str, Any]:
        assert (target, row) == ("bench.dlio:trial", "unet3d")
        return {"used": [90.0, 80.0], "whole": [70.0, 72.0], "steps": steps[name]}

    monkeypatch.setattr(dlio, "interpreter", lambda *given: Path(sys.executable))
    monkeypatch.setattr(dlio, "call", call)
    loaders = "torch,minato-patch"
    arguments = ["--short", "--rows", "unet3d", "--loaders", loaders, "--out", str(tmp_path)]
    assert not dlio.main(arguments)
    page = (tmp_path / "dlio.md").read_text()
    assert "| 85.0; 71.0 | failed |" in page
    assert f"minato.patch(), prefetch_size=2: steps [{whole}, {whole - 1}]" in page


@mostly_slow("name", ["minato", "torch", "minato-share"])
def test_start_up_is_measured(name: str) -> None:
    reading = spdl.startup(name, "fork", 1, 1, 1)
    assert reading["cold_s"] > 0
    assert len(reading["next_s"]) == 1
    assert (reading["share_s"] > 0) == (name == "minato-share")


@pytest.mark.parametrize("name", ["torch", "minato"])
def test_hand_off_and_transport_are_measured(name: str) -> None:
    assert len(spdl.handoff(name, 0, 30)["us"]) == 30
    for kind in ("bytes", "numpy", "torch"):
        assert len(spdl.transport(name, kind, 1, 3, 2)["rates"]) == 2


def test_wrong_payloads_and_items_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    short = payloads.Payloads("numpy", 1 << 20, 2)
    monkeypatch.setattr(spdl, "_transport_source", lambda name, dataset: short)
    with pytest.raises(ValueError, match="2 payloads of 3"):
        spdl.transport("torch", "numpy", 1, 3, 1)
    with pytest.raises(ValueError, match="a payload of 262144 elements"):
        spdl.transport("torch", "numpy", 2, 2, 1)
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

    def call(target: str, name: str, *setting: Any, **how: Any) -> dict[str, Any]:
        if name == "spdl-pool":
            raise environments.TrialFailedError("it is full")
        return readings[target.removeprefix("bench.spdl:")]

    monkeypatch.setattr(spdl, "interpreter", lambda *given: Path(sys.executable))
    monkeypatch.setattr(spdl, "call", call)
    assert not spdl.main(["--short", "--out", str(tmp_path)])
    page = (tmp_path / "spdl.md").read_text()
    assert "| spawn | 1 | 1 | 2.00, 1.00 + 0.50 | 2.00, 1.00 + 0.50 |" in page
    assert "| 2 | 2, 3 |" in page
    assert "| 100, 0.25 s, 300 MB | failed |" in page
