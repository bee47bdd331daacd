"""Where ranks meet, and how they prove that they may: directories, keys, and those who have no business there."""

from __future__ import annotations

import ctypes
import errno
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, deliver_challenge
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minato._support import files
from minato.shared_pool import channel
from minato.shared_pool.channel import Channel, RankListener, WrongKeyError, connected, peer_of
from minato.shared_pool.rendezvous import KEY_BYTES, Found, Rendezvous
from tests.datasets import wait_until
from tests.disks import without_descriptors
from tests.shared_pool.jobs import PATIENCE_S

NEXT = ("next", 0, (), None)


class Host(RankListener):
    """Keeps what it hears."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.heard: list[Any] = []
        self.gone: list[Channel] = []
        super().__init__(rendezvous, lambda _, said: self.heard.append(said), self.gone.append)


@pytest.fixture
def host(rendezvous: Rendezvous) -> Iterator[Host]:
    one = Host(rendezvous)
    yield one
    one.close()
    wait_until(lambda: not one.works)


def called(rendezvous: Rendezvous) -> Found:
    found = rendezvous.call()
    assert found is not None
    found.connection.settimeout(PATIENCE_S)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end hangs up, after its challenge."""
    with suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return True


def check_served(host: Host, rendezvous: Rendezvous) -> None:
    """A rank that knows the key is heard."""
    before = len(host.heard)
    rank = connected(rendezvous, PATIENCE_S)
    rank.send(NEXT)
    wait_until(lambda: len(host.heard) > before)
    assert host.heard[-1] == NEXT
    assert host.works
    rank.close()


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


def test_what_a_killed_host_left_is_replaced(rendezvous: Rendezvous) -> None:
    killed(rendezvous)
    assert len(list(Path(rendezvous.directory).iterdir())) == 2
    assert rendezvous.call() is None
    host = Host(rendezvous)
    check_served(host, rendezvous)
    host.close()


def test_what_killed_hosts_left_is_swept(host: Host, rendezvous: Rendezvous) -> None:
    folder = Path(rendezvous.directory)
    alive = set(folder.iterdir())
    killed(Rendezvous(0, "another job"))
    young = set(folder.iterdir()) - alive
    killed(Rendezvous(0, "a third job"))
    old = set(folder.iterdir()) - alive - young
    others = {folder / f"{'0' * 20}-{'1' * 20}-0.key", folder / "notes.txt"}
    for path in others:
        path.touch()
    for path in alive | old | others:
        os.utime(path, (1, 1), follow_symlinks=False)
    third = Host(Rendezvous(1, "a fourth job"))
    assert alive | young | others < set(folder.iterdir())
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
    for sent in (struct.pack("!i", len(data)) + data, b"\0" * 64, os.urandom(1000), b"x" * 63):
        connection, _ = called(rendezvous)
        with connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):
                while part := connection.recv(1000):
                    answer += part
            assert len(answer) < 200  # a challenge, and that the answer is wrong
    assert host.heard == []
    check_served(host, rendezvous)
    assert not (tmp_path / "executed").exists()


def test_an_answer_of_the_host_is_none_of_a_rank(host: Host, rendezvous: Rendezvous) -> None:
    """A rank that does not know the key sends the host's own challenge back, and is not answered."""
    connection, _ = called(rendezvous)
    connection.setblocking(True)
    with Connection(connection.detach()) as caller:
        caller.send_bytes(caller.recv_bytes())
        with pytest.raises((EOFError, ConnectionResetError)):
            while caller.poll(PATIENCE_S):
                assert b"WELCOME" not in caller.recv_bytes()
    assert host.heard == []
    check_served(host, rendezvous)


@pytest.mark.parametrize("welcomes", [False, True])
def test_a_host_that_does_not_know_the_key_hears_nothing(
    rendezvous: Rendezvous, welcomes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody listens in the place of a host, and finds any answer right, or none."""
    late_s, authenticate = [0.0], Channel.authenticate

    def once(*given: Any, **named: Any) -> None:
        try:
            authenticate(*given, **named)
        finally:
            late_s.append(PATIENCE_S)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(late_s), sleep=time.sleep)
    monkeypatch.setattr(channel, "time", clock)
    monkeypatch.setattr(Channel, "authenticate", once)
    listener, _ = rendezvous.listen()
    listener.settimeout(PATIENCE_S)
    heard: list[bytes] = []

    def pretend() -> None:
        with suppress(OSError):
            while True:
                serve(Connection(listener.accept()[0].detach()))

    def serve(other: Connection[Any, Any]) -> None:
        with other, suppress(EOFError):
            if welcomes:
                other.send_bytes(b"#CHALLENGE#{sha256}" + b"x" * 40)
                heard.append(other.recv_bytes())
                for answer in (b"#WELCOME#", b"x" * 16):
                    other.send_bytes(answer)
                    heard.append(other.recv_bytes())
            else:
                with suppress(AuthenticationError):
                    deliver_challenge(other, b"another key")
            heard.append(other.recv_bytes())

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(WrongKeyError, match="does not know the key"):
        connected(rendezvous, PATIENCE_S)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert welcomes == bool(heard)
    assert {message[:11] for message in heard[1::3]} <= {b"#CHALLENGE#"}
    assert {*heard[2::3]} <= {b"#FAILURE#"}


def test_a_host_that_takes_the_place_of_another_is_found(rendezvous: Rendezvous) -> None:
    """The key of the first one is read, and then the second one's socket is called."""
    host, call, calls = Host(rendezvous), rendezvous.call, itertools.count()

    def late() -> Any:
        found = call()
        return found._replace(key=b"k" * KEY_BYTES) if found and next(calls) == 0 else found

    rendezvous.call = late  # type: ignore[method-assign]
    connected(rendezvous, PATIENCE_S).close()
    assert next(calls) > 1
    host.close()


def test_strangers_that_say_nothing_are_dropped_and_delay_no_rank(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 3600.0)
    host = Host(rendezvous)
    idle = [called(rendezvous)[0] for _ in range(channel._MAX_PENDING - 1)]
    wait_until(lambda: len(host._pending) == len(idle))
    check_served(host, rendezvous)
    for each in idle:
        each.close()
    wait_until(lambda: not host._pending)
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.5)
    silent, slow = called(rendezvous)[0], called(rendezvous)[0]
    with silent, slow:
        with pytest.raises(OSError, match="pipe|reset"):
            for byte in struct.pack("!i", 200) + b"x" * 200:
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        assert is_closed(silent)
    host.close()


