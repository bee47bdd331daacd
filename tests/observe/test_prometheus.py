"""Metrics for Prometheus, at an address of this machine, with clients of every kind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import types
import urllib.request
import weakref
from typing import Any
from unittest.mock import Mock

import pytest

import minato
from minato.observe import metrics
from minato.observe.metrics import CATALOG
from tests.datasets import Numbers, double, wait_until
from tests.disks import without_descriptors
from tests.subprocesses import free_port
from tests.threads import run_together

parser = pytest.importorskip("prometheus_client.parser")
NAMES = {"minato_batches_total", "minato_samples_total", "minato_wait_seconds_total"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_JOIN_S", 60.0)


def loader_of(**options: Any) -> minato.DataLoader[int]:
    return minato.DataLoader(Numbers(12), 2, transforms=[double], **options)


def used(**options: Any) -> minato.DataLoader[int]:
    """A loader with metrics, after an epoch."""
    loader = loader_of(observe=minato.Observe(**{"metrics": 0, **options}))
    assert len(list(loader)) == 6
    return loader


def text_of(url: str | None) -> str:
    with urllib.request.urlopen(str(url), timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return str(answer.read().decode())


def labels_of(url: str | None) -> set[str]:
    return set(re.findall(r'minato_batches_total\{loader="([^"]*)"', "".join(fetched(url))))


def fetched(url: str | None) -> dict[str, float]:
    """Value of each figure by its name and labels."""
    text = text_of(url)
    kinds = {each.type for each in parser.text_string_to_metric_families(text)}
    assert kinds <= {"counter", "gauge"}
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'(\w+\{(?:\w+="(?:[^"\\]|\\.)*",?)+\}) ([-+.e\d]+)', line)
            assert match, line
            found[match[1]] = float(match[2])
            name = match[1].partition("{")[0]
            assert f"# TYPE {name} " in text
            assert text.index(f"# HELP {name} ") < text.index(line)
    return found


def of(figures: dict[str, float], name: str, label: str = "") -> float:
    keys = [key for key in figures if key.startswith(name + "{") and label in key]
    assert len(keys) == 1
    return figures[keys[0]]


def address_of(url: str | None) -> tuple[str, int]:
    host, port = str(url).removeprefix("http://").partition("/")[0].split(":")
    return host, int(port)


def assert_nothing_listens(url: str | None) -> None:
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(address_of(url))
    assert not [each for each in threading.enumerate() if each.name == "minato-metrics"]


def test_a_closed_loader_frees_the_address_until_it_is_used_again() -> None:
    with used() as loader:
        fetched(url := loader.metrics_url)
    assert loader.metrics_url is None
    assert_nothing_listens(url)
    loader.close()
    list(loader)
    assert of(fetched(loader.metrics_url), "minato_batches_total") == 12  # of both epochs
    loader.close()


def test_a_closed_loader_leaves_the_address_to_others() -> None:
    port = free_port()
    first, second = used(metrics=port), used(metrics=port)
    url = second.metrics_url
    assert first.metrics_url == url
    first.close()
    assert of(fetched(url), "minato_batches_total") == 6
    second.close()
    assert_nothing_listens(url)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_figures_while_it_runs_and_afterwards(num_workers: int) -> None:
    loader = loader_of(num_workers=num_workers, observe=minato.Observe(metrics=0))
    assert loader.metrics_url is None
    for epoch in range(2):
        for number, _ in enumerate(loader, 1):
            figures = fetched(loader.metrics_url)
            assert of(figures, "minato_batches_total") == 6 * epoch + number
            assert of(figures, "minato_samples_total") == 12 * epoch + 2 * number
            assert of(figures, "minato_epoch") == epoch
            waited_s = of(figures, "minato_wait_seconds_total")
            assert 0 < waited_s < of(figures, "minato_epoch_seconds_total")
        assert of(figures, "minato_stage_samples_total", 'stage="double"') >= 0
        assert of(figures, "minato_workers") == max(num_workers, 1)
    figures = fetched(loader.metrics_url)
    assert of(figures, "minato_batches_total") == 12
    assert "minato_epoch{" not in "".join(figures)
    url = str(loader.metrics_url)
    assert url.startswith("http://127.0.0.1:")
    del loader
    gc.collect()
    assert_nothing_listens(url)


def test_loaders_share_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MINATO_METRICS_PORT", str(port))
    loaders = [loader_of(num_workers=1, persistent_workers=True) for _ in range(2)]
    for loader in loaders:
        list(loader)
    assert {loader.metrics_url for loader in loaders} == {f"http://127.0.0.1:{port}/metrics"}
    url = loaders[0].metrics_url
    assert len(labels_of(url)) == 2
    del loaders[0], loader
    gc.collect()
    assert len(labels_of(url)) == 1
    loaders.clear()
    gc.collect()
    assert_nothing_listens(url)


def test_a_loader_that_is_collected_while_another_one_begins() -> None:
    """Its finalizer closes the address, at whichever line of the other one."""
    begins, address = metrics.ServedMetrics.__init__.__code__, ("127.0.0.1", 0)

    def served() -> metrics.ServedMetrics:
        return metrics.ServedMetrics(Mock(spec=metrics.LabelledMetrics), address)

    for number in itertools.count(1):
        later = None
        gc.collect()
        earlier, lines = [served()], itertools.count(1)

        def trace(frame: types.FrameType, event: str, _: object) -> Any:
            if frame.f_code is not begins:
                return None
            if event == "line" and next(lines) == number:  # noqa: B023
                earlier.clear()  # noqa: B023
                gc.collect()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            later = served()
        finally:
            sys.settrace(before)
        assert later._metrics in metrics._endpoints[address].alive()
        if earlier:
            break
    assert number > 4


def test_loaders_that_begin_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(weakref.WeakKeyDictionary[Any, str]):
        def values(self) -> Any:
            found = [*super().values()]
            time.sleep(0.05)  # other threads have their turn
            return found

    def slowly(address: Any) -> Any:
        time.sleep(0.05)
        return endpoint(address)

    endpoint = metrics._Endpoint
    monkeypatch.setattr(metrics, "_Endpoint", slowly)
    monkeypatch.setattr(metrics, "_labels", Slow())
    observe = minato.Observe(name="one", metrics=free_port())
    loaders = [loader_of(observe=observe) for _ in range(3)]
    run_together(*(functools.partial(list, loader) for loader in loaders), limit_s=60)
    assert labels_of(loaders[0].metrics_url) == {"one", "one 2", "one 3"}


def test_a_loader_is_served_where_another_is_collected_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    others = [used(metrics=port)]

    def collecting(thing: object) -> Any:
        others.clear()  # as a collection may at any allocation
        return weakref.ref(thing)

    loader = loader_of(observe=minato.Observe(metrics=port, name="later"))
    collected = types.SimpleNamespace(ref=collecting, finalize=weakref.finalize)
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "weakref", collected)
        list(loader)
    assert of(fetched(loader.metrics_url), "minato_batches_total", "later") == 6


def test_loaders_with_the_same_name_are_numbered() -> None:
    loaders = [used(name=name) for name in ("train", "val", "val")]
    labels = set[str]().union(*(labels_of(loader.metrics_url) for loader in loaders))
    (numbered,) = labels - {"train", "val"}
    assert len(labels) == 3
    assert re.fullmatch(r"val \d+", numbered)


def test_a_loader_keeps_its_label() -> None:
    observe = minato.Observe(name="kept", metrics=0)
    first, second = loader_of(observe=observe), loader_of(observe=observe)
    labels = set[str]()
    list(first)
    for _ in range(3):
        with second:
            list(second)
            labels |= labels_of(second.metrics_url)
        for metric in minato.metrics_collector(second, first).collect():
            labels |= {sample.labels["loader"] for sample in metric.samples}
    assert labels == {"kept", "kept 2"}


def test_a_collector_takes_loaders_alone() -> None:
    loaders: Any = [loader_of()]
    with pytest.raises(TypeError, match="one after the other, and got a list"):
        minato.metrics_collector(loaders)


def test_a_registry_of_the_program_collects_loaders() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    train, val = (loader_of(observe=minato.Observe(name=name)) for name in ("train", "val"))
    registry = CollectorRegistry(auto_describe=True)
    registry.register(minato.metrics_collector(train, val))
    list(val)
    batches = iter(train)
    next(batches)
    told = generate_latest(registry).decode().splitlines()
    assert 'minato_batches_total{loader="train"} 1.0' in told
    assert 'minato_batches_total{loader="val"} 6.0' in told
    assert 'minato_epoch{loader="train"} 0.0' in told
    assert any(line.startswith('minato_stage_samples_total{loader="train"') for line in told)
    gone = weakref.ref(train)
    del train, batches
    gc.collect()
    assert gone() is None
    assert 'minato_batches_total{loader="train"} 1.0' in generate_latest(registry).decode()


def test_each_process_of_a_launcher_has_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("LOCAL_RANK", "3")
    loader = used(metrics=f"localhost:{port - 3}")
    assert loader.metrics_url == f"http://localhost:{port}/metrics"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}: .*; use another port"):
            used(metrics=port)
        monkeypatch.setenv("MINATO_METRICS_PORT", str(port))
        loader = loader_of()
        with pytest.warns(minato.MinatoWarning, match=f"127.0.0.1:{port}"):
            assert len(list(loader)) == 6
        assert loader.metrics_url is None


def test_an_interrupted_start_frees_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        thread.start()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(metrics, "start_thread", start)
    loader = loader_of(observe=minato.Observe(metrics=free_port()))
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert len(list(loader)) == 6
    fetched(url := loader.metrics_url)
    loader.close()
    assert_nothing_listens(url)


def test_a_port_above_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(OSError, match=r"127.0.0.1:65536: .*; use another port"):
        used(metrics=65535)


@pytest.mark.parametrize("value", ["65535", "0x", "no thread"])
def test_what_the_environment_asks_for_ends_no_training(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MINATO_METRICS_PORT", "39000" if value == "no thread" else value)
    if value == "no thread":
        refuse = Mock(side_effect=RuntimeError("can't start new thread"))
        monkeypatch.setattr(threading.Thread, "start", refuse)
    loader, missing = loader_of(), "the metrics of a loader will be missing"
    with pytest.warns(minato.MinatoWarning, match=missing) as told:
        assert len(list(loader)) == 6
    assert len(list(loader)) == 6  # and says so once
    assert len(told) == 1
    assert loader.metrics_url is None


@pytest.mark.parametrize(
    "port", [-1, 65536, "host", "host:", True, 1.5, "²", "٣", "1²", "-1", "65536", "1.0", ("host",)]
)
def test_what_is_no_port(port: Any) -> None:
    with pytest.raises(ValueError, match="is no port: give a number up to 65535, .*'0.0.0.0:9100'"):
        loader_of(observe=minato.Observe(metrics=port))


def test_without_measuring_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINATO_METRICS_PORT", "1")
    assert len(list(loader_of(observe=False))) == 6


def test_names_follow_prometheus() -> None:
    """Counters end with _total, times are in seconds, sizes in bytes, and the unit is in the name."""
    loader = loader_of(observe=minato.Observe(metrics=0))
    batches = iter(loader)
    next(batches)
    told = text_of(loader.metrics_url)
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", told, re.MULTILINE))
    assert {"minato_wait_ratio", "minato_stage_seconds_total"} | NAMES <= set(kinds)
    assert "minato_samples_per_second" not in kinds  # rate(minato_samples_total) is better
    for name, kind in kinds.items():
        assert re.fullmatch(r"minato_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|ns|us|s|kb|mb|percent|milliseconds)(_|$)", name)
    for each in CATALOG:
        words = each.name.removesuffix("_total").split("_")
        unit = {"s": "seconds", "bytes": "bytes", "share": "ratio"}.get(each.unit)
        assert unit is None or words[-1] == unit, each


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'minatoloader\[metrics\]'"):
        minato.Observe(metrics=0)
    monkeypatch.setenv("MINATO_METRICS_PORT", "9")
    loader = loader_of()
    with pytest.warns(minato.MinatoWarning, match=r"minatoloader\[metrics\]"):
        assert len(list(loader)) == 6


def test_a_slow_client_does_not_delay_the_end_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 1000.0)
    loader = loader_of(observe=minato.Observe(metrics=0))
    next(iter(loader))
    url = loader.metrics_url
    with socket.create_connection(address_of(url), 20) as client:
        client.sendall(b"GET /metr")
        begun = time.monotonic()
        del loader
        gc.collect()
        assert time.monotonic() - begun < 50
        assert_nothing_listens(str(url))


def test_a_collection_within_threading_ends_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts a thread for each client, which needs the lock of threading.enumerate()."""
    monkeypatch.setattr(metrics, "_JOIN_S", 0.05)
    loader: Any = loader_of(observe=minato.Observe(metrics=0))
    next(iter(loader))
    url = str(loader.metrics_url)
    ended = threading.Event()

    def collect() -> None:
        with threading._active_limbo_lock, socket.create_connection(address_of(url), 20):  # type: ignore[attr-defined]
            time.sleep(0.1)  # until the server has accepted it
            loader.close()
            ended.set()

    threading.Thread(target=collect, daemon=True).start()
    assert ended.wait(60)
    wait_until(lambda: "minato-metrics" not in {each.name for each in threading.enumerate()})
    assert_nothing_listens(url)


