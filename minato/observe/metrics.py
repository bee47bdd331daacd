"""The metrics of a loader: name, kind, unit and meaning of each, their values at one moment, and their address.

``prometheus_client`` writes them for Prometheus, at an address of this machine. Loggers of trainers get them, too.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from minato._fork_safety import forget_in_children
from minato._support.threads import start_thread
from minato.checks import refuse_one
from minato.observe.epoch_log import EpochLog, Totals
from minato.observe.gpus import INTERVAL_S

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication


class Metric(NamedTuple):
    """One metric of a loader.

    Attributes:
        name: Its key in ``loader.metrics()``; with ``minato_`` before it, its name in Prometheus.
        kind: A ``counter`` only grows, over all epochs; a ``gauge`` is of the newest epoch.
        unit: ``s``, ``bytes``, ``share`` (0 to 1), ``per s``, or the things counted.
        exported: Whether monitoring systems get it; they derive rates from counters themselves.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    value: Callable[[Totals], float]
    exported: bool = True


def _counter(name: str, unit: str, meaning: str, count: str) -> Metric:
    """A counter with the value of one count, which is in ns where the unit is ``s``."""
    scale = 1e-9 if unit == "s" else 1.0
    return Metric(name, "counter", unit, meaning, lambda log: log.counts[count] * scale)


def _of_loader(name: str, unit: str, meaning: str, field: str) -> Metric:
    """A gauge with the value of one field of a ``LoaderSnapshot``."""
    return Metric(name, "gauge", unit, meaning, lambda log: getattr(log.loader, field))


CATALOG = (
    _counter("batches_total", "batches", "Batches returned to the training loop.", "batches"),
    _counter(
        "samples_total",
        "samples",
        "Samples in the returned batches, without those that were skipped.",
        "samples",
    ),
    _counter("batch_bytes_total", "bytes", "Bytes in the returned batches.", "bytes"),
    _counter(
        "wait_seconds_total", "s", "Time that the training loop waited for batches.", "waited_ns"
    ),
    _counter("epoch_seconds_total", "s", "Duration of all epochs.", "wall_ns"),
    _counter("worker_busy_seconds_total", "s", "Time that workers processed samples.", "busy_ns"),
    _counter("worker_idle_seconds_total", "s", "Time that workers were idle.", "idle_ns"),
    _counter("worker_deaths_total", "workers", "Workers that died.", "deaths"),
    _counter("sample_retries_total", "retries", "Samples that were loaded again.", "retries"),
    _counter("skipped_samples_total", "samples", "Samples that were skipped.", "skipped"),
    Metric("epoch", "gauge", "epoch", "Number of the epoch.", lambda log: log.epoch),
    Metric(
        "wait_ratio",
        "gauge",
        "share",
        "Share of the epoch that the training loop waited for batches.",
        lambda log: min(log.waited_ns / log.wall_ns, 1.0) if log.wall_ns else 0.0,
    ),
    Metric(
        "samples_per_second",
        "gauge",
        "per s",
        "Samples returned in the epoch, divided by its duration.",
        lambda log: log.samples * 1e9 / log.wall_ns if log.wall_ns else 0.0,
        exported=False,
    ),
    _of_loader("workers", "workers", "Active workers.", "workers"),
    _of_loader("ready_batches", "batches", "Batches that are ready.", "ready"),
    _of_loader("in_flight_batches", "batches", "Batches that are open or ready.", "in_flight"),
    _of_loader(
        "prefetch_window_batches", "batches", "Largest number of batches in flight.", "limit"
    ),
    _of_loader(
        "in_flight_bytes", "bytes", "Approximate memory of the batches in flight.", "memory_bytes"
    ),
    _of_loader(
        "memory_budget_bytes", "bytes", "Limit of the memory of batches in flight.", "budget_bytes"
    ),
)


def values_of(totals: Totals) -> dict[str, float]:
    """The value of each metric; always the same keys, 0 for what is not known yet."""
    return {metric.name: float(metric.value(totals)) for metric in CATALOG}


# ---- for Prometheus -------------------------------------------------------------------------

_Request = socket.socket | tuple[bytes, socket.socket]

