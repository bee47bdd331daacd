"""Each case goes through torch's loader and through minato's, and everything that a program can see is compared."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import _utils as torch_utils
from torch.utils.data import dataloader as torch_loader

from tests.datasets import wait_until


@pytest.fixture(autouse=True, scope="module")
def workers_are_forked() -> Iterator[None]:
    """From Python 3.14 on they are not, and torch cannot send its workers what many cases are made of."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def torch_looks_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch looks only every five seconds whether its workers live, and whether they have ended.

    Those that take longer to leave it ends, and does not wait for their end.
    """
    waits: Any = torch_loader._MultiProcessingDataLoaderIter._try_get_data
    assert waits.__defaults__ == (torch_utils.MP_STATUS_CHECK_INTERVAL,)
    monkeypatch.setattr(waits, "__defaults__", (0.2,))
    monkeypatch.setattr(torch_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    if multiprocessing.active_children():
        gc.collect()
        wait_until(lambda: not multiprocessing.active_children())
