"""What the tests of the core share: both halves of the module that a test file names in ``TWIN``."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


def load(name: str, half: str) -> ModuleType:
    return importlib.import_module(f"minato._core._{name}_{'py' if half == 'pure' else 'c'}")


@pytest.fixture(scope="module", params=["pure", "compiled"])
def twin(request: pytest.FixtureRequest) -> ModuleType:
    """First the pure half of the module, then the compiled one."""
    return load(request.module.TWIN, request.param)


@pytest.fixture(scope="module", params=["pure-compiled"])
def twins(request: pytest.FixtureRequest) -> tuple[ModuleType, ModuleType]:
    """The pure half and the compiled one, to be compared."""
    return load(request.module.TWIN, "pure"), load(request.module.TWIN, "compiled")
