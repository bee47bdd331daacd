"""Everything in the documentation that can be run is run: programs, fragments of programs, and command lines.

A block of Python is either of these, as its opening fence says:

* ``python runnable``: a program. It runs by itself, and prints what a ``text output`` block behind it says.
  ``python runnable tensorboard`` needs that package, and is skipped without it.
* ``python``: a fragment. All fragments of a page are one program, with what ``stand_ins.py`` has in place of the
  reader's own dataset, model and servers, and with the imports of the page's programs. Each loader that a fragment
  leaves behind must deliver. ``python raises OSError`` is a fragment that ends with that exception.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import minato
from minato.cli.main import _parsed, _parser
from tests.project.pages import FENCE, PAGES, ROOT, Block, blocks, name_of
from tests.subprocesses import TIMEOUT_S, in_session

FEW_CORES = "ignore:This DataLoader will create"
"""torch's warning on a machine with one core."""
LANGUAGES = {"bash", "console", "diff", "dockerfile", "text", "text output", "yaml"}
"""What a block is if it is neither Python nor a directive."""

SUBSTITUTES = {"cuda": "meta", "/data/cache": "cache"}
"""What stands in a fragment, and what runs instead. A copy to ``meta`` goes through the same code and needs no GPU."""
NEEDS = {
    "bench/README.md": ("PIL",),
    "docs/how-to/caches.md": ("lmdb",),
    "docs/how-to/metrics.md": ("lightning", "transformers", "pandas"),
    "docs/how-to/object-stores.md": ("obstore", "weed"),
    "docs/how-to/photos.md": ("PIL",),
    "docs/how-to/several-machines.md": ("ray",),
    "docs/how-to/sources.md": ("cassandra", "redis"),
    "docs/how-to/trainers.md": ("accelerate", "lightning", "transformers"),
}
"""Packages and programs without which the fragments of a page are skipped. Some warn of themselves."""
RANKS = {"docs/how-to/ranks.md": 2, "docs/how-to/stream-ranks.md": 2}
"""Pages whose fragments run under torchrun, and how many processes of them."""


class Program(NamedTuple):
    """A block that is a program, and what the block after it says that it prints."""

    name: str
    source: str
    output: str | None
    needs: str


def programs() -> Iterator[Program]:
    for page in PAGES:
        followed = itertools.pairwise([*blocks(page), Block("", "", 0)])
        for number, (block, after) in enumerate(followed):
            if block.info.startswith("python runnable"):
                expected = after.source if after.info == "text output" else None
                needs = block.info.removeprefix("python runnable").strip()
                yield Program(f"{name_of(page)}-{number}", block.source, expected, needs)


