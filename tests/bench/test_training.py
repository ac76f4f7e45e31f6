"""Finished runs on the same data are compared with the first."""

from __future__ import annotations

import json

import pytest

from tools import tables
from xsake.bench.suites import training
from xsake.observe import events, sinks
from xsake.train.config import Config, Run


def run(folder, name, perplexities, reason="finished", data="d", density=1.0):
    """A run folder as `loop.train` writes it, without checkpoints."""
    path = folder / name
    path.mkdir(parents=True)
    Config(run=Run(name=name)).write(path / "config.json")
    file = sinks.EventFile(path / "events.jsonl")
    file.write(
        events.RunStarted(
            step=0,
            run=name,
            config_hash="c",
            data_hash=data,
            commit="abc",
            device="a device",
            versions={"jax": "0.0"},
            parameters=7,
            steps=20,
            tokens_per_step=3,
        )
    )
    for step, perplexity in zip((10, 20), perplexities, strict=True):
        file.write(
            events.TrainStep(
                step=step,
                loss_nats=1.0,
                learning_rate=0.1,
                gradient_norm=1.0,
                skipped_steps=0,
                density_ratio=density,
                tokens_seen=3 * step,
                step_seconds=0.5,
                tokens_per_second=6.0,
            )
        )
        file.write(
            events.Evaluated(
                step=step,
                file="book",
                data_hash="e",
                loss_nats=1.0,
                perplexity=perplexity,
                targets=9,
                density_ratio=density,
            )
        )
    file.write(events.Stopped(step=20, reason=reason))
    file.close()
    return path


def test_the_gap_is_to_the_first_run_at_every_step(tmp_path):
    dense, sparse = (
        run(tmp_path, "dense", (50.0, 20.0)),
        run(tmp_path, "hads", (60.0, 21.0), density=0.43),
    )
    out = tmp_path / "results" / "t.json"
    training.write([dense, sparse], out, 5, "command")
    first, second = json.loads(out.read_text())["results"]
    assert first["perplexity_gap"] == {"book": 0}
    assert second["perplexity_gap"]["book"] == pytest.approx(0.05)
    assert second["perplexity_gap_by_step"]["book"][0] == [10, pytest.approx(0.2)]
    assert len(sinks.read(tmp_path / "results" / "t" / "hads.jsonl")) == 6
    page = tables.fill("<!-- table training t.json -->\n<!-- end -->", out.parent)
    assert "| hads | HADS 0.43 | 0 | 20 | 21.00 (+5.00%) |" in page
    assert "a device, JAX 0.0, commit abc" in page


def test_unfinished_or_mismatched_runs_raise(tmp_path):
    dense, out = run(tmp_path, "dense", (50.0, 20.0)), tmp_path / "t.json"
    half = run(tmp_path, "half", (5.0, 4.0), "signal")
    with pytest.raises(ValueError, match="half is at step 20 of 20; finish it"):
        training.write([dense, half], out, 5, "")
    other = run(tmp_path, "other", (5.0, 4.0), data="x")
    with pytest.raises(ValueError, match="other has other data or another number of steps"):
        training.write([dense, other], out, 5, "")
