"""What the live view looks like, and that nothing else on the screen is disturbed."""

from __future__ import annotations

import builtins
import dataclasses
import io
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
import torch
import tqdm

from minato import DataLoader, MinatoWarning
from minato.cli.main import main
from minato.observe.report.live_display import Lines, Notebook, Panel, html_of, screen_for
from minato.observe.report.live_progress import EpochProgress
from minato.observe.report.text import plain
from tests.observe.report.terminals import terminal

PACE = EpochProgress(
    "Photos <b>, epoch 3",
    12,
    40,
    6.0,
    14.0,
    64.0,
    2.0,
    3e6,
    0.61,
    0.987,
    4,
    1,
    8,
    "Blur",
    0.7,
    0.031,
    "cores 80 %",
    "0: idle 60 %",
)


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread of tqdm's that stays


def test_the_panel_says_all_and_what_is_printed_scrolls_above_it() -> None:
    with terminal() as term:
        panel = Panel(term.stream)
        term.stream.write("before\n")
        panel.show([PACE])
        rows = term.look()
        assert rows[0] == "before"
        assert term.region == (0, 13)
        words = " ".join(rows[14:])
        assert "Photos <b>, epoch 3" in rows[14]
        for what in (
            "64 samples/s",
            "3 MB/s",
            "61 %",
            "4, busy 98.7 %",
            "1 of at most 8 batches ready",
        ):
            assert what in words
        assert "Blur, 70 % of the workers' time, 31 ms per sample" in words
        assert "12 of 40 batches in 0:06, 0:14 left" in rows[23]
        for number in range(30):
            term.stream.write(f"line {number}\n")
        panel.show([PACE])
        after = term.look()
        assert after[14:] == rows[14:]
        assert after[12] == "line 29"
        panel.hide()
        term.look()
        assert term.region in (None, (0, 23))
        kept = [row for row in term.all() if row]
        assert kept == ["before", *(f"line {number}" for number in range(30))]


def test_a_redraw_changes_no_cell_that_stays_the_same() -> None:
    with terminal() as term:
        panel = Panel(term.stream)
        panel.show([PACE])
        before = term.look()
        panel.show([PACE])
        assert term.look() == before


def test_a_progress_bar_is_not_disturbed() -> None:
    with terminal() as term:
        panel = Panel(term.stream)
        for number in tqdm.tqdm(range(5), file=term.stream, mininterval=0, ncols=60):
            panel.show([PACE])
            if number == 2:
                panel.print_line("a line")
        panel.hide()
        rows = [row for row in term.all() if row]
        assert rows[0] == "a line"
        assert len(rows) == 2
        assert re.match(r"100%\|█+\| 5/5 ", rows[1])


def test_the_panel_follows_the_terminals_size() -> None:
    with terminal() as term:
        panel = Panel(term.stream)
        term.stream.write("text\n")
        panel.show([PACE])
        term.look()
        term.resize(30, 100)
        panel.show([PACE, PACE])
        rows = term.look()
        assert "text" in rows
        assert [row[:3] for row in rows].count("╭─ ") == 2
        assert len(rows[29]) == 100
        assert term.region == (0, 9)
        term.resize(9, 60)  # too small for a panel
        panel.show([PACE])
        assert not any("╭─" in row for row in term.look())


def test_lines_go_around_a_progress_bar() -> None:
    with terminal() as term:
        lines = Lines(term.stream)
        lines.show([PACE])
        for _ in tqdm.tqdm(range(2), file=term.stream, mininterval=0, ncols=60):
            lines.print_line("in between")
        rows = [row for row in term.all() if row]
        assert rows[:-1] == [*_wrapped(PACE.line), "in between", "in between"]
        assert "2/2" in rows[-1]


def _wrapped(line: str) -> list[str]:
    return [line[at : at + 80].rstrip() for at in range(0, len(line), 80)]


def test_a_line_says_the_same() -> None:
    assert PACE.line == (
        "Photos <b>, epoch 3: 12 of 40 batches in 0:06, 0:14 left, 64 samples/s, waiting 61 %, 4 workers, "
        "1 of 8 ready, slowest: Blur"
    )


@pytest.mark.parametrize("kind", ["dumb", "no terminal", "no rich"])
def test_without_a_capable_terminal_there_are_lines(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb" else "xterm")
    if kind == "no terminal":
        assert type(screen_for(io.StringIO())) is Lines
        return
    with terminal() as term:
        if kind == "dumb":
            assert type(screen_for(term.stream)) is Lines
            return
        assert type(screen_for(term.stream)) is Panel
        real = builtins.__import__

        def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith("rich"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_rich)
        with pytest.warns(MinatoWarning, match=r'pip install "minatoloader\[report\]"'):
            assert type(screen_for(term.stream)) is Lines


def test_a_notebook_shows_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, output: dict[str, str], raw: bool) -> None:
            assert raw
            shown[-1] = output["text/html"]

    def display(output: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(output["text/html"])
        return Handle()

    shell = SimpleNamespace(kernel=object())
    python = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    screen = screen_for(io.StringIO())
    assert type(screen) is Notebook
    screen.show([PACE])
    screen.show([PACE])
    assert len(shown) == 1
    assert shown[0] == html_of(PACE)
    assert "Photos &lt;b&gt;, epoch 3" in shown[0]
    assert "<script" not in shown[0]
    screen.print_line("all is <over>")
    screen.hide()
    assert re.findall(r">([^<]+)<", shown[0]) == ["all is &lt;over&gt;"]
    screen.show([PACE])
    assert len(shown) == 2


EVIL = "cat\x1b[2J\x1b]0;owned\x07\x9b31m\rdog\nrow"
CONTROLS = {chr(code) for code in [*range(0x20), *range(0x7F, 0xA0)]} - {"\n"}


def test_names_do_not_steer_the_terminal() -> None:
    pace = dataclasses.replace(PACE, title=EVIL, slowest=EVIL)
    with terminal() as term:
        panel = Panel(term.stream)
        panel.show([pace])
        assert any("cat" in row and "dog row" in row for row in term.look())
        panel.hide()
    stream = io.StringIO()
    Lines(stream).show([pace])
    assert not CONTROLS & set(stream.getvalue())
    assert stream.getvalue().count("\n") == 1


def test_a_report_does_not_steer_the_terminal() -> None:
    class Named(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: Any) -> int:
            time.sleep(0.02)
            return 1

    def transform(sample: int) -> int:
        return sample

    transform.__qualname__ = transform.__name__ = EVIL
    loader = DataLoader(Named(), 1, sampler=[EVIL, "a"], transforms=[transform])
    list(loader)
    report = loader.report()
    assert EVIL in [stage.name for stage in report.run.stages][1]
    told = plain(report)
    assert "cat" in told
    assert not CONTROLS & set(told)
    console = rich.console.Console(file=io.StringIO(), force_terminal=False, width=300)
    console.print(report)
    assert not CONTROLS & set(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_command_line_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evil_loaders.py").write_text(f"def f():\n    raise RuntimeError({EVIL!r})\n")
    assert main(["profile", f"{tmp_path / 'evil_loaders.py'}:f"]) == 2
    assert main(["ingest", EVIL, "sqlite:x"]) == 2
    assert main(["ingest", str(tmp_path), f"{EVIL}:x"]) == 2
    assert not CONTROLS & set(capsys.readouterr().err)
