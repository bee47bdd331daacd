"""What a release consists of agrees: versions, the list of Pythons, the workflows and the names of the packages."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from minato import __version__, _distribution

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``setup.py`` defines in a workflow of the project."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    return runpy.run_path("setup.py")


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [__version__]


def test_every_list_of_pythons_is_the_same() -> None:
    classifiers = "\n".join(PROJECT["classifiers"])
    supported = re.findall(
        r"^Programming Language :: Python :: 3\.(.+)$", classifiers, re.MULTILINE
    )
    assert PROJECT["requires-python"] == f">=3.{supported[0]}"
    supported += ["13t", "14t"]  # without a GIL
    assert PYPROJECT["tool"]["cibuildwheel"]["build"].split() == [
        f"cp3{each}-*" for each in supported
    ]
    [matrix] = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    assert matrix.replace('"', "").split(", ") == [f"3.{each}" for each in supported]


def test_extras_are_for_users_and_all_has_each() -> None:
    extras = PROJECT["optional-dependencies"]
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
    actions = re.findall(r"uses: (?!\./)(.*)", text)
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+"  # a tag can be moved
    assert [action for action in actions if not re.fullmatch(pinned, action)] == []


def test_a_release_needs_the_tests_and_the_test_index() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    needs = dict(re.findall(r"^  ([\w-]+):\n    needs: (.*)$", text, re.MULTILINE))
    assert needs["test-index"] == "[tests, wheels]"
    assert (needs["try"], needs["publish"], needs["docs"]) == ("test-index", "try", "publish")


def test_pre_commit_has_the_versions_of_make_lint() -> None:
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    used = re.findall(r"additional_dependencies: \[(.*)\]", hooks)
    assert used
    assert set(used) <= pins


def test_what_is_pinned_runs_on_every_python_3_11() -> None:
    """Debian 12 has 3.11.2."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    needs = {
        each.name.lower(): each.metadata["Requires-Python"] for each in metadata.distributions()
    }
    needed = {name: needs.get(name.lower()) for name in pins}
    assert len([*filter(None, needed.values())]) > 100
    assert {
        name: need
        for name, need in needed.items()
        if need and not SpecifierSet(need).contains("3.11.0")
    } == {}


def test_the_commit_of_a_checkout_and_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "minato"
    package.mkdir()
    monkeypatch.setattr(_distribution, "_package", str(package))
    assert _distribution.commit() == "unknown"

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert _distribution.commit() == head.stdout[:12]

    (package / "_commit.txt").write_text("0123456789ab\n")
    assert _distribution.commit() == "0123456789ab"


def test_the_page_for_the_package_index_has_whole_links(setup: dict[str, Any]) -> None:
    urls = setup["home"]()
    assert urls["Source"] == "https://example.org/owner/name"
    page = setup["readme"](urls["Source"])
    assert re.findall(r"\]\((?!https://|#).*?\)", page) == []
    assert "](https://example.org/owner/name/blob/main/CHANGELOG.md)" in page
    images = re.findall(r'(?:src|srcset)="(.*?)"', page)
    assert len(images) == 2 * page.count("<picture>") > 0
    assert all(image.startswith("https://example.org/owner/name/raw/main/") for image in images)


def test_messages_name_pages_by_the_address_of_the_documentation(
    setup: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = re.compile(r"\bdocumentation\([\"'](.*?)[\"']\)")
    sources = (path.read_text() for path in (ROOT / "minato").rglob("*.py"))
    pages = [page for text in sources for page in called.findall(text)]
    assert pages
    for page in pages:
        assert (ROOT / f"docs/{page}.md").is_file(), page
    installed = Message()
    monkeypatch.setattr(metadata, "metadata", lambda name: installed)
    assert _distribution.documentation(pages[0]) == f"docs/{pages[0]}.md in minato's repository"
    for name, address in setup["home"]().items():
        installed["Project-URL"] = f"{name}, {address}"
    assert _distribution.documentation(pages[0]) == f"https://owner.github.io/name/{pages[0]}.html"


def test_both_commands_are_the_same() -> None:
    assert PROJECT["scripts"] == dict.fromkeys(("minato", "minatoloader"), "minato.cli:start")
    assert metadata.metadata("minatoloader")["Name"] == "minatoloader"
