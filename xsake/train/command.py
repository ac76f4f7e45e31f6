"""`xsake train`: every config field is a flag; a preset or a config.json sets the defaults."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro

from xsake.observe.sinks import Terminal
from xsake.train import loop, warm_start
from xsake.train.config import PRESETS, Config

Preset = Literal["tiny", "shipped", "gpt-37m", "gpt-37m-4k", "gpt-37m-nsa", "gpt-37m-msa"]


def train_from(arguments: list[str]) -> Callable[..., None]:
    """The `train` command, with the defaults of the --preset or --config among its arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--init")
    chosen, _ = parser.parse_known_args(arguments)
    default = PRESETS.get(chosen.preset, PRESETS["tiny"])
    if chosen.config is not None:
        default = Config.read(chosen.config)
    if chosen.init is not None and not {"-h", "--help"} & set(arguments):
        default = warm_start.configured(default, chosen.init)

    def train(
        settings: Annotated[Config, tyro.conf.arg(name="")] = default,
        preset: Preset = "tiny",
        config: Path | None = None,
    ) -> None:
        """Trains a model, or resumes the run of this name; see docs/training.md.

        Args:
          settings: all settings; runs/NAME/config.json records them.
          preset: sets the defaults of the other flags.
          config: a config.json that sets these defaults instead.
        """
        with contextlib.closing(Terminal(settings.schedule.steps)) as terminal:
            outcome = loop.train(settings, terminal)
        if outcome.reason != "finished":
            how = "without --run.restart" if settings.run.restart else "again"
            print(f"run the same command {how} to resume")
        print(f"written: {outcome.folder}")

    return train
