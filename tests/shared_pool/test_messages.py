"""Whatever one end of a channel sends, the other one goes on or says what is wrong."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from minato._core.segment import Segment
from minato.batching.arena import Arena, Slot
from minato.observe.observers import Observers
from minato.sampling.progress import Completed, Outgoing
from minato.shared_pool import channel as meetings
from minato.shared_pool.channel import (
    BatchDescriptor,
    BatchMessage,
    Channel,
    Hello,
    RankListener,
    connected,
    encoded,
    from_host,
    from_rank,
)
from minato.shared_pool.client import PoolClient
from minato.shared_pool.rendezvous import Rendezvous
from minato.shared_pool.server import PoolServer
from minato.shared_pool.source import LeasedBatch
from tests.datasets import wait_until
from tests.disks import without_descriptors
from tests.shared_pool.jobs import PATIENCE_S

NBYTES = 1 << 16

# ---- what may be sent -----------------------------------------------------------------------

small = st.integers(0, 3)
counts = st.one_of(small, st.integers(0, NBYTES + 10), st.integers(0, (1 << 63) - 1))
hashes = st.integers(0, (1 << 64) - 1)
pairs = st.lists(st.tuples(counts, counts), max_size=3).map(tuple)
slots = st.tuples(counts, counts).map(lambda pair: Slot(*sorted(pair)))
places = st.lists(st.tuples(small, slots), max_size=3).map(tuple)
texts = st.text(max_size=5)
tallies = st.tuples(counts, hashes)
hads = st.builds(Completed, pairs, counts, *[tallies] * 3)
greetings = st.builds(Hello, small, small, st.dictionaries(texts, texts, max_size=2))
strings = st.lists(st.tuples(counts, counts, counts), max_size=3).map(tuple)
descriptors = st.builds(
    BatchDescriptor, slots, counts, st.tuples(counts, counts), st.booleans(), strings, counts
)
epochs = st.integers(-3, 3)
from_ranks = st.one_of(
    st.tuples(st.just("hello"), st.just(0), st.just(()), greetings),
    st.tuples(st.just("enter"), small, pairs, st.tuples(epochs, st.one_of(st.none(), hads))),
    st.tuples(st.sampled_from(["next", "leave", "bye"]), small, pairs, st.none()),
)
from_hosts = st.one_of(
    st.tuples(st.sampled_from(["welcome", "open", "end"]), small),
    st.tuples(st.sampled_from(["broken", "refused"]), texts),
    st.tuples(st.just("failed"), small, texts),
    st.tuples(st.just("arena"), small, st.one_of(st.just(NBYTES), counts)),
    st.tuples(st.just("given back"), places),
    st.builds(
        BatchMessage,
        st.just("batch"),
        small,
        small,
        descriptors,
        st.tuples(st.lists(st.tuples(counts, counts), max_size=3), counts, hashes),
    ),
)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.floats(), texts, st.integers(-2, 1 << 65)),
    st.sampled_from(["hello", "arena", "batch"]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=2)
)


@st.composite
def altered(draw: Any, messages: Any) -> bytes:
    """A message with one part of it replaced, left out, or said twice."""
    whole = json.loads(encoded(draw(messages)))
    parts: list[Any] = [whole]
    here = whole
    while isinstance(here, list) and here and draw(st.booleans()):
        here = draw(st.sampled_from(here))
        parts.append(here)
    spot = draw(st.sampled_from([part for part in parts if isinstance(part, list)]))
    if spot:
        number = draw(st.integers(0, len(spot) - 1))
        instead = draw(
            st.one_of(values.map(lambda value: [value]), st.sampled_from(["drop", "twice"]))
        )
        changed = {"drop": [], "twice": [spot[number]] * 2}
        spot[number : number + 1] = changed[instead] if isinstance(instead, str) else instead
    return json.dumps(whole).encode()


def anything(messages: Any) -> Any:
    """Bytes of messages, of what nearly are some, and others."""
    return st.one_of(
        messages.map(encoded),
        altered(messages),
        values.map(lambda value: json.dumps(value).encode()),
        st.binary(max_size=40),
        st.sampled_from([b"[" * 10_000, b"1" * 5000, b'"\\ud800"', b"\xff", b"{}", b"NaN"]),
    )


def framed(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


streams = st.one_of(
    st.binary(max_size=30), st.just(b"\xff" * 12), st.just(struct.pack("!i", 1 << 30))
)

# ---- reading them ---------------------------------------------------------------------------


@given(from_ranks, from_hosts)
def test_messages_arrive_as_they_were(rank: Any, host: Any) -> None:
    assert from_rank(encoded(rank)) == rank
    assert from_host(encoded(host)) == host


@pytest.mark.parametrize("decode", [from_rank, from_host])
@given(data=st.one_of(anything(from_ranks), anything(from_hosts)))
@example(data=b'["given back",[null]]')
@example(data=b'["given back",["ab"]]')
@example(data=b'["batch",0,0,null,[[],0,0]]')
@example(data=b'["batch",0,0,[[0,1],0,[0,0],false,[true,1],0],[[],0,0]]')
@example(data=b'["enter",0,[null],[0,null]]')
def test_what_is_no_message_is_a_value_error(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        message = decode(data)
    except ValueError:
        return
    assert decode(encoded(message)) == message


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(anything(from_ranks).map(framed), streams), max_size=6))
def test_a_channel_reads_any_stream(sent: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, from_rank)
    with theirs:
        theirs.sendall(b"".join(sent))
        theirs.shutdown(socket.SHUT_WR)
        for _ in range(len(sent) * 20 + 1):  # bytes at random may be several messages
            channel.wait(0)
    assert channel.over
    channel.close()


# ---- a host that sends anything -------------------------------------------------------------


@contextlib.contextmanager
def at_a_meeting() -> Iterator[Rendezvous]:
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield Rendezvous(0, "a job")
        finally:
            tempfile.tempdir = before


def num_descriptors() -> int:
    """Number of descriptors of this process, without the one of each local rank, which stays."""
    gc.collect()  # a link and what it has mapped know each other
    return len(os.listdir("/proc/self/fd")) - len(meetings._processes)


def check_link(sent: list[Any], lets_in: bool) -> None:
    """A rank whose host sends these gets batches, errors in words, or the end."""

    def said(channel: Channel, message: Any) -> None:
        with contextlib.suppress(OSError):
            if message[0] == "hello" and lets_in:
                channel.send(("welcome", 0))
            elif message[0] == "enter" or not lets_in:
                if lets_in:
                    channel.send(("open", 0))
                for each in sent:
                    if isinstance(each, bytes):
                        channel._socket.sendall(framed(each))
                    else:
                        has_memory = each[0] == "arena"
                        channel.send(each, memory.descriptor if has_memory else None)
                channel.hang_up()

    memory = Segment(NBYTES)
    with at_a_meeting() as rendezvous:
        host = RankListener(rendezvous, said, lambda channel: None)
        try:
            link = PoolClient(rendezvous, Hello(1, 1, {}), timeout_s=5.0)
        except RuntimeError:
            host.close()
            return
        held = []
        try:
            number, _ = link.enter(EPOCH)
            for _ in range(len(sent) + 1):
                link.arrived(number)
                handle = link.next(number)
                link.ask(number, handle)
                link.drop(handle)
                link.given_back()
                with contextlib.suppress(RuntimeError, MemoryError):
                    held.append(handle.open())
        except (RuntimeError, StopIteration):
            pass
        held.clear()
        link.close()
        host.close()
        link._channel.close()


sent_by_hosts = st.lists(st.one_of(from_hosts, from_hosts, anything(from_hosts)), max_size=8)
MEMORY = ("arena", 0, NBYTES)
PORTION = ([], 0, 0)
EPOCH: Any = SimpleNamespace(number=0, progress=SimpleNamespace(latest=lambda: PORTION, part=None))


def batch(arena: int, *parts: Any) -> Any:
    return BatchMessage("batch", 0, arena, BatchDescriptor(*parts), PORTION)


HOSTILE: list[list[Any]] = [
    [MEMORY, batch(0, Slot(0, NBYTES), 64, (0, 0), False, (), 64)],
    [MEMORY, batch(0, Slot(0, NBYTES), 0, (64, 1 << 40), False, (), 64)],
    [MEMORY, batch(0, Slot(0, 1 << 40), 64, (0, 0), False, (), 64)],
    [MEMORY, batch(0, Slot(0, NBYTES), 64, (0, 0), True, (), 1 << 50)],
    [batch(7, Slot(0, 64), 64, (0, 0), False, (), 64)],
    [("arena", 0, NBYTES + 4096)],
    [MEMORY, MEMORY, b"[]", MEMORY],
    [MEMORY, ("given back", ((0, Slot(0, 1 << 50)), (3, Slot(0, 1))))],
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(sent_by_hosts, st.booleans())
def test_a_rank_survives_its_host(sent: list[Any], lets_in: bool) -> None:
    check_link(sent, lets_in)


def test_nothing_that_a_host_sent_is_left() -> None:
    before = num_descriptors()
    for sent in HOSTILE:
        check_link(sent, True)
    wait_until(lambda: num_descriptors() <= before)


def test_without_descriptors_the_memory_of_the_host_is_refused_in_words() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, from_host)
    with theirs:
        theirs.sendall(framed(encoded(MEMORY)))
        socket.send_fds(theirs, [b"\1"], [0])
        with without_descriptors():
            channel.wait(PATIENCE_S)
    assert channel.over
    assert "raise the limit (ulimit -n)" in str(channel.fault)
    channel.close()


def test_memory_that_is_smaller_than_it_is_said_to_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a file of another size"):
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, 4096)
        Segment.received(descriptor, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# ---- ranks and strangers that send anything -------------------------------------------------


class Engine:
    """Gives so many batches, in memory of its own."""

    def __init__(self, count: int, texts: Any = ()) -> None:
        self.arena = Arena(Segment(1 << 30))
        self.observers = Observers([])
        self.left = count
        self.texts = texts

    def next(self) -> Outgoing:
        if not self.left:
            raise StopIteration
        self.left -= 1
        slot = self.arena.acquire()
        descriptor = BatchDescriptor(slot, 0, (0, 0), False, self.texts, 64)
        return Outgoing(LeasedBatch(descriptor, self.arena.lease(slot, 64)))

    def begin(self, epoch: Any, batches: Any) -> bool:
        return True

    def cancel(self) -> None:
        self.left = 0


def begun(server: PoolServer, engine: Engine, quota: int) -> int:
    """The number of an epoch of the server."""
    return server.begin_epoch(engine, quota, EPOCH, [])[0]  # type: ignore[arg-type]


def entered(rendezvous: Rendezvous, rank: int, facts: dict[str, str], number: int) -> Channel:
    """The channel of a rank that takes part in an epoch."""
    channel = connected(rendezvous, PATIENCE_S)
    channel.send(("hello", 0, (), Hello(rank, rank, facts)))
    channel.send(("enter", number, (), (0, None)))
    return channel


def taken(server: PoolServer, number: int) -> int:
    """How many batches of an epoch the host's own rank gets."""
    for count in itertools.count():
        try:
            handle = server.next(number)
        except StopIteration:
            return count
        server.ask(number, handle)
        server.drop(handle)
    raise AssertionError


