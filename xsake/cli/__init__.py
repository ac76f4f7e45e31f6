"""The `xsake` command: each of its commands is a function, whose arguments are the flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from xsake.bench.checks import WrongResultError
from xsake.cli import checkpoints, demo, hads, machine, training
from xsake.cli.terminal import console

COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": machine.doctor,
    "demo": demo.demo,
    "bench": machine.bench,
    "inspect": checkpoints.inspect,
    "generate": checkpoints.generate,
    "calibrate": hads.calibrate,
    "plan": hads.plan,
    "evaluate": hads.evaluate,
    "tokenize": training.tokenize,
    "train": training.train,
    "runs": training.runs,
}


def main() -> None:
    """Runs the command that is named; what was asked wrongly is one red line."""
    commands = dict(COMMANDS)
    try:
        if sys.argv[1:2] == ["train"]:  # its flags need packages that the others do without
            from xsake.train import command

            commands["train"] = command.train_from(sys.argv[2:])
        tyro.extras.subcommand_cli_from_dict(commands, prog="xsake")
    except ModuleNotFoundError as error:
        console.print(f"xsake: {error}; pip install 'xsake\\[model]' has it", style="red")
        sys.exit(1)
    except (ArithmeticError, ValueError, OSError, WrongResultError) as error:
        console.print(f"xsake: {error}", style="red", markup=False)
        sys.exit(1)
