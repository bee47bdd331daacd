"""The live view: what it shows while an epoch runs, and that it leaves the terminal whole."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import rich.console
import rich.file_proxy
import rich.live
import tqdm

import minato
from minato.cli.main import main
from minato.observe import live
from tests.datasets import Numbers, Stream
from tests.observe.terminals import Terminal, terminal
from tests.subprocesses import children, environment
from tests.threads import run_together

LONGEST_S = 60.0
Take = Callable[[], Terminal]
ENDED = r"Numbers, epoch 0: 40 batches, 80 samples in \S+ [mµ]?s, \S+ samples/s, waiting \S+ %"


@pytest.fixture(autouse=True)
def patient_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_JOIN_S", LONGEST_S)
    monkeypatch.setattr(live, "_LINE_EVERY_S", 3600.0)  # no line of an epoch that takes long


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Take]:
    """Called by a test itself, as pytest sets both streams once more when it begins."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def take() -> Terminal:
        monkeypatch.setattr(sys, "stderr", term.stream)
        monkeypatch.setattr(sys, "stdout", term.stream)
        return term

    with terminal(rows=40, columns=100) as term:
        yield take


def loader_of(size: int = 80, **options: object) -> minato.DataLoader[int]:
    return minato.DataLoader(Numbers(size), 2, transforms=[float], **options)  # type: ignore[arg-type]


def until(true: Callable[[], bool], term: Terminal | None = None) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not true():
        assert time.monotonic() < deadline, "" if term is None else "\n".join(term.look())
        time.sleep(0.02)


def panels(term: Terminal) -> int:
    return sum(row.startswith("╭─") for row in term.look())


def until_panels(term: Terminal, count: int) -> None:
    until(lambda: panels(term) == count, term)


def drawing_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "minato-live"]


def rows_of(term: Terminal) -> list[str]:
    return [row for row in term.all() if row]


def assert_gone(term: Terminal) -> None:
    assert panels(term) == 0
    assert not drawing_threads()
    assert sys.stdout is sys.stderr is term.stream


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_is_shown_and_leaves_a_line(num_workers: int, use: Take) -> None:
    term = use()
    with (loader := loader_of(num_workers=num_workers)).live():
        for number, _ in enumerate(loader):
            if number == 3:
                until_panels(term, 1)
                for shown in (
                    r"Numbers, epoch 0",
                    r"\d of 40 batches in \d+:\d\d, \S+ left",
                    r"throughput +\S+ samples/s, \S+ batches/s, \S+ \S?B/s",
                    r"waiting +\S+ % of the loop's time",
                    rf"workers +{max(num_workers, 1)}, busy \S+ % of their time",
                    r"prefetch +\d+ of at most \d+ batch(es)? ready",
                    r"slowest +(dataset|float|–)",
                    r"machine +.*free, no GPU",
                ):
                    # The panel may have been drawn before the first batch.
                    until(lambda shown=shown: bool(re.search(shown, "\n".join(term.look()))), term)
        assert_gone(term)
    list(loader)
    assert [bool(re.fullmatch(ENDED, row)) for row in rows_of(term)] == [True]


