"""The commit and package versions that are recorded with results."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, jax, jaxlib, numpy and the packages named."""
    names = ("jax", "jaxlib", "numpy", *packages)
    return {"python": platform.python_version(), **{x: metadata.version(x) for x in names}}


def commit() -> str:
    """XSAKE_COMMIT if it is set; else `commit_of` this checkout."""
    return os.environ.get("XSAKE_COMMIT") or commit_of(Path(__file__).parent)


def commit_of(folder: Path) -> str:
    """The commit that a folder is checked out at, with a + if files differ; or "unknown"."""
    git = ["git", "-C", str(folder)]
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    try:
        head = run([*git, "rev-parse", "HEAD"]).stdout.strip()
        changes = run([*git, "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")
