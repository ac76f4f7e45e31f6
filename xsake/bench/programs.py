"""What benchmarks check before they compile or write anything, and how their programs end.

    xsake bench --suite hopper               why_not("hopper") ─ a reason ─▶ ValueError of the CLI
    python -m xsake.bench.suites.selection   stop_without("hopper", …) ────▶ one sentence, status 2

A program that starts processes to measure does not use the GPU itself: it asks with `apart`.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn, get_args

from xsake import _jax
from xsake.backends.hopper.limits import NEEDS_JAX

Need = Literal["gpu", "hopper"]  # any GPU; one that the Hopper kernels run on
BAD_INPUT = 2  # the exit status, that of argparse


def why_not(need: Need) -> str | None:
    """What is needed and what was found instead; None if a benchmark can run here."""
    try:
        platform = _jax.platform()
    except RuntimeError as error:  # JAX_PLATFORMS names a device that is not there
        return f"needs a {'Hopper ' * (need == 'hopper')}GPU, but JAX cannot start: {error}"
    if need == "hopper":
        return _jax.why_no_hopper(NEEDS_JAX)
    return None if platform == "gpu" else f"needs a GPU; this is a {platform}"


def why_not_apart(need: Need) -> str | None:
    """`why_not` by a process of its own, so that this one takes no memory of the GPU."""
    command = [sys.executable, "-m", "xsake.bench.programs", need]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return None
    for line in ended.stderr.splitlines():  # JAX may print lines of its own
        if ended.returncode == BAD_INPUT and line.startswith(f"{need} "):
            return line.removeprefix(f"{need} ")
    raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stderr}")


def stop(message: str) -> NoReturn:
    """Ends the program with a sentence about its input or the machine."""
    print(message, file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def stop_for_suite(name: str) -> NoReturn:
    """Ends a module that is run as a program and is none, but a suite."""
    stop(f"this module is no program but a suite: run `xsake bench --suite {name}`")


def stop_without(need: Need, program: str, *, apart: bool = False) -> None:
    """Ends the program, which is called `program`, if it cannot measure on this machine."""
    reason = why_not_apart(need) if apart else why_not(need)
    if reason is not None:
        stop(f"{program} {reason}")


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Around what reads the user's files: an error ends the program with its sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        stop(str(error))


def output_file(text: str) -> Path:
    """The type of an argument `--out`: a file whose folder exists, checked before the work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file to write")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def check_outputs(*files: Path) -> None:
    """Ends the program if a file that it will write cannot be one; it has no `argparse` parser."""
    for file in files:
        try:
            output_file(str(file))
        except argparse.ArgumentTypeError as error:
            stop(str(error))


def add_out(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds `--out FILE`."""
    words = "the JSON file to write" + ("" if required else "; default: none")
    parser.add_argument("--out", type=output_file, required=required, metavar="FILE", help=words)


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`; the lines of the description stay as they are."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


if __name__ == "__main__":
    (asked,) = (need for need in get_args(Need) if need == sys.argv[1])
    stop_without(asked, asked)
