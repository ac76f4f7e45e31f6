"""Attention over a sequence split over eight devices equals attention on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.second_python
def test_eight_devices_give_the_results_of_one():
    ended = subprocess.run(
        [sys.executable, "-m", "tests.parallel.context_on_eight"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.count(": ok\n") == 10
