"""Where a run's events go: events.jsonl, the sinks that the config names, and the caller's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from xsake import _extras
from xsake.observe import events, sinks
from xsake.train.config import Config

LOCK_SECONDS = 5.0  # how long the report of a lost process waits for a sink that is stuck


class Log:
    """The sinks of process 0; the other processes have none.

    Args:
      config: the settings.
      step: the one that the run begins or resumes at; events.jsonl loses later events. -1: all.
      extra: the caller's sinks.
      is_writer: whether this is process 0.
    """

    def __init__(
        self, config: Config, step: int, extra: tuple[sinks.Sink, ...], is_writer: bool = True
    ) -> None:
        self._lock = threading.RLock()  # `Watch` writes from its own thread
        self._has_ended = False  # no event follows
        self._file: sinks.EventFile | None = None
        self._sinks: list[sinks.Sink] = []
        if is_writer:
            self._file = sinks.EventFile(config.run_folder / "events.jsonl", step)
            self._sinks = [self._file, *configured(config, max(0, step)), *extra]

    def write(self, event: events.Event) -> None:
        """Writes an event to every sink."""
        with self._lock:
            self._has_ended |= isinstance(event, events.Stopped)
            for sink in self._sinks:
                sink.write(event)

    def write_loss(self, step: int, note: str) -> None:
        """Writes that a process was lost, unless the run has stopped or a sink is stuck."""
        if self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                if not self._has_ended:
                    self.write(events.Stopped(step=step, reason=events.LOST, note=note))
            finally:
                self._lock.release()

    def sync(self) -> None:
        """Has the event file on disk."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Closes every sink."""
        with self._lock:
            self._has_ended = True
        for sink in self._sinks:
            sink.close()


def check(config: Config) -> None:
    """Raises if a sink's package is not installed, before a folder is made."""
    settings = config.observe
    for name, is_on, extra, module in (
        ("prometheus_port", settings.prometheus_port, "serve", "prometheus_client"),
        ("wandb", settings.wandb, "wandb", "wandb"),
        ("trackio", settings.trackio, "trackio", "trackio"),
        ("tensorboard", settings.tensorboard, "tensorboard", "tensorboardX"),
    ):
        if is_on:
            _extras.require(f"observe.{name}", extra, module)


def configured(config: Config, step: int) -> Iterator[sinks.Sink]:
    """The sinks that the config names beside events.jsonl, of a run that begins at `step`."""
    settings, folder = config.observe, config.run_folder
    if settings.prometheus_port:
        yield sinks.Prometheus(settings.prometheus_port, config.run.name)
    if settings.wandb:
        yield sinks.Wandb(folder, config.run.name, config.to_dict(), step)
    if settings.trackio:
        yield sinks.Trackio(config.run.name, config.to_dict(), step)
    if settings.tensorboard:
        yield sinks.TensorBoard(folder / "tensorboard", step)
