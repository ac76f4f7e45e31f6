"""The suite `hopper-versions`: the cases of `hopper` at this commit and at another one.

    this process ── compiles ─┐                        ┌─ here, there ─┐
                              ├─ check ─ every round: ─┤               ├─ seconds of both, ratio
    one of AGAINST ─ compiles ┘                        └─ there, here ─┘

    git worktree add ../other COMMIT
    xsake bench --suite hopper-versions --against ../other

Both versions have the same inputs, machine and packages, and each checks its own results before it
is timed. They take turns, so that the clock of a GPU, which drops as it heats, affects both alike.
Compiling runs the forward once, for the residuals of the vjp. With `--jobs`, this may fall into
another case's round: compiling in turn would take longer than everything else. The median over
rounds leaves such a round out. With XLA_FLAGS=--xla_gpu_autotune_level=0 the float32 checks compile
much faster; what it leaves untuned, products by XLA, is not timed here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xsake import masks
from xsake.bench import programs
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import checked_calls
from xsake.bench.measure import CAUSAL, compiled
from xsake.bench.suites import Part, Record
from xsake.bench.suites.hopper import SHAPES, dense_case
from xsake.bench.timing import LOCK, alone, beside, time_queued
from xsake.observe import provenance

AGAINST = "XSAKE_AGAINST"  # in the environment: the checkout of the other version
AGAINST_COMMIT = "XSAKE_AGAINST_COMMIT"  # its commit, for a folder without git
# It imports xsake from the current folder, and does not wait for its turn: it is timed while this
# process has it.
NOT_PASSED = ("PYTHONPATH", "PYTHONSAFEPATH", LOCK)
ROUNDS = 7
SECONDS = 0.1  # of a round of one version
WORDS = 600  # characters of what a process printed last

# What the other version runs, in its own checkout: only functions that it has had for long.
WORKER = """
import json, pathlib, sys
import xsake
from xsake import masks
from xsake.bench.cases import Case, hopper_case
from xsake.bench.checks import checked_calls
from xsake.bench.measure import compiled
from xsake.bench.timing import time_queued

def answer(x):
    print("answer", json.dumps(x), flush=True)

if not pathlib.Path(xsake.__file__).is_relative_to(pathlib.Path.cwd()):
    sys.exit(f"xsake was imported from {xsake.__file__}")
asked = json.loads(sys.argv[1])
B, T, H = (asked[x] for x in "BTH")
if asked["density"] is None:
    rule = masks.causal() if asked["causal"] else masks.everything()
    case = Case(asked["name"], B, T, N=16, H=H, dtype=asked["dtype"], rule=rule)
else:
    case = hopper_case(B, T, H, asked["density"])
given, calls = compiled(case, asked["backend"])
answer("compiled")
for line in sys.stdin:
    if line.strip() == "check":
        checked_calls(case, given, calls)
        answer("checked")
        continue
    fn, arguments = calls[line.strip()]
    answer(time_queued(fn, *arguments, seconds=asked["seconds"], rounds=1).median_seconds)
"""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A case that both versions can make, and how it is timed; see WORKER."""

    name: str
    B: int
    T: int
    H: int
    density: float | None = None
    causal: bool = False
    dtype: str = "bfloat16"
    backend: str = "hopper"
    seconds: float = SECONDS

    def case(self) -> Case:
        """It, as this version makes it."""
        if self.density is not None:
            return hopper_case(self.B, self.T, self.H, self.density)
        case = dense_case(self.B, self.T, self.H)
        rule = CAUSAL if self.causal else masks.everything()
        return dataclasses.replace(case, name=self.name, rule=rule, dtype=self.dtype)


def parts(quick: bool, model: Path | None = None) -> Iterator[Part]:
    """Dense, causal and block-sparse cases, those of the suite `hopper`."""
    for H in (128, 64):
        for B, T in SHAPES[:1] if quick else SHAPES:
            shape = f"{B}·16·{T}·{H}"
            asked = [
                Asked(f"{shape} full", B, T, H),
                Asked(f"{shape} causal", B, T, H, causal=True),
                *(
                    Asked(hopper_case(B, T, H, density).name, B, T, H, density)
                    for density in ((0.43,) if quick else (0.43, 0.20, 0.10))
                ),
            ]
            yield from (Part(one.name, functools.partial(records, one)) for one in asked)


