"""``minato run`` and the variables for jobs that cannot be edited: the script is itself, the reports are complete."""

from __future__ import annotations

import json
import os
import py_compile
import re
import signal
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.selection import mostly_slow
from tests.subprocesses import python

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader
from beside import Numbers

class Mine(torch.utils.data.Dataset):  # workers that are spawned find it in __mp_main__
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Numbers.factor * index

def main():
    loader = DataLoader(Mine(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1])
    print(type(loader).__module__, loader.compat, __name__, sys.argv[1:])
    print([batch.tolist() for batch in loader])

if __name__ == "__main__":
    main()
"""
SEEN = "minato.loader {} __main__ ['{}', '--lr', '3', '-h']\n[[0, 2, 4, 6], [8, 10, 12, 14]]\n"
PLAIN = """
import torch
from {place} import DataLoader
for name in {names}:
    list(DataLoader(list(range(8)), batch_size=4))
"""
RUN = ("-m", "minato", "run")


def plain(names: object, place: str = "minato") -> str:
    return PLAIN.format(place=place, names=names)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith("MINATO_"):
            monkeypatch.delenv(name)


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(*arguments, cwd=folder, **variables)


def job(folder: Path, source: str, *arguments: str, **variables: str) -> Any:
    """Run a script as it is, or as the arguments say."""
    (folder / "train.py").write_text(source)
    return run(folder, *(arguments or ["train.py"]), **variables)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_script_runs_unchanged_and_is_reported(tmp_path: Path, method: str) -> None:
    own, compat = (["--compat"], "torch") if method == "fork" else ([], None)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/train.py").write_text(TRAIN)
    (tmp_path / "job/beside.py").write_text("class Numbers:\n    factor = 2\n")
    done = run(tmp_path, *RUN, *own, "job/train.py", method, "--lr", "3", "-h")
    assert (done.returncode, done.stdout) == (0, SEEN.format(compat, method))
    last = done.stderr.rpartition("\nminato: ")[2]
    assert last.startswith("loader 'Mine', 1 epoch\nToo few batches for a verdict: 2.\n")
    assert last.count("\n") < 24


TWO = """
import time
from minato import DataLoader, Observe

def slow(sample):
    time.sleep(0.002)
    return sample

for name, size in (("val", 8), ("train", 80)):
    loader = DataLoader(range(size), 4, transforms=[slow] * 2, observe=Observe(name=name))
    list(loader)
    list(loader)
"""


@pytest.mark.slow
def test_the_loader_that_was_waited_for_most_is_last(tmp_path: Path) -> None:
    done = job(tmp_path, TWO, *RUN, "train.py", MINATO_REPORT="report.html")
    lines = done.stderr.splitlines()
    heads = [line for line in lines if line.startswith("minato: loader ")]
    assert [head.split("'")[1] for head in heads] == ["val", "train"]
    assert "2 epochs, waiting " in heads[0]
    assert lines[-12:].index(heads[-1]) >= 0
    page = (tmp_path / "report.html").read_text()
    assert page.index("<h2>train</h2>") < page.index("<h2>val</h2>")
    full = run(tmp_path, *RUN, "--full", "train.py").stderr
    assert full.count("Stages\n") == 2
    assert "\n  waiting " in full.rpartition("\n\n")[2]


def test_a_script_from_a_pipe_and_without_stderr_has_its_output_alone(tmp_path: Path) -> None:
    source = "import sys; sys.stderr = None; print(__name__)"
    done = python(*RUN, "/dev/stdin", cwd=tmp_path, given=source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__\n", "")


@mostly_slow(
    ("source", "status"),
    [
        ("def fail():\n    1 / 0\nfail()", 1),
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('no data')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("import sys; sys.exit()", 0),
        ("x = (", 1),
        ("import sys; sys.excepthook = print; 1 / 0", 1),
    ],
)
def test_the_exit_status_and_the_last_words_are_those_of_the_script(
    tmp_path: Path, source: str, status: int
) -> None:
    theirs = job(tmp_path, source)
    ours = job(tmp_path, source, *RUN, "train.py")
    assert ours.returncode == theirs.returncode == status
    nothing = "" if status else "\nminato: no loader of minato ran in this process\n"
    assert ours.stderr == theirs.stderr + nothing


@pytest.mark.slow
def test_a_script_imports_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("key = 1")
    start = "import sys; from minato.cli import start; sys.exit(start())"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/minato").write_text(start)
    done = job(tmp_path, "import secrets; print(secrets.key)", "bin/minato", "run", "train.py")
    assert (done.returncode, done.stdout) == (0, "1\n")


@pytest.mark.slow
@mostly_slow("rank", [0, 1])
def test_reports_are_written_for_a_job_that_cannot_be_edited(tmp_path: Path, rank: int) -> None:
    source = plain(["a", "b"])
    file = tmp_path / ("report.rank1.json" if rank else "report.json")
    for _ in range(2):  # the second run replaces the first one's
        done = job(tmp_path, source, MINATO_REPORT="report.json", LOCAL_RANK=str(rank))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        reports = json.loads(file.read_text())["minato_reports"]
        assert [each["run"]["throughput"]["samples"] for each in reports] == [8, 8]


MANY = """
from minato import DataLoader, Observe
train = DataLoader(range(8), 4, observe=Observe(name="train"))
for epoch in range(33):
    list(train)
    list(DataLoader(range(8), 4))
