"""Sinks of events: a sink is an object with write(event) and close().

Event ─┬─ EventFile     events.jsonl, always written; the source of truth
       ├─ Terminal      a progress bar, or plain lines if the output is not a terminal
       ├─ Prometheus    /metrics on a port
       ├─ Wandb         an offline run in the run's folder
       ├─ Trackio       a run of the local Trackio project
       └─ TensorBoard   scalars
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from xsake import _files
from xsake.observe import metrics
from xsake.observe.compiling import compiling
from xsake.observe.events import (
    Evaluated,
    Event,
    HeadsObserved,
    PlanSwapped,
    Resumed,
    RunStarted,
    Sampled,
    Stopped,
    Straggler,
    TrainStep,
    parse,
)
from xsake.observe.metrics import scalars


@runtime_checkable
class Sink(Protocol):
    """Receives events."""

    def write(self, event: Event) -> None:
        """Writes one event."""

    def close(self) -> None:
        """Called once, after the last event."""


class EventFile:
    """events.jsonl: one line per event, flushed at once.

    A file opened at step s keeps the events up to s. Later events and an incomplete last line are
    removed: the run will log them again.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        if path.exists():
            _truncate(path, step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        self._file.write(event.to_json() + "\n")
        self._file.flush()

    def sync(self) -> None:
        """fsync; called before each checkpoint."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _truncate(path: Path, step: int) -> None:
    """Atomically replaces the file by its complete lines up to `step`.

    Earlier Stopped events are removed, because Stopped is the last event of a file.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            event = _files.parse_object(line, "it") if line.strip() else None
            if event is not None and not _files.fits(event.get("step"), int):
                raise ValueError(f"its step is {event.get('step')!r:.40}")
        except ValueError as error:
            if not any(after.strip() for after in lines[number:]):
                continue  # the last line, cut off
            raise ValueError(
                f"{path}, line {number} is damaged: {error}; remove it to resume"
            ) from error
        if event is not None and event["step"] <= step and event.get("event") != Stopped.__name__:
            kept.append(line)
    with _files.replaced(path) as part:
        part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def read(path: str | Path) -> list[Event]:
    """The events of a file that may still be written to: an incomplete last line is ignored."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        if line.strip():
            try:
                found.append(parse(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return found


# -------------------------------------------------------------------------------------- on request


class Prometheus:
    """xsake_train_loss_nats{run="…"} and the other metrics of `metrics.py`, served on a port."""

    def __init__(self, port: int = 0, run: str = "") -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.registry = CollectorRegistry()
        self._newest, self._run = metrics.Newest(), run
        self.registry.register(self)
        self._server = start_http_server(port, registry=self.registry)[0] if port else None

    def write(self, event: Event) -> None:
        self._newest.write(event)

    def collect(self) -> Iterator[Any]:
        """What prometheus_client calls for a scrape, in a thread of its own."""
        return metrics.families({self._run: self._newest})

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class Wandb:
    """An offline W&B run; `wandb sync --append FOLDER/wandb/offline-run-*` uploads it.

    Every process of a run writes a folder of its own, all with the run's id, so that they are one
    run after the upload. W&B keeps the first value of a step; a resumed run logs the same again.
    """

    def __init__(self, folder: Path, run: str, config: Mapping[str, object], step: int = 0) -> None:
        import wandb

        self._run = wandb.init(
            mode="offline",
            project="xsake",
            name=run,
            id=run,
            dir=str(folder),
            config={**config, "resumed_at_step": step},
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, event: Event) -> None:
        if found := scalars(event):
            self._run.log(found, step=event.step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the local Trackio project `xsake`; `trackio show` opens its dashboard.

    A resumed run continues the run of its name and logs the steps after its checkpoint again, with
    the same values.
    """

    def __init__(self, run: str, config: Mapping[str, object], step: int = 0) -> None:
        import trackio

        self._run = trackio.init(
            project="xsake",
            name=run,
            config=dict(config),
            resume="allow" if step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, event: Event) -> None:
        if found := scalars(event):
            self._run.log(found, step=event.step)

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """Scalars for TensorBoard; on resume, scalars after the restored step are purged."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from tensorboardX import SummaryWriter

        # the suffix, because the name alone is the same for two files of one second
        self._writer = SummaryWriter(
            str(folder),
            purge_step=step + 1 if step else None,
            filename_suffix=f".step-{step:09}",
        )

    def write(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=event.time_unix_seconds)

    def close(self) -> None:
        self._writer.close()


class Terminal:
    """A progress bar on a terminal, elsewhere a line every ten seconds; reports compilation."""

    def __init__(self, steps: int, step: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(highlight=False)
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        is_terminal = self._console.is_terminal
        self._progress = Progress(*columns, console=self._console) if is_terminal else None
        self._steps, self._last_line = steps, 0.0
        if self._progress is not None:
            self._task = self._progress.add_task("", total=steps, completed=step)
            self._progress.start()
        self._description, self._has_started, self._has_compiled = "", False, False
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(compiling(self._compiling))

    def write(self, event: Event) -> None:
        self._has_started = True
        if isinstance(event, TrainStep):
            self._step(event)
        elif isinstance(event, RunStarted):
            size = f"{event.parameters:,} parameters"
            size += f" of {event.init}" if event.init else ""
            self._print(f"{size}, {event.devices} × {event.device}")
            if event.note:
                self._print(event.note)
        elif isinstance(event, Evaluated) and event.perplexity is not None:
            self._print(f"step {event.step}: perplexity {event.perplexity:.2f} on {event.file}")
        elif isinstance(event, Sampled):
            prompt, text = (" ".join(x.split()) for x in (event.prompt, event.text))
            self._print(f"step {event.step}: “{prompt}” continues: {text}")
        elif isinstance(event, PlanSwapped):
            self._print(f"step {event.step}: new plan of density {event.density_ratio:.3f}")
        elif isinstance(event, HeadsObserved):
            layers, heads = len(event.entropy_ratios), len(event.entropy_ratios[0])
            self._print(f"step {event.step}: observed {layers} × {heads} heads")
        elif isinstance(event, Resumed):
            self._print(". ".join(filter(None, [f"resumed at step {event.step}", event.note])))
        elif isinstance(event, Straggler):
            times = f"{event.step_seconds:.2f} s, the median {event.median_seconds:.2f} s"
            waited = "" if event.process is None else f", waiting for process {event.process}"
            self._print(f"step {event.step} took {times}{waited}")
        elif isinstance(event, Stopped):
            self._print(f"step {event.step}: {event.reason}")

    def _step(self, event: TrainStep) -> None:
        self._description = line = one_line(event)
        if self._progress is not None:
            self._progress.update(self._task, completed=event.step, description=line)
        elif time.monotonic() - self._last_line > 10 or event.step == self._steps:
            self._last_line = time.monotonic()
            self._print(f"step {event.step}/{self._steps}  {line}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def _compiling(self, is_on: bool) -> None:
        """On a terminal at every compilation; elsewhere one line before the first step."""
        if self._progress is not None:
            shown = "compiling" if is_on else self._description
            self._progress.update(self._task, description=shown)
        elif is_on and self._has_started and not self._has_compiled:
            self._has_compiled = True
            self._print("compiling")

    def close(self) -> None:
        """Ends the bar and shows the cursor again; once more does nothing."""
        self._listening.close()
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


def one_line(event: TrainStep) -> str:
    """Loss, speed, MFU and density of a step as text."""
    loss = "skipped" if event.loss_nats is None else f"loss {event.loss_nats:.3f}"
    parts = [loss, f"{event.tokens_per_second:,.0f} tokens/s"]
    if event.mfu_ratio is not None:
        parts.append(f"MFU {event.mfu_ratio:.1%}")
    return "  ".join([*parts, f"density {event.density_ratio:.2f}"])