def test_without_descriptors_the_host_pauses_and_goes_on(
    host: Host, rendezvous: Rendezvous
) -> None:
    with rendezvous._opened() as folder, socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(PATIENCE_S)
        address = str(next(folder.glob("*.sock")))
        with without_descriptors():
            caller.connect(address)
            time.sleep(0.3)
            assert host.works
            assert not host._pending
        wait_until(lambda: bool(host._pending))
    check_served(host, rendezvous)


def test_descriptors_of_strangers_and_ranks_do_not_arrive(
    rendezvous: Rendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_STALL_S", 1)
    host = Host(rendezvous)
    (tmp_path / "sent").touch()

    def num_received() -> int:
        """The descriptors of the file in this process, which is the host's too, but for the first one."""
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        found = 0
        for link in links:
            with suppress(FileNotFoundError):  # another thread has closed it
                found += str(link.readlink()) == file.name
        return found - 1

    with open(tmp_path / "sent") as file:
        sender = connected(rendezvous, PATIENCE_S)
        with called(rendezvous).connection as stranger:
            socket.send_fds(stranger, [b"x"], [file.fileno()] * 2)
            wait_until(lambda: bool(host._pending))
            check_served(host, rendezvous)
            assert num_received() == 0
        sender.send(NEXT, file.fileno())
        with suppress(OSError):  # the byte with the descriptor is no message of a rank
            sender.send(NEXT)
        wait_until(lambda: any(each.fault for each in host.gone))
        assert num_received() == 0
    check_served(host, rendezvous)
    sender.close()
    host.close()


def test_what_a_rank_sends_can_end_its_own_channel_alone(
    host: Host, rendezvous: Rendezvous
) -> None:
    good = connected(rendezvous, PATIENCE_S)
    for sent in (b"\xff" * 64, struct.pack("!i", 2) + b"{}", struct.pack("!i", 1 << 30), b"\xff"):
        number = len(host.gone)
        bad = connected(rendezvous, PATIENCE_S)
        bad._socket.sendall(sent)
        if len(sent) == 1:
            bad.hang_up()  # in the middle of a message
        wait_until(lambda number=number: len(host.gone) > number)
        assert "no message" in str(host.gone[-1].fault)
        bad.close()
        good.send(NEXT)
        wait_until(lambda number=number: len(host.heard) > number)
    good.close()


def test_an_error_where_a_message_is_handled_ends_its_channel_alone(
    host: Host, rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = connected(rendezvous, PATIENCE_S)
    monkeypatch.setattr(host, "_on_message", lambda channel, message: int("x"))
    bad.send(NEXT)
    wait_until(lambda: bool(host.gone))
    assert host.gone[0].fault == "ValueError: invalid literal for int() with base 10: 'x'"
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
        monkeypatch.setattr(files, name, tmp_path / name)
    if overflow and os.geteuid() == int(overflow):
        pytest.skip("this user has that number")
    files.unmapped_user.cache_clear()
    one, other = socket.socketpair()
    with one, other:
        if refused:
            with pytest.raises(PermissionError, match="all users without a mapping"):
                peer_of(one)
        else:
            assert peer_of(one) == os.getpid()
    files.unmapped_user.cache_clear()


def test_in_a_namespace_without_users_it_is_refused() -> None:
    received, sent = multiprocessing.Pipe(duplex=False)

    def ask() -> None:
        new_user = 0x10000000
        if ctypes.CDLL(None).unshare(new_user) != 0:
            sent.send("no user namespaces here")
            return
        files.unmapped_user.cache_clear()
        try:
            sent.send(f"process {peer_of(socket.socketpair()[0])}")
        except PermissionError as error:
            sent.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=ask)
    with received, sent:
        process.start()
        found = received.recv()
        process.join()
    if found == "no user namespaces here":
        pytest.skip(found)
    assert "represents all users without a mapping" in found
