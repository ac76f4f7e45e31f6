"""Command lines of `xsake`, called in this process."""

from __future__ import annotations

import shlex
import sys

import pytest

from xsake import cli


def caller(monkeypatch, capsys):
    """call(line, code=0) runs `xsake LINE`, which must exit with this code; returns its output."""

    def call(line, code=0):
        monkeypatch.setattr(sys, "argv", ["xsake", *shlex.split(line)])
        if code:
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert stopped.value.code == code
        else:
            cli.main()
        return "".join(capsys.readouterr())

    return call
