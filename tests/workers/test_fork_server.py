"""Workers of the start method ``forkserver`` come from minato's own fork server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from minato import DataLoader, MinatoWarning
from minato.workers.fork_server import server_pid
from tests.selection import mostly_slow

LIMIT_S = 60.0


class Processes(Dataset[Any]):
    """Each sample is the pid of its worker, the parent's, and whether torch was there before the worker began."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        time.sleep(0.005)
        return index, os.getpid(), os.getppid()


def load(**arguments: Any) -> list[tuple[int, int, int]]:
    loader = DataLoader(
        Processes(), batch_size=4, num_workers=2, multiprocessing_context="forkserver", **arguments
    )
    return [tuple(sample) for batch in loader for sample in torch.stack(batch, 1).tolist()]


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )


SCRIPT = """\
import os
import sys
import torch
from minato import DataLoader
{top}
print("imported as", __name__)

class Pids(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, os.getppid()

if __name__ == "__main__":
    for _ in range(2):
        loader = DataLoader(Pids(), batch_size=2, num_workers=2, multiprocessing_context="forkserver")
        got = list(loader)
        assert sorted(i for batch in got for i in batch[0].tolist()) == list(range(24))
    print("parents", sorted({{pid for batch in got for pid in batch[1].tolist()}}), flush=True)
"""


def write(path: Path, top: str = "") -> Path:
    script = path / "script.py"
    script.write_text(SCRIPT.format(top=top))
    return script


def test_all_workers_of_all_loaders_come_from_one_server() -> None:
    first, second = load(), load()
    assert [index for index, *_ in first] == [index for index, *_ in second] == list(range(24))
    assert {parent for *_, parent in first + second} == {server_pid()}
    assert not {pid for _, pid, _ in first} & {pid for _, pid, _ in second}


def test_the_main_module_is_imported_once(tmp_path: Path) -> None:
    ended = run(write(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("imported as __mp_main__") == 1
    assert "fork server" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top", "cause"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "threads"),
        ("if __name__ != '__main__' and any('multiprocessing.forkserver' in word for word in sys.orig_argv) and not"
         " torch.utils.data.get_worker_info() and os.getppid() == int(os.environ['PARENT']): raise KeyError('no key')",
         "KeyError: 'no key'"),
    ],
)  # fmt: skip
def test_a_main_module_that_cannot_be_imported_there_is_left_to_the_workers(
    tmp_path: Path, top: str, cause: str
) -> None:
    top = f"if __name__ == '__main__':\n    os.environ['PARENT'] = str(os.getpid())\n{top}"
    ended = run(write(tmp_path, top))
    assert ended.returncode == 0, ended.stderr
    assert cause in ended.stderr
    assert "imported as __mp_main__" in ended.stdout
    assert "parents [" in ended.stdout


@pytest.mark.slow
def test_a_script_without_a_guard_is_refused_and_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from minato import DataLoader\n"
        "next(iter(DataLoader([1, 2], num_workers=1, multiprocessing_context='forkserver')))\n"
    )
    ended = run(script)
    assert ended.returncode == 1
    assert "__name__ == '__main__'" in ended.stderr
    assert f"the main module ({script}) starts workers where it is imported" in ended.stderr


def test_the_variable_leaves_multiprocessings_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINATO_FORK_SERVER", "0")
    assert server_pid() not in {parent for *_, parent in load()}


def test_a_killed_server_is_started_again() -> None:
    load()
    killed = server_pid()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert [index for index, *_ in load()] == list(range(24))
    assert server_pid() not in (None, killed)


@pytest.mark.slow
def test_a_forked_child_of_the_program_starts_its_own() -> None:
    load()
    pid = os.fork()
    if pid == 0:
        complete = [index for index, *_ in load()] == list(range(24))
        os._exit(0 if complete else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_server_and_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = write(tmp_path)
    text = script.read_text().replace(
        "        got = list(loader)",
        "        iterator = iter(loader); next(iterator); print('ready', flush=True); input()",
    )
    script.write_text(text)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        while "ready" not in (line := program.stdout.readline()):
            assert line, "the program has ended"
        descendants = psutil.Process(program.pid).children(recursive=True)
        assert len(descendants) >= 3
        program.kill()
    _, alive = psutil.wait_procs(descendants, timeout=LIMIT_S / 2)
    assert not alive


BUILDING = """\
import os
import signal
import sys
import torch
from minato import DataLoader
from minato.workers.fork_server import server_pid

class Environment(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getppid(), int(os.environ.get("SET_LATER", 0)), int("SET_BEFORE" in os.environ)

def build():
    os.environ["SET_BEFORE"] = "1"
    loader = DataLoader(
        Environment(), num_workers=1, multiprocessing_context="forkserver"
    )
    print("server" if server_pid() else "none", flush=True)
    return loader

"""
ITERATING = """\
    early = server_pid()
    os.environ["SET_LATER"] = "3"
    del os.environ["SET_BEFORE"]
    {during}
    assert {{tuple(map(int, batch)) for batch in loader}} == {{(server_pid(), 3, 0)}}
    assert server_pid() == early or early is None
    print("complete")
"""


@pytest.mark.parametrize(
    ("building", "early"),
    mostly_slow(
        [
            (
                'if __name__ == "__main__":\n    # A comment.\n    loader = (\n        build()\n)\n',
                True,
            ),
            (
                'loader = build() if __name__ == "__main__" else None\nif __name__ == "__main__":\n',
                False,
            ),
            (
                'if __name__ != "__mp_main__":\n    loader = build()\nif __name__ == "__main__":\n',
                False,
            ),
            ('loader = build()\nif __name__ == "__main__":\n', False),
        ]
    ),
    ids=["guarded", "top-level", "other-condition", "workers-too"],
)
def test_the_server_starts_with_the_loader_where_an_import_of_the_script_is_safe(
    tmp_path: Path, building: str, early: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(BUILDING + building + ITERATING.format(during=""))
    ended = run(script)
    assert ended.returncode == 0, ended.stderr
    *built, last = ended.stdout.split()  # the worker of the last script builds a loader, too
    assert (set(built), last) == ({"server" if early else "none"}, "complete")


@pytest.mark.slow
def test_ctrl_c_while_the_server_imports_leaves_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    during = "os.kill(early, signal.SIGINT)"
    guarded = 'if __name__ == "__main__":\n    loader = build()\n'
    script.write_text(BUILDING + guarded + ITERATING.format(during=during))
    ended = run(script)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["server", "complete"]
    assert not ended.stderr


@pytest.mark.slow
def test_threads_that_end_before_a_fork_leave_the_main_module_to_the_server(tmp_path: Path) -> None:
    pytest.importorskip("scipy.linalg")
    ended = run(write(tmp_path, "import scipy.linalg"))
    assert ended.returncode == 0, ended.stderr
    assert "fork server" not in ended.stderr


def test_a_killed_worker_is_replaced_from_the_server() -> None:
    loader = DataLoader(
        Processes(), batch_size=1, num_workers=2, multiprocessing_context="forkserver"
    )
    iterator = iter(loader)
    pids = [int(next(iterator)[1]) for _ in range(3)]
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.warns(MinatoWarning, match="Another worker takes its place"):
        rest = [tuple(map(int, batch)) for batch in iterator]
    assert len(rest) == 21
    assert {parent for *_, parent in rest} == {server_pid()}
