"""What the commands share: the console, the default dtype, the table of backends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import xsake
from xsake import _jax

console = Console(highlight=False)

Out = Annotated[Path, tyro.conf.arg(aliases=["-o"])]  # where a command writes


def fast_dtype() -> str:
    """The fastest dtype on this platform: float32 on a CPU, bfloat16 elsewhere."""
    return "float32" if _jax.platform() == "cpu" else "bfloat16"


def reasons(explanation: xsake.Explanation, call: str) -> Table:
    """Whether each backend can run a call and why not, with the chosen one marked."""
    table = Table("backend", "this machine", title=f"causal attention, {call}")
    for name, why in explanation.reasons.items():
        table.add_row(name, "chosen" if name == explanation.chosen else why or "can run")
    return table
