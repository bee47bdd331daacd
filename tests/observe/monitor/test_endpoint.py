"""The metrics endpoint with clients that are slow, hostile or too many."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import minato
from minato._support import socket_server
from minato._support.socket_server import Server
from minato.observe.monitor import endpoint
from minato.observe.monitor.endpoint import Endpoint, _Request
from tests.datasets import Numbers, wait_until

REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"


@pytest.fixture
def served() -> Iterator[Endpoint]:
    one = Endpoint("127.0.0.1", 0)
    yield one
    one.close()
    assert not one._server.works


def connected(one: Endpoint) -> socket.socket:
    client = socket.create_connection(address_of(one.url), 20)
    client.settimeout(20)
    return client


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    return host, int(port)


def answer_of(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def asked(one: Endpoint) -> bytes:
    with connected(one) as client:
        client.sendall(REQUEST)
        return answer_of(client)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_slow_client_does_not_delay_the_end_of_a_loader() -> None:
    loader = minato.DataLoader(Numbers(8), 2, metrics_address=0)
    next(iter(loader))
    assert loader.metrics_url is not None
    with socket.create_connection(address_of(loader.metrics_url), 20) as client:
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    client.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        time.sleep(0.2)
        begun = time.monotonic()
        del loader
        gc.collect()
        took_s = time.monotonic() - begun
        ended.set()
        thread.join()
        assert took_s < 5.0  # the client goes on for as long as it takes
        assert not [each for each in threading.enumerate() if each.name == "minato-metrics"]


def test_slow_clients_have_a_deadline_and_do_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_TIME_LIMIT_S", 0.5)
    one = Endpoint("127.0.0.1", 0)
    try:
        slow = [connected(one) for _ in range(endpoint._MOST_CLIENTS - 1)]
        begun = time.monotonic()
        for client in slow:
            client.sendall(b"GET /metr")
        assert asked(one).startswith(b"HTTP/1.1 200 OK\r\n")
        for number in range(40):  # a byte every 50 ms resets no clock
            with contextlib.suppress(OSError):
                slow[0].sendall(b"i")
            if number > 10 and not one._server._clients:
                break
            time.sleep(0.05)
        assert [answer_of(client) for client in slow] == [b""] * len(slow)
        assert time.monotonic() - begun < 10
        for client in slow:
            client.close()
    finally:
        one.close()


def test_more_clients_than_are_served_at_once_wait_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_TIME_LIMIT_S", 1.0)
    served = []
    accept = Server._accept

    def count(server: Server) -> None:
        accept(server)
        served.append(len(server._clients))

    monkeypatch.setattr(Server, "_accept", count)
    one = Endpoint("127.0.0.1", 0)
    try:
        idle = [connected(one) for _ in range(endpoint._MOST_CLIENTS + 4)]
        assert asked(one).startswith(b"HTTP/1.1 200 OK\r\n")
        assert max(served) == endpoint._MOST_CLIENTS
        for client in idle:
            client.close()
    finally:
        one.close()


def test_a_client_that_does_not_read_has_the_same_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_TIME_LIMIT_S", 0.3)
    monkeypatch.setattr(Endpoint, "_text", lambda self: "x" * (64 << 20))
    one = Endpoint("127.0.0.1", 0)
    try:
        with connected(one) as client:
            client.sendall(REQUEST)
            time.sleep(0.6)
            assert 0 < len(answer_of(client)) < 64 << 20
    finally:
        one.close()


def test_connections_that_are_reset_are_not_mentioned(
    served: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    for sent in (b"", b"GET /met", REQUEST):
        for _ in range(3):
            client = connected(served)
            client.sendall(sent)
            reset(client)
    assert asked(served).startswith(b"HTTP/1.1 200 OK\r\n")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When servers tried to accept a connection."""
    found: list[float] = []
    accept = Server._accept
    monkeypatch.setattr(
        Server, "_accept", lambda self: (found.append(time.monotonic()), accept(self))
    )
    return found


