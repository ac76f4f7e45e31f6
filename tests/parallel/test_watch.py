"""A process that is to end does end."""

from __future__ import annotations

import sys

import pytest

from xsake.parallel import watch
from xsake.parallel.watch import EXIT_CODE, Watch


class Exited(BaseException):
    """In place of the end of this process."""


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    def stop(code):
        raise Exited(code)

    monkeypatch.setattr(watch.os, "_exit", stop)


def broken(*_):
    raise OSError("stale file handle")


@pytest.mark.parametrize("on_lost", [None, broken])
def test_a_process_ends_and_reports_even_if_its_folder_cannot_be_read(capsys, on_lost):
    found = Watch(30.0, broken, on_lost)
    with pytest.raises(Exited, match=str(EXIT_CODE)):
        found._report_and_exit("process 1 of 2 has died", EXIT_CODE)
    said = capsys.readouterr().err
    assert "xsake: process 1 of 2 has died; process 0 ends. The newest checkpoint is not kn" in said
    assert "(stale file handle). Run the same command again" in said


def test_a_process_ends_even_if_nobody_reads_stderr(monkeypatch):
    class Closed:
        write = flush = broken

    lost = []
    found = Watch(30.0, lambda: "Newest checkpoint: step 3", lost.append)
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(Exited, match="1"):
        found._report_and_exit("process 1 of 2 raised", 1)
    assert lost == ["process 1 of 2 raised"]
