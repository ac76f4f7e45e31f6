"""Which code ran: the commit and the versions that make a number a measurement."""

from __future__ import annotations

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
    """The checkout's commit, with a + when files differ from it.

    Outside a checkout the environment variable XSAKE_COMMIT says it, else "unknown".
    """
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get("XSAKE_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
