"""Where ranks meet, and how they prove that they may: directories, keys, and those who have no business there."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minato.shared_pool import channel, handshake
from minato.shared_pool.channel import Channel, RankListener, connected
from minato.shared_pool.handshake import WrongKeyError, peer_of, prove
from minato.shared_pool.messages import from_host
from minato.shared_pool.rendezvous import KEY_BYTES, Rendezvous, _address
from tests.shared_pool.jobs import until

NEXT = ("next", 0, (), None)


@pytest.fixture
def rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Rendezvous(0, "a job")


class Host(RankListener):
    """Keeps what it hears."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.heard: list[Any] = []
        self.gone: list[Channel] = []
        super().__init__(
            rendezvous, lambda _, message: self.heard.append(message), self.gone.append
        )


@pytest.fixture
def host(rendezvous: Rendezvous) -> Iterator[Host]:
    one = Host(rendezvous)
    yield one
    one.close()
    assert not one.works


def called(rendezvous: Rendezvous) -> tuple[socket.socket, bytes]:
    found = rendezvous.call()
    assert found is not None
    found[0].settimeout(20)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end hangs up, without another byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def check_served(host: Host, rendezvous: Rendezvous) -> None:
    """A rank that knows the key is heard."""
    before = len(host.heard)
    channel = connected(rendezvous, 20, from_host)
    channel.send(NEXT)
    until(lambda: len(host.heard) > before)
    assert host.heard[-1] == NEXT
    assert host.works
    channel.close()


# ---- the directory --------------------------------------------------------------------------


