"""Names, texts, figures, logs and warnings fail only into themselves: every batch comes, every report can be read."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from minato import DataLoader, ErrorPolicy, Observe, StragglerPolicy
from minato._support.hashes import fingerprint, index_hash
from minato._support.pickling import check_picklable
from minato._support.values import short, text_of, traceback_of
from minato.errors import MinatoWarning, NotPicklableError
from minato.observe.epoch_log import EpochLog, RunningEpoch
from minato.observe.observers import Observer
from minato.observe.trace import LoopTrack, Track
from minato.sampling.samplers import independent
from minato.sources.base import KeyedSource, SourceError
from minato.transforms.compose import Transforms
from tests.datasets import Numbers, drain, events_of, flat, forked, metrics_of, raising
from tests.selection import loaders, mostly_slow, sweep
from tests.subprocesses import python

SIZE, BATCH, BAD = 12, 4, 5
GOOD = [i for i in range(SIZE) if i != BAD]


fails = raising(ValueError, "broken")


class Odd:
    """An index whose methods do what they like; the dataset takes its number alone."""

    def __init__(self, number: int) -> None:
        self.number = number


class ReprRaises(Odd):
    __repr__ = __str__ = fails


class ReprIsNoText(Odd):
    def __repr__(self) -> str:
        return 3  # type: ignore[return-value]

    __str__ = __repr__


class ReprHasSurrogates(Odd):
    def __repr__(self) -> str:
        return f"name \udcff {self.number}"


class ReprIsLong(Odd):
    def __repr__(self) -> str:
        return f"{self.number} " + "x" * 10_000_000


class ReprHasControls(Odd):
    def __repr__(self) -> str:
        return f'\0\n\x1b[31m"{self.number}\\'


class ReprRecurses(Odd):
    def __repr__(self) -> str:
        return repr(self)


class NotComparable(Odd):
    __eq__ = __hash__ = __bool__ = __len__ = __lt__ = fails  # type: ignore[assignment]


class NotConvertible(Odd):
    __index__ = __int__ = __float__ = __format__ = __iter__ = __bytes__ = fails  # type: ignore[assignment]


class OddNumber(int):
    __repr__ = __str__ = __format__ = fails

    @property
    def number(self) -> int:
        return int.__pos__(self)


class OddText(str):
    __slots__ = ()
    __repr__ = __str__ = __format__ = fails

    @property
    def number(self) -> int:
        return len(str.__str__(self))

    @classmethod
    def of(cls, number: int) -> OddText:
        return cls("\udcff" * number)


class NoClass(Odd):
    """Cannot be pickled, either."""

    __class__ = property(fails)  # type: ignore[assignment]


KEYS: dict[str, Callable[[int], Any]] = {
    kind.__name__: kind
    for kind in (ReprRaises, ReprIsNoText, ReprHasSurrogates, ReprIsLong, ReprHasControls)
    + (ReprRecurses, NotComparable, NotConvertible, OddNumber)
} | {"OddText": OddText.of, "in a tuple": lambda i: (ReprRaises(i), i)}  # type: ignore[dict-item]
UNPICKLABLE: dict[str, Callable[[int], Any]] = {"NoClass": NoClass}
WORKERS = loaders("inline", "threads", "fork")


QUICK = {
    "inline": set(KEYS) - {"ReprIsLong"},
    "threads": {"ReprHasSurrogates", "NoClass"},
    "fork": {"ReprRaises", "OddText", "in a tuple"},
}
"""Kinds of indices that each run of the tests tries; the others are slow tests."""


def number_of(key: Any) -> int:
    return int(key[1] if type(key) is tuple else key.number)


class Keyed(Numbers):
    """Sample ``BAD`` does what it is told to."""

    size = SIZE

    def __init__(self, bad: Callable[[], None] | None = None) -> None:
        self.bad = bad

    def __getitem__(self, key: Any) -> int:
        number = number_of(key)
        if number == BAD and self.bad is not None:
            self.bad()
        return number


refuse = raising(ValueError, "bad")


def die() -> None:
    os._exit(1)


def hang() -> None:
    time.sleep(1000)


def check_views(loader: DataLoader[Any]) -> None:
    """Everything that shows something of a loader."""
    report = loader.report()
    texts = (str(report), report.details(), repr(report), report.to_html(), repr(loader))
    assert all(text.encode() for text in texts)
    assert json.loads(report.to_json())
    assert str(loader.slow_samples()).encode()
    assert loader.coverage().complete
    assert all(isinstance(value, float) for value in loader.metrics().values())
    assert loader.live().rows() == []
    assert all(len(str(each.index)) < 100 for each in report.slowest)


SWEEP = [
    pytest.param(workers, kind, bad, marks=[] if kind in QUICK[workers] else [pytest.mark.slow])
    for workers in WORKERS
    for kind in KEYS | (UNPICKLABLE if workers != "fork" else {})
    for bad in (None, refuse)[kind not in QUICK[workers] :]
]


@pytest.mark.parametrize(("workers", "kind", "bad"), SWEEP)
def test_indices_of_any_behaviour(kind: str, workers: str, bad: Any, tmp_path: Path) -> None:
    keys = [(KEYS | UNPICKLABLE)[kind](i) for i in range(SIZE)]
    theirs = drain(TorchLoader(Keyed(bad), BATCH, sampler=keys, **forked(0)))
    trace, log = tmp_path / "trace.json", tmp_path / "log.jsonl"
    arguments: dict[str, Any] = {
        "sampler": keys,
        "stragglers": StragglerPolicy(history=tmp_path / "costs"),
        **WORKERS[workers],
    }
    loader: Any = DataLoader(Keyed(bad), BATCH, observe=Observe(trace=trace), **arguments)
    samples, errors = drain(loader)
    assert samples == theirs[0]
    assert [*map(type, errors)] == [*map(type, theirs[1])]
    check_views(loader)
    assert len(events_of(trace)) > SIZE
    if bad is None:
        return
    outcomes = {"skip": "skipped", "retry": "raised", (lambda _: 99): "substituted"}
    for policy, outcome in outcomes.items():
        errors_are = ErrorPolicy(policy, log=log, retries=1)
        loader = DataLoader(Keyed(bad), BATCH, order="arrival", errors=errors_are, **arguments)
        with warnings.catch_warnings(action="ignore"):
            samples, errors = drain(loader)
        assert set(samples) - {99} == set(range(SIZE)) - {BAD} or errors
        record = json.loads(log.read_text().splitlines()[-1])
        assert (record["outcome"], record["message"]) == (outcome, "bad")
        check_views(loader)


@mostly_slow("kind", ["ReprRaises", "ReprHasSurrogates", "ReprIsLong", "OddNumber"])
def test_a_worker_that_dies_on_such_an_index(kind: str) -> None:
    keys = [KEYS[kind](i) for i in range(SIZE)]
    loader = DataLoader(Keyed(die), BATCH, sampler=keys, errors="skip", **forked(2))
    with pytest.warns(MinatoWarning) as warned:
        assert drain(loader)[0] == GOOD
    assert sum("while it ran the sample with index" in str(each.message) for each in warned) == 2
    check_views(loader)
    loader = DataLoader(Keyed(die), BATCH, sampler=keys, **forked(2))
    with (
        pytest.warns(MinatoWarning, match="while it ran the sample with index"),
        pytest.raises(RuntimeError, match="exited unexpectedly") as raised,
    ):
        list(loader)
    assert "while it ran the sample with index" in str(raised.value.__cause__)


@mostly_slow("kind", ["ReprHasSurrogates", "ReprRaises", "ReprIsLong"])
def test_such_an_index_that_takes_too_long(kind: str) -> None:
    keys = [KEYS[kind](i) for i in range(SIZE)]
    policy = ErrorPolicy("skip", sample_timeout=3.0)  # others may get no time
    loader = DataLoader(Keyed(hang), BATCH, sampler=keys, errors=policy, **forked(2))
    with pytest.warns(MinatoWarning, match="1 sample of this epoch was skipped"):
        assert drain(loader)[0] == GOOD


@pytest.mark.parametrize("make", (KEYS | UNPICKLABLE).values(), ids=KEYS | UNPICKLABLE)
def test_hashes_and_texts_of_such_an_index(make: Callable[[int], Any]) -> None:
    key = make(3)
    assert len(text_of(key)) <= 1100
    assert text_of(key).encode()
    assert isinstance(index_hash(key), int)


# ---- exceptions ------------------------------------------------------------------------------


class OddError(Exception):
    """Can be sent, as ``Exception`` can."""


class StrRaises(OddError):
    __str__ = fails


class StrIsNoText(OddError):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class ReprOfErrorRaises(OddError):
    __repr__ = fails


class StrHasSurrogates(OddError):
    def __str__(self) -> str:
        return "file \udcff"


class StrIsLong(OddError):
    def __str__(self) -> str:
        return "y" * 6_000_000


class NoModule(OddError):
    __module__ = None  # type: ignore[assignment]


class OddModule(OddError):
    __module__ = 3  # type: ignore[assignment]


class NotesRaise(OddError):
    __notes__ = property(fails)  # type: ignore[assignment]


class NoAttributes(OddError):
    __setattr__ = fails


class NeedsArguments(OddError):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


class IsFalse(OddError):
    __bool__ = fails
    __eq__ = __hash__ = fails  # type: ignore[assignment]


def with_notes(notes: Any) -> Exception:
    error = OddError("notes")
    error.__notes__ = notes
    return error


def in_a_circle() -> Exception:
    one, other = OddError("one"), OddError("other")
    one.__cause__, other.__cause__ = other, one
    one.__context__ = one
    return one


def in_a_long_chain() -> Exception:
    error = OddError("last")
    for _ in range(2000):
        error, cause = OddError("next"), error
        error.__cause__ = cause
    return error


def local() -> Exception:
    class Local(Exception):
        pass

    return Local("the text of a local class")


ERRORS: dict[str, Callable[[], Exception]] = {
    **{
        make.__name__: make
        for make in (StrRaises, StrIsNoText, ReprOfErrorRaises, StrHasSurrogates, StrIsLong)
        + (NoModule, OddModule, NotesRaise, NoAttributes, IsFalse, in_a_circle, in_a_long_chain)
        + (local,)
    },
    "NeedsArguments": lambda: NeedsArguments(1, 2),
    "with_notes": lambda: with_notes([3, ReprRaises(1), None]),
    "with_notes_that_are_none": lambda: with_notes(3),
    "with_odd_arguments": lambda: OddError(ReprRaises(1), OddNumber(3)),
}


QUICK_ERRORS = ("StrRaises", "OddModule", "local")


@pytest.mark.parametrize(
    ("workers", "kind"),
    [
        pytest.param(workers, kind, marks=[pytest.mark.slow] * is_slow)
        for workers in WORKERS
        for kind in ERRORS
        for is_slow in [workers != "inline" and kind not in QUICK_ERRORS]
    ],
)
def test_exceptions_of_any_behaviour(kind: str, workers: str, tmp_path: Path) -> None:
    def bad() -> None:
        raise ERRORS[kind]()

    dataset, expected = Keyed(bad), [i for i in range(SIZE) if i // BATCH != BAD // BATCH]
    keys = [Odd(i) for i in range(SIZE)]
    arguments: dict[str, Any] = {"sampler": keys, **WORKERS[workers]}
    samples, (error,) = drain(DataLoader(dataset, BATCH, **arguments))
    assert samples == expected
    if workers == "inline":
        (theirs,) = drain(TorchLoader(dataset, BATCH, sampler=keys))[1]
        assert type(error) is type(theirs) or kind == "local"
    assert traceback_of(error).encode()
    for policy, outcome in (("skip", "skipped"), ("retry", "raised")):
        log = tmp_path / f"{policy}.jsonl"
        loader = DataLoader(dataset, BATCH, errors=ErrorPolicy(policy, log=log), **arguments)
        with warnings.catch_warnings(action="ignore"):
            samples, errors = drain(loader)
        assert samples == (expected if errors else GOOD)
        (record,) = [json.loads(line) for line in log.read_text().splitlines()]
        assert record["outcome"] == outcome
        assert record["exception"].endswith(
            "Local" if kind == "local" else type(ERRORS[kind]()).__name__
        )
        assert len(record["message"]) <= 1 << 16
        assert loader.report().run.errors.unrecorded == 0
        check_views(loader)


class Fails:
    """Raises an error when it is called, pickled or copied."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def _raise(self, *_: object) -> Any:
        raise self.error

    __call__ = __reduce_ex__ = __deepcopy__ = _raise


