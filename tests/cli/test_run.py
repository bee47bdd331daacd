"""``minato run`` and the variables for jobs that cannot be edited: the script is itself, the reports are complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import mostly_slow
from tests.subprocesses import TIMEOUT_S

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
    print(type(loader).__module__, __name__, sys.argv[1:], [batch.tolist() for batch in loader])

if __name__ == "__main__":
    main()
"""
SEEN = "minato.loader __main__ ['{}', '--lr', '3', '-h'] [[0, 2, 4, 6], [8, 10, 12, 14]]\n"
PLAIN = """
import torch
from {place} import DataLoader
for name in {names}:
    list(DataLoader(list(range(8)), batch_size=4))
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name[:7] != "MINATO_"}
    paths = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/train.py").write_text(TRAIN)
    (tmp_path / "job/beside.py").write_text("class Numbers:\n    factor = 2\n")
    return tmp_path


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_script_runs_unchanged_and_is_reported(folder: Path, method: str) -> None:
    done = run(folder, "-m", "minato", "run", "job/train.py", method, "--lr", "3", "-h")
    assert (done.returncode, done.stdout) == (0, SEEN.format(method))
    assert "minato: loader 'Mine', 1 epochs\n" in done.stderr
    assert "\nWaiting\n" in done.stderr


def test_a_module_runs(folder: Path) -> None:
    job = folder / "job"
    done = run(job, "-m", "minato", "run", "-m", "train", "fork", "--lr", "3", "-h")
    assert (done.returncode, done.stdout) == (0, SEEN.format("fork"))


@pytest.mark.parametrize(
    ("source", "status", "last"),
    mostly_slow(
        [
            ("raise SystemExit(7)", 7, ""),
            ("1 / 0", 1, "ZeroDivisionError: division by zero"),
            ("import sys; sys.exit('no data')", 1, "no data"),
            ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
            ("import atexit; atexit.register(print, 'last')", 0, ""),
        ],
    ),
)
def test_the_exit_status_is_that_of_the_script(
    tmp_path: Path, source: str, status: int, last: str
) -> None:
    (tmp_path / "train.py").write_text(source)
    done = run(tmp_path, "-m", "minato", "run", "train.py")
    assert done.returncode == status
    script, _, report = done.stderr.rpartition("\nminato: ")
    assert report == "no loader of minato ran in this process\n"
    assert script.rstrip().endswith(last)


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "minato", "run", "trian.py")
    assert (done.returncode, done.stderr) == (
        2,
        "minato: there is no file 'trian.py': check the path\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", mostly_slow([0, 1]))
def test_reports_are_written_for_a_job_that_cannot_be_edited(tmp_path: Path, rank: int) -> None:
    (tmp_path / "train.py").write_text(PLAIN.format(place="minato", names=["a", "b"]))
    file = tmp_path / ("report.rank1.json" if rank else "report.json")
    for _ in range(2):  # the second run replaces the first one's
        done = run(tmp_path, "train.py", MINATO_REPORT="report.json", LOCAL_RANK=str(rank))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        reports = json.loads(file.read_text())["minato_reports"]
        assert [each["run"]["throughput"]["samples"] for each in reports] == [8, 8]


@pytest.mark.slow
def test_a_report_in_text_names_loaders_that_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.format(place="minato", names="range(34)"))
    done = run(tmp_path, "train.py", MINATO_REPORT="report.txt")
    text = (tmp_path / "report.txt").read_text()
    assert (done.returncode, text.count("minato: loader ")) == (0, 32)
    assert text.endswith("minato: 2 earlier loaders are not shown\n")


@pytest.mark.slow
def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.format(place="minato", names=[1, 2]))
    (tmp_path / "data.json").write_text('{"mine": 1}')
    done = run(tmp_path, "train.py", MINATO_REPORT="data.json", MINATO_TRACE="data.json")
    assert done.returncode == 0
    assert (tmp_path / "data.json").read_text() == '{"mine": 1}'
    assert "MinatoWarning: the report cannot be written: MINATO_REPORT='data.json'" in done.stderr
    assert "MinatoWarning: a loader is not traced: MINATO_TRACE='data.json'" in done.stderr


@pytest.mark.slow
def test_each_loader_is_traced_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.format(place="torch.utils.data", names=[1, 2]))
    done = run(tmp_path, "-m", "minato", "run", "train.py", MINATO_TRACE="run.json")
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["run-2.json", "run.json"]
    for path in tmp_path.glob("*.json"):
        assert '"training loop"' in path.read_text()


@pytest.mark.slow
def test_nothing_is_kept_without_the_variables(tmp_path: Path) -> None:
    script = PLAIN.format(place="minato", names=[1]) + (
        "import sys\nprint('minato.observe.report' in sys.modules)"
    )
    (tmp_path / "train.py").write_text(script)
    done = run(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, "False\n")
