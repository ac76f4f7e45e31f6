"""python -m xsake.cli."""

from xsake.cli import main

main()