def check_ended(server: PoolServer) -> None:
    server._thread.join(PATIENCE_S)
    assert not server._thread.is_alive()


def check_hub(sent: list[tuple[int, Any]], in_turn: bool) -> None:
    """The host's own rank gets its batches, whatever the others send, and its threads end."""
    with at_a_meeting() as rendezvous:
        facts = {"batch_size": "4"}
        server = PoolServer(rendezvous, Hello(0, 0, facts), 3, in_turn, "continue")
        number = begun(server, Engine(9), 3)
        channels = [entered(rendezvous, rank, facts, number) for rank in (1, 2)]
        for who, each in sent:
            with contextlib.suppress(OSError):
                if who < 2 and not isinstance(each, bytes):
                    channels[who].send(each)
                elif who < 2:
                    channels[who]._socket.sendall(framed(each))
                else:
                    found = rendezvous.call()
                    assert found is not None
                    with found[0] as stranger:
                        stranger.sendall(each if isinstance(each, bytes) else framed(encoded(each)))
        assert taken(server, number) == 3
        assert server._listener.works
        for channel in channels:
            channel.close()
        server.close()
        check_ended(server)
        wait_until(lambda: not server._listener.works)


sent_by_ranks = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(from_ranks, from_ranks, anything(from_ranks))),
    max_size=12,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(sent_by_ranks, st.booleans())
