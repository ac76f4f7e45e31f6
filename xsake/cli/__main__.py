"""python -m xsake.cli, the same as python -m xsake."""

from xsake.cli import main

main()
