"""``minato.patch()``: who finds which class, when, and what is back afterwards."""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import dataloader

import minato
from minato._support import loader_class
from tests.datasets import Numbers
from tests.threads import run_together

module_level = torch.utils.data.DataLoader
"""A name of torch's class in a module that was imported before."""


@pytest.fixture(autouse=True)
def torchs_own_afterwards() -> Iterator[None]:
    assert torch.utils.data.DataLoader is loader_class.TorchDataLoader
    yield
    for name in (torch.utils.data.DataLoader, dataloader.DataLoader, module_level):
        assert name is loader_class.TorchDataLoader
    assert not isinstance(loader_class.TorchDataLoader(Numbers(1)), minato.DataLoader)


def test_patch_and_unpatch() -> None:
    assert type(torch.utils.data.DataLoader(Numbers(4))) is loader_class.TorchDataLoader
    minato.patch()
    try:
        for name in (torch.utils.data.DataLoader, dataloader.DataLoader, module_level):
            assert name is minato.DataLoader
        loader = module_level(Numbers(6), 2, num_workers=1)
        assert type(iter(loader)).__name__ == "BatchIterator"
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    finally:
        minato.unpatch()


def test_as_a_block_that_raises() -> None:
    with pytest.raises(KeyError), minato.patch():
        assert torch.utils.data.DataLoader is minato.DataLoader
        raise KeyError


def test_nested() -> None:
    minato.unpatch()  # alone, it does nothing
    with minato.patch():
        with minato.patch():
            pass
        assert torch.utils.data.DataLoader is minato.DataLoader
        minato.patch()
        minato.unpatch()
        assert module_level is minato.DataLoader


class Drawing(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_random_numbers_may_be_torchs() -> None:
    def drawn() -> list[list[float]]:
        torch.manual_seed(1)
        loader = torch.utils.data.DataLoader(Drawing(6), 2, True, num_workers=2)
        return [batch.flatten().tolist() for batch in loader]

    torchs = drawn()
    with minato.patch(compat="torch"):
        assert drawn() == torchs
        with minato.patch():
            assert drawn() != torchs
        loader = minato.DataLoader.from_torch(torch.utils.data.DataLoader(Numbers(4)))
    assert (loader.compat, minato.DataLoader(Numbers(4)).compat) == ("torch", None)
    with pytest.raises(ValueError, match="compat='pytorch'"):
        minato.patch(compat="pytorch")  # type: ignore[arg-type]


class Touchy:
    """No module, although it is among these."""

    def __getattribute__(self, name: str) -> object:
        if name == "__class__":
            return Touchy
        raise AssertionError(f"asked for {name}")


def test_names_in_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of our class stay, and those that were bound to something else in between."""
    ours, theirs = types.ModuleType("ours"), types.ModuleType("theirs")
    ours.DataLoader, theirs.DataLoader = minato.DataLoader, loader_class.TorchDataLoader
    for name, module in {"ours": ours, "theirs": theirs, "touchy": Touchy()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with minato.patch():
        assert theirs.DataLoader is minato.DataLoader
        theirs.DataLoader = "something else"
    assert ours.DataLoader is minato.DataLoader
    assert theirs.DataLoader == "something else"


def test_a_module_imported_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch.utils.data import DataLoader\nclass Theirs(DataLoader): pass\n"
    (tmp_path / "imported_late.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with minato.patch():
        late = importlib.import_module("imported_late")
        assert late.DataLoader is minato.DataLoader
        assert isinstance(late.Theirs(Numbers(2)), minato.DataLoader)
    monkeypatch.delitem(sys.modules, "imported_late")
    assert late.DataLoader is minato.DataLoader  # as documented


class Earlier(loader_class.TorchDataLoader[int]):
    """A subclass from before."""


def test_torchs_loaders_still_count_as_loaders() -> None:
    before = loader_class.TorchDataLoader(Numbers(2))
    assert not isinstance(before, minato.DataLoader)  # which a cache might remember
    assert not issubclass(Earlier, minato.DataLoader)
    with minato.patch():
        assert isinstance(before, torch.utils.data.DataLoader)
        assert isinstance(Earlier(Numbers(2)), torch.utils.data.DataLoader)
        assert issubclass(Earlier, torch.utils.data.DataLoader)
        assert isinstance(minato.DataLoader(Numbers(2)), torch.utils.data.DataLoader)
        assert not isinstance(Numbers(2), torch.utils.data.DataLoader)
        assert list(before) == [0, 1]

        class Later(torch.utils.data.DataLoader):
            pass

        assert not isinstance(before, Later)
        assert isinstance(Later(Numbers(2)), Later)
    assert isinstance(Later(Numbers(2)), minato.DataLoader)
    assert not isinstance(before, minato.DataLoader)


class ByName(module_level[int]):
    """A subclass from before, whose methods name their base."""

    def __init__(self, size: int) -> None:
        module_level.__init__(self, Numbers(size))

    def __setattr__(self, name: str, value: object) -> None:
        module_level.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[int]:
        return module_level.__iter__(self)

    def __len__(self) -> int:
        return module_level.__len__(self)

    def _get_iterator(self) -> dataloader._BaseDataLoaderIter:
        return module_level._get_iterator(self)


def test_subclasses_from_before_that_name_their_base() -> None:
    before = ByName(2)
    with minato.patch():
        for loader in (before, ByName(2)):
            assert (len(loader), list(loader), minato.is_active(loader)) == (2, [0, 1], False)


def test_torchs_loaders_can_be_pickled() -> None:
    before = loader_class.TorchDataLoader(Numbers(2))
    outside = pickle.dumps(before)
    with minato.patch():
        within = pickle.dumps(before)
        assert type(pickle.loads(within)) is loader_class.TorchDataLoader
    assert type(pickle.loads(within)) is loader_class.TorchDataLoader
    assert pickle.dumps(before) == outside
    assert b"minato" not in outside


def test_replacing_the_name_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "DataLoader", minato.DataLoader)
    monkeypatch.setattr(dataloader, "DataLoader", minato.DataLoader)
    loader = torch.utils.data.DataLoader(Numbers(4), 2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_abstract_base_classes_mix_with_our_class() -> None:
    class Named(ABC):
        @abstractmethod
        def name(self) -> str: ...

    class Mixed(minato.DataLoader, Named):
        def name(self) -> str:
            return "mixed"

    assert Mixed(Numbers(2)).name() == "mixed"
    assert isinstance(Mixed(Numbers(2)), loader_class.TorchDataLoader)


def test_from_many_threads() -> None:
    def patch_often() -> None:
        for _ in range(20):
            with minato.patch():
                seen.add(torch.utils.data.DataLoader)

    seen: set[type] = set()
    run_together(*[patch_often] * 4, limit_s=60)
    assert seen == {minato.DataLoader}
