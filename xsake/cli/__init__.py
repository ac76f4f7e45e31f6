"""The `xsake` command line: a subcommand is a function, and its arguments are the flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import tyro

import xsake
from xsake import _extras
from xsake.bench.checks import WrongResultError
from xsake.cli import checkpoints, cost, demo, evaluate, hads, machine, serve, training
from xsake.cli.terminal import console

DESCRIPTION = """Block-sparse attention for JAX. `xsake COMMAND --help` describes a command.

`xsake --version` prints the version; `xsake --tyro-print-completion bash` (or zsh, tcsh) prints a
script that completes commands and flags."""
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Command(NamedTuple):
    """A subcommand and the extra that it needs beyond `cli`, if any."""

    run: Callable[..., Any]
    extra: str | None = None


COMMANDS: dict[str, Command] = {
    "doctor": Command(machine.doctor),
    "demo": Command(demo.demo, "train"),
    "bench": Command(machine.bench),
    "cost": Command(cost.cost),
    "inspect": Command(checkpoints.inspect, "model"),
    "generate": Command(checkpoints.generate, "model"),
    "calibrate": Command(hads.calibrate, "model"),
    "plan": Command(hads.plan, "model"),
    "evaluate": Command(evaluate.evaluate, "model"),
    "tokenize": Command(training.tokenize, "model"),
    "train": Command(training.train, "train"),
    "runs": Command(training.runs),
    "serve": Command(serve.serve, "serve"),
}


def main() -> None:
    """Runs the given subcommand; a user error is printed as one red line."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"xsake {xsake.__version__}")
        return
    try:
        tyro.extras.subcommand_cli_from_dict(
            _functions(arguments), prog="xsake", description=DESCRIPTION
        )
    except ModuleNotFoundError as error:
        _stop(_extras.advice(error))
    except KeyboardInterrupt as error:
        _stop(str(error) or "stopped by Ctrl-C", INTERRUPTED)
    except (ArithmeticError, ValueError, OSError, WrongResultError) as error:
        _stop(str(error))


def _functions(arguments: list[str]) -> dict[str, Callable[..., Any]]:
    """The commands by name; raises if packages of the one in `arguments` are not installed."""
    functions = {name: command.run for name, command in COMMANDS.items()}
    name = next(iter(arguments), "")
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    extra = COMMANDS[name].extra if name in COMMANDS else None
    if extra is not None and (name == "train" or not asks_for_help):
        _extras.require(f"xsake {name}", extra)
    # its flags are fields of dataclasses, which import the packages of the extra `train`
    if name == "train" or name.startswith("--tyro-"):
        from xsake.train import command

        functions["train"] = command.train_from(arguments[1:] if name == "train" else [])
    return functions


def _stop(reason: str, code: int = 1) -> None:
    console.print(f"xsake: {reason}", style="red", markup=False, soft_wrap=True)
    sys.exit(code)
