"""What is shipped: the sdist, the compiled wheel built from it, and the pure wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IMPORT = """
import json, minato
from minato._distribution import commit
print(json.dumps([minato.__file__, minato.implementation()[0], minato.__version__, commit()]))
"""


def run(*arguments: object, cwd: Path, **variables: str) -> str:
    """What Python writes with these arguments."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MINATO_")}
    command, together = [sys.executable, *map(str, arguments)], subprocess.STDOUT
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, stdout=PIPE, stderr=together, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build_wheel(source: Path, to: Path, **variables: str) -> Path:
    options = "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", to
    pip = "-m", "pip", "--no-cache-dir", "wheel"
    run(*pip, *options, source, cwd=to.parent, **variables)
    [wheel] = to.glob("*.whl")
    return wheel


def imported(site: Path, **variables: str) -> list[str]:
    """Where the package in a folder lies, its core, its version and its commit."""
    told = run("-W", "error", "-c", IMPORT, cwd=site.parent, PYTHONPATH=str(site), **variables)
    file, *about = json.loads(told)
    assert Path(file).is_relative_to(site)
    return about


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of the checkout that has been compiled before."""
    work = tmp_path_factory.mktemp("sdist")
    checkout = work / "checkout"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    (checkout / "minato/_core/_left_over_c.c").write_text("int left_over;\n")
    # As in an sdist; there is no git.
    (checkout / "minato/_commit.txt").write_text("0123456789ab\n")
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run("-c", script, work, cwd=checkout)
    [archive] = work.glob("minatoloader-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "cc"
    compiler.write_text('#!/bin/bash\nexec gcc "${@/#-O3/-O0}"\n')  # optimizing takes the most time
    compiler.chmod(0o700)
    return build_wheel(sdist, folder / "dist", CC=str(compiler))


def test_sdist_has_every_source_and_nothing_generated(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    suffixes = {".py", ".pyx", ".pxd", ".pyi", ".h"}
    wanted = [path for path in (ROOT / "minato").rglob("*") if path.suffix in suffixes]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= names
    assert {"minato/py.typed", "setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    others = (*(ROOT / "tests").rglob("*.py"), *pages)
    assert {str(path.relative_to(ROOT)) for path in others} <= names
    generated = {name for name in names if name.endswith((".c", ".so", ".pyc", ".html"))}
    assert generated == {"tests/sanitizers/ledger_threads.c"}


def test_wheel_holds_what_runs_and_no_more(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "minato").rglob("*.py*")}
    assert {name for name in sources if name.endswith((".py", ".pyi", ".typed"))} <= names
    compiled = {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == {path.stem for path in (ROOT / "minato/_core").glob("_*_c.pyx")}
    assert [name for name in names if name.endswith((".pyx", ".pxd", ".h", ".c"))] == []
    assert sum(each.file_size for each in archive.infolist() if each.filename.endswith(".so")) < 2e6
    folders = {name.partition("/")[0].partition("-")[0] for name in names}
    assert folders == {"minato", "minatoloader"}


def test_wheel_runs_compiled_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    kind, version, commit = imported(site)
    assert (kind, commit) == ("compiled", "0123456789ab")
    assert wheel.name.startswith(f"minatoloader-{version}-cp")


def test_pure_wheel(sdist: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sdist, tmp_path / "dist", MINATO_NO_EXTENSIONS="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    assert [name for name in archive.namelist() if name.endswith(".so")] == []
    site = tmp_path / "site"
    archive.extractall(site)
    assert imported(site, MINATO_NO_EXTENSIONS="1")[0] == "pure"
