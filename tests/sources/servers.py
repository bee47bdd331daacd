"""Real servers on loopback: started when a test first needs one, restarted by tests, stopped by their own pid."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import cassandra_node
from bench.harness.cassandra_node import free_port

Settings = dict[str, Any]

PIDS: set[int] = set()
"""Servers that outlive a test."""
THREADS: set[str] = set()
"""Names of threads that do."""

_PATIENCE_S = 90.0
_STOPPING_S = 10.0
_TESTS_PID = os.getpid()


PASSWORD = "hush-hush"


class Missing(Exception):
    """A server cannot be had on this machine; says why."""


@atexit.register
def _end_all() -> None:
    """Kill what still runs, should the tests end without their fixtures."""
    if os.getpid() == _TESTS_PID:
        for pid in PIDS:
            _kill(pid)


def _kill(pid: int) -> None:
    """Kill a server and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Server:
    """A server process in a folder of its own; ``answers`` raises as long as it is not ready."""

    def __init__(
        self,
        name: str,
        folder: Path,
        command: list[str],
        answers: Callable[[], Any],
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.folder = folder
        self._command = command
        self._answers = answers
        self._stop_signal = stop_signal

        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=cassandra_node.end_with_the_parent,
            )
        PIDS.add(self._process.pid)
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._answers()
                return
            except Exception as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log_text = (self.folder / "log").read_text(errors="replace")[-2000:]
                    self.stop()
                    raise RuntimeError(
                        f"{self.name} does not answer: {error}\n{log_text}"
                    ) from error
                time.sleep(0.02)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(self._stop_signal)
        try:
            process.wait(_STOPPING_S)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            process.wait()
        PIDS.discard(process.pid)

    def kill(self) -> None:
        """End it at once; it has no time to save anything."""
        if self._process is not None:
            _kill(self._process.pid)
        self.stop()

    def restart(self) -> None:
        self.stop()
        time.sleep(0.2)
        self.start()


def connects(port: int, address: str = "127.0.0.1") -> None:
    socket.create_connection((address, port), timeout=1).close()


def program(name: str, package: str | None = None, inside: str = "") -> Path:
    """A server's program: from a Python package, from this environment, or the system's."""
    if package is not None:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin).parent / inside / name
            if path.exists():
                return path
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Missing(f"there is no program {name!r}: install the extra 'test'")
    return Path(found)


# ---- the servers ----------------------------------------------------------------------------


def cassandra_server(folder: Path, *, certificate: Path | None = None) -> tuple[Server, Settings]:
    """A node that asks for a role, which ``make_role`` makes, and a client's settings; all come over TLS, if at all."""
    place = replace(cassandra_node.new_place(), authenticates=True)
    if certificate is not None:
        place = replace(place, extra=_TLS.format(certificate=certificate))
    settings = {"hosts": [place.address], "port": place.port}
    settings |= {"username": "minato", "password": PASSWORD}
    return _cassandra(folder, place), settings


def make_role(settings: Settings, **of_cluster: Any) -> None:
    """Make the role of a client, which may do everything, in a node that is new."""
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import Cluster, NoHostAvailable

    first = PlainTextAuthProvider("cassandra", "cassandra")
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        cluster = Cluster(
            settings["hosts"], port=settings["port"], auth_provider=first, **of_cluster
        )
        try:
            role = f"CREATE ROLE {settings['username']} WITH SUPERUSER = true AND LOGIN = true"
            cluster.connect().execute(f"{role} AND PASSWORD = '{settings['password']}'")
            return
        except NoHostAvailable:  # a new node makes its first role in the background
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        finally:
            cluster.shutdown()


_TLS = """\
client_encryption_options:
  enabled: true
  optional: false
  keystore: {certificate}
  ssl_context_factory:
    class_name: org.apache.cassandra.security.PEMBasedSslContextFactory
"""


def cassandra_ring(folder: Path, addresses: Sequence[str]) -> tuple[list[Server], Settings]:
    """Nodes that know each other and ask for no role, and the settings of a client. Start them in this order."""
    places = cassandra_node.ring(addresses)
    nodes = []
    for place in places:
        (folder / place.address).mkdir()
        nodes.append(_cassandra(folder / place.address, place))
    return nodes, {"hosts": list(addresses), "port": places[0].port}


def _cassandra(folder: Path, place: cassandra_node.Place) -> Server:
    try:
        command = cassandra_node.command(folder, place)
    except cassandra_node.NotInstalled as error:
        raise Missing(str(error)) from None
    name = f"cassandra {place.address}"
    return Server(name, folder, command, lambda: connects(place.port, place.address))


def s3_servers(folder: Path) -> tuple[Server, Server, dict[str, Any]]:
    """SeaweedFS: its storage, the S3 gateway before it, and the settings of a client."""
    weed = str(program("weed"))
    ports = {name: free_port() for name in ("master", "volume", "filer")}
    storage = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-filer", "-volume.max=8"]
    storage += [f"-{name}.port={port}" for name, port in ports.items()]
    storage += [f"-{name}.port.grpc={free_port()}" for name in ports if name != "filer"]
    filer_grpc, port = free_port(), free_port()
    storage += [f"-filer.port.grpc={filer_grpc}", "-master.volumeSizeLimitMB=64"]
    config = folder / "s3.json"
    config.write_text(
        '{"identities": [{"name": "tests", "credentials": [{"accessKey": "minato", '
        f'"secretKey": "{PASSWORD}"}}], "actions": ["Admin", "Read", "Write", "List"]}}]}}'
    )
    gateway = [weed, "s3", f"-filer=127.0.0.1:{ports['filer']}.{filer_grpc}", f"-port={port}"]
    gateway += [f"-port.grpc={free_port()}", "-ip.bind=127.0.0.1", f"-config={config}"]
    gateway += ["-port.iceberg=0", "-port.lance=0"]  # other tests may have these fixed ports
    settings = {
        "access_key_id": "minato",
        "secret_access_key": PASSWORD,
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "virtual_hosted_style_request": False,
    }

    def stores() -> None:
        import obstore

        obstore.put(s3_store(settings), "answers", b"yes")

    return (
        Server("seaweedfs", folder, storage, lambda: connects(ports["filer"]), signal.SIGKILL),
        Server("seaweedfs-s3", folder, gateway, stores, signal.SIGKILL),
        settings,
    )


def s3_store(settings: dict[str, Any]) -> Any:
    from obstore.store import from_url

    options: Any = {"allow_http": True}
    return from_url("s3://minato", client_options=options, **settings)


def remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
