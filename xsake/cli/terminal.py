"""What the commands share: the console, and what they say of this machine."""

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
    """What this machine computes in fastest, of what every backend takes."""
    return "float32" if _jax.platform() == "cpu" else "bfloat16"


def reasons(told: xsake.Explanation, what: str) -> Table:
    """Every backend's reason, and the one that is chosen."""
    table = Table("backend", "this machine", title=f"causal attention, {what}")
    for name, why in told.reasons.items():
        table.add_row(name, "chosen" if name == told.chosen else why or "can run")
    return table
