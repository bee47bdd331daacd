"""What tests of shared pools share."""

from __future__ import annotations

import pytest


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is the second of two ranks."""
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**places, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch
