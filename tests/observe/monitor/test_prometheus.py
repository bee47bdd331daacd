"""Figures for those who collect them, at an address of this machine."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

import minato
from tests.datasets import Numbers, double

NAMES = {"minato_batches_total", "minato_samples_total", "minato_wait_seconds_total"}


def loader_of(**options: Any) -> minato.DataLoader[int]:
    return minato.DataLoader(Numbers(12), 2, transforms=[double], **options)


def fetched(url: str | None) -> dict[str, float]:
    """Value of each figure by its name and labels."""
    assert url is not None
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
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
    with loader_of(metrics_address=0) as loader:
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
    first, second = (loader_of(metrics_address=port) for _ in range(2))
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
    loader = loader_of(num_workers=num_workers, metrics_address=0)
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


def test_loaders_with_the_same_name_are_numbered() -> None:
    loaders = [loader_of(name=name, metrics_address=0) for name in ("train", "val", "val")]
    labels = set()
    for loader in loaders:
        list(loader)
        keys = "".join(fetched(loader.metrics_url))
        labels |= set(re.findall(r'minato_batches_total\{loader="([^"]*)"', keys))
    (numbered,) = labels - {"train", "val"}
    assert len(labels) == 3
    assert re.fullmatch(r"val \d+", numbered)


def test_each_process_of_a_launcher_has_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("LOCAL_RANK", "3")
    loader = loader_of(metrics_address=f"localhost:{port - 3}")
    list(loader)
    assert loader.metrics_url == f"http://localhost:{port}/metrics"


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}: .*; use another port"):
            list(loader_of(metrics_address=port))
        monkeypatch.setenv("MINATO_METRICS_PORT", str(port))
        loader = loader_of()
        with pytest.warns(minato.MinatoWarning, match=f"127.0.0.1:{port}"):
            assert len(list(loader)) == 6
        assert loader.metrics_url is None


@pytest.mark.parametrize("port", [-1, 65536, "host", "host:", True, 1.5])
def test_what_is_no_port(port: Any) -> None:
    with pytest.raises(ValueError, match="is no port: give a number up to 65535"):
        loader_of(metrics_address=port)


def test_without_measuring_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="contradicts stats=False"):
        loader_of(metrics_address=0, stats=False)
    monkeypatch.setenv("MINATO_METRICS_PORT", "1")
    assert len(list(loader_of(stats=False))) == 6


def test_other_requests_are_refused() -> None:
    loader = loader_of(metrics_address=0)
    list(loader)
    assert loader.metrics_url is not None
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(loader.metrics_url.replace("metrics", "secrets"), timeout=20)
    assert {key.partition("{")[0] for key in fetched(loader.metrics_url)} >= NAMES


def test_a_forked_child_does_not_listen() -> None:
    loader = loader_of(metrics_address=0)
    list(loader)
    url = loader.metrics_url
    assert url is not None
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)  # until the parent says so
        os._exit(0)
    try:
        del loader
        gc.collect()
        assert_nothing_listens(url)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)
