"""What tests of shared pools share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from minato.shared_pool.rendezvous import Rendezvous


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process is the second of two ranks."""
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**places, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    """The place of a job in a directory of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Rendezvous(0, "a job")
