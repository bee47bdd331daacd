"""minato's own arguments of a loader: each field here has its default and its check.

To add an option, add a field to :class:`Options`, and to ``DataLoader`` a parameter and its documentation. ``python
docs/write_options.py`` writes the reference. Options that belong together form a group, a frozen dataclass with its
documentation. Each group refuses its wrong combinations in its ``__post_init__``; combinations of several arguments
are refused in :meth:`Options.of`. :class:`Retry` is an argument of sources and of streams.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from minato._support.counters import Counters
from minato._support.threads import pause
from minato._support.values import integer_of, message_of, number_of, short, text_of, type_name
from minato._system import available_cores, rank_and_ranks
from minato.checks import (
    check_choice,
    check_device,
    check_number,
    check_whole,
    did_you_mean,
    given_number,
    given_whole,
    refuse_class,
)
from minato.errors import missing

T = TypeVar("T")

IN_PLACE = "in_place"
"""The value of ``pin_memory`` with which batches are pinned where the workers write them."""
NEXT_EPOCH = "next_epoch"
"""The value of ``persistent_workers`` with which idle workers begin the next epoch."""

_SINGLE_MAX_LAG = 1024
"""For loaders of single samples, which are much less than batches: with fewer, workers wait for a slow one."""
DEFAULT_MAX_LAG = 32
"""Batches; about what a few workers finish during a sample that takes a hundred times as long as the others."""
_MIXING = ("arrival", "fast_first")
_MOST_AT_FIRST = 12
"""Workers with which ``num_workers="auto"`` begins at most, as in the MinatoLoader paper."""
_MOST_WORKERS = 4096  # for which the ledger has numbers
_WAITING_PER_CORE, _MOST_WAITING = 8, 32
"""The default of ``AutoScale.max`` where there are few cores: for workers that wait for a disk or a network."""
_INT64 = 1 << 63
_TAKES_CLASSES = ("transforms",)  # a class may transform a sample: str, or a path
_LEAST_BUDGET = 100  # bytes; a smaller number is meant as one of gigabytes
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_NOT_FOR_ACTORS = (
    *("concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls"),
    *("max_restarts", "max_task_retries", "name", "namespace"),
)
"""Options of a Ray actor that the loader decides: an actor runs one sample at a time, for this loader alone."""


def option(
    default: object, values: str, check: Callable[[str, object], object] | None = None
) -> Any:
    """Define a field; the docstring of the class has its meaning, and ``values`` says in Markdown what is possible.

    ``check`` is called with the field's name and value; it returns the value to keep, or raises.
    """
    return field(default=default, metadata={"values": values, "check": check})


class _Group:
    """Options that belong together. Each is checked when it is given; a class in place of its object is a TypeError."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # of a dataclass
            value = getattr(self, each.name)
            if isinstance(value, type) and each.name not in _TAKES_CLASSES:
                refuse_class(each.name, value)
            if (check := each.metadata.get("check")) is not None:
                object.__setattr__(self, each.name, check(each.name, value))


# ---- checks of single values ----------------------------------------------------------------


def _one_of(
    *choices: object, unless: Callable[[object], object] = lambda value: False, others: str = ""
) -> Callable[[str, Any], Any]:

    def check(name: str, value: object) -> Any:
        if not unless(value):
            check_choice(name, value, choices, others)
        return value

    return check


def _torchs_or(own: str) -> Callable[[str, Any], Any]:
    """Torch's values, which torch checks, or a text of ours."""
    return _one_of(False, True, own, unless=lambda value: not isinstance(value, str))


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds)


def _wrong_type(name: str, value: object, remedy: str) -> TypeError:
    return TypeError(f"{name}={text_of(value)} is a {type_name(value)}: {remedy}")


def _whole(
    least: int, other: str | None = None, most: int | None = None
) -> Callable[[str, Any], Any]:
    def check(name: str, value: object) -> Any:
        if other is None or not isinstance(value, str):
            return check_whole(name, value, least, most)
        check_choice(name, value, (other,), "an integer")
        return value

    return check


def _given_whole(least: int) -> Callable[[str, Any], Any]:
    return lambda name, value: given_whole(name, value, least)


def _positive_seconds(name: str, value: object) -> Any:
    value = check_number(name, value, "seconds")
    if value is not None and not value > 0:
        raise ValueError(f"{name}={value} is too small: give more than 0 seconds")
    return value


def _percentile(name: str, value: object) -> Any:
    value = check_number(name, value)
    if value is not None and not 1 <= value < 100:
        meant = f": did you mean {100 * value:g}?" if 0 < value < 1 else ""
        raise ValueError(f"{name}={value} is not between 1 and 100{meant}")
    return value


def _path(name: str, value: Any) -> str | None:
    try:
        path = None if value is None else os.fsdecode(value)
    except TypeError:
        raise _wrong_type(name, value, "give a path") from None
    # It means the same file later, whatever directory the program goes to.
    return os.path.join(os.getcwd(), path) if path and not os.path.isabs(path) else path


_on_error = _one_of(
    "raise", "skip", "retry", unless=callable, others="a function, an ErrorPolicy(...)"
)


def _max_failures(name: str, value: object) -> Any:
    value = check_number(name, value, "a number of samples, or a share below 1")
    if value is not None and not 0 <= value < (1 if isinstance(value, float) else math.inf):
        raise ValueError(
            f"{name}={value} is not possible: give a number of samples (an integer), or a share below 1"
        )
    return value


def _actor_options(name: str, value: object) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "give a dictionary, as {'num_cpus': 2}")
    ours = [each for each in value if each in _NOT_FOR_ACTORS]
    if ours:
        raise ValueError(
            f"{name} cannot set {', '.join(ours)}, which the loader decides: leave it out"
        )
    return dict(value)


def _seed(name: str, value: object) -> int | None:
    value = check_whole(name, value, None)
    return None if value is None else (value + _INT64) % (2 * _INT64) - _INT64


def _bytes(name: str, value: object) -> int | None:
    """A number of bytes, also from a string such as ``"8GB"``."""
    if isinstance(value, str):
        found = _BYTES.fullmatch(value.strip())
        if found is None:
            raise ValueError(
                f"{name}={text_of(value)} is no amount of memory: write '8GB' or '512MiB'"
            )
        number, prefix, binary = found.groups()
        power = " kmgt".index(prefix.lower() or " ")
        value = int(float(number) * (1024 if binary else 1000) ** power)
    budget = check_whole(name, value, 1)
    if budget is not None and budget < _LEAST_BUDGET:
        raise ValueError(
            f"{name}={budget} is a number of bytes, too few for any batch: did you mean '{budget}GB'?"
        )
    return budget