@pytest.mark.parametrize("redirected", [False, True])
def test_the_output_of_the_program_scrolls_above_or_stays_where_it_is_redirected(
    redirected: bool, use: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    term, log = use(), io.StringIO()
    if redirected:
        monkeypatch.setattr(sys, "stdout", log)
    with (loader := loader_of(num_workers=1)).live():
        for number, _ in enumerate(loader):
            if number == 0:
                until_panels(term, 1)
            print(f"line {number}")
            print(f"error {number}", file=sys.stderr)
            term.look()
            if number == 20:
                until_panels(term, 1)
    kinds = ["error"] if redirected else ["line", "error"]
    rows = rows_of(term)
    assert rows[:-1] == [f"{kind} {number}" for number in range(40) for kind in kinds]
    assert re.fullmatch(ENDED, rows[-1])
    assert log.getvalue().splitlines() == [f"line {number}" for number in range(40 * redirected)]


def test_a_progress_bar_stays_whole(use: Take) -> None:
    term = use()
    with (loader := loader_of(num_workers=1)).live():
        bar = tqdm.tqdm(loader, ncols=60, mininterval=0, file=term.stream)
        assert bar.total == len(loader) == 40
        for _ in bar:
            assert panels(term) == 0
    rows = rows_of(term)
    assert len(rows) == 2
    assert re.fullmatch(ENDED, rows[0])
    assert re.match(r"100%\|█+\| 40/40 ", rows[1])


@pytest.mark.parametrize("how", ["break", "error", "close"])
def test_an_epoch_that_is_left_is_shown_no_more(how: str, use: Take) -> None:
    term = use()
    loader = loader_of(num_workers=1)
    view = loader.live()
    with suppress(KeyboardInterrupt):
        for _ in loader:
            until_panels(term, 1)
            if how == "close":
                view.close()
                assert_gone(term)
                return
            if how == "break":
                break
            raise KeyboardInterrupt
    assert_gone(term)
    assert "Numbers, epoch 0 (not finished): 1 batch, 2 samples" in term.all()[0]


def test_two_loaders_share_the_screen(use: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    term = use()
    monkeypatch.setenv("MINATO_LIVE", "1")
    train, evaluate = loader_of(num_workers=1), loader_of(num_workers=1)
    for first, _ in enumerate(train):
        until_panels(term, 1)
        if first == 0:
            for second, _ in enumerate(evaluate):  # its workers are forked while the panel is drawn
                if second == 0:
                    until_panels(term, 2)
    assert_gone(term)
    assert [bool(re.fullmatch(ENDED, row)) for row in rows_of(term)] == [True, True]


def test_a_panel_grows_before_or_after_a_line_is_printed(
    use: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    term = use()
    monkeypatch.setenv("MINATO_LIVE", "1")
    loaders, batches = [loader_of(), loader_of()], []
    process = rich.live.Live.process_renderables

    def process_slowly(panel: Any, renderables: Any) -> Any:
        processed = process(panel, renderables)
        if threading.current_thread() is threading.main_thread() and len(batches) == 1:
            batches.append(iter(loaders[1]))
            deadline = time.monotonic() + 4 * live._DRAW_EVERY_S
            while panels(term) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        return processed

    batches.append(iter(loaders[0]))
    until_panels(term, 1)
    monkeypatch.setattr(rich.live.Live, "process_renderables", process_slowly)
    live._board._print("a line")
    until_panels(term, 2)
    assert next(row for row in term.all() if row) == "a line"
    batches.clear()
    assert_gone(term)


def test_the_end_of_a_view_waits_for_no_lock(use: Take, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may end an epoch in a thread that holds what the drawing thread waits for."""
    term = use()
    monkeypatch.setattr(live, "_COST", 1e9)  # it always draws every _DRAW_EVERY_S
    monkeypatch.setattr(live, "_JOIN_S", 0.1)
    loader = loader_of(num_workers=1)
    view, batches = loader.live(), iter(loader)
    next(batches)
    until_panels(term, 1)
    drawing = live._board._thread
    assert drawing is not None

    def close_with_lock() -> None:
        assert live._board._panel is not None
        with live._board._panel._lock:
            time.sleep(3 * live._DRAW_EVERY_S)
            view.close()

    run_together(close_with_lock, limit_s=LONGEST_S)
    drawing.join(LONGEST_S)
    assert_gone(term)  # the drawing thread took the panel away when it could


@pytest.mark.parametrize("what", ["start", "rows", "drawing", "summary"])
def test_a_view_that_fails_leaves_the_terminal_to_the_next(
    what: str, use: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    term = use()
    loader, other = loader_of(num_workers=1), loader_of(num_workers=1)
    in_thread = what in ("rows", "drawing")

    def fail(*_: object, **__: object) -> list[object]:
        if in_thread and threading.current_thread().name != "minato-live":
            return []
        raise RuntimeError("broken")

    def use_loader() -> None:
        batches = iter(loader)
        next(batches)
        if in_thread:
            until(lambda: not drawing_threads(), term)
            assert live._board._views
        list(batches)

    def stop(panel: Any, whole: Any = rich.live.Live.stop) -> None:
        whole(panel)
        fail()

    places = {"start": (live, "start_thread"), "drawing": (live, "_drawn")}
    with loader.live():
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(*places.get(what, (live.Live, what)), fail)
            broken.setattr(rich.live.Live, "stop", stop)  # as where stderr fails
            with pytest.warns(minato.MinatoWarning, match=r"because .*RuntimeError.*: broken"):
                use_loader()
            assert_gone(term)
        with other.live():
            for _ in other:
                until_panels(term, 1)
    assert_gone(term)
    assert not live._board._views


class Redirected(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(isinstance(sys.stdout, rich.file_proxy.FileProxy))


def test_a_forked_child_writes_to_the_terminal_itself(use: Take) -> None:
    term = use()
    loader, other = loader_of(num_workers=1), minato.DataLoader(Redirected(2), 2, num_workers=1)
    with loader.live():
        for number, _ in enumerate(loader):
            if number == 0:
                until_panels(term, 1)
                assert isinstance(sys.stdout, rich.file_proxy.FileProxy)
                assert [batch.tolist() for batch in other] == [[0, 0]]
    assert_gone(term)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_of_multiprocessing_leaves_the_terminal_whole(method: str) -> None:
    done = children("live", method, TERM="xterm")
    assert done.stdout == "[0, 0]\n"
    assert done.stderr.count("\x1b[?25l") == done.stderr.count("\x1b[?25h") == 2


@pytest.mark.parametrize("kind", ["dumb", "no terminal", "no rich", "another panel"])
def test_without_a_capable_terminal_there_are_lines(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LINE_EVERY_S", 0.05)
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb" else "xterm")
    if kind == "no rich":
        for name in ["rich", *sys.modules]:
            if name.partition(".")[0] == "rich":
                monkeypatch.setitem(sys.modules, name, None)
    with terminal(rows=40, columns=1000) as term:
        stream = io.StringIO() if kind == "no terminal" else term.stream
        monkeypatch.setattr(sys, "stderr", stream)
        if kind == "another panel":
            console = rich.console.Console(file=io.StringIO())
            monkeypatch.setattr(sys, "stdout", rich.file_proxy.FileProxy(console, sys.stdout))

        def lines() -> list[str]:
            text = stream.getvalue() if isinstance(stream, io.StringIO) else "\n".join(term.all())
            return [row for row in text.splitlines() if row]

        with (loader := loader_of()).live():
            told = pytest.warns(minato.MinatoWarning, match=r"minatoloader\[report\]")
            with told if kind == "no rich" else nullcontext():
                batches = iter(loader)
            next(batches)
            until(lambda: any(" ready; " in row for row in lines()), term)
            list(batches)
        assert all(row.startswith("Numbers, epoch") for row in lines())
        (line, *_) = [row for row in lines() if " ready; " in row]
        assert re.match(r"Numbers, epoch \d: \d+ of 40 batches in .*; waiting \S+ % of the", line)
        assert panels(term) == 0


def test_in_a_log_there_is_a_line_for_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    loader = loader_of()
    view = loader.live()
    for number in range(2):
        list(loader)
        line = log.getvalue().splitlines()[number]
        assert re.fullmatch(ENDED, line.replace("epoch 1", "epoch 0"))
    log.close()
    assert list(loader)  # a stream that is closed stops nothing
    view.close()


@pytest.mark.parametrize(
    ("live", "rank", "lines"), [("0", "0", 0), ("", "0", 0), ("1", "0", 2), ("1", "1", 0)]
)
def test_the_environment_decides(
    live: str, rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MINATO_LIVE", live)
    monkeypatch.setenv("LOCAL_RANK", rank)
    loader = loader_of(4)
    for _ in range(2):
        list(loader)
    list(loader_of(4, observe=False))
    assert capsys.readouterr().err.count("Numbers, epoch") == lines


@pytest.mark.parametrize(
    ("dataset", "batch"), [(Stream(8), 2), (Numbers(8), minato.CostBatches(2, lambda sample: 1))]
)
def test_streams_and_batches_by_cost_have_no_end_to_foretell(
    dataset: Any, batch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with (loader := minato.DataLoader(dataset, batch)).live() as view:
        batches = iter(loader)
        next(batches)
        assert view.rows()
        assert (view.epoch.length, view.epoch.batches) == (None, 1)
        list(batches)
    assert "4 batches, 8 samples" in capsys.readouterr().err


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 5), (True, 4)])
def test_the_length_is_what_is_left(drop_last: bool, batches: int) -> None:
    with (loader := loader_of(9, drop_last=drop_last)).live() as view:
        for length in (batches, batches - 1):
            batch = iter(loader)
            next(batch)
            assert view.rows()
            assert (view.epoch.batches, view.epoch.length) == (1, length)
            loader.load_state_dict(loader.state_dict())
            list(batch)
            assert view.rows() == []


def test_epochs_of_one_number_are_told_apart() -> None:
    with (loader := loader_of(8)).live() as view:
        for _ in range(3):
            loader.set_epoch(7)
            for count, _ in enumerate(loader, 1):
                rows = dict(view.rows())
                assert (view.epoch.title, view.epoch.batches) == ("Numbers, epoch 7", count)
                assert float(rows["throughput"].partition(" ")[0]) > 0
                assert not rows["waiting"].startswith("-")


def test_after_a_look_at_a_batch_the_epoch_around_it_is_shown_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (loader := loader_of(8)).live() as view:
        for number, _ in enumerate(loader):
            assert view.epoch.title.endswith(", epoch 0")
            assert dict(view.rows())
            if number:
                break
            batches = iter(loader)
            next(batches)
            assert view.epoch.title.endswith(", epoch 1")
            del batches
            assert view.rows() == []
        list(loader)
        for _ in zip(loader, loader, strict=False):  # the second one is left
            pass
    lines = capsys.readouterr().err.splitlines()
    whiches = ("1 (not finished)", "0 (not finished)", 2, 3, "4 (not finished)")
    assert [line.split(":")[0] for line in lines] == [
        f"Numbers, epoch {which}" for which in whiches
    ]


def test_rates_are_those_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, rates = 1, []
    monkeypatch.setattr(live, "now_ns", lambda: now_ns)
    with (loader := loader_of(200)).live() as view:
        for number, _ in enumerate(loader):
            now_ns += 20_000_000_000 if number == 50 else 200_000_000
            rates.append(dict(view.rows())["throughput"].partition(" ")[0])
    assert [rates[number] for number in (40, 50, 99)] == ["10", "0.1", "10"]


def test_another_thread_may_look_while_files_of_the_machine_are_read() -> None:
    with (loader := loader_of(8)).live() as view:
        next(batches := iter(loader))
        log, others = loader._minato_history.epoch_log, iter([view.rows])
        assert log is not None
        read = log.machine

        def machine() -> Any:
            for look in others:
                look()
            return read()

        log.machine = machine
        assert view.rows()
        times = [each.at_ns for each in view.epoch.recent]
        assert times == sorted(times)
        del batches


INTERRUPTED = """
import time
import minato
from tests.datasets import Numbers

if __name__ == "__main__":
    for _ in minato.DataLoader(Numbers(1000), 2, num_workers=1):
        time.sleep(0.05)
"""


def test_the_terminal_is_whole_after_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    variables = {**environment(), "MINATO_LIVE": "1", "TERM": "xterm"}
    command = [sys.executable, str(script)]
    with terminal() as term:
        with subprocess.Popen(
            command, env=variables, stderr=term.stream, start_new_session=True
        ) as process:
            until_panels(term, 1)
            os.killpg(process.pid, signal.SIGINT)
            # Who does not read holds up the program, once the terminal's buffer is full.
            until(lambda: bool(term.look()) and process.poll() is not None, term)
        assert "KeyboardInterrupt" in rows_of(term)
        assert panels(term) == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (59.7, "1:00"), (725, "12:05"), (3661, "1:01:01")]
)
def test_durations(seconds: float, words: str) -> None:
    assert live._clock(seconds) == words


# ---- names that hold control characters ------------------------------------------------------

EVIL = "cat\x1b[2J\x1b]0;owned\x07\x9b31m\rdog\nrow"
CONTROLS = {chr(code) for code in [*range(0x20), *range(0x7F, 0xA0)]} - {"\n"}


def evil_loader() -> Any:
    def transform(sample: float) -> float:
        time.sleep(sample)
        return sample

    transform.__qualname__ = transform.__name__ = EVIL
    dataset, observe = {EVIL: 0.02, "a": 0.02}, minato.Observe(name=EVIL)
    return minato.DataLoader(dataset, sampler=[*dataset], transforms=[transform], observe=observe)


def test_names_do_not_steer_the_terminal(use: Take) -> None:
    term = use()
    with (loader := evil_loader()).live():
        for _ in loader:
            until_panels(term, 1)
            assert any("cat" in row and "dog row" in row for row in term.look())
    assert any("cat" in row and "dog row" in row for row in term.all())


def test_lines_do_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LINE_EVERY_S", 0.02)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with (loader := evil_loader()).live():
        for _ in loader:
            until(lambda: "\n" in stream.getvalue())
    assert stream.getvalue().count("\n") >= 2
    assert not CONTROLS & set(stream.getvalue())


def test_a_report_does_not_steer_the_terminal() -> None:
    loader = evil_loader()
    list(loader)
    report = loader.report()
    assert EVIL in [stage.name for stage in report.run.stages][1]
    told = f"{report}\n{report.details()}\n{report.to_html()}"
    assert "cat" in told
    screen = io.StringIO()
    rich.console.Console(file=screen, force_terminal=False, width=300).print(report)
    assert not CONTROLS & set(told + screen.getvalue())


def test_the_command_line_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["minato"])
    (tmp_path / "evil_loaders.py").write_text(f"def f():\n    raise RuntimeError({EVIL!r})\n")
    assert main(["profile", f"{tmp_path / 'evil_loaders.py'}:f"]) == 2
    assert not CONTROLS & set(capsys.readouterr().err)