def test_a_host_survives_its_ranks(sent: list[Any], in_turn: bool) -> None:
    check_hub(sent, in_turn)


@pytest.mark.stress
def test_a_host_and_its_ranks_for_long(stress_s: float) -> None:
    until_s, number = time.monotonic() + stress_s, os.getpid()
    before, threads = num_descriptors(), threading.active_count()
    while time.monotonic() < until_s:
        number += 1
        for check, sent in ((check_hub, sent_by_ranks), (check_link, sent_by_hosts)):
            run = settings(max_examples=100, database=None)(
                seed(number)(given(sent, st.booleans())(check))
            )
            run()
    wait_until(lambda: num_descriptors() <= before)
    wait_until(lambda: threading.active_count() <= threads)


def test_a_host_that_takes_leave_does_not_wait_for_a_rank_that_is_slow() -> None:
    count, texts = 40, tuple((i, 4096 + 640 * i, 600) for i in range(4000))
    with at_a_meeting() as rendezvous:
        server = PoolServer(rendezvous, Hello(0, 0, {}), 2, True, "continue")
        number = begun(server, Engine(2 * count, texts), count)
        rank = entered(rendezvous, 1, {}, number)
        assert taken(server, number) == count
        server.close()
        time.sleep(0.2)
        assert server._ranks.lock.acquire(timeout=PATIENCE_S)  # whoever sends has it
        try:
            assert server._ranks.slots[1].inbox
        finally:
            server._ranks.lock.release()
        kinds = []
        while "end" not in kinds:
            rank.wait(PATIENCE_S)
            kinds += [message[0] for message, _ in rank.received]
            rank.received.clear()
            assert not rank.over
        rank.close()
        check_ended(server)
    assert kinds == ["welcome", "open", "arena", *["batch"] * count, "end"]


def test_threads_of_a_meeting_are_gone() -> None:
    threads = threading.active_count()
    check_hub([], True)
    wait_until(lambda: threading.active_count() == threads)