def test_clients_that_go_or_are_silent_leave_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    loader = used()
    place = address_of(loader.metrics_url)
    for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n", b"\xff" * 100 + b"\r\n\r\n"):
        client = socket.create_connection(place, 20)
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    with socket.create_connection(place, 60) as client, contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    assert {key.partition("{")[0] for key in fetched(loader.metrics_url)} >= NAMES
    loader.close()
    assert capfd.readouterr() == ("", "")


def test_many_clients_are_refused_and_the_next_is_served() -> None:
    loader = used()
    place = address_of(loader.metrics_url)
    idle = [socket.create_connection(place, 20) for _ in range(metrics._MOST_CLIENTS + 4)]
    for client in idle[metrics._MOST_CLIENTS :]:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""  # at once, in the order of their connections
    for client in idle:
        client.close()
    wait_until(lambda: not any("process_request" in each.name for each in threading.enumerate()))
    assert {key.partition("{")[0] for key in fetched(loader.metrics_url)} >= NAMES
    loader.close()


def test_without_descriptors_it_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []
    accept = metrics._Server.get_request

    def counted(server: Any) -> Any:
        attempts.append(time.monotonic())
        return accept(server)

    monkeypatch.setattr(metrics._Server, "get_request", counted)
    loader = used()
    client = socket.socket()
    client.settimeout(20)
    with without_descriptors():
        client.connect(address_of(loader.metrics_url))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_until(lambda: len(attempts) > 3)
        pauses_s = [after - before for before, after in itertools.pairwise(attempts)]
        assert min(pauses_s) >= metrics._PAUSE_S - 0.001
    assert client.recv(100).startswith(b"HTTP/1.0 200 OK\r\n")
    client.close()
    loader.close()


def test_it_starts_without_looking_a_name_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Mock()
    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getnameinfo"):
        monkeypatch.setattr(socket, name, looked_up)
    used().close()
    assert not looked_up.called


def test_a_forked_child_does_not_listen() -> None:
    loader = used()
    url = loader.metrics_url
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the parent says so
        list(loader)
        os._exit(7 if loader.metrics_url is None and not metrics._endpoints else 1)
    try:
        del loader
        gc.collect()
        assert_nothing_listens(url)
    finally:
        os.close(write)
        os.close(read)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 7
