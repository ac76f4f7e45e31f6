"""Measures the cases of a suite in several processes at once: xsake bench --jobs N.

    cases ─ groups ─┬─ process 1 ─ compiles ─┐                     ┌─ part 1 ─┐
                    ├─ process 2 ─ compiles ─┼─ one at a time: times ─ part 2 ─┼─ join ─ the file
                    └─ …                     ┘                     └─ …       ┘

Compiling takes most of the time of a suite on a GPU. Processes compile side by side and take turns
to time (`timing.alone`). Cases that need each other's records are a group, measured by one process.
What a process that fails or runs out of time had measured is left out.

python -m xsake.bench.side_by_side SUITE FILE QUICK CASE… is one of the processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xsake.bench import run
from xsake.bench.timing import LOCK, command_line

POLL = 0.2  # seconds between looks at the processes
WORDS = 400  # characters of what a failed process printed last
# Each process takes the memory that it needs, not three quarters of the GPU's.
OWN_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

Start = Callable[[str, Path, bool, Sequence[str], dict[str, str], Any], "subprocess.Popen[Any]"]


class Job(NamedTuple):
    """A process that measures some cases."""

    cases: list[str]
    out: Path
    log: Path
    process: subprocess.Popen[Any]


class Outcome(NamedTuple):
    """The whole result, and why cases are missing from it."""

    result: dict[str, Any] | None
    missing: dict[str, str]  # {case: reason}


def run_jobs(
    name: str,
    out: Path,
    jobs: int,
    *,
    quick: bool = False,
    only: str = "",
    seconds: float | None = None,
    report: Callable[[str], None] | None = None,
    start: Start | None = None,
) -> Outcome:
    """Measures a suite by at most `jobs` processes at a time, and writes its JSON file.

    Args:
      name: of the suite.
      out: the JSON file; cases that it holds are not measured again, as in `run.run_suite`.
      jobs: processes at a time.
      quick: shorter sequences and fewer repeats.
      only: measures the cases with this text in their name.
      seconds: after these no process is started, and those that run are ended.
      report: called with a line about every process that ended.
      start: starts a process; default `start_process`.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    os.environ |= OWN_MEMORY  # this process asks for the GPU's name
    out.parent.mkdir(parents=True, exist_ok=True)
    earlier = run.earlier(name, out, quick)
    held = {record["case"] for record in earlier["results"]}
    waiting = [
        todo
        for group in run.groups(name, quick, only)
        if (todo := [case for case in group if case not in held])
    ]
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        pool = _Pool(name, quick, Path(folder), start or start_process)
        try:
            while waiting or pool.running:
                if deadline is not None and time.monotonic() > deadline:
                    late = [case for job in pool.running for case in job.cases]
                    late += [case for group in waiting for case in group]
                    missing |= dict.fromkeys(late, f"not done after {seconds:g} s")
                    break
                while waiting and len(pool.running) < jobs:
                    pool.start(waiting.pop(0))
                for job, why in pool.ended():
                    missing |= dict.fromkeys(job.cases, why) if why else {}
                    if report is not None:
                        report(f"{'; '.join(job.cases)}: {why or 'measured'}")
                time.sleep(POLL)
        finally:
            pool.stop()
        files = [*([out] if held else []), *pool.files]
        result = run.join(name, files, out, command=command_line()) if files else None
    return Outcome(result, missing)


def start_process(
    name: str, out: Path, quick: bool, cases: Sequence[str], more: dict[str, str], log: Any
) -> subprocess.Popen[Any]:
    """A process of this Python that measures some cases and writes `out`."""
    arguments = [name, str(out), str(int(quick)), *cases]
    return subprocess.Popen(
        [sys.executable, "-m", "xsake.bench.side_by_side", *arguments],
        env=os.environ | more,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


class _Pool:
    """The processes, and the files of those that ended well."""

    def __init__(self, name: str, quick: bool, folder: Path, start: Start) -> None:
        self.name, self.quick, self.folder, self._start = name, quick, folder, start
        self.running: list[Job] = []
        self.files: list[Path] = []
        self._count = 0

    def start(self, cases: list[str]) -> None:
        """Starts a process for these cases."""
        out, log = (self.folder / f"{self._count}.{x}" for x in ("json", "log"))
        self._count += 1
        more = {LOCK: os.environ.get(LOCK) or str(self.folder / "turn"), **OWN_MEMORY}
        with log.open("w") as file:
            process = self._start(self.name, out, self.quick, cases, more, file)
        self.running.append(Job(cases, out, log, process))

    def ended(self) -> list[tuple[Job, str]]:
        """The processes that ended since, and why those that failed did."""
        found = [(job, code) for job in self.running if (code := job.process.poll()) is not None]
        self.running = [job for job in self.running if job.process.returncode is None]
        self.files += [job.out for job, code in found if code == 0]
        return [(job, _why(job, code) if code else "") for job, code in found]

    def stop(self) -> None:
        """Ends what still runs."""
        for job in self.running:
            job.process.send_signal(signal.SIGKILL)
        for job in self.running:
            job.process.wait()
        self.running = []


def _why(job: Job, code: int) -> str:
    said = job.log.read_text(errors="replace").strip()
    return f"exit status {code}: {said[-WORDS:] or 'it printed nothing'}"


if __name__ == "__main__":
    suite, file, is_quick, *cases_here = sys.argv[1:]
    run.run_suite(suite, Path(file), bool(int(is_quick)), cases=cases_here)