_TIME_LIMIT_S = 2.0  # how long a request waits for its client
_MOST_CLIENTS = 16
_PAUSE_S = 0.1
_JOIN_S = 5.0
_EXPORTED = [metric for metric in CATALOG if metric.exported]
_STAGE, _GPU = ("loader", "stage"), ("gpu", "name")
_FAMILIES = [
    *((each.name, each.kind, ("loader",), each.meaning) for each in _EXPORTED),
    ("stage_seconds_total", "counter", _STAGE, "Time in a stage, for the samples that were timed."),
    ("stage_samples_total", "counter", _STAGE, "Samples that were timed in a stage."),
    ("gpu_observed_seconds_total", "counter", _GPU, "Time that a GPU was monitored."),
    ("gpu_idle_seconds_total", "counter", _GPU, "Time that a GPU was idle."),
    ("gpu_busy_seconds_total", "counter", _GPU, "Time that a GPU was busy, times utilization."),
]
_Values = dict[str, dict[tuple[str, ...], float]]
"""By name and labels: loaders at one address show the same GPUs."""
_labels: weakref.WeakKeyDictionary[EpochLog, str] = weakref.WeakKeyDictionary()
"""That of each loader, which keeps it for its life."""
_making = threading.RLock()
"""Held by a thread that chooses a label or opens an address. Not by finalizers, which may run in any thread."""


class LabelledMetrics:
    """The metrics of one loader, without it and its dataset; a name that another loader has is followed by a number."""

    def __init__(self, log: EpochLog, name: str, stages: Sequence[str]) -> None:
        self._log, self._stages = log, stages
        name = name.encode("utf-8", "backslashreplace").decode()
        names = itertools.chain([name], (f"{name} {n}" for n in itertools.count(2)))
        with _making:
            if log not in _labels:
                taken = {*_labels.values()}
                _labels[log] = next(each for each in names if each not in taken)
            self.name = _labels[log]

    def add_to(self, found: _Values) -> None:
        """Add the present values; between two epochs only totals over epochs."""
        totals, machine = self._log.totals(), self._log.machine()
        for metric in _EXPORTED:
            if totals.running or metric.kind == "counter":
                found[metric.name][self.name,] = float(metric.value(totals))
        if not totals.running:
            return
        for stage, (count, total_ns) in zip(self._stages, self._log.stages(), strict=False):
            labels = self.name, stage.encode("utf-8", "backslashreplace").decode()
            found["stage_seconds_total"][labels] = total_ns / 1e9
            found["stage_samples_total"][labels] = count
        for number, (gpu, _) in enumerate(machine.gpus):
            for name, field, seconds in (
                ("gpu_observed_seconds_total", "samples", INTERVAL_S),
                ("gpu_idle_seconds_total", "idle", INTERVAL_S),
                ("gpu_busy_seconds_total", "busy_percent", INTERVAL_S / 100),
            ):
                count = machine.counts.get(f"gpu{number}_{field}", 0)
                found[name][str(number), gpu] = count * seconds


