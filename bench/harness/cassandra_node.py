"""A real Cassandra node on loopback: where its distribution is, its configuration, and the command that starts it.

The benchmark of remote data and the tests of the sources use it. Nothing is downloaded: without Java or a distribution,
``home()`` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

VARIABLE = "MINATO_CASSANDRA_HOME"
"""Names the directory of the distribution, whose ``lib`` has Cassandra's jars."""
HEAP = "256m"
START_S = 90.0
"""How long a node may take to answer; 6 s on two idle cores."""
_STOP_S = 10.0
_PORTS = (15_000, 32_000)
"""Below Linux's ephemeral ports, which begin at 32768."""

_CONFIGURATION = """\
cluster_name: minato
num_tokens: 4
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "{seed}:{storage_port}"
listen_address: {address}
rpc_address: {address}
storage_port: {storage_port}
native_transport_port: {port}
data_file_directories: ["{folder}/data"]
commitlog_directory: {folder}/commitlog
saved_caches_directory: {folder}/saved_caches
hints_directory: {folder}/hints
cdc_raw_directory: {folder}/cdc_raw
commitlog_sync: periodic
commitlog_sync_period: 1000ms
commitlog_segment_size: 16MiB
auto_snapshot: false
auto_bootstrap: false
memtable_heap_space: 32MiB
memtable_offheap_space: 32MiB
key_cache_size: 16MiB
file_cache_size: 32MiB
read_request_timeout: {request_timeout_ms}ms
write_request_timeout: {request_timeout_ms}ms
"""
_AUTHENTICATION = """\
authenticator: PasswordAuthenticator
authorizer: CassandraAuthorizer
"""
_LOGGING = """\
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level %date{ISO8601} %logger{0} - %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="OUT"/></root>
</configuration>
"""
# The parts of the JDK that Cassandra 5.0 reaches into; a distribution has them in conf/jvm17-server.options.
_EXPORTED = {
    "java.base": "jdk.internal.misc jdk.internal.ref sun.nio.ch java.lang.ref jdk.internal.util",
    "java.management.rmi": "com.sun.jmx.remote.internal.rmi",
    "java.rmi": "sun.rmi.registry sun.rmi.server",
    "java.sql": "java.sql",
}
_OPENED = {
    "java.base": "java.io java.lang java.lang.module java.lang.reflect java.net java.nio java.util "
    "java.util.concurrent java.util.concurrent.atomic jdk.internal.loader jdk.internal.math jdk.internal.misc "
    "jdk.internal.module jdk.internal.ref jdk.internal.reflect jdk.internal.util sun.nio.ch",
    "java.rmi": "sun.rmi.transport.tcp",
    "jdk.management.jfr": "jdk.management.jfr",
    "jdk.management": "com.sun.management.internal",
    "jdk.compiler": "com.sun.tools.javac.file",
}

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class NotInstalled(Exception):
    """No node can be started on this machine; says why, and what helps."""


@dataclass(frozen=True)
class Place:
    """Where a node listens, and whom it knows; the nodes of a ring differ in their addresses alone.

    Attributes:
        seed: Address of the ring's first node.
        extra: Further lines of ``cassandra.yaml``.
        authenticates: Whether clients need a role; ``cassandra`` with the same password is there.
    """

    port: int
    storage_port: int
    address: str = "127.0.0.1"
    seed: str = "127.0.0.1"
    extra: str = ""
    authenticates: bool = False
    request_timeout_s: float = 10.0


def free_port() -> int:
    """A port of loopback that nothing listens on now, and that the kernel gives to no client meanwhile."""
    draw = random.SystemRandom()  # as the seeds of parallel tests are the same
    while True:
        port = draw.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def new_place() -> Place:
    """A node of its own, on free ports."""
    return Place(free_port(), free_port())


