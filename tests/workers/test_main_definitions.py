"""Lambdas, functions, classes and datasets of the main module reach workers that are not forked, however it runs."""

from __future__ import annotations

import multiprocessing
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from minato import DataLoader
from tests.datasets import Numbers
from tests.subprocesses import python

LIMIT_S = 200.0
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])

DEFINITIONS = """\
import functools
import torch
from torch.utils.data import Dataset
from minato import DataLoader

FACTOR = None

class Marker:
    def __repr__(self):
        return "M"

@functools.cache
def offset():
    return 1

def set_factor(number):
    global FACTOR
    FACTOR = 3

class Tripled(Dataset):
    kind = Marker

    class Nested(Marker):
        pass

    def __init__(self):
        self.triple = lambda x: FACTOR * x + offset()
        self.marker = Marker()

    def __len__(self):
        return 4

    @functools.cache
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
        collate_fn=lambda samples: (sum(samples) + offset() - 1, Tripled.kind(), Tripled.Nested()),
        transforms=[lambda x: x + 1], worker_init_fn=set_factor,
    )
    print(list(loader), end=" ")
"""
GOT = "[(7, M, M), (19, M, M)] [(-3, M, M), (-15, M, M)]"


def output(*arguments: object) -> str:
    ended = python(*arguments, timeout_s=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
@METHODS
def test_python_c(method: str) -> None:
    assert output("-c", DEFINITIONS + ITERATION.format(method=method)) == GOT


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize("guarded", ["use", "rank", "classes", "all"])
def test_a_script(tmp_path: Path, method: str, guarded: str) -> None:
    script = tmp_path / "script.py"
    use = ITERATION.format(method=method)
    functions, dataset, classes = DEFINITIONS.partition("class Tripled")
    above, under = {
        "use": (DEFINITIONS, use),
        "rank": (
            f"{DEFINITIONS}def work(rank):\n{textwrap.indent(use, '    ')}",
            "torch.multiprocessing.spawn(work)",
        ),
        "classes": (functions, dataset + classes + use),
        "all": ("", DEFINITIONS + use),
    }[guarded]
    guard = 'if __name__ == "__main__":\n'
    script.write_text(above + guard + textwrap.indent(under, "    "))
    assert output(str(script)) == GOT


@pytest.mark.slow
@METHODS
def test_ipython(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    code = DEFINITIONS + ITERATION.format(method=method)
    assert output("-m", "IPython", "--colors=NoColor", "-c", code) == GOT


@pytest.mark.slow
@METHODS
def test_a_jupyter_kernel(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    sources = DEFINITIONS, ITERATION.format(method=method)
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    limits = {"timeout": LIMIT_S, "startup_timeout": LIMIT_S}
    nbclient.NotebookClient(notebook, **limits, kernel_name="python3").execute()
    written = [each.text for each in notebook.cells[1].outputs if each.name == "stdout"]
    assert "".join(written).strip() == GOT


class Kept(Numbers):
    """What only a starting child can be given, beside what it cannot import."""

    def __init__(self, method: str) -> None:
        super().__init__(8)
        self.lock = multiprocessing.get_context(method).Lock()
        self.generator = torch.Generator().manual_seed(3)
        self.factor = 1
        self.double = lambda x: self.factor * x

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return self.double(index)


@METHODS
def test_what_the_definitions_refer_to_is_shared(method: str) -> None:
    met = torch.zeros(8, dtype=torch.int64).share_memory_()

    def halved(value: int) -> int:
        met[value // 2] += 1
        return value // 2

    def counted(value: int) -> int:
        met[value] += 1
        return value

    def prepare(number: int) -> None:
        dataset.factor = 2

    dataset = Kept(method)
    options: Any = {"multiprocessing_context": method, "transforms": [halved, counted]}
    loader = DataLoader(dataset, 4, num_workers=2, worker_init_fn=prepare, **options)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert met.tolist() == [2] * 8


@METHODS
def test_tensors_shared_by_a_definition_alone_are_no_copies(method: str) -> None:
    met = torch.zeros(8, dtype=torch.int64).share_memory_()

    def counted(value: int) -> int:
        met[value] += 1
        return value

    options: Any = {"multiprocessing_context": method, "transforms": [counted]}
    loader = DataLoader(Numbers(8), 4, num_workers=1, **options)
    assert len(list(loader)) == 2
    assert met.tolist() == [1] * 8


ADDED = 0


def set_added(number: int) -> None:
    global ADDED
    ADDED = 5


@METHODS
def test_a_lambda_sees_the_globals_of_the_module_that_its_worker_has(method: str) -> None:
    options: Any = {"multiprocessing_context": method, "transforms": [lambda x: x + ADDED]}
    loader = DataLoader(Numbers(2), 2, num_workers=1, worker_init_fn=set_added, **options)
    assert [batch.tolist() for batch in loader] == [[5, 6]]
