"""Rows dealt out to devices: the numbers are those of one, and a run may change its devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xsake.parallel import mesh as devices

ROOT = Path(__file__).parents[2]


def test_eight_devices_train_as_one_does(tmp_path):
    told = subprocess.run(
        [sys.executable, "-m", "tests.train.sharded", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr[-2000:]
    assert told.stdout.count(": ok\n") == 7


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"run.devices = 99, but there are \d+; ask for fewer"):
        devices.make_mesh(99, 99, 1)