class Collector:
    """Collects the metrics that ``loaders`` returns for a registry of ``prometheus_client``."""

    def __init__(self, loaders: Callable[[], Iterable[LabelledMetrics]]) -> None:
        self._loaders = loaders

    def collect(self) -> Iterator[Any]:
        """The present values, by metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found: _Values = defaultdict(dict)
        for loader in self._loaders():
            loader.add_to(found)
        for name, kind, labels, meaning in _FAMILIES:
            if name in found:
                make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                family = make(f"minato_{name}", meaning, labels=labels)
                for each, value in found[name].items():
                    family.add_metric(each, value)
                yield family


class ServedMetrics:
    """The metrics of one loader, served while this object exists; several loaders may share a host and port, 0 for any.

    ImportError, OSError: prometheus_client is not installed; the address is not available.
    """

    def __init__(self, metrics: LabelledMetrics, address: tuple[str, int]) -> None:
        self._metrics, self._pid = metrics, os.getpid()
        reference = weakref.ref(metrics)
        with _making:
            endpoint = _endpoints.get(address)
            if endpoint is not None:
                endpoint.loaders.append(reference)
            # A collection may have closed it meanwhile.
            if endpoint is None or _endpoints.get(address) is not endpoint:
                endpoint = _Endpoint(address)
                endpoint.loaders.append(reference)
                _endpoints[address] = endpoint
        self._url = endpoint.url
        weakref.finalize(metrics, _leave, address)

    @property
    def url(self) -> str | None:
        """Where they are served; None in a forked child, which leaves the address to its parent."""
        return self._url if self._pid == os.getpid() else None


class _Handler(WSGIRequestHandler):
    timeout = _TIME_LIMIT_S

    def log_message(self, *_: object) -> None:
        """Write nothing: stderr belongs to the program."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _MOST_CLIENTS
    timeout = 0.5  # in s: the interval of serve_forever(), where the end of the socket wakes nobody

    def __init__(self, address: tuple[str, int], serve: WSGIApplication) -> None:
        self._free = threading.Semaphore(_MOST_CLIENTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)
        self.set_app(serve)

    def get_request(self) -> Any:
        """Accept a client; without descriptors, pause, as the next attempt would fail as well."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: _Request, client_address: object) -> None:
        """Serve a client in a thread of its own; refuse it where there are many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: _Request, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which may take seconds."""
        TCPServer.server_bind(self)
        host, self.server_port = self.socket.getsockname()[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, *_: object) -> None:
        """Ignore a client that has gone."""


class _Endpoint:
    """Serves the metrics of the loaders at one address, in a thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self.loaders: list[weakref.ref[LabelledMetrics]] = []
        registry, host = CollectorRegistry(), address[0]
        registry.register(Collector(self.alive))
        self.server = _Server(address, make_wsgi_app(registry))
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self.server.server_port}/metrics"
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="minato-metrics", daemon=True)
        try:
            start_thread(self._thread)
        except RuntimeError:
            self.server.server_close()
            raise

    def alive(self) -> list[LabelledMetrics]:
        """The metrics of the loaders that exist."""
        return [each for one in self.loaders if (each := one()) is not None]

    def _serve(self) -> None:
        with self.server:
            while not self._is_over:
                self.server.handle_request()

    def close(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self.server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        # The garbage collector runs in any thread: in this one, or in one that holds a lock of threading's, which this
        # one needs to serve a client.
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)


_endpoints: dict[tuple[str, int], _Endpoint] = {}


def _leave(address: tuple[str, int]) -> None:
    endpoint = _endpoints.get(address)
    if endpoint is None:  # in a forked child
        return
    endpoint.loaders = [each for each in endpoint.loaders if each() is not None]
    if not endpoint.loaders:
        del _endpoints[address]
        endpoint.close()


def _forget() -> None:
    global _making
    _making = threading.RLock()
    for endpoint in _endpoints.values():
        endpoint.server.server_close()  # this forked child's copy of the socket
    _endpoints.clear()


forget_in_children(_forget)


# ---- for the loggers of trainers ------------------------------------------------------------


USUAL_NAMES = ("wait_ratio", "samples_per_second")
"""The metrics that are logged by default: whether the loader is too slow, and how fast training is."""


@runtime_checkable
class MeasuredLoader(Protocol):
    """A ``minato.DataLoader``, as far as loggers need it."""

    name: str

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name."""


def loaders_in(found: object) -> Iterator[MeasuredLoader]:
    """The loaders of minato in what a trainer calls its loader: one, a wrapper of one, or a collection of them."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        for each in found:
            yield from loaders_in(each)
        return
    inner = getattr(found, "base_dataloader", found)  # Accelerate's wrappers
    if isinstance(inner, MeasuredLoader):
        yield inner


def checked(names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of metrics; None: all. ValueError: one is no metric. TypeError: they are one name."""
    known = [metric.name for metric in CATALOG]
    refuse_one("names", names)
    for name in names or ():
        if name not in known:
            raise ValueError(f"names: {name!r} is no metric: choose of {', '.join(known)}")
    return tuple(known if names is None else names)


def metrics_of(found: object, prefix: str, names: Sequence[str]) -> dict[str, float]:
    """Some metrics of loaders, with a prefix, of several also with their names; ValueError: ``observe=False``."""
    loaders = list(loaders_in(found))
    values: dict[str, float] = {}
    for number, loader in enumerate(loaders):
        start = prefix if len(loaders) == 1 else f"{prefix}{number} {loader.name}/"
        metrics = loader.metrics()
        values.update({f"{start}{name}": metrics[name] for name in names})
    return values
