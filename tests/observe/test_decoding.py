"""Whether a report recognises photographs that PIL decodes."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Subset

from minato import DataLoader
from minato.observe.verdict import uses_pil
from tests.datasets import Numbers

pytest.importorskip("PIL")

SOURCE = """\
{imports}

class Pictures:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

def resized(picture):
    return picture

class More(Pictures):
    __module__ = "builtins"
"""
COUNT = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that imports what is given."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(imports: str) -> Any:
        name = f"pictures_{next(COUNT)}"
        (tmp_path / f"{name}.py").write_text(SOURCE.format(imports=imports))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return make


@pytest.mark.parametrize(
    "imports",
    ["from PIL import Image", "import PIL.Image", "from PIL.Image import open", "import torch", ""],
)
def test_what_the_module_imports_decides(module, imports: str):
    made = module(imports)
    for parts in ([made.Pictures()], [Numbers(3), made.resized], [made.More()]):
        assert uses_pil(parts) == ("PIL" in imports)


def test_wrapped_datasets_count(module):
    pictures = module("from PIL import Image").Pictures()
    assert uses_pil([Subset(pictures, [0])])
    assert uses_pil([ConcatDataset([Numbers(2), Subset(pictures, [1])])])
    assert not uses_pil([ConcatDataset([Numbers(2), Numbers(3)])])


def test_a_dataset_that_wraps_itself_has_an_end():
    dataset = Numbers(3)
    dataset.dataset = dataset  # type: ignore[attr-defined]
    assert not uses_pil([dataset])


def test_the_report_says_so(module):
    loader = DataLoader(module("from PIL import Image").Pictures(), transforms=[abs])
    list(loader)
    assert loader.report().setup.uses_pil
