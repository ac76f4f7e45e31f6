"""The `xsake` command: each of its commands is a function, whose arguments are the flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from xsake.bench.checks import WrongResultError
from xsake.cli import checkpoints, hads, machine
from xsake.cli.terminal import console

COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": machine.doctor,
    "demo": machine.demo,
    "bench": machine.bench,
    "inspect": checkpoints.inspect,
    "generate": checkpoints.generate,
    "calibrate": hads.calibrate,
    "plan": hads.plan,
    "evaluate": hads.evaluate,
}


def main() -> None:
    """Runs the command that is named; what was asked wrongly is one red line."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="xsake")
    except ModuleNotFoundError as error:
        console.print(f"xsake: {error}; pip install 'xsake\\[model]' has it", style="red")
        sys.exit(1)
    except (ValueError, OSError, WrongResultError) as error:
        console.print(f"xsake: {error}", style="red", markup=False)
        sys.exit(1)