class Letters(KeyedSource):
    def read_value(self, key: str) -> str:
        return key

    def list_keys(self) -> list[str]:
        return ["a"]


WRAPPED: dict[str, tuple[type[Exception], str, Callable[[Fails], object]]] = {
    "decode": (SourceError, "cannot decode key 'a'", lambda it: Letters(None, it, None)[0]),
    "a fingerprint": (TypeError, "has no fingerprint", fingerprint),
    "a pickle": (NotPicklableError, "^it cannot be", lambda it: check_picklable("it", it)),
    "a copy": (ValueError, "cannot be copied", lambda it: independent(it, None)),
}


@pytest.mark.parametrize("what", WRAPPED)
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_that_names_another_is_made_whatever_that_does(kind: str, what: str) -> None:
    expected, text, work = WRAPPED[what]
    with pytest.raises(expected, match=text):
        work(Fails(ERRORS[kind]()))


# ---- names -----------------------------------------------------------------------------------


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__"):
            fails()
        return super().__getattribute__(name)


class Step:
    def __call__(self, value: Any) -> Any:
        return value


class OddStep(Step, metaclass=Meta):
    __repr__ = fails


class LongStep(Step):
    __qualname__ = "z" * 100_000


class SurrogateStep(Step):
    __qualname__ = "name \udcff"