def test_the_files_are_for_this_user_alone_and_go_with_the_host(rendezvous: Rendezvous) -> None:
    keys = []
    for _ in range(2):
        listener, key = rendezvous.listen()
        folder = Path(rendezvous.directory)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {(path.suffix, stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()} == {
            (".key", 0o600),
            (".sock", 0o600),
        }
        assert len(key) == KEY_BYTES
        keys.append(key)
        listener.close()
        rendezvous.end()
        assert list(folder.iterdir()) == []
    assert keys[0] != keys[1]


def test_nothing_has_an_abstract_address(host: Host) -> None:
    """Those are open to all processes of the network namespace, whatever files they see."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    assert not [name for name in names if name.startswith("@minato")]


def open_to_others(path: Path) -> None:
    path.mkdir(mode=0o700)
    path.chmod(0o770)


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("squat", [open_to_others, of_another_user, a_link, Path.touch])
def test_a_directory_that_is_not_its_own_is_refused(
    rendezvous: Rendezvous, squat: Callable[[Path], None]
) -> None:
    squat(Path(rendezvous.directory))
    for attempt in (rendezvous.listen, rendezvous.call):
        with pytest.raises(RuntimeError, match=r"cannot meet in .*minato-\d+.*TMPDIR"):
            attempt()


def test_without_a_directory_for_temporary_files(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(RuntimeError, match="cannot meet: .*set TMPDIR"):
        rendezvous.listen()


def test_a_long_path(
    rendezvous: Rendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    host = Host(rendezvous)
    check_served(host, rendezvous)
    host.close()


def test_one_host_at_a_time(host: Host, rendezvous: Rendezvous) -> None:
    with pytest.raises(OSError, match="in use") as found:
        Host(Rendezvous(0, "a job"))
    assert found.value.errno == errno.EADDRINUSE
    check_served(host, rendezvous)
    other = Host(Rendezvous(1, "a job"))
    check_served(other, Rendezvous(1, "a job"))
    other.close()


def killed(rendezvous: Rendezvous) -> None:
    """A host that leaves its files."""

    def listen() -> None:
        rendezvous.listen()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=listen)
    process.start()
    process.join()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_what_a_killed_host_left_is_replaced(rendezvous: Rendezvous) -> None:
    killed(rendezvous)
    assert len(list(Path(rendezvous.directory).iterdir())) == 2
    assert rendezvous.call() is None
    host = Host(rendezvous)
    check_served(host, rendezvous)
    host.close()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_what_killed_hosts_left_is_swept(host: Host, rendezvous: Rendezvous) -> None:
    folder = Path(rendezvous.directory)
    alive = set(folder.iterdir())
    killed(Rendezvous(0, "another job"))
    young = set(folder.iterdir()) - alive
    killed(Rendezvous(0, "a third job"))
    old = set(folder.iterdir()) - alive - young
    elsewhere = folder / f"{'0' * 20}-{'1' * 20}-0.key"
    elsewhere.touch()
    foreign = folder / "notes.txt"
    foreign.touch()
    for path in {*alive, *old, elsewhere, foreign}:
        os.utime(path, (1, 1), follow_symlinks=False)
    third = Host(Rendezvous(1, "a fourth job"))
    assert {*alive, *young, elsewhere, foreign} < set(folder.iterdir())
    assert not old & set(folder.iterdir())
    third.close()


# ---- who may ---------------------------------------------------------------------------------


class Executed:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_whoever_does_not_know_the_key_is_not_heard(
    host: Host, rendezvous: Rendezvous, tmp_path: Path
) -> None:
    data = pickle.dumps(Executed(tmp_path / "executed"))
    for sent in (struct.pack("<IB", len(data), 0) + data, b"\0" * 64, os.urandom(1000), b"x" * 63):
        connection, _ = called(rendezvous)
        with connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(1000):
                    answer += part
            assert len(answer) in (0, 64)  # a challenge and a proof, whatever was sent
    assert host.heard == []
    check_served(host, rendezvous)
    assert not (tmp_path / "executed").exists()


def test_a_wrong_key_is_refused(host: Host, rendezvous: Rendezvous) -> None:
    connection, key = called(rendezvous)
    with connection, pytest.raises(WrongKeyError):
        prove(connection, bytes([key[0] ^ 1]) + key[1:], time.monotonic() + 20)


def test_a_proof_of_the_host_is_none_of_a_rank(host: Host, rendezvous: Rendezvous) -> None:
    connection, _ = called(rendezvous)
    with connection:
        connection.sendall(b"c" * 32)
        answer = connection.recv(64, socket.MSG_WAITALL)
        connection.sendall(answer[32:])
        assert is_closed(connection)
    check_served(host, rendezvous)


def test_a_host_that_does_not_know_the_key_hears_nothing(rendezvous: Rendezvous) -> None:
    """Somebody listens in the place of a host."""
    listener, _ = rendezvous.listen()
    heard = []

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            heard.append(connection.recv(1000))
            connection.sendall(heard[0] * 2)
            heard.append(connection.recv(1000))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(WrongKeyError, match="does not know the key"):
        connected(rendezvous, 0.0, from_host)
    thread.join()
    listener.close()
    assert [len(data) for data in heard] == [32, 0]


def test_a_host_that_takes_the_place_of_another_is_found(rendezvous: Rendezvous) -> None:
    """The key of the first one is read, and then the second one's socket is called."""
    first, wrong = Host(rendezvous), [True]
    call = rendezvous.call

    def late() -> Any:
        found = call()
        if found and wrong.pop():
            return found[0], b"k" * KEY_BYTES
        return found

    wrong.insert(0, False)
    rendezvous.call = late  # type: ignore[method-assign]
    connected(rendezvous, 20, from_host).close()
    first.close()


def test_strangers_that_say_nothing_are_dropped_and_delay_no_rank(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.5)
    host = Host(rendezvous)
    idle = [called(rendezvous)[0] for _ in range(channel._MAX_PENDING - 1)]
    begun = time.monotonic()
    check_served(host, rendezvous)
    for number in range(200):
        if not host._server._clients:
            break
        with suppress(OSError):
            idle[0].sendall(b"x" * (number < 30))
        time.sleep(0.02)
    assert all(is_closed(each) for each in idle[1:])
    assert time.monotonic() - begun < 20
    for each in idle:
        each.close()
    host.close()


def test_without_descriptors_the_host_pauses_and_goes_on(
    host: Host, rendezvous: Rendezvous
) -> None:
    with rendezvous._opened() as folder, socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            caller.connect(_address(folder, rendezvous._stem))
            time.sleep(0.3)
            assert host.works
            assert not host._server._clients
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: bool(host._server._clients))
    check_served(host, rendezvous)