"""


@pytest.mark.slow
def test_a_report_in_text_has_the_loaders_that_were_used_last(tmp_path: Path) -> None:
    done = job(tmp_path, MANY, MINATO_REPORT="report.txt")
    text = (tmp_path / "report.txt").read_text()
    assert (done.returncode, text.count("minato: loader ")) == (0, 32)
    assert text.startswith("minato: not shown: 2 earlier loaders\n")
    assert "minato: loader 'train', 33 epochs\n" in text


@pytest.mark.slow
def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"mine": 1}')
    done = job(tmp_path, plain([1, 2]), MINATO_REPORT="data.json", MINATO_TRACE="data.json")
    assert done.returncode == 0
    assert (tmp_path / "data.json").read_text() == '{"mine": 1}'
    assert "MinatoWarning: the report cannot be written: MINATO_REPORT='data.json'" in done.stderr
    assert "MinatoWarning: a loader is not traced: MINATO_TRACE='data.json'" in done.stderr


@pytest.mark.slow
def test_each_loader_is_traced_in_a_file_of_its_own(tmp_path: Path) -> None:
    source = plain([1, 2], "torch.utils.data")
    done = job(tmp_path, source, *RUN, "train.py", MINATO_TRACE="run.json")
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["run-2.json", "run.json"]
    for path in tmp_path.glob("*.json"):
        assert '"training loop"' in path.read_text()


SEVERAL = """
import multiprocessing, os, sys
from minato import DataLoader

def read(size):
    list(DataLoader(range(size), 4))

if __name__ == "__main__":
    before = DataLoader(range(8), 4)
    for begin in (lambda: list(before), lambda: read(16)):
        if os.fork() == 0:
            begin()
            sys.exit()
        os.wait()
    process = multiprocessing.get_context("spawn").Process(target=read, args=(24,))
    process.start()
    process.join()
    list(before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_of_a_program_writes_a_report_of_its_own(tmp_path: Path, rank: int) -> None:
    done = job(tmp_path, SEVERAL, MINATO_REPORT="report.json", LOCAL_RANK=str(rank))
    assert (done.returncode, done.stderr) == (0, "")
    own = ".rank1" if rank else ""
    read = {}
    for path in tmp_path.glob("report*.json"):
        (report,) = json.loads(path.read_text())["minato_reports"]
        read[path.name] = report["run"]["throughput"]["samples"]
    assert read.pop(f"report{own}.json") == 8
    assert sorted(read.values()) == [8, 16, 24]
    assert all(re.fullmatch(rf"report{own}\.pid\d+\.json", name) for name in read)


@pytest.mark.slow
def test_nothing_is_kept_without_the_variables(tmp_path: Path) -> None:
    source = f"{plain([1])}import sys\nprint('minato.observe.report' in sys.modules)"
    done = job(tmp_path, source)
    assert (done.returncode, done.stdout) == (0, "False\n")


# ---- as python runs it -----------------------------------------------------------------------

PROBE = '''"""A document."""
import atexit, multiprocessing, os, pickle, sys, threading, traceback

class Model:
    pass

def save(where):
    try:
        print(where, len(pickle.dumps(Model())) > 0, sys.modules["__main__"].Model is Model)
    except Exception as error:
        print(where, error)

def child(model):
    print("child", type(model) is Model, __name__, flush=True)

def after_the_end():
    threading.main_thread().join()
    save("in a thread")

if __name__ == "__main__":
    own = {name: value for name, value in globals().items() if name[:2] == "__"}
    own.pop("__builtins__")
    print(sorted(own), __name__, __doc__, __package__, getattr(__spec__, "name", None))
    print(type(__loader__).__name__.replace("Sourceless", "Source"), __file__, __cached__)
    print(sys.argv, sys.path[0], sys._getframe().f_code.co_filename)
    print(sys.modules["__main__"].__dict__ is globals(), sys.flags.optimize, sys.flags.dev_mode)
    os.chdir("/")
    print(os.path.exists(__file__) or ".zip" in __file__)
    atexit.register(save, "at exit")
    threading.Thread(target=after_the_end).start()
    if "spawn" in sys.argv:
        process = multiprocessing.get_context("spawn").Process(target=child, args=(Model(),))
        process.start()
        process.join()
        print(process.exitcode)
    print(traceback.extract_stack()[-1].name, end=" end\\n", flush=True)
'''


def layout(folder: Path) -> None:
    """The probe as a script, a module, a package, a directory, a zip file and a compiled file."""
    (folder / "package").mkdir()
    (folder / "directory").mkdir()
    (folder / "package/__init__.py").touch()
    for name in ("probe.py", "package/__main__.py", "package/module.py", "directory/__main__.py"):
        (folder / name).write_text(PROBE)
    (folder / "linked").mkdir()
    (folder / "linked/link.py").symlink_to(folder / "probe.py")
    with zipfile.ZipFile(folder / "file.zip", "w") as file:
        file.writestr("__main__.py", PROBE)
    py_compile.compile(str(folder / "probe.py"), cfile=str(folder / "compiled.pyc"))


@mostly_slow(
    "command",
    [
        "probe.py spawn -- --lr 1 -h -m",
        "-m package spawn x",
        "-X dev -m package.module -- -m",
        "linked/../linked/link.py x",
        "directory spawn x",
        "file.zip x",
        "compiled.pyc x",
        "-P directory x",
    ],
)
def test_a_script_sees_what_python_shows_it(tmp_path: Path, command: str) -> None:
    layout(tmp_path)
    words = command.split()
    own = [words.pop(0) for _ in range({"-O": 1, "-P": 1, "-X": 2}.get(words[0], 0))]
    theirs = run(tmp_path, *own, *words)
    ours = run(tmp_path, *own, *RUN, *words)
    assert theirs.stdout.count("\n") >= 8
    assert ours.stdout == theirs.stdout
    assert (ours.returncode, theirs.returncode) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("-m package.nothing", 1, "there is no module 'package.nothing' that can be run"),
        ("-m .package", 1, "there is no module '.package' that can be run"),
        ("-m math", 1, "there is no module 'math' that can be run"),
        ("empty", 1, "'empty' has no __main__"),
        ("nothing.zip", 2, "there is no file 'nothing.zip': check the path\n"),
        ("", 2, "the following arguments are required: SCRIPT"),
    ],
)
def test_what_cannot_be_run(tmp_path: Path, command: str, status: int, words: str) -> None:
    layout(tmp_path)
    (tmp_path / "empty").mkdir()
    done = run(tmp_path, *RUN, *command.split())
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"minato: {words}")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_package_that_lacks_another_says_so(tmp_path: Path) -> None:
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking/__init__.py").write_text("import lack")
    done = run(tmp_path, *RUN, "-mlacking.module", "-m", "other")
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'lack'\n")


