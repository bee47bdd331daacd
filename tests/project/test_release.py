"""What a release consists of agrees: versions, the list of Pythons, the workflows and the names of the packages."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from minato import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def project() -> dict[str, Any]:
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]


def test_every_list_of_pythons_is_the_same() -> None:
    data = project()
    prefix = "Programming Language :: Python :: 3."
    supported = [
        name.removeprefix(prefix)
        for name in data["project"]["classifiers"]
        if name.startswith(prefix)
    ]
    assert data["project"]["requires-python"] == f">=3.{supported[0]}"
    supported.append(f"{supported[-1]}t")  # without a GIL
    assert data["tool"]["cibuildwheel"]["build"].split() == [f"cp3{each}-*" for each in supported]
    [matrix] = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    assert matrix.replace('"', "").split(", ") == [f"3.{each}" for each in supported]


def test_extras_are_for_users_and_all_has_each() -> None:
    extras = project()["project"]["optional-dependencies"]
    assert {"test", "lint", "docs", "bench", "demo"}.isdisjoint(extras)
    reached, pending = set(), ["all"]
    while pending:
        name = pending.pop()
        reached.add(name)
        for requirement in extras[name]:
            if match := re.fullmatch(r"minatoloader\[(.*)\]", requirement):
                pending += match[1].split(",")
    assert reached == set(extras)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_is_there(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"(?:run: |uses: \./)(\.(?:ci|github)/[\w./]+)", text)
    assert [name for name in used if not (ROOT / name).is_file()] == []
    assert "\npermissions:\n  contents: read\n" in text


def test_both_commands_are_the_same() -> None:
    scripts = project()["project"]["scripts"]
    assert scripts == dict.fromkeys(("minato", "minatoloader"), "minato.cli:start")
    assert metadata.metadata("minatoloader")["Name"] == "minatoloader"