def records(asked: Asked, done: list[Record]) -> Iterator[Record]:
    """One record for the forward and one for the backward."""
    commit = against_commit()
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(Other(checkout(), asked))
        case = asked.case()
        given, calls = compiled(case, asked.backend)
        other.answer()  # that it has compiled
        with beside():
            checked_calls(case, given, calls)
            other.ask("check")
        for direction, (fn, args) in calls.items():
            here = functools.partial(_seconds, fn, args, asked.seconds)
            there = functools.partial(other.ask, direction)
            with alone():
                mine, its = by_turns(here, there, ROUNDS)
            ratios = sorted(x / y for x, y in zip(mine, its, strict=True))
            yield {
                "suite": "hopper-versions",
                "case": asked.name,
                "direction": direction,
                "T": asked.T,
                "H": asked.H,
                "against_commit": commit,
                "median_seconds": statistics.median(mine),
                "against_median_seconds": statistics.median(its),
                "over_against": statistics.median(ratios),  # above 1: this version is slower
                "least_over_against": ratios[0],
                "most_over_against": ratios[-1],
                "rounds": len(ratios),
            }


def by_turns(
    one: Callable[[], float], two: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """What both return in every round; each is the first of them in every other round."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append((one, two)[which]())
    return found


def _seconds(fn: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> float:
    return time_queued(fn, *args, seconds=seconds, rounds=1).median_seconds


@contextlib.contextmanager
def comparing(folder: Path | None) -> Iterator[None]:
    """Inside, this process and those that it starts compare with the checkout in `folder`."""
    before = os.environ.get(AGAINST)
    try:
        if folder is not None:
            os.environ[AGAINST] = str(folder)
        yield
    finally:
        os.environ.pop(AGAINST, None)
        if before is not None:
            os.environ[AGAINST] = before


def checkout() -> Path:
    """The folder of the other version."""
    given = os.environ.get(AGAINST)
    if not given:
        raise ValueError(
            "the suite hopper-versions compares with another version: --against FOLDER names a "
            "checkout of it, which `git worktree add FOLDER COMMIT` makes"
        )
    folder = Path(given).resolve()
    if not (folder / "xsake" / "__init__.py").is_file():
        raise ValueError(f"{folder} is not a checkout of XSAKE: it has no xsake/__init__.py")
    return folder


def against_commit() -> str:
    """The commit of the other version."""
    folder = checkout()
    return os.environ.get(AGAINST_COMMIT) or provenance.commit_of(folder)


class Other:
    """A process of another version that compiles a case; it checks and times it when asked."""

    def __init__(self, folder: Path, asked: Asked) -> None:
        self._printed: list[str] = []
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (see __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(dataclasses.asdict(asked))],
            cwd=folder,
            env={name: x for name, x in os.environ.items() if name not in NOT_PASSED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,  # with stdout, a line of it could end up inside an answer
            text=True,
        )

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, what: str) -> Any:
        """The answer to "check", or the seconds of a call in a direction."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self.answer()

    def answer(self) -> Any:
        """The next answer; raises with what the process printed if it ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            mark, _, rest = line.partition(" ")
            if mark == "answer":
                return json.loads(rest)
            self._printed.append(line)
        raise self._failure()

    def _failure(self) -> RuntimeError:
        """What to raise when the process has ended: its status, and the end of what it printed."""
        assert self._process.stdout is not None
        status = self._process.wait()
        self._errors.seek(0)
        printed = "".join([*self._printed, *self._process.stdout, self._errors.read()]).strip()
        said = printed[-WORDS:] or "it printed nothing"
        return RuntimeError(f"the other version ended with status {status}: {said}")


if __name__ == "__main__":
    programs.stop_for_suite("hopper-versions")
