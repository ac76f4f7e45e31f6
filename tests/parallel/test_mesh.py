"""Data-parallel training equals training on one device; runs resume on any number of devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xsake.parallel.mesh import make_mesh

ROOT = Path(__file__).parents[2]


@pytest.mark.second_python
def test_training_on_eight_devices_equals_training_on_one(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tests.train.sharded", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.count(": ok\n") == 7


def test_more_devices_than_exist_raise():
    with pytest.raises(ValueError, match=r"run.devices = 99, but there are \d+; ask for fewer"):
        make_mesh(99, 99, 1)
