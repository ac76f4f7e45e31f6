"""Progress of a command: a bar on a terminal, plain lines elsewhere; "compiling" while XLA does.

on a terminal   document 3 of 16 · compiling ━━━━━━━╺━━━━━━━━━━━━━━━━━━━ 0:00:41
elsewhere       document 3 of 16 (41 s)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xsake.cli.terminal import console
from xsake.observe.compiling import compiling

SECONDS_BETWEEN_LINES = 10


class Report(Protocol):
    """Shows a text and, if their number is known, how many parts of the work are done."""

    def __call__(self, text: str, done: int | None = None) -> None:
        """Updates the line."""


@contextlib.contextmanager
def progress(text: str, total: int | None = None) -> Iterator[Report]:
    """A progress line that begins with `text` and ends with the block.

    Where the output is not a terminal, the lines of finished parts are printed, and others at most
    every ten seconds.
    """
    if not console.is_terminal:
        lines = _Lines(text)
        with compiling(lines.compiling):
            yield lines.report
        return
    columns = (
        TextColumn("{task.description}{task.fields[state]}", markup=False),
        BarColumn(bar_width=32),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(text, total=total, state="")

        def report(text: str, done: int | None = None) -> None:
            bar.update(task, description=text, completed=done)

        with compiling(lambda is_on: bar.update(task, state=" · compiling" if is_on else "")):
            yield report


class _Lines:
    """Prints what `progress` reports as lines with the seconds since the start."""

    def __init__(self, text: str) -> None:
        self._began = self._last = time.monotonic()
        self._compiled = False
        console.print(text, soft_wrap=True)

    def report(self, text: str, done: int | None = None) -> None:
        now = time.monotonic()
        if done is not None or now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            console.print(f"{text} ({now - self._began:.0f} s)", soft_wrap=True)

    def compiling(self, is_on: bool) -> None:
        """Says so once: the first part of the work takes longer than the others."""
        if is_on and not self._compiled:
            self._compiled = True
            console.print("compiling")


@contextlib.contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error while nothing is printed; only on a terminal."""
    errors = Console(stderr=True, highlight=False)
    if not errors.is_terminal:
        yield lambda text: None
        return
    shown = text
    with errors.status(text) as line:

        def update(text: str) -> None:
            nonlocal shown
            shown = text
            line.update(text)

        with compiling(lambda on: line.update(f"{shown} · compiling" if on else shown)):
            yield update