# ---- what goes wrong before a script does -----------------------------------------------------

UNGUARDED = """
import sys
from torch.utils.data import Dataset
from minato import DataLoader

class Mine(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

for batch in DataLoader(Mine(), 4, num_workers=2, multiprocessing_context=sys.argv[1]):
    print(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_forgotten_guard_is_told_in_a_sentence(tmp_path: Path, method: str) -> None:
    done = job(tmp_path, UNGUARDED, "train.py", method)
    assert (done.returncode, done.stdout) == (1, "")
    first, *lines = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert lines[-4].startswith("RuntimeError: DataLoader worker (pid(s) ")
    assert f"{tmp_path / 'train.py'} starts workers when it is imported" in lines[-3]
    assert 'if __name__ == "__main__":' in lines[-2]
    assert "main()" in lines[-1]
    assert len(lines) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "command"),
    [
        ("ascii", "profile loaders.py:make"),
        ("latin-1", "profile loaders.py:make"),
        ("ascii", "doctor"),
        ("ascii", "demo"),
    ],
)
def test_output_in_any_encoding(tmp_path: Path, encoding: str, command: str) -> None:
    (tmp_path / "loaders.py").write_text(
        "import minato\nnamed = minato.Observe(name='µ \\udcff')\n"
        "def make():\n    return minato.DataLoader(list(range(64)), 4, observe=named)\n"
    )
    done = run(tmp_path, "-m", "minato", *command.split(), PYTHONIOENCODING=encoding)
    assert done.returncode in ((0, 1) if command == "doctor" else (0,)), done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("arguments", [["doctor"], ["run", "train.py"]])
def test_the_other_projects_files_are_told_without_a_traceback(
    tmp_path: Path, arguments: list[str]
) -> None:
    package = tmp_path / "minato"
    package.mkdir()
    for path in (Path(__file__).parents[2] / "minato").iterdir():
        if path.name != "__init__.py":
            (package / path.name).symlink_to(path)
    (package / "minato.py").write_text("class Minato:\n    pass\n")
    (package / "__init__.py").write_text("from minato.minato import Minato\n")
    start = "import sys; sys.path.insert(0, ''); from minato.cli import start; sys.exit(start())"
    done = run(tmp_path, "-c", start, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"minato: {package} holds the files of two projects")
    assert done.stderr.count("\n") == 1