def test_without_descriptors_it_pauses_and_goes_on(attempts: list[float], served: Endpoint) -> None:
    client = socket.socket()
    client.settimeout(20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        client.connect(address_of(served.url))
        client.sendall(REQUEST)
        wait_until(lambda: len(attempts) > 3)
        pauses_s = [after - before for before, after in zip(attempts, attempts[1:], strict=False)]
        assert min(pauses_s) >= socket_server._PAUSE_S - 0.001
        assert served._server.works
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answer_of(client).startswith(b"HTTP/1.1 200 OK\r\n")
    client.close()


def test_it_starts_without_looking_a_name_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a name was looked up")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getnameinfo"):
        monkeypatch.setattr(socket, name, fail)
    one = Endpoint("127.0.0.1", 0)
    one.close()


def test_figures_that_cannot_be_made_are_an_answer(
    served: Endpoint, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "text_of", lambda loaders: 1 // 0)
    answer = asked(served)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"ZeroDivisionError: integer division or modulo by zero\n")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("HEAD /metrics HTTP/1.0", "200 OK"),
        ("GET /?x=1 HTTP/1.1", "200 OK"),
        ("GET /etc/passwd HTTP/1.1", "404 Not Found"),
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed"),
        ("GET /metrics", "400 Bad Request"),
        ("GET /metrics HTTP/1.1\r\nCookie: " + "x" * 8192, "431 Request Header Fields Too Large"),
    ],
)
def test_requests_and_their_answers(served: Endpoint, request_line: str, status: str) -> None:
    with connected(served) as client:
        client.sendall(request_line.encode() + b"\r\n\r\n")
        head, _, body = answer_of(client).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == f"HTTP/1.1 {status}"
    length = next(int(line.split(": ")[1]) for line in lines if line.startswith("Content-Length"))
    assert len(body) == (0 if request_line.startswith("HEAD") else length)


# ---- random clients -------------------------------------------------------------------------

pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            *(
                b"GET ",
                b"HEAD ",
                b"POST ",
                b"/metrics",
                b"/",
                b"?",
                b" HTTP/1.1",
                b" HTTP/1.",
                b"\0",
            ),
            *(b"\r\n", b"\n", b"\r", b"Host: x", b"\xff\xfe", b"x" * 5000),
        ]
    ),
)


@given(st.lists(pieces, max_size=12))
@example([REQUEST])
def test_whatever_is_asked_has_an_answer_or_none(asked: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        client = _Request(ours, lambda: "figures\n")
        goes_on = True
        for piece in [*asked, None]:
            if piece is None:
                theirs.shutdown(socket.SHUT_WR)
            else:
                theirs.sendall(piece)
            for _ in range(3):
                if goes_on:
                    with contextlib.suppress(BlockingIOError):
                        goes_on = client.step()
        assert not goes_on
        client.close()
        with contextlib.suppress(ConnectionResetError):
            answer = theirs.recv(1 << 16)
            assert answer == b"" or re.match(rb"HTTP/1.1 [2-5]\d\d [A-Z]", answer)


@pytest.mark.stress
def test_random_clients(stress_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    """While many clients misbehave, another one has its answer within the limit, and then nothing is left."""
    loader = minato.DataLoader(Numbers(8), 2, metrics_address=0)
    batches = iter(loader)
    next(batches)
    assert loader.metrics_url is not None
    place = address_of(loader.metrics_url)
    until_s = time.monotonic() + stress_s

    def misbehave(seed: int) -> None:
        rng = random.Random(seed)
        words = [b"GET ", b"/metrics", b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b"\xff" * 9, b"x" * 9000]
        while time.monotonic() < until_s:
            client = socket.create_connection(place, 20)
            with contextlib.suppress(OSError):
                for _ in range(rng.randrange(6)):
                    client.sendall(rng.choice([*words, rng.randbytes(rng.randrange(1, 50))]))
                    time.sleep(rng.choice([0, 0, 0.01, 0.5]))
                if rng.random() < 0.5:
                    client.shutdown(socket.SHUT_WR)
            if rng.random() < 0.5:
                reset(client)
            client.close()

    threads = [threading.Thread(target=misbehave, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    slowest_s, count = 0.0, 0
    while time.monotonic() < until_s:
        begun = time.monotonic()
        with socket.create_connection(place, 20) as client:
            client.settimeout(20)
            client.sendall(REQUEST)
            assert answer_of(client).startswith(b"HTTP/1.1 200 OK\r\n")
        slowest_s, count = max(slowest_s, time.monotonic() - begun), count + 1
    for thread in threads:
        thread.join()
    assert slowest_s < 5
    assert count
    assert len(list(batches)) == 3
    assert capfd.readouterr().err == ""
