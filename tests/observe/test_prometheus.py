"""Metrics for Prometheus, at an address of this machine, with clients of every kind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import socket
import struct
import sys
import threading
import time
import types
import urllib.request
import weakref
from typing import Any

import pytest

import minato
from minato.observe import metrics
from minato.observe.metrics import CATALOG
from tests.datasets import Numbers, double, wait_until

parser = pytest.importorskip("prometheus_client.parser")
NAMES = {"minato_batches_total", "minato_samples_total", "minato_wait_seconds_total"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_JOIN_S", 60.0)


def loader_of(**options: Any) -> minato.DataLoader[int]:
    return minato.DataLoader(Numbers(12), 2, transforms=[double], **options)


def fetched(url: str | None) -> dict[str, float]:
    """Value of each figure by its name and labels."""
    assert url is not None
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    assert {each.type for each in parser.text_string_to_metric_families(text)} <= {
        "counter",
        "gauge",
    }
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
    (value,) = (
        value for key, value in figures.items() if key.startswith(name + "{") and label in key
    )
    return value


def assert_nothing_listens(url: str) -> None:
    port = int(re.findall(r":(\d+)/", url)[0])
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))
    assert not [each for each in threading.enumerate() if each.name == "minato-metrics"]


def test_a_closed_loader_frees_the_address_until_it_is_used_again() -> None:
    with loader_of(observe=minato.Observe(metrics=0)) as loader:
        list(loader)
        url = loader.metrics_url
        assert url is not None
        fetched(url)
    assert loader.metrics_url is None
    assert_nothing_listens(url)
    loader.close()
    list(loader)
    assert of(fetched(loader.metrics_url), "minato_batches_total") == 12  # of both epochs
    loader.close()


def test_a_closed_loader_leaves_the_address_to_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    first, second = (loader_of(observe=minato.Observe(metrics=port)) for _ in range(2))
    list(first)
    list(second)
    url = second.metrics_url
    assert url is not None
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
            assert (
                0
                < of(figures, "minato_wait_seconds_total")
                < of(figures, "minato_epoch_seconds_total")
            )
        assert of(figures, "minato_stage_samples_total", 'stage="double"') >= 0
        assert of(figures, "minato_workers") == max(num_workers, 1)
    figures = fetched(loader.metrics_url)
    assert of(figures, "minato_batches_total") == 12
    assert "minato_epoch{" not in "".join(figures)
    url = loader.metrics_url
    assert url is not None
    assert url.startswith("http://127.0.0.1:")
    del loader
    gc.collect()
    assert_nothing_listens(url)


def test_loaders_share_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MINATO_METRICS_PORT", str(port))
    loaders = [loader_of(num_workers=1, persistent_workers=True) for _ in range(2)]
    for loader in loaders:
        list(loader)
    assert {loader.metrics_url for loader in loaders} == {f"http://127.0.0.1:{port}/metrics"}
    figures = fetched(loaders[0].metrics_url)
    assert sum(key.startswith("minato_batches_total") for key in figures) == 2
    url = loaders[0].metrics_url
    assert url is not None
    del loaders[0], loader
    gc.collect()
    assert sum(key.startswith("minato_batches_total") for key in fetched(url)) == 1
    loaders.clear()
    gc.collect()
    assert_nothing_listens(url)


def test_a_loader_is_served_where_another_is_collected_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    others = [loader_of(observe=minato.Observe(metrics=port))]
    list(others[0])

    def collecting(thing: object) -> Any:
        others.clear()  # as a collection may at any allocation
        return weakref.ref(thing)

    loader = loader_of(observe=minato.Observe(metrics=port, name="later"))
    with monkeypatch.context() as patched:
        patched.setattr(
            metrics, "weakref", types.SimpleNamespace(ref=collecting, finalize=weakref.finalize)
        )
        list(loader)
    assert of(fetched(loader.metrics_url), "minato_batches_total", "later") == 6


def test_loaders_with_the_same_name_are_numbered() -> None:
    loaders = [
        loader_of(observe=minato.Observe(name=name, metrics=0)) for name in ("train", "val", "val")
    ]
    labels = set()
    for loader in loaders:
        list(loader)
        keys = "".join(fetched(loader.metrics_url))
        labels |= set(re.findall(r'minato_batches_total\{loader="([^"]*)"', keys))
    (numbered,) = labels - {"train", "val"}
    assert len(labels) == 3
    assert re.fullmatch(r"val \d+", numbered)


def test_a_loader_keeps_its_label() -> None:
    observe = minato.Observe(name="kept", metrics=0)
    first, second = loader_of(observe=observe), loader_of(observe=observe)
    labels = set()
    list(first)
    for _ in range(3):
        with second:
            list(second)
            keys = "".join(fetched(second.metrics_url))
            labels |= set(re.findall(r'minato_batches_total\{loader="([^"]*)"', keys))
        for metric in minato.metrics_collector(second, first).collect():
            labels |= {sample.labels["loader"] for sample in metric.samples}
    assert labels == {"kept", "kept 2"}


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
    with pytest.raises(ValueError, match="observe=False"):
        minato.metrics_collector(loader_of(observe=False))


def test_each_process_of_a_launcher_has_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("LOCAL_RANK", "3")
    loader = loader_of(observe=minato.Observe(metrics=f"localhost:{port - 3}"))
    list(loader)
    assert loader.metrics_url == f"http://localhost:{port}/metrics"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}: .*; use another port"):
            list(loader_of(observe=minato.Observe(metrics=port)))
        monkeypatch.setenv("MINATO_METRICS_PORT", str(port))
        loader = loader_of()
        with pytest.warns(minato.MinatoWarning, match=f"127.0.0.1:{port}"):
            assert len(list(loader)) == 6
        assert loader.metrics_url is None


def test_a_port_above_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(OSError, match=r"127.0.0.1:65536: .*; use another port"):
        list(loader_of(observe=minato.Observe(metrics=65535)))


@pytest.mark.parametrize("value", ["65535", "0x", "no thread"])
def test_what_the_environment_asks_for_ends_no_training(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MINATO_METRICS_PORT", value)
    if value == "no thread":

        def refuse(_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setenv("MINATO_METRICS_PORT", "39000")
        monkeypatch.setattr(threading.Thread, "start", refuse)
    loader = loader_of()
    with pytest.warns(
        minato.MinatoWarning, match="the metrics of a loader will be missing"
    ) as told:
        assert len(list(loader)) == 6
    assert len(list(loader)) == 6  # and says so once
    assert len(told) == 1
    assert loader.metrics_url is None


@pytest.mark.parametrize(
    "port", [-1, 65536, "host", "host:", True, 1.5, "²", "٣", "1²", "-1", "65536", "1.0"]
)
def test_what_is_no_port(port: Any) -> None:
    with pytest.raises(ValueError, match="is no port: give a number up to 65535"):
        loader_of(observe=minato.Observe(metrics=port))


def test_without_measuring_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="contradicts stats=False"):
        loader_of(observe=minato.Observe(metrics=0, stats=False))
    monkeypatch.setenv("MINATO_METRICS_PORT", "1")
    assert len(list(loader_of(observe=False))) == 6


def test_names_follow_prometheus() -> None:
    """Counters end with _total, times are in seconds, sizes in bytes, and the unit is in the name."""
    loader = loader_of(observe=minato.Observe(metrics=0))
    batches = iter(loader)
    next(batches)
    assert loader.metrics_url is not None
    with urllib.request.urlopen(loader.metrics_url, timeout=20) as answer:
        text = answer.read().decode()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
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


def address_of(url: str | None) -> tuple[str, int]:
    assert url is not None
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    return host, int(port)


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
    loader = loader_of(observe=minato.Observe(metrics=0))
    list(loader)
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
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_many_clients_are_refused_and_the_next_is_served() -> None:
    loader = loader_of(observe=minato.Observe(metrics=0))
    list(loader)
    place = address_of(loader.metrics_url)
    idle = [socket.create_connection(place, 20) for _ in range(metrics._MOST_CLIENTS + 4)]
    for client in idle[metrics._MOST_CLIENTS :]:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""  # at once, in the order of their connections
    for client in idle:
        client.close()
    wait_until(lambda: threads_of_clients() == 0)
    assert {key.partition("{")[0] for key in fetched(loader.metrics_url)} >= NAMES
    loader.close()


def test_without_descriptors_it_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []
    accept = metrics._Server.get_request
    monkeypatch.setattr(
        metrics._Server,
        "get_request",
        lambda self: (attempts.append(time.monotonic()), accept(self))[1],
    )
    loader = loader_of(observe=minato.Observe(metrics=0))
    list(loader)
    client = socket.socket()
    client.settimeout(20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        client.connect(address_of(loader.metrics_url))
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_until(lambda: len(attempts) > 3)
        pauses_s = [after - before for before, after in zip(attempts, attempts[1:], strict=False)]
        assert min(pauses_s) >= metrics._PAUSE_S - 0.001
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert client.recv(100).startswith(b"HTTP/1.0 200 OK\r\n")
    client.close()
    loader.close()


def threads_of_clients() -> int:
    return sum("process_request" in each.name for each in threading.enumerate())


def test_it_starts_without_looking_a_name_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a name was looked up")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getnameinfo"):
        monkeypatch.setattr(socket, name, fail)
    loader = loader_of(observe=minato.Observe(metrics=0))
    list(loader)
    loader.close()


def test_a_forked_child_does_not_listen() -> None:
    loader = loader_of(observe=minato.Observe(metrics=0))
    list(loader)
    url = loader.metrics_url
    assert url is not None
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
