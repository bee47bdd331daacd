"""Stores that all tests of sources share; each is filled, and its server started, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.sources import servers
from tests.sources.kinds import KINDS, Kind


@pytest.fixture(scope="session")
def kind_named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Kind]]:
    made: dict[str, Kind | servers.Missing | ImportError] = {}
    with ExitStack() as stack:

        def get(name: str) -> Kind:
            if name not in made:
                try:
                    made[name] = KINDS[name](tmp_path_factory.mktemp(name), stack)
                except (servers.Missing, ImportError) as error:
                    made[name] = error
            found = made[name]
            if not isinstance(found, Kind):
                pytest.skip(f"{name}: {found}")
            return found

        yield get


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest, kind_named: Callable[[str], Kind]) -> Kind:
    return kind_named(request.param)
