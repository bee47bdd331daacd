"""Each case goes through torch's loader and through minato's, and everything that a program can see is compared."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import _utils as torch_utils
from torch.utils.data import dataloader as torch_loader

# Failures in the shared helpers show both sides.
pytest.register_assert_rewrite("tests.parity.harness")


@pytest.fixture
def torch_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks only every five seconds whether its workers live, and whether they have ended."""
    waits: Any = torch_loader._MultiProcessingDataLoaderIter._try_get_data
    assert waits.__defaults__ == (torch_utils.MP_STATUS_CHECK_INTERVAL,)
    monkeypatch.setattr(waits, "__defaults__", (0.2,))
    monkeypatch.setattr(torch_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
