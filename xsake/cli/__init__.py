"""The `xsake` command line: a subcommand is a function, and its arguments are the flags."""

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
    """Runs the given subcommand; a user error is printed as one red line."""
    commands = dict(COMMANDS)
    try:
        if sys.argv[1:2] == ["train"]:  # its flags import the packages of the extra `train`
            from xsake.train import command

            commands["train"] = command.train_from(sys.argv[2:])
        tyro.extras.subcommand_cli_from_dict(commands, prog="xsake")
    except ModuleNotFoundError as error:
        advice = "install the extra that has it, such as pip install 'xsake\\[train]'"
        console.print(f"xsake: {error}; {advice}", style="red")
        sys.exit(1)
    except (ArithmeticError, ValueError, OSError, WrongResultError) as error:
        console.print(f"xsake: {error}", style="red", markup=False)
        sys.exit(1)