def test_descriptors_of_strangers_and_ranks_do_not_arrive(
    host: Host, rendezvous: Rendezvous
) -> None:
    channel = connected(rendezvous, 20, from_host)
    channel.send(NEXT)
    until(lambda: bool(host.heard))
    before = len(os.listdir("/proc/self/fd"))
    with called(rendezvous)[0] as stranger:
        socket.send_fds(stranger, [b"x"], [0, 1])
        until(lambda: bool(host._server._clients))
        assert len(os.listdir("/proc/self/fd")) == before + 2  # both ends of the connection
    with suppress(BrokenPipeError):
        channel.send(NEXT, 0)  # its head says so: that is no message of a rank
    until(lambda: bool(host.gone))
    assert "no head of a message" in str(host.gone[0].fault)
    check_served(host, rendezvous)
    channel.close()
    until(lambda: len(os.listdir("/proc/self/fd")) < before)


def test_what_a_rank_sends_can_end_its_own_channel_alone(
    host: Host, rendezvous: Rendezvous
) -> None:
    good = connected(rendezvous, 20, from_host)
    for number, sent in enumerate(
        [b"\xff" * 64, struct.pack("<IB", 2, 0) + b"{}", struct.pack("<IB", 1 << 31, 0)]
    ):
        bad = connected(rendezvous, 20, from_host)
        bad._connection.sendall(sent)
        until(lambda number=number: len(host.gone) > number)
        assert "no message" in str(host.gone[-1].fault)
        bad.close()
        good.send(NEXT)
        until(lambda number=number: len(host.heard) > number)
    good.close()


def test_an_error_where_a_message_is_handled_ends_its_channel_alone(
    host: Host, rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = connected(rendezvous, 20, from_host)
    monkeypatch.setattr(host, "_on_message", lambda channel, message: 1 // 0)
    bad.send(NEXT)
    until(lambda: bool(host.gone))
    assert host.gone[0].fault == "ZeroDivisionError: integer division or modulo by zero"
    bad.close()
    monkeypatch.undo()
    assert host.works


# ---- users that cannot be told apart --------------------------------------------------------


@pytest.mark.parametrize(
    ("uid_map", "overflow", "refused"),
    [
        ("         0          0 4294967295\n", None, False),
        ("         0       1000          1\n", None, True),
        ("         0       1000          1\n", "1", False),
    ],
)
def test_a_user_that_stands_for_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid_map: str, overflow: str, refused: bool
) -> None:
    for name, text in (("_UID_MAP", uid_map), ("_OVERFLOW_UID", overflow or str(os.geteuid()))):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(handshake, name, tmp_path / name)
    if overflow and os.geteuid() == int(overflow):
        pytest.skip("this user has that number")
    handshake._unknown_users.cache_clear()
    one, other = socket.socketpair()
    with one, other:
        if refused:
            with pytest.raises(PermissionError, match="all users without a mapping"):
                peer_of(one)
        else:
            assert peer_of(one) == os.getpid()
    handshake._unknown_users.cache_clear()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_in_a_namespace_without_users_it_is_refused() -> None:
    received, sent = multiprocessing.Pipe(duplex=False)

    def ask() -> None:
        new_user = 0x10000000
        if ctypes.CDLL(None).unshare(new_user) != 0:
            sent.send("no user namespaces here")
            return
        handshake._unknown_users.cache_clear()
        try:
            sent.send(f"process {peer_of(socket.socketpair()[0])}")
        except PermissionError as error:
            sent.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=ask)
    process.start()
    found = received.recv()
    process.join()
    received.close()
    sent.close()
    if found == "no user namespaces here":
        pytest.skip(found)
    assert "represents all users without a mapping" in found