def _name(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong_type(name, value, "give a string")
    return short(value)


def _device(name: str, value: object) -> DeviceCopies | None:
    if value is None or isinstance(value, DeviceCopies):
        return value
    return DeviceCopies(value)  # type: ignore[arg-type]  # its check refuses what is no device


def _torch_device(name: str, value: object) -> torch.device:
    found = check_device(value)
    if found is None:
        raise TypeError("DeviceCopies(device=None): name the device")
    return found


def _observe(name: str, value: object) -> Observe:
    if isinstance(value, Observe):
        return value
    check_choice(name, value, (True, False), "Observe(...)")
    return Observe(stats=bool(value))


def _recording(name: str, value: object) -> Any:
    if value is not None and not isinstance(value, (Record, Replay)):
        raise _wrong_type(name, value, "give a Record or a Replay")
    return value


def _needed_path(name: str, value: object) -> str:
    path = _path(name, value)
    if path is None:
        raise TypeError(f"{name}=None: give a path")
    return path


def parse_address(value: int | str, name: str = "metrics") -> tuple[str, int]:
    """Host and port of ``Observe(metrics=...)``; without a host, only this machine can reach it."""
    host, _, port = str(value).rpartition(":")
    if isinstance(value, bool) or not re.fullmatch("[0-9]+", port) or int(port) > 65535:
        raise ValueError(
            f"{name}={text_of(value)} is no port: give a number up to 65535, or a string such as '0.0.0.0:9100'"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def _metrics(name: str, value: Any) -> Any:
    if value is None:
        return value
    is_pair = isinstance(value, tuple) and len(value) == 2  # as a copy of these options has it
    address = parse_address("{}:{}".format(*value) if is_pair else value, name)
    if importlib.util.find_spec("prometheus_client") is None:
        raise missing(f"{name}={text_of(value)}", "prometheus_client", "metrics")
    return address


def _errors(name: str, value: object) -> ErrorPolicy:
    return value if isinstance(value, ErrorPolicy) else ErrorPolicy(_on_error(name, value))


def _stragglers(name: str, value: object) -> StragglerPolicy:
    if value is not None and not isinstance(value, StragglerPolicy):
        raise _wrong_type(name, value, "give a StragglerPolicy")
    return value or StragglerPolicy()


def _fetch(name: str, value: object) -> FetchOptions:
    if isinstance(value, FetchOptions):
        return value
    return FetchOptions.uncounted(check_whole(name, value, 1) or 1)


def _workers(name: str, value: object) -> Any:
    if isinstance(value, SharedPool):
        return value
    if not isinstance(value, RayWorkers):
        others = "SharedPool(), RayWorkers(...)"
        if integer_of(value) is not None:
            others += f"; did you mean num_workers={text_of(value)}?"
        check_choice(name, value, ("process", "thread"), others)
        return value
    if importlib.util.find_spec("ray") is None:
        raise missing(f"{name}={value}", "ray", "ray")
    return value


def _num_workers(name: str, value: object) -> Any:
    if value == "auto":
        value = AutoScale()
    if number_of(value) and integer_of(value) is None:  # torch begins with it, and cannot count
        raise TypeError(_advice_on_number(name, value))
    if (integer_of(value) or 0) > _MOST_WORKERS:
        given_whole(name, value, 1, _MOST_WORKERS)
    # torch refuses what is no number.
    return StartingWorkers.of(value) if isinstance(value, AutoScale) else value


# ---- groups ---------------------------------------------------------------------------------


class Unbound(int):
    """torch's default of ``prefetch_factor``: reads like it, but does not bound the prefetch window.

    A type of its own, so that a loader made from another one's attributes is not bound either.
    """


@dataclass(frozen=True)
class Arrival(_Group):
    """Samples that are ready go into the oldest open batch: ``order=Arrival(max_lag=8)``.

    Attributes:
        max_lag: How many batches later than in strict order a sample may be returned. Default: ``32``; of single
            samples ``1024``.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    max_lag: int | None = option(None, "batches, 0 or more", _whole(0))


@dataclass(frozen=True)
class FastFirst(_Group):
    """As :class:`Arrival`, but slow samples wait for the newest open batch: ``order=FastFirst(max_lag=8)``.

    Attributes:
        max_lag: How many batches later than in strict order a sample may be returned. Default: ``32``; of single
            samples ``1024``.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    max_lag: int | None = option(None, "batches, 0 or more", _whole(0))


@dataclass(frozen=True)
class DeviceCopies(_Group):
    """Where batches are returned, and how many are copied there ahead: ``device=DeviceCopies("cuda", ahead=1)``.

    Attributes:
        device: The device. Default: must be given.
        ahead: How many complete batches are copied there ahead of their turn, as in the MinatoLoader paper. Default:
            ``2``.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    device: str | torch.device = option(None, "string, `torch.device`", _torch_device)
    ahead: int = option(2, "batches, 0 or more", _given_whole(0))

    def __str__(self) -> str:
        return str(self.device)


@dataclass(frozen=True)
class Record(_Group):
    """Write down the order of the batches: ``recording=Record(path)``.

    Attributes:
        path: File to which the order of the batches is appended as they are returned. Default: must be given.

    Raises:
        TypeError: The path is none.
    """

    path: str | os.PathLike[str] = option(None, "path", _needed_path)


@dataclass(frozen=True)
class Replay(_Group):
    """Repeat a recorded order: ``recording=Replay(path)``.

    Attributes:
        path: A file of ``Record``: the same samples come in the same batches, in the recorded order, with the recorded
            seed. The sampler is not used; ``order`` is ``strict``. Default: must be given.

    Raises:
        TypeError: The path is none.
    """

    path: str | os.PathLike[str] = option(None, "path", _needed_path)


@dataclass(frozen=True)
class Observe(_Group):
    """What is measured of a run, and where it goes: ``observe=Observe(...)``.

    Attributes:
        stats: Whether the times for the report are measured, a few microseconds for each batch. ``"gpu"``: a process of
            local rank 0 also measures the use of the GPUs. Default: ``True``.
        trace: File, overwritten, that records the run moment by moment for https://ui.perfetto.dev. It ends at 256 MiB.
            Default: none.
        metrics: Port of 127.0.0.1, or host and port, that serves metrics for Prometheus from the first iteration on; 0:
            any free port, shown by ``metrics_url``. Needs ``prometheus_client``. Default: none.
        name: Labels the loader in reports, the live view, metrics and traces. Default: the dataset's class.

    Raises:
        ValueError, TypeError: A value or a combination is not possible.
    """

    stats: bool | str = option(True, '`True`, `False`, `"gpu"`', _one_of(True, False, "gpu"))
    trace: str | os.PathLike[str] | None = option(None, "path", _path)
    metrics: int | str | tuple[str, int] | None = option(
        None, '0 to 65535, `"host:port"`', _metrics
    )

    name: str | None = option(None, "string", _name)

    def __post_init__(self) -> None:
        given = self.metrics
        super().__post_init__()
        if given is not None and not self.stats:
            raise ValueError(
                f"metrics={given!r} contradicts stats=False, which measures nothing: leave one out"
            )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of ``metrics``."""
        return cast("tuple[str, int] | None", self.metrics)


@dataclass(frozen=True)
class PaperController:
    """The worker controller of the MinatoLoader paper with other constants: ``AutoScale(controller=...)``.

    Every period the number of workers changes by α (1 - ready batches / batches in flight) + β (processor use - θ).

    Attributes:
        alpha: Weight of the empty part of the queue; the paper does not give it.
        beta: Weight of the processor's use above ``theta``; the paper does not give it.
        theta: The target use of the processor, from 0 to 1.
        clip: Largest change per period, both ways.
        smoothing: Weight of the latest period in the moving average of the queue, above 0 and up to 1.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    alpha: float = 2.0
    beta: float = 2.0
    theta: float = 0.7
    clip: float = 2.0
    smoothing: float = 0.3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            given_number(name, value)
        if not all(each >= 0 for each in (self.alpha, self.beta, self.clip)):
            raise ValueError(
                f"alpha={self.alpha}, beta={self.beta} and clip={self.clip} must not be below 0"
            )
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta={self.theta} is not between 0 and 1")
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing={self.smoothing} is not above 0 and up to 1")


@dataclass(frozen=True)
class AutoScale(_Group):
    """A number of workers that follows the load: ``num_workers=AutoScale(...)``.

    Attributes:
        min: The fewest active workers; those that host readers are always active. Default: 1.
        max: The most active workers. Default: the cores, or 8 for each but not above 32.
        controller: How the number follows: ``corrected``, or the MinatoLoader paper's formulas as printed: ``paper``,
            or a ``PaperController`` with other constants. Default: ``"corrected"``.
        start: Workers in the first epoch; up to ``readers`` of them host the readers of an iterable dataset. Default:
            one per core, at most 12.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    min: int | None = option(None, "1 or more", _whole(1, most=_MOST_WORKERS))
    max: int | None = option(None, "`min` or more", _whole(1, most=_MOST_WORKERS))
    controller: str | PaperController = option(
        "corrected",
        '`"corrected"`, `"paper"`, a `PaperController`',
        _one_of("corrected", "paper", unless=_is(PaperController)),
    )
    start: int | None = option(None, "between `min` and `max`", _whole(1, most=_MOST_WORKERS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits()

    def limits(self) -> tuple[int, int, int]:
        """Workers at first, at least and at most, with the defaults for this machine.

        Raises:
            ValueError: They contradict each other.
        """
        cores = int(available_cores())
        least = 1 if self.min is None else self.min
        # Workers that wait for a disk or a network do not need a core each.
        most = max(cores, min(_WAITING_PER_CORE * cores, _MOST_WAITING), least, self.start or 1)
        most = most if self.max is None else self.max
        start = max(least, min(cores, _MOST_AT_FIRST, most)) if self.start is None else self.start
        if not least <= start <= most:
            given = f"start={start}" if self.start is not None else f"min={least}"
            raise ValueError(
                f"{given} is not between min={least} and max={most}: give AutoScale numbers in this order"
            )
        return start, least, most


class StartingWorkers(int):
    """The attribute ``num_workers`` of a loader whose number of workers changes: reads like the first number.

    Attributes:
        scale: Its limits. A loader made from the attributes of another one scales as that one does.
    """

    scale: AutoScale

    @classmethod
    def of(cls, scale: AutoScale) -> StartingWorkers:
        """The first number of workers, with the limits."""
        start, least, most = scale.limits()
        number = cls(start)
        number.scale = replace(scale, min=least, max=most, start=start)
        return number

    def times(self, count: int) -> StartingWorkers:
        """The number and its limits for ``count`` loaders together."""
        start, least, most = self.scale.limits()
        return self.of(
            replace(self.scale, min=least * count, max=most * count, start=start * count)
        )


@dataclass(frozen=True)
class RayWorkers(_Group):
    """Workers that are actors of a Ray cluster (extra ``ray``): ``workers=RayWorkers(...)``.

    Attributes:
        actor_options: Options of each actor, passed to Ray's ``ActorClass.options``. Default: ``{"num_cpus": 1}``.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    actor_options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"values": "dictionary", "check": _actor_options}
    )


@dataclass(frozen=True)
class Retry:
    """How often, and for how long, a read that failed is repeated.

    The pauses double with each attempt, up to ``longest_s``. The second half of each pause is random, so that the
    processes do not all return to a restarted server at the same time.

    Attributes:
        attempts: Largest number of attempts; 1: no read is repeated.
        first_s: Upper limit of the first pause, in seconds.
        longest_s: Upper limit of any pause, in seconds.
        deadline_s: No attempt begins more than this many seconds after the first.
    """

    attempts: int = 8
    first_s: float = 0.05
    longest_s: float = 5.0
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        given_whole("attempts", self.attempts, 1)
        for name in ("first_s", "longest_s", "deadline_s"):
            if not given_number(name, value := getattr(self, name), "seconds") >= 0:
                raise ValueError(f"{name}={value} is not possible: give 0 seconds or more")

    @classmethod
    def given(cls, retry: Retry | None) -> Retry:
        """An argument, or the default for None; TypeError: it is something else, such as a number of attempts."""
        if not isinstance(retry, cls | None):
            raise TypeError(
                f"retry={text_of(retry)} is a {type_name(retry)}: give a Retry, such as Retry(attempts=8)"
            )
        return retry or cls()

    def __fingerprint__(self) -> None:
        """No sample depends on it."""

    def pauses(self) -> Iterator[float]:
        """The pause after each failure in seconds, as long as there is a further attempt; the first begins now."""
        return self._pauses(time.monotonic())

    def _pauses(self, started: float) -> Iterator[float]:
        bound_s = self.first_s
        for _ in range(self.attempts - 1):
            bound_s = min(bound_s, self.longest_s)
            # Not from a global generator: those are bound to the sample, which must not depend on a failure.
            pause_s = bound_s * (0.5 + 0.5 * _jitter.random())
            if time.monotonic() - started + pause_s > self.deadline_s:
                return
            yield pause_s
            bound_s *= 2

    def call(
        self,
        read: Callable[[], T],
        is_transient: Callable[[Exception], bool],
        counters: Counters | None = None,
    ) -> T:
        """What a function returns, which is called again after transient errors; it raises the last one."""
        pauses = self.pauses()
        while True:
            try:
                return read()
            except Exception as error:
                pause_s = next(pauses, None) if is_transient(error) else None
                if pause_s is None or not pause(pause_s):
                    raise
            if counters is not None:
                counters.add(retries=1)


_jitter = random.SystemRandom()  # without a state, which all forked workers would share


@dataclass(frozen=True)
class ErrorPolicy(_Group):
    """What happens when a sample raises or hangs, or a worker dies: ``errors=ErrorPolicy(...)``.

    Attributes:
        on_error: What happens to a sample that raises. ``"raise"``: its batch raises the error, as with torch.
            ``"skip"``: the sample is left out. ``"retry"``: it is tried again, and raises if that does not help. A
            function is called in the worker with a ``SampleFailure``. The value it returns replaces the sample,
            ``minato.SKIP`` leaves it out, and an exception is raised. Default: ``"raise"``.
        retries: How often a sample is tried again, with the same random numbers, before ``on_error`` applies. Default:
            2 with ``"retry"``, else 0.
        max_failures: How many samples of an epoch may be left out or replaced before ``minato.ErrorBudgetError`` ends
            it. Default: any number.
        log: File to which each failure is appended as a line of JSON: index, epoch, seed, worker, transform, exception,
            traceback, outcome. Default: none.
        sample_timeout: Seconds that a sample may take before its worker process is ended and replaced. The sample then
            fails with ``minato.SampleTimeoutError``, whose text holds the worker's stack. The limit also holds for a
            call of ``__getitems__``. It holds for ``worker_init_fn`` and for a call of ``collate_fn``, too, which raise
            after ``retries`` more tries. It holds for each call of the iterator of an iterable dataset, whose reader is
            read again, twice at most. Default: none.
        on_worker_death: What happens when a worker process dies. ``"restart"``: another replaces it, its samples are
            loaded again, and a warning says so; three deaths on one sample raise. ``"raise"``: torch's RuntimeError at
            once, as always with ``compat="torch"`` and map-style datasets that have a state, whose workers hold state
            that would be lost. Default: ``"restart"``.

    Raises:
        ValueError, TypeError: A value or a combination is not possible.
    """

    on_error: str | Callable[[Any], Any] = option(
        "raise", '`"raise"`, `"skip"`, `"retry"`, a function', _on_error
    )
    retries: int | None = option(None, "0 or more", _whole(0))
    max_failures: float | None = option(
        None, "a number of samples (integer), or a share below 1", _max_failures
    )
    log: str | os.PathLike[str] | None = option(None, "path", _path)
    sample_timeout: float | None = option(None, "seconds above 0", _positive_seconds)
    on_worker_death: str = option("restart", '`"restart"`, `"raise"`', _one_of("restart", "raise"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_failures is not None and self.on_error in ("raise", "retry"):
            raise ValueError(
                f"max_failures={self.max_failures} has no meaning with on_error={self.on_error!r}, where no sample is "
                "left out: use on_error='skip' or a function"
            )

    @property
    def outcome(self) -> Any:
        """What happens after the last try: ``raise``, ``skip`` or a function."""
        return "raise" if self.on_error == "retry" else self.on_error

    @property
    def tries_again(self) -> int:
        """How often a sample is tried again."""
        return self.retries if self.retries is not None else 2 * (self.on_error == "retry")

    @property
    def log_path(self) -> str | None:
        """``log`` as a string."""
        return cast("str | None", self.log)

    @property
    def handles_samples(self) -> bool:
        """Whether a sample that raises is anything but an error of its batch."""
        return self.on_error != "raise" or self.tries_again > 0 or self.log is not None


@dataclass(frozen=True)
class StragglerPolicy(_Group):
    """When a sample counts as slow: ``stragglers=StragglerPolicy(...)``.

    Attributes:
        percentile: Samples that cost more than this percentile of all are slow; none is where costs differ little.
            Default: 75, as in the MinatoLoader paper.
        after_s: Instead: samples that take longer than this are slow. Default: none.
        history: Directory in which each epoch saves the costs of its samples, so that the next run knows slow samples
            from the start. Default: none.

    Raises:
        ValueError, TypeError: A value or a combination is not possible.
    """

    percentile: float | None = option(None, "between 1 and 100", _percentile)
    after_s: float | None = option(None, "seconds above 0", _positive_seconds)
    history: str | os.PathLike[str] | None = option(None, "path", _path)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.percentile is not None and self.after_s is not None:
            raise ValueError(
                f"percentile={self.percentile} and after_s={self.after_s} both set from when on a sample is slow: "
                "give one"
            )

    @property
    def share(self) -> float:
        """The percentile from 0 to 1."""
        return 0.75 if self.percentile is None else self.percentile / 100


@dataclass(frozen=True)
class SharedPool(_Group):
    """One pool of workers for the ranks of a node: ``workers=SharedPool(...)``.

    Attributes:
        on_rank_death: What the other ranks do when the process of one ends. ``"raise"``: a RuntimeError.
            ``"continue"``: they continue without its part of the dataset. ``"wait"``: they continue, and wait before
            the next epoch until another process takes its place. Without local rank 0, which hosts the workers, none
            continues. Default: ``"raise"``.

    Raises:
        ValueError: A value is not possible.
    """

    on_rank_death: str = option(
        "raise", '`"raise"`, `"continue"`, `"wait"`', _one_of("raise", "continue", "wait")
    )


class FetchReport(NamedTuple):
    """Counts of reads, of all workers and epochs; none where a worker reads one sample after the other.

    Attributes:
        reads: Samples that were requested, each counted once.
        hedged: Samples that were requested twice.
        hedges_won: Samples whose second request was answered first.
    """

    reads: int
    hedged: int
    hedges_won: int


@dataclass(frozen=True)
class FetchOptions(_Group):
    """How each worker reads several samples at once: ``fetch_concurrency=FetchOptions(...)``.

    Attributes:
        concurrency: In-flight reads of each worker at most. Default: ``1``.
        max_in_flight: In-flight reads of all workers of a loader at most, at least one for each. The workers share
            them. Default: none.
        slow_start: The prefetch window grows by one batch after this many returned batches, up to what memory allows.
            So at most one batch more is requested than ``1 + 1/slow_start`` times what was returned. None: it is full
            at once. Default: none.
        hedge_percentile: Reads that take longer than this percentile of their worker's reads are requested again, and
            the first answer counts. Where more reads than that are late, only one at a time is hedged. The dataset must
            return the same sample again. Default: none.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    concurrency: int = option(1, "1 or more", _given_whole(1))
    max_in_flight: int | None = option(None, "the number of workers or more", _whole(1))
    slow_start: int | None = option(None, "batches, 1 or more", _whole(1))
    hedge_percentile: float | None = option(None, "between 1 and 100", _percentile)
    counters: Counters | None = field(default=None, init=False, repr=False, compare=False)
    """None for a plain ``fetch_concurrency=N``, which has no report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hedge_percentile is not None and self.concurrency == 1:
            raise ValueError(
                f"hedge_percentile={self.hedge_percentile} requests a read again while it is in flight, and "
                "concurrency=1 allows each worker one: give 2 or more"
            )
        object.__setattr__(self, "counters", Counters(*FetchReport._fields))

    @classmethod
    def uncounted(cls, concurrency: int) -> FetchOptions:
        """The options of ``fetch_concurrency=N``, without counters, which would take shared memory."""
        plain = object.__new__(cls)
        for each in fields(cls):
            object.__setattr__(plain, each.name, each.default)
        object.__setattr__(plain, "concurrency", concurrency)
        return plain

    def __str__(self) -> str:
        return str(self.concurrency) if self.counters is None else repr(self)

    @property
    def at_once(self) -> bool:
        """Whether a worker does more than read one sample after the other."""
        return self.concurrency > 1 or self.max_in_flight is not None

    def report(self) -> FetchReport:
        """The counts so far."""
        return FetchReport(*(self.counters.totals() if self.counters is not None else (0, 0, 0)))


@dataclass(frozen=True)
class Readers(_Group):
    """How an iterable dataset is read: ``readers=Readers(...)``.

    By default each rank of a job has ``count`` readers, whatever its rank. With ``ranks`` all ranks together have
    ``count`` readers: rank q has the readers q, q + ranks, … Then ``seed`` is 0 by default.

    Attributes:
        count: Number of readers. Each iterates over its own copy of the dataset, like one of torch's workers:
            ``get_worker_info()`` gives its number and ``count``. Default: ``num_workers``, at least 1; with
            ``num_workers="auto"`` it must be given.
        where: ``"worker"``: workers host the readers. ``"main"``: a thread of the training process reads, and the
            workers run the transforms. That is for what can be neither forked nor pickled, such as a consumer of
            messages or a database cursor. There is one reader then, which reads the dataset itself. Default:
            ``"worker"``.
        resume: How a reader continues from a loaded state, or after its worker has died. ``"state"``: from the state of
            the dataset or its iterator, if that has one. ``"read"``: it reads from the beginning of the epoch and drops
            what was delivered, which is exact even where the dataset's own state is not. Default: ``"state"``.
        ranks: Number of ranks among which the readers are dealt. ``"auto"``: that of torch.distributed once it is
            initialised, else the environment's ``WORLD_SIZE``. The dataset must not divide itself by rank. Default:
            they are not dealt.
        epoch_end: What a rank does whose readers have ended before those of others. ``"drop"``: its epoch ends.
            ``"shortest"``: the epoch of all ranks ends with it, and what others have left is not read. ``"repeat"``: it
            reads its own items again, from the start of the epoch, until the last rank ends. ``"pad"``: it returns
            copies of its last batch, for which ``loader.is_padding`` is true. Default: ``"drop"``.
        rank: Rank of this process, with ``ranks`` as a number. Default: that of torch.distributed, else ``RANK``.

    Raises:
        ValueError, TypeError: A value or a combination is not possible.
    """

    count: int | None = option(None, "1 or more", _whole(1))
    where: str = option("worker", '`"worker"`, `"main"`', _one_of("worker", "main"))
    resume: str = option("state", '`"state"`, `"read"`', _one_of("state", "read"))
    ranks: int | str | None = option(None, '1 or more, `"auto"`', _whole(1, other="auto"))
    epoch_end: str = option(
        "drop",
        '`"drop"`, `"shortest"`, `"repeat"`, `"pad"`',
        _one_of("drop", "shortest", "repeat", "pad"),
    )
    rank: int | None = option(None, "below `ranks`", _whole(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = f"ranks={self.ranks!r}"
        if self.ranks is not None and (self.count is None or self.where == "main"):
            raise ValueError(
                f"{given} deals the readers, whose number must be the same in all ranks: give it, as in "
                f"Readers(64, {given}), without where='main'"
            )
        if self.rank is not None and not isinstance(self.ranks, int):
            raise ValueError(f"rank={self.rank} needs the number of ranks: give ranks= as a number")
        if self.epoch_end != "drop" and self.ranks is None:
            raise ValueError(
                f"epoch_end={self.epoch_end!r} is about readers that are dealt among ranks: give ranks='auto' too"
            )
        self.dealt()

    def dealt(self) -> tuple[int, int]:
        """Rank and number of ranks among which the readers are dealt, at present.

        Raises:
            ValueError: A rank has no reader, or is not among the ranks.
        """
        if self.ranks is None:
            return 0, 1
        rank, ranks = rank_and_ranks()
        if isinstance(self.ranks, int):
            rank, ranks = rank if self.rank is None else self.rank, self.ranks
        if rank >= ranks:
            raise ValueError(f"rank={rank} is not below ranks={ranks}: count them from 0")
        if cast(int, self.count) < ranks:
            raise ValueError(
                f"Readers({self.count}) leaves {ranks - cast(int, self.count)} of {ranks} ranks without a reader: give "
                "at least as many readers as ranks"
            )
        return rank, ranks


def _readers(name: str, value: object) -> Readers | None:
    if value is None or isinstance(value, Readers):
        return value
    return Readers(check_whole(name, value, 1))


# ---- batches ----------------------------------------------------------------------------------


def _cost(name: str, value: object) -> float:
    number = number_of(value)
    if number is None or not number > 0:
        raise ValueError(f"{name}={text_of(value)} is no cost: give a number above 0")
    return float(number)


def _padding(name: str, value: object) -> float:
    number = number_of(value)
    if number is None or not 0 < number < 1:
        raise ValueError(f"{name}={text_of(value)} is no share: give a number between 0 and 1")
    return float(number)


@dataclass(frozen=True)
class CostBatches(_Group):
    """Batches that are closed by the cost of their samples, once these are loaded: ``batch_size=CostBatches(...)``.

    The loader loads single samples, in its ``order``. They wait in groups of similar cost until a batch is full.
    ``collate_fn`` then gets the list of its samples, in the training process; by default it is ``PadCollate()``.
    Samples that wait are not delivered: a state has them still to come. Where the costs are known in advance, use
    :class:`CostBatchSampler`, whose batches workers build.

    Attributes:
        max_cost: Largest cost of a batch: the number of its samples times the largest of their costs. Default: must be
            given.
        cost: A function that returns the cost of a sample, such as its number of tokens; or the key of the field whose
            length it is. Default: the sample's own length.
        max_padding: Largest share of a batch that may be padding. Default: ``0.2``.
        max_size: Largest number of samples in a batch. Default: no limit.
        max_wait: Number of samples that may arrive while one waits; its batch is closed then. Default: ``1024``.
        padded: ``False``: a batch costs the sum of its samples' costs, and may hold samples of any cost, as nothing is
            padded. Default: ``True``.

    Raises:
        ValueError, TypeError: A value is not possible.
    """

    max_cost: float = option(None, "above 0", _cost)
    cost: Any = option(None, "function, key")
    max_padding: float = option(0.2, "between 0 and 1", _padding)
    max_size: int | None = option(None, "1 or more", _whole(1))
    max_wait: int = option(1024, "0 or more", _given_whole(0))
    padded: bool = option(True, "`True`, `False`", _one_of(True, False))


# ---- all options ----------------------------------------------------------------------------


class TorchArguments(NamedTuple):
    """The arguments of torch that decide which options are possible."""

    in_order: bool
    has_batch_sampler: bool
    is_stream: bool
    drop_last: bool = False
    in_threads: bool = False  # whether the processes of ``multiprocessing_context`` are threads
    is_single: bool = False  # whether single samples are loaded
    dataset_name: str = "dataset"  # the default of ``Observe.name``


@dataclass(frozen=True)
class Options(_Group):
    """The arguments that torch's loader lacks, and the two of torch's that take more values here."""

    num_workers: int = option(0, '0 or more, `"auto"`, an `AutoScale`', _num_workers)
    pin_memory: bool | str = option(False, '`True`, `False`, `"in_place"`', _torchs_or(IN_PLACE))
    persistent_workers: bool | str = option(
        False, '`True`, `False`, `"next_epoch"`', _torchs_or(NEXT_EPOCH)
    )
    transforms: Any = option(None, "list of callables, or an object with `.transforms`")
    order: str = option(
        None,
        '`"strict"`, `"batch"`, `"arrival"`, `"fast_first"`, an `Arrival`, a `FastFirst`',
        _one_of(
            *(None, "strict", "batch", *_MIXING),
            unless=_is(Arrival, FastFirst),
            others="Arrival(...), FastFirst(...)",
        ),
    )
    seed: int | None = option(None, "integer", _seed)
    device: DeviceCopies | None = option(None, "string, `torch.device`, a `DeviceCopies`", _device)
    readers: Readers | None = option(None, "1 or more; a `Readers`", _readers)
    fetch_concurrency: FetchOptions = option(1, "samples, 1 or more; a `FetchOptions`", _fetch)
    cache: Any = option(None, "`DiskCache(…)`, `MemoryCache(…)`")
    compat: str | None = option(None, '`None`, `"torch"`', _one_of(None, "torch"))
    memory_budget: int | None = option(None, 'bytes, 100 or more; `"8GB"`, `"512MiB"`', _bytes)
    workers: str | SharedPool | RayWorkers = option(
        "process", '`"process"`, `"thread"`, a `SharedPool`, a `RayWorkers`', _workers
    )
    errors: ErrorPolicy = option(
        "raise", '`"raise"`, `"skip"`, `"retry"`, a function, an `ErrorPolicy`', _errors
    )
    stragglers: StragglerPolicy = option(None, "a `StragglerPolicy`", _stragglers)
    observe: Observe = option(True, "`True`, `False`, an `Observe`", _observe)
    recording: Record | Replay | None = option(None, "a `Record`, a `Replay`", _recording)
    snapshot_every_n_steps: int | Literal["auto"] | None = option(
        "auto", "0 or more, `'auto'`, `None`", _whole(0, other="auto")
    )
    max_lag: int = DEFAULT_MAX_LAG
    """By how many batches a sample may be late; of ``order``."""

    @classmethod
    def of(cls, given: Mapping[str, Any], torchs: TorchArguments) -> Options:
        """Check the values of the fields, and fill in the defaults that depend on others.

        Raises:
            ValueError: A value is not possible; the message names the argument, the value and the remedy.
            TypeError: A value has a wrong type.
            ModuleNotFoundError: Ray is not installed.
        """
        options = cls(**given)
        options = options.in_context(options.workers, torchs.in_threads)
        _check_recording(options, torchs.is_stream)
        options = _with_defaults(options, torchs)
        for check in _CHECKS:
            check(options, torchs.is_stream)
        return options

    def in_context(self, workers: str | SharedPool | RayWorkers, in_threads: bool) -> Options:
        """The options with workers of a ``multiprocessing_context``, whose processes may be threads.

        ValueError: There are none to share.
        """
        if in_threads and isinstance(workers, SharedPool):
            raise ValueError(
                "workers=SharedPool(...) shares processes, and those of this multiprocessing_context are threads: give "
                "'fork', 'spawn' or 'forkserver', or leave it out"
            )
        workers = "thread" if in_threads and workers == "process" else workers
        return self if workers == self.workers else replace(self, workers=workers)

    @property
    def name(self) -> str:
        """The label of the loader."""
        return cast(str, self.observe.name)

    @property
    def target(self) -> torch.device | None:
        """The device, unless it is host memory."""
        device = None if self.device is None else cast(torch.device, self.device.device)
        return None if device is None or device.type == "cpu" else device

    @property
    def to_device(self) -> int:
        """Number of batches that are copied to the device ahead."""
        return 0 if self.device is None else self.device.ahead

    @property
    def begins_next_epoch(self) -> bool:
        """Whether idle workers begin the next epoch."""
        return self.persistent_workers == NEXT_EPOCH

    @property
    def replays(self) -> bool:
        """Whether the batches are those of a recorded order."""
        return isinstance(self.recording, Replay)

    @property
    def autoscale(self) -> AutoScale | None:
        """The limits of a changing number of workers; None for a fixed one."""
        return self.num_workers.scale if isinstance(self.num_workers, StartingWorkers) else None

    @property
    def worker_kind(self) -> Literal["process", "thread", "ray"]:
        """What a worker is."""
        if isinstance(self.workers, RayWorkers):
            return "ray"
        return "thread" if self.workers == "thread" else "process"

    @property
    def shared_pool(self) -> SharedPool | None:
        """How the ranks of a node share the workers; None if each has its own."""
        return self.workers if isinstance(self.workers, SharedPool) else None

    @property
    def actor_options(self) -> Mapping[str, Any]:
        """Options of each Ray actor."""
        return self.workers.actor_options if isinstance(self.workers, RayWorkers) else {}

    @property
    def deals_readers(self) -> bool:
        """Whether the readers of an iterable dataset are dealt among ranks."""
        return self.readers is not None and self.readers.ranks is not None

    @property
    def seeds_samples(self) -> bool:
        """Whether randomness is bound to each sample rather than to the worker."""
        return self.compat is None

    @property
    def mixes_batches(self) -> bool:
        """Whether samples may take places in other batches than their own."""
        return self.order in _MIXING

    @property
    def returns_in_order(self) -> bool:
        """Whether batches are returned in the order of the sampler."""
        return self.order == "strict"


def _refuse(given: str, refused: Mapping[str, bool], remedy: str = "") -> None:
    for cause, applies in refused.items():
        if applies:
            raise ValueError(f"{given} does not go with {cause}{remedy}")


def _check_recording(options: Options, is_stream: bool) -> None:
    recording = options.recording
    if is_stream and recording is not None:
        raise ValueError(
            f"recording={recording} holds the indices of each batch, and an iterable dataset has none: leave it out"
        )
    if options.replays and options.order not in (None, "strict"):
        raise ValueError(
            f"recording={recording} gives the batches as they are recorded, and order={options.order!r} would change "
            "them: leave order out"
        )


def _with_defaults(options: Options, torchs: TorchArguments) -> Options:
    in_order, given = torchs.in_order, cast(Any, options.order)
    max_lag = _SINGLE_MAX_LAG if torchs.is_single else DEFAULT_MAX_LAG
    order: str | None = given
    if isinstance(given, (Arrival, FastFirst)):
        order = "arrival" if isinstance(given, Arrival) else "fast_first"
        max_lag = max_lag if given.max_lag is None else given.max_lag
    whole = torchs.is_stream or options.compat == "torch"
    if options.replays:
        in_order, order = True, "strict"
    if order is None:
        free = "batch" if whole or torchs.has_batch_sampler else "arrival"
        order = "strict" if in_order else free
    if order == "strict" and not in_order:
        raise ValueError("order='strict' contradicts in_order=False: give one of the two")
    if order in _MIXING and torchs.has_batch_sampler:
        raise ValueError(
            f"order={order!r} mixes the batches that a batch_sampler makes: use order='batch' to get each of them as "
            "soon as it is complete"
        )
    if order in _MIXING and options.compat == "torch":
        raise ValueError(
            f"order={order!r} mixes batches, but with compat='torch' each batch is one worker's: use order='batch' to "
            "get each of them as soon as it is complete"
        )
    seed, observe = options.seed, options.observe
    if seed is None and options.deals_readers:
        seed = 0  # torch's generator may differ between ranks
    if observe.name is None:
        observe = replace(observe, name=torchs.dataset_name)
    return replace(options, order=order, max_lag=max_lag, seed=seed, observe=observe)


def _check_readers(options: Options, is_stream: bool) -> None:
    if options.readers is not None and not is_stream:
        raise ValueError(
            f"readers={options.readers.count} is for iterable datasets, and this one has indices, which any worker "
            "reads: leave it out"
        )


def _check_reading_here(options: Options, is_stream: bool) -> None:
    readers = options.readers
    if readers is None or readers.where == "worker":
        return
    if readers.count not in (None, 1):
        raise ValueError(
            f"Readers({readers.count}, where='main') has one thread, which reads the dataset itself: give Readers(1, "
            "where='main')"
        )
    refused = {
        "num_workers=0, with which the training loop reads and transforms: give 1 or more": (
            options.num_workers == 0
        ),
        "compat='torch', where workers read: leave one of the two out": options.compat == "torch",
    }
    _refuse("Readers(where='main')", refused)


def _check_next_epoch(options: Options, is_stream: bool) -> None:
    if not options.begins_next_epoch:
        return
    refused = {
        "an iterable dataset": is_stream,
        "compat='torch'": options.compat == "torch",
        f"recording={options.recording}": options.replays,
    }
    _refuse(f"persistent_workers={NEXT_EPOCH!r}", refused, ": give True")


def _check_errors(options: Options, is_stream: bool) -> None:
    errors = options.errors
    limit_s = errors.sample_timeout
    if limit_s is None:
        return
    if options.num_workers == 0 or options.worker_kind != "process":
        raise ValueError(
            f"sample_timeout={limit_s} needs worker processes, because nothing else can be ended: use num_workers=1 "
            "or more and workers='process'"
        )
    if options.compat == "torch":
        raise ValueError(
            f"sample_timeout={limit_s} ends workers, and with compat='torch' they hold state that would be lost: use "
            "torch's timeout="
        )
    if is_stream and errors.on_worker_death == "raise":
        raise ValueError(
            f"sample_timeout={limit_s} ends workers, whose readers are then read again, and on_worker_death='raise' "
            "rules that out: leave one of the two out"
        )


def _check_scaling(options: Options, is_stream: bool) -> None:
    if options.autoscale is None:
        return
    if options.compat == "torch":
        raise ValueError(
            "the number of workers cannot change with compat='torch', whose content depends on it: give num_workers as "
            "a number"
        )
    readers = options.readers or Readers()
    if is_stream and readers.count is None and readers.where == "worker":
        raise ValueError(
            "num_workers='auto' or an AutoScale needs readers= with an iterable dataset, whose content depends on "
            "their number and must not depend on the machine: give readers=4, or readers=1 for a dataset that does not "
            "divide itself by get_worker_info()"
        )


def _check_fetching(options: Options, is_stream: bool) -> None:
    fetch, scale = options.fetch_concurrency, options.autoscale
    most_workers = options.num_workers if scale is None else cast(int, scale.max)
    if fetch.max_in_flight is not None and fetch.max_in_flight < most_workers:
        raise ValueError(
            f"max_in_flight={fetch.max_in_flight} reads are fewer than {most_workers} workers, each of which may have "
            "one in flight: use fewer workers"
        )
    if fetch.hedge_percentile is not None and fetch.max_in_flight == max(most_workers, 1):
        raise ValueError(
            f"hedge_percentile={fetch.hedge_percentile} requests a read again while it is in flight, and max_in_flight="
            f"{fetch.max_in_flight} allows each worker one: raise it"
        )
    if not fetch.at_once and fetch.slow_start is None:
        return
    if is_stream:
        raise ValueError(
            f"fetch_concurrency={fetch} reads several samples by their indices, and an iterable dataset has none: "
            "leave it out, or use a map-style dataset"
        )
    if options.compat == "torch":
        raise ValueError(
            f"fetch_concurrency={fetch} contradicts compat='torch': samples that are read at once draw from the "
            "worker's stream in any order; leave one of the two out"
        )


def _check_sharing(options: Options, is_stream: bool) -> None:
    if options.shared_pool is None:
        return
    on_error = options.errors.on_error
    refused = {
        "an iterable dataset, whose samples have no indices to divide: use a map-style dataset": is_stream,
        "num_workers=0, with which there are no workers to share: use 1 or more": (
            options.num_workers == 0
        ),
        "compat='torch', where each batch is one worker's: leave it out": options.compat == "torch",
        f"on_error={on_error!r}, with which ranks might get different numbers of batches: use 'raise' or 'retry'": (
            on_error not in ("raise", "retry")
        ),
        f"recording={options.recording}, as each rank has only a part of the batches: leave it out": (
            options.recording is not None
        ),
        f"pin_memory={IN_PLACE!r}, as only torch knows when all ranks' copies are over: use device=, or "
        "pin_memory=True": options.pin_memory == IN_PLACE,
    }
    _refuse("workers=SharedPool(...)", refused)


def refuse_beside_cost_batches(options: Options, torchs: TorchArguments) -> None:
    """Refuse what goes with batches of the sampler only.

    Raises:
        ValueError: It was given.
    """
    refused = {
        "batch_sampler=, which makes the batches itself: use sampler=": torchs.has_batch_sampler,
        "drop_last=True, as no number of samples makes a batch full: leave it out": torchs.drop_last,
        "device=, which would copy samples one by one: use pin_memory=True": options.device
        is not None,
        "workers=SharedPool(...), where each rank has a given number of batches: leave it out": (
            options.shared_pool is not None
        ),
        "recording=, which records batches of the sampler: leave it out": options.recording
        is not None,
    }
    _refuse("batch_size=CostBatches(...)", refused)


def _check_ray(options: Options, is_stream: bool) -> None:
    if not isinstance(options.workers, RayWorkers):
        return
    given = "workers=RayWorkers(...)"
    if options.num_workers == 0:
        raise ValueError(
            f"{given} has actors as workers, and num_workers=0 has none: use num_workers=1 or more"
        )
    if options.autoscale is not None:
        raise ValueError(
            f"{given} has as many workers as the cluster has free cores, num_workers at most: give it as a number"
        )
    if is_stream:
        raise ValueError(
            f"{given} sends actors the indices of samples, and an iterable dataset has none: use workers='process', "
            "or a map-style dataset"
        )
    if options.compat == "torch":
        raise ValueError(
            "compat='torch' gives the streams of torch's worker processes: use workers='process'"
        )
    fetch = options.fetch_concurrency
    if fetch.at_once or fetch.slow_start is not None:
        raise ValueError(
            f"fetch_concurrency={fetch} contradicts {given}, whose actors run one sample at a time: leave it out, and "
            "use more workers with RayWorkers({'num_cpus': 0.25})"
        )


_CHECKS = (
    *(_check_readers, _check_reading_here, _check_errors, _check_scaling),
    *(_check_fetching, _check_sharing, _check_ray, _check_next_epoch),
)

# ---- documentation --------------------------------------------------------------------------

WIDENED = ("num_workers", "pin_memory", "persistent_workers")
"""Arguments of torch that take more values here."""
DEFAULTS = {each.name: each.default for each in fields(Options) if each.metadata}
OPTION_NAMES = tuple(DEFAULTS)
OWN_NAMES = tuple(name for name in OPTION_NAMES if name not in WIDENED)
GROUPS = (
    *(Arrival, AutoScale, CostBatches, DeviceCopies, ErrorPolicy, FastFirst, FetchOptions),
    *(Observe, RayWorkers, Readers, Record, Replay, SharedPool, StragglerPolicy),
)

# ---- advice about errors of torch's and Python's own ---------------------------------------

_UNKNOWN = re.compile(r"unexpected keyword argument '(\w+)'")
_NUMBERS = {"num_workers": True, "batch_size": True, "prefetch_factor": True, "timeout": False}
"""torch's arguments that are numbers, and whether they are integers; it compares them whatever they are."""


def advice(error: Exception, names: Iterable[str], given: Mapping[str, object]) -> str:
    """Words that name a refused argument and the right one; empty where the message of torch or Python has them.

    ``names`` are the arguments of the constructor, and ``given`` those that the program gave.
    """
    text = message_of(error)
    unknown = _UNKNOWN.search(text)
    if unknown is not None:
        return _advice_on_name(unknown[1], names, text)
    return advice_on_numbers(text, given)


def advice_on_numbers(text: str, given: Mapping[str, object]) -> str:
    """As :func:`advice`, of arguments that torch compares and counts with, also once iteration begins."""
    for name, is_whole in _NUMBERS.items():
        value = given.get(name, 1)
        is_none = value is None and name in ("num_workers", "timeout")
        if f"{name}={text_of(value)} is of" in text:
            return ""
        is_part = is_whole and number_of(value) is not None and integer_of(value) is None
        if isinstance(value, str) or is_part or is_none:
            return _advice_on_number(name, value)
    return ""


def _advice_on_name(name: str, names: Iterable[str], told: str) -> str:
    for group in GROUPS:
        if any(each.name == name and each.init for each in fields(group)):
            values = ((each.name, str(each.metadata.get("values"))) for each in fields(Options))
            holders = (of for of, text in values if f"`{group.__name__}`" in text)
            holder = next(holders, "batch_size")
            return f"{name}= belongs to a group: {holder}=minato.{group.__name__}({name}=...)"
    nearest = did_you_mean(name, names).removeprefix("; did you mean ")
    is_told = not nearest or "Did you mean" in told  # by Python, from 3.13 on
    return "" if is_told else f"Did you mean {nearest}"


def _advice_on_number(name: str, value: object) -> str:
    others = (", 'auto' or an AutoScale", ("auto",)) if name == "num_workers" else ("", ())
    kind, nearest = type_name(value), did_you_mean(value, others[1])
    with suppress(TypeError, ValueError, OverflowError):
        nearest = f"; did you mean {name}={int(float(cast(str, value)))}?"
    return f"{name}={text_of(value)} is of type {kind}: give a number{others[0]}{nearest}"
