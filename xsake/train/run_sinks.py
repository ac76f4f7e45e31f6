"""The sinks that a run's config asks for, beside its event file."""

from __future__ import annotations

from collections.abc import Iterator

from xsake import _extras
from xsake.observe import sinks
from xsake.train.config import Config


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
