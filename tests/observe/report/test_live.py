"""A loader that shows how it goes while it is used."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.utils.data
import tqdm

import minato
from minato.observe.report import live
from tests.datasets import Numbers
from tests.observe.report.terminals import Terminal, terminal
from tests.subprocesses import environment

LONGEST_S = 30.0
ENDED = r"Numbers, epoch 0: 40 batches, 80 samples in \S+ m?s, \S+ samples/s, waiting \S+ %"


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread of tqdm's that stays


@pytest.fixture
def term(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    with terminal(rows=40, columns=100) as it:
        # pytest sets sys.stderr once more when the test begins.
        monkeypatch.setattr(live, "sys", SimpleNamespace(stderr=it.stream))
        yield it


def loader_of(size: int = 80, **options: object) -> minato.DataLoader[int]:
    return minato.DataLoader(Numbers(size), 2, transforms=[float], **options)  # type: ignore[arg-type]


def panels(term: Terminal) -> int:
    return sum(row.startswith("╭─ ") for row in term.look())


def until_panels(term: Terminal, count: int) -> None:
    deadline = time.monotonic() + LONGEST_S
    while panels(term) != count:
        assert time.monotonic() < deadline, "\n".join(term.look())
        time.sleep(0.02)


def assert_gone(term: Terminal) -> None:
    assert panels(term) == 0
    assert term.region in (None, (0, 39))
    assert not [each for each in threading.enumerate() if each.name == "minato-live"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_is_shown_and_leaves_a_line(num_workers: int, term: Terminal) -> None:
    loader = loader_of(num_workers=num_workers)
    with loader.live():
        for number, _ in enumerate(loader):
            if number == 3:
                until_panels(term, 1)
                assert re.search("Numbers, epoch 0", "\n".join(term.look()))
                assert re.search(r"\d of 40 batches", "\n".join(term.look()))
        assert_gone(term)
    list(loader)
    assert [bool(re.fullmatch(ENDED, row)) for row in term.all() if row] == [True]


def test_a_progress_bar_has_the_right_length_and_stays_whole(term: Terminal) -> None:
    loader = loader_of(num_workers=1)
    with loader.live():
        bar = tqdm.tqdm(loader, ncols=60, mininterval=0, file=term.stream)
        assert bar.total == len(loader) == 40
        for number, _ in enumerate(bar):
            if number == 3:
                until_panels(term, 1)
    rows = [row for row in term.all() if row]
    assert len(rows) == 2
    assert re.fullmatch(ENDED, rows[0])
    assert re.match(r"100%\|█+\| 40/40 ", rows[1])


@pytest.mark.parametrize("how", ["break", "error", "close"])
def test_an_epoch_that_is_left_is_shown_no_more(how: str, term: Terminal) -> None:
    loader = loader_of(num_workers=1)
    view = loader.live()
    try:
        for _ in loader:
            until_panels(term, 1)
            if how == "close":
                view.close()
                assert_gone(term)
                return
            if how == "break":
                break
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert_gone(term)
    assert "Numbers, epoch 0 (not finished): 1 batches, 2 samples" in term.all()[0]


def test_two_loaders_share_the_screen(term: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINATO_LIVE", "1")
    train, evaluate = loader_of(num_workers=1), loader_of(num_workers=1)
    for first, _ in enumerate(train):
        until_panels(term, 1)
        if first == 0:
            for second, _ in enumerate(evaluate):  # its workers are forked while the panel is drawn
                if second == 0:
                    until_panels(term, 2)
    assert_gone(term)
    assert [bool(re.fullmatch(ENDED, row)) for row in term.all() if row] == [True, True]


def test_in_a_log_there_is_a_line_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(live, "sys", SimpleNamespace(stderr=log))
    loader = loader_of()
    view = loader.live()
    for number in range(2):
        list(loader)
        assert re.fullmatch(
            ENDED, log.getvalue().splitlines()[number].replace("epoch 1", "epoch 0")
        )
    log.close()
    assert list(loader)  # a stream that is closed stops nothing
    view.close()


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("MINATO_LIVE", "0", 0),
        ("MINATO_LIVE", "", 0),
        ("MINATO_LIVE", "1", 2),
        ("LOCAL_RANK", "1", 0),
    ],
)
def test_the_environment_decides(
    name: str,
    value: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MINATO_LIVE", "1")
    monkeypatch.setenv(name, value)
    loader = loader_of(4)
    for _ in range(2):
        list(loader)
    list(loader_of(4, stats=False))
    assert capsys.readouterr().err.count("Numbers, epoch") == lines


def test_what_is_not_measured_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="stats=False"):
        loader_of(stats=False).live()


def test_a_stream_has_no_end_to_foretell(capsys: pytest.CaptureFixture[str]) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    with (loader := minato.DataLoader(Stream(), 2)).live() as view:
        batches = iter(loader)
        next(batches)
        pace = view.progress()
        assert pace is not None
        assert (pace.length, pace.remaining_s, pace.batches) == (None, None, 1)
        list(batches)
    assert "4 batches, 8 samples" in capsys.readouterr().err


INTERRUPTED = """
import time
import minato
from minato.observe.report import live
from tests.datasets import Numbers

if __name__ == "__main__":
    for _ in minato.DataLoader(Numbers(1000), 2, num_workers=1):
        time.sleep(0.05)
"""


def test_the_terminal_is_whole_after_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    with terminal() as term:
        with subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment(), "MINATO_LIVE": "1", "TERM": "xterm"},
            stderr=term.stream,
            start_new_session=True,
        ) as process:
            until_panels(term, 1)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(LONGEST_S)
        rows = [row for row in term.all() if row]
        assert rows[-1] == "KeyboardInterrupt"
        assert panels(term) == 0
        assert term.region in (None, (0, 23))


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 5), (True, 4)])
def test_the_length_is_what_is_left(drop_last: bool, batches: int) -> None:
    loader = loader_of(9, drop_last=drop_last)
    with loader.live() as view:
        batch = iter(loader)
        next(batch)
        pace = view.progress()
        assert pace is not None
        assert pace.length == batches
        state = loader.state_dict()
        loader.load_state_dict(state)
        list(batch)
        batch = iter(loader)
        next(batch)
        pace = view.progress()
        assert pace is not None
        assert (pace.batches, pace.length) == (1, batches - 1)
        list(batch)