def home() -> Path:
    """The directory of the distribution, as named or of the ``cassandra`` on the path; else ``NotInstalled``."""
    named, program = os.environ.get(VARIABLE), shutil.which("cassandra")
    if not named and program is None:
        raise NotInstalled(
            f"there is no Cassandra: let {VARIABLE} name the directory of its distribution"
        )
    found = Path(named) if named else Path(program or "").resolve().parents[1]
    if not any(found.glob("lib/*cassandra*.jar")):
        raise NotInstalled(
            f"{str(found)!r} has no lib/*cassandra*.jar: let {VARIABLE} name the directory of the distribution"
        )
    _java()
    return found


def _java() -> str:
    name = str(Path(os.environ["JAVA_HOME"]) / "bin" / "java") if "JAVA_HOME" in os.environ else ""
    found = shutil.which(name or "java")
    if found is None:
        raise NotInstalled(f"there is no program {name or 'java'!r}: Cassandra 5.0 needs Java 17")
    return found


def _unnamed(option: str, packages: dict[str, str]) -> list[str]:
    return [f"{option}={at}/{each}=ALL-UNNAMED" for at in packages for each in packages[at].split()]


def command(folder: Path, place: Place) -> list[str]:
    """Write the configuration of a node into its folder, and return the command line that starts it."""
    jars = home() / "lib" / "*"
    configuration = _CONFIGURATION.format(
        folder=folder,
        port=place.port,
        storage_port=place.storage_port,
        address=place.address,
        seed=place.seed,
        request_timeout_ms=round(1e3 * place.request_timeout_s),
    )
    configuration += _AUTHENTICATION * place.authenticates + place.extra
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    (folder / "conf" / "cassandra.yaml").write_text(configuration)
    (folder / "conf" / "logback.xml").write_text(_LOGGING)
    properties = {
        "jdk.attach.allowAttachSelf": "true",
        "java.io.tmpdir": f"{folder}/tmp",
        "cassandra.config": f"file://{folder}/conf/cassandra.yaml",
        "logback.configurationFile": f"{folder}/conf/logback.xml",
        "cassandra.storagedir": str(folder),
        "cassandra.logdir": str(folder),
        "cassandra.skip_wait_for_gossip_to_settle": "0",
        "cassandra.ring_delay_ms": "0",
        "cassandra.superuser_setup_delay_ms": "0",
        "cassandra.auth_bcrypt_gensalt_log2_rounds": "4",
        "cassandra-foreground": "yes",
    }
    return [
        *(_java(), f"-Xms{HEAP}", f"-Xmx{HEAP}", "-Xss512k", "-XX:+UseSerialGC"),
        *_unnamed("--add-exports", _EXPORTED),
        *_unnamed("--add-opens", _OPENED),
        *(f"-D{name}={value}" for name, value in properties.items()),
        *("-cp", f"{folder}/conf:{jars}", "org.apache.cassandra.service.CassandraDaemon"),
    ]


def ring(addresses: Sequence[str], request_timeout_s: float = 2.0) -> list[Place]:
    """Nodes that know each other; the first is to be started first."""
    first = replace(new_place(), seed=addresses[0], request_timeout_s=request_timeout_s)
    return [replace(first, address=address) for address in addresses]


def end_with_the_parent() -> None:
    """In a child, before it becomes the server: the kernel kills it when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Node:
    """A node, once it is started; when it starts again, it finds its data in the folder."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self._folder = place, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens; a ``RuntimeError`` has the end of its log."""
        line = command(self._folder, self.place)
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                preexec_fn=end_with_the_parent,
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                address = self.place.address, self.place.port
                socket.create_connection(address, timeout=1).close()
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    end = (self._folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"Cassandra does not answer: {error}\n{end}") from error
            time.sleep(0.05)

    def hang(self) -> None:
        """Stop it at once: its connections stay, and say nothing any more."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_STOP_S)


@contextmanager
def running(place: Place | None = None) -> Iterator[Node]:
    """A node of its own, for the ``with`` block; then its data goes."""
    with tempfile.TemporaryDirectory(prefix="cassandra-") as name:
        node = Node(place or new_place(), Path(name))
        try:
            node.start()
            yield node
        finally:
            node.kill()