def run(
    program: Path, folder: Path, *, strict: bool = True, ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program with the minato that is tested here, under torchrun for ``ranks``; end all that it has started."""
    paths = [str(Path(minato.__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, *(("-W", "error", "-W", FEW_CORES) if strict else ())]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with in_session([*command, str(program)], environment, folder) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("program", [*programs()], ids=lambda program: program.name)
def test_programs_with_workers_have_the_guard_that_workers_need(program: Program) -> None:
    if "num_workers=" in program.source:
        assert '\nif __name__ == "__main__":\n' in program.source


@pytest.mark.slow
@pytest.mark.parametrize("program", [*programs()], ids=lambda program: program.name)
def test_programs_run_and_print_what_the_page_says(program: Program, tmp_path: Path) -> None:
    if program.needs:
        pytest.importorskip(program.needs)
    file = tmp_path / "program.py"
    file.write_text(program.source, encoding="utf-8")
    done = run(file, tmp_path, strict=not program.needs)
    # Other packages warn of themselves, and log to stderr.
    assert (done.returncode, "" if program.needs else done.stderr) == (0, ""), done.stderr
    assert program.output in (None, done.stdout.replace(str(tmp_path), "/home/ann"))


def test_programs_were_found() -> None:
    pages = {program.name.rpartition("-")[0] for program in programs()}
    assert {"README.md", "docs/tutorial/first-loader.md", "docs/how-to/order.md"} <= pages


def fragments(page: Path) -> str:
    """The fragments of a page as one program, each line of which has the number that it has on the page."""
    lines = [""] * (page.read_text(encoding="utf-8").count("\n") + 1)
    lines[0] = "from pytest import raises; "
    lines[0] += "from tests.project.stand_ins import delivered, stand_ins; "
    lines[0] += f"globals().update(stand_ins({name_of(page)!r}))"
    for block in blocks(page):
        source = block.source.splitlines()
        kind, _, rest = block.info.partition(" ")
        if kind != "python" or rest.startswith("runnable "):
            continue
        assert block.line > 1, "the first line is the title"
        if rest == "runnable":
            nodes = ast.parse(block.source).body
            imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
            kept = {n for each in imports for n in range(each.lineno - 1, each.end_lineno or 0)}
            source = [line if number in kept else "" for number, line in enumerate(source)]
        elif rest:
            lines[block.line - 1] = f"with raises({rest.removeprefix('raises ')}):"
            source = [f"    {line}" for line in source]
        else:
            lines[block.line + len(source)] = "delivered(globals())"
        lines[block.line : block.line + len(source)] = source
    text = "\n".join(lines) + "\n"
    for written, used in SUBSTITUTES.items():
        text = text.replace(written, used)
    return text


WITH_FRAGMENTS = [
    page
    for page in PAGES
    if any(re.fullmatch(r"python( raises \w+)?", block.info) for block in blocks(page))
]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_FRAGMENTS, ids=name_of)
def test_fragments_run(page: Path, tmp_path: Path) -> None:
    name = name_of(page)
    beside_python = Path(sys.executable).parent
    for needed in NEEDS.get(name, ()):
        if not importlib.util.find_spec(needed) and not (beside_python / needed).exists():
            pytest.skip(f"{needed} is not installed")
    file = tmp_path / f"{page.stem.replace('-', '_')}.py"
    file.write_text(fragments(page), encoding="utf-8")
    done = run(file, tmp_path, strict=name not in NEEDS, ranks=RANKS.get(name, 0))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_fragments_were_found() -> None:
    assert len(WITH_FRAGMENTS) > 20
    assert {*NEEDS, *RANKS} <= {name_of(page) for page in WITH_FRAGMENTS}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    fences = re.findall(r"^\s*(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page)), "a block is indented, or not closed"
    for block in blocks(page):
        if block.info.startswith("python"):
            assert re.fullmatch(r"python( runnable( [\w.]+)?| raises \w+)?", block.info)
            compile(block.source, str(page), "exec")
        else:
            assert block.info in LANGUAGES or re.match(r"\{[\w-]+\}", block.info), block.info


@pytest.mark.slow
def test_tutorial_program(tmp_path: Path) -> None:
    program = ROOT / "docs" / "tutorial" / "first_loader.py"
    best_s = [math.inf] * 4  # a busy machine only adds to them
    for _ in range(3):
        done = run(program, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        lines = re.findall(r"^(\w.*\w) +([\d.]+) s, (\d+) samples$", done.stdout, re.MULTILINE)
        names, taken, samples = zip(*lines, strict=True)
        assert names == ("torch", "torch, as they come", "minato", "minato, as they come")
        assert set(samples) == {"1600"}
        best_s = [*map(min, best_s, map(float, taken))]
        torch_s, _, in_order_s, as_they_come_s = best_s
        if 2 * max(in_order_s, as_they_come_s) < torch_s:
            return
    pytest.fail(done.stdout)


# ---- command lines --------------------------------------------------------------------------

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
COMMANDS = ("minato", "make", "python", "pip")


def command_lines(page: Path) -> Iterator[tuple[str, bool]]:
    """Each command line of a page, and whether it is complete, which one within a sentence need not be."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.info in ("bash", "console"):
            for line in block.source.splitlines():
                yield line.removeprefix("$ "), True
    text = FENCE.sub("", text)
    for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
        yield line, True
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^    .*$", "", text, flags=re.M)):
        yield " ".join(span.split()), False


def words_of(line: str) -> list[str]:
    """The words of a command line from the first one of ``COMMANDS`` on; none if it has other commands."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # text that is no command line
        return []
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    if words[:1] == ["torchrun"]:
        words = words[words.index("minato") :] if "minato" in words else []
    return words if words[:1] and words[0] in COMMANDS else []


CHECKED = [
    pytest.param(words, complete, id=f"{name_of(page)}: {line}")
    for page in PAGES
    for line, complete in dict.fromkeys(command_lines(page))
    if len(words := words_of(line)) > 1
]


@pytest.mark.parametrize(("words", "complete"), CHECKED)
def test_command_lines(
    words: list[str],
    complete: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What they name is there: commands, options, targets, modules, extras."""
    command, *rest = words
    if command == "minato":
        check_minato(rest, complete)
    elif command == "make":
        for word in rest:
            variable, given, _ = word.partition("=")
            assert re.search(rf"\b{variable}\b", MAKEFILE) if given else word in TARGETS
    elif command == "pip":
        for word in rest:
            extras = re.fullmatch(r"minatoloader\[(.*)\]", word)
            known = PROJECT["project"]["optional-dependencies"]
            assert not extras or set(extras[1].split(",")) <= set(known)
        if "--group" in rest:
            assert rest[rest.index("--group") + 1] in PROJECT["dependency-groups"]
    elif rest[:1] == ["-m"] and rest[1:] and rest[1] == rest[1].lower():
        assert importlib.util.find_spec(rest[1]), "there is no such module"
        options = [word.partition("=")[0] for word in rest[2:] if word.startswith("-")]
        if options and rest[1].startswith(("bench.", "tests.")):
            module = importlib.import_module(rest[1])
            monkeypatch.setattr(sys, "argv", [rest[1], "--help"])
            with pytest.raises(SystemExit):
                module.main()
            known = set(re.findall(r"--?[a-z][\w-]*", capsys.readouterr().out))
            assert set(options) <= known


def check_minato(words: list[str], complete: bool) -> None:
    if complete or words[0].startswith("-"):
        ends = [SystemExit] if words == ["--version"] else []
        with contextlib.suppress(*ends):
            _parsed(words)
        return
    parser = _parser()
    [commands] = (each for each in parser._actions if isinstance(each.choices, dict))
    assert isinstance(commands.choices, dict)
    known = commands.choices[words[0]]._option_string_actions
    assert {word for word in words[1:] if word.startswith("--")} <= set(known) or words[0] == "run"


def test_command_lines_were_found() -> None:
    found = {(param.values[0][0], param.values[1]) for param in CHECKED}
    assert {*((command, False) for command in COMMANDS), ("minato", True), ("pip", True)} <= found