class AnyAttribute(Step):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__qualname__":
            raise AttributeError(name)
        return self


class NoAttribute(Step):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class NamedThree(Step):
    __qualname__: ClassVar[Any] = "NamedThree"

    def __init__(self) -> None:
        self.__qualname__ = 3  # type: ignore[misc]


STEPS = (OddStep, LongStep, SurrogateStep, AnyAttribute, NoAttribute, NamedThree)


@mostly_slow("workers", WORKERS)
@pytest.mark.parametrize("kind", STEPS, ids=range(len(STEPS)))
def test_transforms_of_any_name(kind: Any, workers: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.json"
    loader = DataLoader(
        Numbers(SIZE),
        BATCH,
        transforms=[kind(), kind(), refuse_five],
        errors=ErrorPolicy("skip", log=log),
        observe=Observe(metrics=0, trace=trace),
        stragglers=StragglerPolicy(history=tmp_path / "costs"),
        **WORKERS[workers],
    )
    with pytest.warns(MinatoWarning, match="1 sample of this epoch was skipped"):
        epoch = [(batch.tolist(), metrics_of(loader)) for batch in loader]
    assert {text.count("minato_stage_seconds_total{") for _, text in epoch} == {4}
    assert flat(samples for samples, _ in epoch) == GOOD
    assert json.loads(log.read_text())["transform"] == "refuse_five"
    assert len(events_of(trace)) > SIZE
    check_views(loader)
    loader.close()


def refuse_five(value: int) -> int:
    if value == BAD:
        raise ValueError("five")
    return value


@pytest.mark.parametrize("name", ["\udcff", "x" * 1_000_000, 'a"\\\n{}', "\0", "dataset"])
def test_loaders_of_any_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    trace = tmp_path / "trace.json"
    loader = DataLoader(Numbers(SIZE), BATCH, observe=Observe(name=name, trace=trace, metrics=0))
    for _ in loader:
        assert "minato_batches_total{" in metrics_of(loader)
    assert events_of(trace)
    check_views(loader)
    loader.close()


def test_datasets_of_any_name(tmp_path: Path) -> None:
    """Their costs are kept, too."""

    class Strange(Numbers, metaclass=Meta):
        __repr__ = fails

    for _ in range(2):
        loader = DataLoader(Strange(SIZE), BATCH, stragglers=StragglerPolicy(history=tmp_path))
        assert drain(loader) == (list(range(SIZE)), [])
        check_views(loader)
    assert len(list(tmp_path.iterdir())) == 1


# ---- observers, warnings, logs ---------------------------------------------------------------


METHODS = ("begin", "started", "enter", "leave", "finish")


def followed_by(place: type, method: str) -> type:
    """The class whose method an engine calls for an observer."""
    return RunningEpoch if place is EpochLog and method != "begin" else place


RAISED: dict[str, Callable[[], Exception]] = {
    "value": lambda: ValueError("x"),
    "text": StrRaises,
    "disk": lambda: OSError(28, "full"),
    "memory": MemoryError,
}


# Where the log is the only observer, its ``calls`` note what its ``enter`` would.
@sweep(workers=list(WORKERS), method=[each for each in METHODS if each != "enter"], error=RAISED)
def test_an_observer_that_raises_is_switched_off(
    method: str, workers: str, error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mock(side_effect=error())
    monkeypatch.setattr(followed_by(EpochLog, method), method, broken)
    loader = DataLoader(Numbers(SIZE), BATCH, **WORKERS[workers])
    with pytest.warns(MinatoWarning, match="EpochLog of this loader is switched off") as told:
        assert torch.cat(list(loader)).tolist() == list(range(SIZE))
    # Python 3.12 and later warn of forks beside threads; pytest has some.
    of_ours = [each for each in told if issubclass(each.category, MinatoWarning)]
    assert (len(of_ours), broken.call_count) == (1, 1)


@pytest.mark.parametrize("method", METHODS)
def test_figures_end_with_the_epochs_before_the_log_was_switched_off(
    method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minato.observe.live._LINE_EVERY_S", 3600.0)  # none but that of the end
    loader = DataLoader(Numbers(SIZE), BATCH)
    with loader.live():
        list(loader)
        before, reported = loader.metrics(), loader.report().to_dict()["run"]
        with monkeypatch.context() as broken:
            broken.setattr(followed_by(EpochLog, method), method, fails)
            with pytest.warns(
                MinatoWarning, match="EpochLog of this loader is switched off"
            ) as told:
                list(loader)
        list(loader)
        assert len(told) == 1
    assert capsys.readouterr().err.count("Numbers, epoch") == 1
    assert (loader.metrics(), loader.report().to_dict()["run"]) == (before, reported)
    with loader.live() as view:
        assert drain(loader) == (list(range(SIZE)), [])
        assert view.rows() == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", [EpochLog, LoopTrack])
def test_where_warnings_are_errors_no_batch_is_lost(
    method: str, place: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(followed_by(place, method), method, fails)
    loader = DataLoader(Numbers(SIZE), BATCH, observe=Observe(trace=tmp_path / "trace.json"))
    with warnings.catch_warnings(action="error"):
        samples, errors = drain(loader)
    assert samples == list(range(SIZE))
    assert [type(each) for each in errors] == [MinatoWarning]
    assert "switched off, because it raised ValueError: broken" in str(errors[0])


def test_a_trace_that_ends_loses_no_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: Track) -> None:
        self.error = OSError(28, "No space left on device")

    loader = DataLoader(Numbers(SIZE), BATCH, observe=Observe(trace=tmp_path / "trace.json"))
    monkeypatch.setattr(Track, "flush", full)
    with warnings.catch_warnings(action="error"):
        samples, (error,) = drain(loader)
    assert samples == list(range(SIZE))
    assert "the trace ends here: [Errno 28]" in str(error)
    assert loader.report().run.throughput.samples == SIZE


@pytest.mark.parametrize("event", ["started", "finish"])
def test_a_view_that_raises_is_switched_off_alone(event: str) -> None:
    class View(Observer):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def started(self) -> None:
            self.seen.append("started")

        def finish(self) -> None:
            self.seen.append("finish")

    loader = DataLoader(Numbers(SIZE), BATCH)
    broken, sound = View(), View()
    setattr(broken, event, fails)
    observers: Any = loader._minato_history.observers  # type: ignore[attr-defined]
    observers += [broken, sound]
    with pytest.warns(MinatoWarning, match="View of this loader is switched off"):
        assert drain(loader) == (list(range(SIZE)), [])
    assert drain(loader) == (list(range(SIZE)), [])
    assert sound.seen == ["started", "finish"] * 2
    assert broken not in observers
    assert loader.report().run.epochs == 2


def test_the_end_of_the_programs_recursion_switches_nothing_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection there may end an iterator."""
    loader = DataLoader(Numbers(SIZE), BATCH)
    next(iter(loader))
    with monkeypatch.context() as deep:
        deep.setattr(EpochLog, "end", Mock(side_effect=RecursionError))
        loader.close()
    list(loader)
    assert loader.report().run.throughput.samples == BATCH + SIZE


def test_the_end_of_an_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Numbers(SIZE), BATCH)
    batches = iter(loader)
    next(batches)
    monkeypatch.setattr(EpochLog, "end", fails)
    with pytest.warns(MinatoWarning, match="EpochLog of this loader is switched off"):
        loader.close()


@pytest.mark.parametrize("policy", ["skip", ErrorPolicy("skip", max_failures=1)])
def test_the_warning_of_skipped_samples_as_an_error(policy: Any) -> None:
    loader = DataLoader(Numbers(SIZE), BATCH, transforms=[refuse_five], errors=policy)
    with warnings.catch_warnings(action="error"):
        samples, errors = drain(loader)
    assert samples == GOOD
    assert [type(each) for each in errors] == [MinatoWarning]
    assert loader.report().epochs[0].finished


def test_a_handler_of_logs_that_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.getMessage()
            raise OSError("full")

    monkeypatch.setattr(logging.getLogger("minato"), "handlers", [Broken()])
    caplog.set_level(logging.DEBUG, "minato")
    loader = DataLoader(Numbers(SIZE), BATCH)
    assert drain(loader) == (list(range(SIZE)), [])
    loader.close()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_log_that_cannot_be_written(
    workers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = ErrorPolicy("skip", log=tmp_path / "log.jsonl")
    arguments = {"transforms": [refuse_five], "errors": policy, **WORKERS[workers]}
    for error in (OSError(28, "full"), ValueError("broken")):
        write = Mock(side_effect=error)
        monkeypatch.setattr("minato.workers.error_policy.FailureLog._write", write)
        loader = DataLoader(Numbers(SIZE), BATCH, **arguments)
        with warnings.catch_warnings(record=True, action="always"):
            assert drain(loader)[0] == GOOD
        errors = loader.report().run.errors
        assert (errors.skipped, errors.unrecorded) == (1, 1)


def test_costs_of_a_dataset_without_a_fingerprint_are_not_kept(tmp_path: Path) -> None:
    dataset = Numbers(SIZE)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    loader = DataLoader(dataset, BATCH, stragglers=StragglerPolicy(history=tmp_path))
    with pytest.warns(MinatoWarning, match="is not used, as the costs have no name: .*lock"):
        assert drain(loader)[0] == list(range(SIZE))
    assert drain(loader)[0] == list(range(SIZE))
    assert list(tmp_path.iterdir()) == []


def test_long_texts_are_cut() -> None:
    assert short("x" * 2000) == "x" * 997 + "..."
    assert short("\ud800") == "\\ud800"
    assert len(Transforms.of([LongStep()]).names[0]) == 1000


SCRIPT = """
import os, sys, warnings
import torch
from minato import DataLoader, Observe
how = sys.argv[1]
if how == "closed":
    sys.stderr.close()
elif how == "none":
    sys.stderr = None
elif how == "full":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
elif how == "ascii":
    sys.stderr.reconfigure(encoding="ascii", errors="strict")
def five(value):
    if value == 5:
        raise ValueError("\\udcff µ")
    return value
found = []
for workers in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}, {"num_workers": 1, "workers": "thread"}):
    loader = DataLoader(range(12), 4, transforms=[five], errors="skip", observe=Observe(name="\\udcff µ"), **workers)
    for batch in loader:
        found += batch.tolist()
    loader.live()
    loader.report().to_html()
print(found == [i for i in range(12) if i != 5] * 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "none", "full", "ascii"])
def test_a_standard_error_that_takes_nothing(how: str, tmp_path: Path) -> None:
    variables = {"MINATO_LIVE": "1", "MINATO_REPORT": str(tmp_path / "report.txt"), "LC_ALL": "C"}
    # Unbuffered: else Python keeps each line that failed, and fails again at each fork and at its end.
    done = python("-u", "-c", SCRIPT, how, **variables)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert "\nWaiting\n" in (tmp_path / "report.txt").read_text()


