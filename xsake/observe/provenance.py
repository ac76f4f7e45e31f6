"""Which code ran: the commit and the versions that make a number a measurement."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of jax, jaxlib, numpy and more packages."""
    names = ("jax", "jaxlib", "numpy", *packages)
    return {"python": platform.python_version(), **{x: metadata.version(x) for x in names}}


def commit() -> str:
    """XSAKE_COMMIT where it is set; else the checkout's, with a + when files differ from it."""
    if said := os.environ.get("XSAKE_COMMIT"):
        return said
    git = ["git", "-C", str(Path(__file__).parent)]
    say = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    try:
        head = say([*git, "rev-parse", "HEAD"]).stdout.strip()
        changes = say([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")
