"""`xsake train`: every leaf of the config is a flag, a preset or a config.json its default."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro

from xsake.observe.sinks import Terminal
from xsake.train import loop
from xsake.train.config import PRESETS, Config


def train_from(words: list[str]) -> Callable[..., None]:
    """The command, its defaults those of the --preset or --config among its words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--config", type=Path)
    chosen, _ = parser.parse_known_args(words)
    default = PRESETS.get(chosen.preset, PRESETS["tiny"])
    if chosen.config is not None:
        default = Config.read(chosen.config)

    def train(
        settings: Annotated[Config, tyro.conf.arg(name="")] = default,
        preset: Literal["tiny", "shipped", "gpt-37m"] = "tiny",
        config: Path | None = None,
    ) -> None:
        """Trains a model, or goes on with a run of this name; see docs/training.md.

        Args:
          settings: runs/NAME/config.json holds them all.
          preset: where the defaults of the other flags come from.
          config: a config.json that they come from instead.
        """
        outcome = loop.train(settings, Terminal(settings.schedule.steps))
        if outcome.reason != "finished":
            print("the same command goes on from here")
        print(f"written: {outcome.folder}")

    return train