# ---- coroutines that end the loop ------------------------------------------------------------


class Subtasks(Numbers):
    """Each sample awaits two tasks; those of sample ``BAD`` do what they are told to."""

    def __init__(self, how: str) -> None:
        super().__init__(SIZE)
        self.how = how

    async def __aget__(self, index: int) -> int:
        one, other = await asyncio.gather(self.part(index, "one"), self.part(index, "other"))
        return one + other

    async def part(self, index: int, which: str) -> int:
        await asyncio.sleep(0)
        if index == BAD and which == "one":
            if self.how == "exit":
                sys.exit(3)
            if self.how == "interrupt":
                raise KeyboardInterrupt
            if self.how == "stop":
                asyncio.get_running_loop().stop()
            if self.how == "background":
                self.task = asyncio.get_running_loop().create_task(self.ends())
                self.task.add_done_callback(asyncio.Task.exception)
        await asyncio.sleep(0)
        return index

    async def ends(self) -> None:
        await asyncio.sleep(0)
        raise SystemExit


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "workers": "thread"}, forked(2)])
@pytest.mark.parametrize("how", ["exit", "interrupt", "stop", "background"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_task_that_ends_the_event_loop(how: str, workers: dict[str, Any]) -> None:
    if how == "interrupt" and "multiprocessing_context" in workers:
        pytest.skip("a KeyboardInterrupt ends a worker process, as a Ctrl-C does")
    loader = DataLoader(
        Subtasks(how), 2, fetch_concurrency=4, timeout=60 if workers else 0, errors=told, **workers
    )
    found, errors = drain(loader, 3)
    left_out = [] if how in ("stop", "background") else [4, 5]
    assert found == [2 * i for i in range(SIZE) if i not in left_out]
    is_repeated = how == "interrupt" and not workers  # it may be a Ctrl-C: the batch is made again
    assert len(errors) == len(left_out) / 2 + is_repeated


def told(failure: Any) -> Any:
    raise failure.error
