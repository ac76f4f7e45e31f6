"""What the commands share: the console, checks of flags and files, the table of backends."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import xsake
from xsake import _jax
from xsake.backends import choice

console = Console(highlight=False)

Out = Annotated[Path, tyro.conf.arg(aliases=["-o"])]  # where a command writes


def fast_dtype() -> str:
    """The fastest dtype on this platform: float32 on a CPU, bfloat16 elsewhere."""
    return "float32" if _jax.platform() == "cpu" else "bfloat16"


def reasons(explanation: xsake.Explanation, call: str) -> Table:
    """Whether each backend can run a call and why not, with the chosen one marked."""
    table = Table("backend", "this machine", title=f"causal attention, {call}")
    for name, words in explanation.words().items():
        table.add_row(name, words)
    return table


def at_least(least: int, **flags: int | None) -> None:
    """Raises unless every flag that is given is at least `least`; --max-tokens is max_tokens."""
    for name, value in flags.items():
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least {least}, got {value}")


def writable_file(path: Path) -> Path:
    """Makes the folder of a file that a command will write; raises if the file cannot be written.

    Commands call it before their work, not after.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file to write")
    make_folder(path.parent)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists():
            path.open("ab").close()
    except OSError as error:
        raise type(error)(f"{path} cannot be written ({error.strerror}); name another") from error
    return path


@contextlib.contextmanager
def kept_in(out: Path, what: str) -> Iterator[None]:
    """Around work that the same command continues: after Ctrl-C it says what the file has."""
    try:
        yield
    except KeyboardInterrupt:
        if not out.is_file():
            raise
        raise KeyboardInterrupt(
            f"stopped by Ctrl-C; {out} has {what} that were finished; run the same command again "
            "to continue"
        ) from None


def check_implementation(name: str | None) -> None:
    """Raises for --implementation NAME that is no backend, before anything is loaded."""
    try:
        choice.check_name(name)
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"the folder {folder} cannot be made ({error.strerror}); name another one"
        ) from error


def runnable() -> str:
    """What to type for `xsake` in the current folder: `make demo` does not put it on the PATH."""
    script = Path(sys.executable).with_name("xsake")
    found = shutil.which("xsake")
    if found is not None and (not script.exists() or Path(found).samefile(script)):
        return "xsake"
    here = Path.cwd()
    executable = script if script.exists() else Path(sys.executable)
    shown = executable.relative_to(here) if executable.is_relative_to(here) else executable
    return shlex.quote(str(shown)) + ("" if script.exists() else " -m xsake")
