"""Lambdas, functions, classes and datasets of the main module reach workers that are not forked, however it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT_S = 90.0
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])

DEFINITIONS = """\
import torch
from torch.utils.data import Dataset
from minato import DataLoader

class Marker:
    pass

def offset():
    return 1

class Tripled(Dataset):
    def __init__(self):
        self.triple = lambda x: 3 * x + offset()
        self.marker = Marker()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert isinstance(self.marker, Marker)
        return self.triple(index)

def local():
    class Local(Tripled):
        def __getitem__(self, index):
            return -super().__getitem__(index)

    return Local()

"""
ITERATION = """\
for dataset in (Tripled(), local()):
    loader = DataLoader(
        dataset, batch_size=2, num_workers=1, multiprocessing_context="{method}",
        collate_fn=lambda samples: sum(samples) + offset() - 1, transforms=[lambda x: x + 1],
    )
    print(list(loader), end=" ")
"""
GOT = "[7, 19] [-3, -15]"


def output(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=dict(os.environ),
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@METHODS
def test_python_c(method: str) -> None:
    assert output("-c", DEFINITIONS + ITERATION.format(method=method)) == GOT


@METHODS
@pytest.mark.parametrize("guarded", ["all", "use"])
def test_a_script(tmp_path: Path, method: str, guarded: str) -> None:
    script = tmp_path / "script.py"
    above, under = "", DEFINITIONS + ITERATION.format(method=method)
    if guarded == "use":
        above, under = DEFINITIONS, ITERATION.format(method=method)
    guard = 'if __name__ == "__main__":\n'
    script.write_text(above + guard + textwrap.indent(under, "    "))
    assert output(str(script)) == GOT


@METHODS
def test_ipython(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    code = DEFINITIONS + ITERATION.format(method=method)
    assert output("-m", "IPython", "--colors=NoColor", "-c", code) == GOT


@METHODS
def test_a_jupyter_kernel(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (DEFINITIONS, ITERATION.format(method=method))
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3").execute()
    written = [each.text for each in notebook.cells[1].outputs if each.name == "stdout"]
    assert "".join(written).strip() == GOT
