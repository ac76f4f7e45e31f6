"""Timing: warm-up, rounds, median; and provenance, which is recorded with every result."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import Array

from xsake import _jax
from xsake.observe import provenance as provenance_of


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call per round; calls that are timed together share their rounds."""

    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """The median over rounds."""
        return statistics.median(self.seconds)

    @property
    def least_seconds(self) -> float:
        """The fastest round."""
        return min(self.seconds)

    @property
    def repeats(self) -> int:
        """The number of rounds."""
        return len(self.seconds)

    def over(self, other: Timing) -> float:
        """The median over rounds of own time ÷ the other's time; drift over rounds cancels."""
        return statistics.median(
            mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)
        )


LOCK = "XSAKE_TIMING_LOCK"  # in the environment: the file of a lock that processes share
_held: list[int] = []  # how: fcntl.LOCK_EX while this process is `alone`, LOCK_SH while `beside`


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits for its turn if XSAKE_TIMING_LOCK names a file, and gives the turn back at the end.

    So processes that measure parts of a suite can compile side by side, which takes most of their
    time, and still have the accelerator to themselves when they time. Every function that times
    waits for its turn; `alone` around several of them keeps it.
    """
    if fcntl.LOCK_SH in _held:
        raise RuntimeError("a process that prepares cannot time: it would wait for itself")
    with _holding(fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Around work on the accelerator that is not timed: it waits while another process times.

    Processes prepare, compile and check beside each other, and none while one is `alone`.
    """
    with _holding(fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _holding(how: int) -> Iterator[None]:
    """Holds the lock, if there is one and this process does not hold it already."""
    path = os.environ.get(LOCK)
    if not path or _held:
        yield
        return
    with open(path, "a") as file:
        # in turns: without them, processes that share the lock would never leave it to the others
        with open(path + ".turn", "a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(file, how)
        _held.append(how)
        try:
            yield
        finally:
            _held.clear()


def time_calls(
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], repeats: int = 7
) -> dict[str, Timing]:
    """Times several compiled functions, interleaved, so that drift affects them equally."""
    with alone():
        for fn, args in calls.values():
            jax.block_until_ready(fn(*args))
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, (fn, args) in calls.items():
                began = time.perf_counter()
                jax.block_until_ready(fn(*args))
                seconds[name].append(time.perf_counter() - began)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def time_queued(
    fn: Callable[..., Any],
    *args: Any,
    seconds: float = 0.1,
    rounds: int = 5,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> Timing:
    """Seconds per call on an accelerator: queues many calls, waits once, and averages.

    Calls that are compared need rounds of equal length: an idle GPU runs at a higher clock for some
    hundredths of a second, until the power limit applies.
    """
    with alone():
        wait(fn(*args))
        began = time.perf_counter()
        wait([fn(*args) for _ in range(3)])
        calls = max(3, int(seconds * 3 / (time.perf_counter() - began)))
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(calls):
                result = fn(*args)
            wait(result)
            times.append((time.perf_counter() - began) / calls)
    return Timing(tuple(times))


def time_on_device(fn: Callable[..., Any], *args: Any, calls: int = 20) -> float:
    """Seconds of a GPU's kernels and copies in one call, by the profiler: the median over calls.

    Small kernels end before the host has launched the next one; this leaves the host's time out.
    """
    with alone(), tempfile.TemporaryDirectory() as folder:
        jax.block_until_ready(fn(*args))
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(fn(*args))
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = sorted(_events_on_gpu(path))
    if not found or len(found) % calls:
        raise RuntimeError(f"the profiler found {len(found)} kernels in {calls} calls")
    size = len(found) // calls
    each = (found[i : i + size] for i in range(0, len(found), size))
    return statistics.median(sum(seconds for _, seconds in one) for one in each)


def _events_on_gpu(path: Path) -> Iterator[tuple[float, float]]:
    """(begin, seconds) of every kernel and copy in a trace."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        streams = (x for x in plane.lines if "/device:GPU" in plane.name and "Stream" in x.name)
        for event in itertools.chain.from_iterable(x.events for x in streams):
            yield event.start_ns, event.duration_ns / 1e9


Calls = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]  # a compiled function, its arguments


def compile_directions(attend: Callable[..., Any], inputs: Sequence[Array], more: Any) -> Calls:
    """Compiles attend(q, k, v, more) and its vjp alone, concurrently; inputs are q, k, v.

    The arguments of the vjp are the forward's residuals and d_out.
    """
    q, k, v = inputs
    d_out = jax.random.normal(jax.random.key(0), (*q.shape[:3], v.shape[-1]), q.dtype)

    def forward() -> Any:
        return jax.jit(attend).lower(q, k, v, more).compile(), (q, k, v, more)

    def backward() -> Any:
        def saved(q: Any, k: Any, v: Any, more: Any) -> Any:
            return jax.vjp(lambda *x: attend(*x, more), q, k, v)[1]

        pull_back = jax.jit(saved)(q, k, v, more)
        run = jax.jit(lambda pull_back, x: pull_back(x))
        return run.lower(pull_back, d_out).compile(), (pull_back, d_out)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = {
            name: pool.submit(make) for name, make in (("forward", forward), ("backward", backward))
        }
        return {name: future.result() for name, future in made.items()}


def compiled_together(calls: Mapping[Any, tuple[Callable[..., Any], tuple[Any, ...]]]) -> Any:
    """The functions compiled for their arguments, concurrently; nothing is run."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = {
            name: pool.submit(lambda fn, args: jax.jit(fn).lower(*args).compile(), fn, args)
            for name, (fn, args) in calls.items()
        }
        return {name: future.result() for name, future in made.items()}


def time_interleaved(calls: Calls, rounds: int = 3) -> dict[str, Timing]:
    """Times queued calls, interleaved, so that drift of the clock affects them equally.

    Each round starts with a different call. A call's time in a round is the median of a whole
    `time_queued`, because the GPU's clock takes tenths of a second to follow a change of load.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with alone():
        for number in range(rounds):
            for i in range(len(names)):
                name = names[(i + number) % len(names)]
                fn, args = calls[name]
                seconds[name].append(time_queued(fn, *args).median_seconds)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def time_directions(calls: Calls) -> dict[str, float]:
    """Median seconds of each call, queued."""
    with alone():
        return {name: time_queued(fn, *args).median_seconds for name, (fn, args) in calls.items()}


def temporary_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Memory that the compiled function needs beyond its arguments and results; nothing is run."""
    analysis: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def provenance() -> dict[str, Any]:
    """Machine, versions, commit, command and date; XLA_FLAGS if there are any."""
    flags = os.environ.get("XLA_FLAGS")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "device": _jax.device_kind(),
            "platform": _jax.platform(),
            "processor": _processor(),
            "architecture": platform.machine(),
            "cores": len(jax.devices()) if _jax.platform() != "cpu" else _cores(),
        },
        "versions": provenance_of.versions(),
        "commit": provenance_of.commit(),
        "command": command_line(),
        **({"xla_flags": flags} if flags else {}),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line() -> str:
    """The command line as a shell reads it, with absolute paths shortened to file names."""
    module = sys.modules["__main__"].__spec__  # None for a script
    run = f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name
    arguments = (Path(x).name if Path(x).is_absolute() else x for x in sys.argv[1:])
    return f"{run} {shlex.join(arguments)}".rstrip()


def _processor() -> str:
    """The CPU's name by lscpu, which knows ARM too; without lscpu, what Python reports."""
    if shutil.which("lscpu") is None:
        return platform.processor() or platform.machine()
    output = subprocess.run(
        ["lscpu"], env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True
    ).stdout
    facts = dict(line.split(":", 1) for line in output.splitlines() if ":" in line)
    return facts.get("Model name", "").strip() or platform.machine()
