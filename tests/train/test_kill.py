"""kill -9 at random times: the loss curve is bit-identical to that of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.test_loop import logged
from xsake.observe import sinks
from xsake.observe.events import PlanSwapped, Resumed, TrainStep

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)  # for ten kills, or two on a busy machine
@pytest.mark.parametrize(
    ("steps", "kills", "seed"),
    [
        (20, 2, 0),
        (40, 3, 0),
        (40, 10, 1),
    ],
)
def test_a_killed_run_is_bit_identical_to_an_undisturbed_one(tmp_path, steps, kills, seed):
    """float32 on the CPU, plans swapped every four steps, a checkpoint every three."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.train.killed", *map(str, (tmp_path, steps, kills, seed))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("killed with") == kills
    calm, stormy = logged(tmp_path / "calm"), logged(tmp_path / "stormy")
    for _, values in (calm[0], stormy[0]):
        values.pop("run")
    assert [x for x, _ in calm].count(TrainStep.__name__) == steps
    assert [x for x, _ in calm].count(PlanSwapped.__name__) == steps // 4 - 1
    assert stormy == calm
    events = sinks.read(tmp_path / "stormy" / "events.jsonl")
    assert any(isinstance(x, Resumed) and x.step > 0 for x in events)
