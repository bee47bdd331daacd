"""The command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import minato
from minato.cli.main import main
from tests.subprocesses import TIMEOUT_S, environment, in_session

LOADERS = """
import time
import minato
import torch
from minato import DataLoader

class Sleepy(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(48))

def theirs():
    return torch.utils.data.DataLoader(Sleepy(), 4, shuffle=True, num_workers=1)

def mine():
    return DataLoader(Sleepy(), 4, num_workers=1, order="batch")

def transformed():
    return DataLoader(Sleepy(), 4, transforms=[float])

def measured():
    return DataLoader(Sleepy(), minato.CostBatches(4, lambda sample: 1), collate_fn=list)

def stream():
    return torch.utils.data.DataLoader(Stream(), 4, drop_last=True)

def single():
    return torch.utils.data.DataLoader(Sleepy(), None)

def drawn():
    return torch.utils.data.DataLoader(Sleepy(), batch_sampler=[[0, 1], [2]] * 12)

def once():
    return torch.utils.data.DataLoader(Sleepy(), batch_sampler=iter([[0, 1], [2]] * 6))

def nothing():
    return 3

def broken():
    raise RuntimeError("no such disk")

def pipe():
    pipes = torch.utils.data.datapipes.iter
    return torch.utils.data.DataLoader(pipes.IterableWrapper(range(48)), 4)

class Ends(Sleepy):
    def __getitem__(self, index):
        raise SystemExit(5)

def ends_in_a_sample():
    return DataLoader(Ends(), 4)

def ends():
    raise SystemExit("usage: train.py --data FOLDER")

class Wordy(Sleepy):
    def __getitem__(self, index):
        raise ValueError("first line\\n  second\\n}")

def wordy():
    return DataLoader(Wordy(), 4, num_workers=1)

def wordy_inline():
    return DataLoader(Wordy(), 4)

def bad_samples():
    return DataLoader([1, 2, "a", None], 4)

class Mute(Exception):
    def __str__(self):
        raise ZeroDivisionError

def mute():
    raise Mute

constant = 5
"""


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name = re.sub(r"\W", "_", f"loaders_{tmp_path.name}")
    file = tmp_path / f"{name}.py"
    file.write_text(LOADERS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["minato"])
    monkeypatch.chdir(tmp_path)
    return file


@pytest.mark.parametrize("name", ["theirs", "mine", "stream", "single", "drawn"])
def test_any_loader(name: str, loaders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", f"{loaders}:{name}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    batches = {"single": 48, "drawn": 24}.get(name, 12)
    assert told["run"]["throughput"]["batches"] == batches
    assert told["origin"]["script"] == f"{loaders}:{name}"
    assert set(told["comparison_s"]) == {"minato", "torch"}
    assert min(told["comparison_s"].values()) > 0


def test_in_words(loaders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batches", "9", "--step-ms", "1"]
    assert main(["profile", f"{loaders.stem}:theirs", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Time for the same batches, steps included, with\n  minato")
    lines = out.rpartition("\n\n")[2].splitlines()
    assert any(word in lines[0] for word in ("bottleneck", "workers", "prefetch", "samples"))
    assert any(line.startswith("  waiting ") for line in lines)
    assert out.count("\n") < 24
    assert main(["profile", f"{loaders.stem}:theirs", *arguments, "--full"]) == 0
    told = capsys.readouterr().out
    for words in ("Waiting\n", "Stages\n", "Slowest samples\n"):
        assert words in told


@pytest.mark.parametrize(("load", "warns"), [(0.4, False), (1e6, True)])
def test_a_busy_machine_is_named(
    load: float, warns: bool, loaders: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (load, 0.0, 0.0))
    assert main(["profile", f"{loaders}:mine", "--batches", "2"]) == 0
    assert ("compare again" in capsys.readouterr().out) == warns


@pytest.mark.parametrize("name", ["measured", "transformed", "once"])
def test_what_torch_cannot_repeat_is_not_compared(
    name: str, loaders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{loaders}:{name}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["comparison_s"]) == {"minato"}
    assert told["run"]["throughput"]["batches"] == 12
    stages = [stage["name"] for stage in told["run"]["stages"]]
    assert ("float" in stages) == (name == "transformed")


@pytest.mark.parametrize(
    ("factory", "code", "words"),
    [
        ("{file}:nothing", 2, "returned a int"),
        ("{file}:broken", 2, "RuntimeError: no such disk"),
        ("{file}:mute", 2, "mute raised Mute: <Mute whose str() raised ZeroDivisionError>"),
        ("{file}:ends", 2, "SystemExit: usage: train.py --data FOLDER"),
        ("{file}:ends_in_a_sample", 1, "the loader raised SystemExit: 5"),
        ("{file}:pipe", 2, "a loader for which torch's engine loads"),
        ("{file}:missing", 2, "has no function 'missing'"),
        ("{file}:constant", 2, "has no function 'constant'"),
        (
            "{dir}/train.v2.py:mine",
            2,
            "has a dot in its name, and workers cannot import it: rename",
        ),
        ("{dir}/lacking.py:mine", 2, "raised ModuleNotFoundError: No module named 'lack'\n"),
        ("./loaders:mine", 2, "'./loaders' is no name of a module: write package.module, or"),
        ("no_such.module:mine", 2, "No module named 'no_such'; check its name and the directory"),
        ("{file}", 2, "write module:function"),
        ("no_such_module:make", 2, "No module named 'no_such_module'"),
        ("no/such/file.py:make", 2, "there is no file"),
        ("{file}:bad_samples", 1, "the loader raised TypeError"),
        ("{file}:wordy", 1, "the loader raised ValueError: first line;"),
        ("{file}:wordy_inline", 1, "the loader raised ValueError: first line;"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    factory: str, code: int, words: str, loaders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loaders.parent / "train.v2.py").write_text("")
    (loaders.parent / "lacking.py").write_text("import lack")
    assert main(["profile", factory.format(file=loaders, dir=loaders.parent)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("minato: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--batches", "0"], ["--step-ms", "-1"]])
def test_arguments_that_are_not_possible(
    arguments: list[str], loaders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{loaders}:mine", *arguments]) == 2
    err = capsys.readouterr().err
    assert arguments[0] in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["profile"], ["profile", "a:b", "--batches", "x"], ["x"]]
)
def test_unknown_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(f"minato {minato.__version__} (commit ")
    assert "core: " in told
    assert "torch " in told


def test_nobody_reads(loaders: Path) -> None:
    command = [sys.executable, "-m", "minato", "profile", f"{loaders}:mine", "--batches", "2"]
    with in_session(command, environment()) as process:
        process.stdout.close()  # type: ignore[union-attr]
        err = process.stderr.read()  # type: ignore[union-attr]
        assert process.wait(TIMEOUT_S) == 1
    assert "Traceback" not in err


def test_a_file_with_the_name_of_a_module_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["minato"])
    (tmp_path / "json.py").write_text("def f():\n    return 3\n")
    before = sys.path.copy()
    assert main(["profile", f"{tmp_path / 'json.py'}:f"]) == 2
    assert sys.path == before
    told = capsys.readouterr().err
    assert "json.py' has the name of another module, 'json'" in told
    assert "rename it" in told
