"""The `xsake` command, and python -m xsake; it says how to install what the command line needs."""

from __future__ import annotations

import sys

from xsake import _extras


def main() -> None:
    """Runs the command line, unless its packages are missing."""
    try:
        _extras.require("the command xsake", "cli", "rich", "tyro")
    except ModuleNotFoundError as error:
        sys.exit(f"xsake: {error}")
    from xsake import cli

    cli.main()


if __name__ == "__main__":
    main()
