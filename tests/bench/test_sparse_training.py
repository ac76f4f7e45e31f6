"""Dense, NSA and MSA are trained, stopped, resumed and compared; overlaps are those of a loop."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.corpus import MODEL, config, token_file
from tools import tables
from xsake.bench.suites import sparse_training
from xsake.model import Sparse
from xsake.observe import events, sinks
from xsake.train import loop
from xsake.train.config import PRESETS, Compute, Hads

SPARSE = {
    "dense": Sparse(),
    "nsa": Sparse(
        block_size=8,
        num_selected=3,
        local_blocks=1,
        window_size=8,
        compression_block=8,
        compression_stride=4,
    ),
    "msa": Sparse(block_size=8, num_selected=3, index_size=4),
}


@pytest.fixture
def tiny(monkeypatch):
    """Presets of a model that trains in a test; 5 steps, stopped when asked."""
    found = {}
    for name, preset in sparse_training.RUNS.items():
        model = dataclasses.replace(MODEL, attention=name, sparse=SPARSE[name])
        base = config("runs", hads=Hads(), model=model, schedule__steps=5, schedule__warmup_steps=0)
        checkpoint = dataclasses.replace(base.checkpoint, export=True)
        data = dataclasses.replace(base.data, separate=False)
        compute = Compute(dtype="bfloat16", loss_tokens=32)
        found[preset] = dataclasses.replace(base, checkpoint=checkpoint, data=data, compute=compute)
    monkeypatch.setattr(sparse_training, "PRESETS", found)
    monkeypatch.setattr(sparse_training, "WINDOWS", 2)
    return found


@pytest.mark.slow
def test_three_runs_are_resumed_and_compared(tiny, tmp_path, monkeypatch, capsys):
    text = str(token_file(tmp_path).folder)
    out, runs = tmp_path / "result.json", tmp_path / "runs"
    line = ["--train", text, "--valid", text, "--runs", str(runs), "--out", str(out)]
    assert sparse_training.main([*line, "--seconds", "1"]) == 3  # less than LEAST_SECONDS
    assert not runs.exists()
    trained, train = [], loop.train

    def stopped(config, *extra):
        """The second run is stopped once, as if its time was over."""
        trained.append(config.run.name)
        if trained == ["dense", "nsa"]:
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, stop_at=3))
        return train(config, *extra)

    monkeypatch.setattr(sparse_training.loop, "train", stopped)
    assert sparse_training.main(line) == 3
    assert "run the same command again to resume" in capsys.readouterr().out
    assert not out.exists()
    assert sparse_training.main(line) == 0
    assert trained == ["dense", "nsa", "nsa", "msa"]
    report = json.loads(out.read_text())
    dense, nsa, msa = report["results"]
    assert [x["attention"] for x in (dense, nsa, msa)] == ["dense", "nsa", "msa"]
    assert len({x["data_hash"] for x in report["results"]}) == 1
    assert dense["validation_loss_gap_ratio"] == 0
    ratio = nsa["validation_loss_nats"] / dense["validation_loss_nats"]
    assert nsa["validation_loss_gap_ratio"] == pytest.approx(ratio - 1)
    assert (dense["index_loss_nats"], nsa["index_loss_nats"]) == (None, None)
    assert msa["index_loss_nats"] > 0
    assert "overlap" not in dense
    for record in (nsa, msa):
        found = record["overlap"]
        assert len(found["overlap_ratio_by_layer"]) == MODEL.layers
        assert all(0 < x <= 1 for x in found["overlap_ratio_by_layer"])
        assert all(0 <= x <= 1 for x in found["free_overlap_ratio_by_layer"])
        unions = found["union_blocks_by_group_and_layer"]
        assert list(unions) == ["8", "16", "32"]
        assert all(3 <= x <= 6 for x in unions["8"])


def test_a_command_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch):
    """Finished runs are left alone; without enough time none begins."""
    text = str(token_file(tmp_path).folder)
    line = ["--train", text, "--valid", text, "--runs", str(tmp_path / "runs"), "--out", "x.json"]
    trained, done = [], {"dense"}

    def train(config, *sinks):
        """The second run is stopped at its first attempt."""
        trained.append(config.run.name)
        reason = "seconds" if trained == ["nsa"] else "finished"
        done.update([config.run.name] if reason == "finished" else [])
        return loop.Outcome(1, reason, config.run_folder)

    monkeypatch.setattr(sparse_training, "is_finished", lambda run: run.name in done)
    monkeypatch.setattr(sparse_training.loop, "train", train)
    monkeypatch.setattr(sparse_training, "write", lambda settings, out: {"results": []})
    found = [sparse_training.main([*line, "--seconds", x]) for x in ("1", "300", "300", "1")]
    assert found == [3, 3, 0, 0]
    assert trained == ["nsa", "nsa", "msa"]


def test_a_run_is_finished_when_its_model_is_written(tmp_path):
    assert not sparse_training.is_finished(tmp_path)
    file = sinks.EventFile(tmp_path / "events.jsonl")
    file.write(events.Stopped(step=5, reason="seconds"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert not sparse_training.is_finished(tmp_path)
    file.write(events.Stopped(step=5, reason="finished"))
    file.close()
    assert sparse_training.is_finished(tmp_path)


def test_the_table_of_a_page_has_loss_speed_and_overlap():
    record = {
        "attention": "nsa",
        "parameters": 37e6,
        "steps": 2000,
        "validation_loss_nats": 4.0,
        "validation_loss_gap_ratio": 0.0125,
        "median_tokens_per_second": 1234.5,
        "overlap": {
            "overlap_ratio_by_layer": [0.9, 0.75],
            "free_overlap_ratio_by_layer": [0.5, 0.625],
        },
    }
    dense = {x: y for x, y in record.items() if x != "overlap"} | {"attention": "dense"}
    *_, first, second = tables.TABLES["sparse-training"]([dense, record]).splitlines()
    assert first == "| dense | 37.0 M | 2,000 | 4.0000 (+1.25%) | 1,234 |  |  |"
    assert second.endswith("| 0.75 … 0.90 | 0.50 … 0.62 |")


def test_overlaps_are_those_of_sets():
    rng = np.random.default_rng(0)
    member = rng.random((2, 20, 2, 7)) < 0.4
    counted = np.arange(20) >= 6
    shares, unions = [], []
    for b in range(2):
        for kappa in range(2):
            sets = [set(np.flatnonzero(member[b, t, kappa])) for t in range(20)]
            for one, other, is_counted in zip(sets[:-1], sets[1:], counted[:-1], strict=True):
                if is_counted:
                    shares.append(len(one & other) / max(len(one), 1))
            unions += [len(set.union(*sets[t : t + 4])) for t in (8, 12, 16)]
    given = jnp.asarray(member), jnp.asarray(counted)
    assert float(sparse_training._overlap(*given)) == pytest.approx(np.mean(shares), rel=1e-5)
    assert float(sparse_training._union(*given, 4)) == pytest.approx(np.mean(unions), rel=1e-5)


def test_the_presets_differ_in_attention_only():
    dense, nsa, msa = (PRESETS[name] for name in sparse_training.RUNS.values())
    for other in (nsa, msa):
        plain = dataclasses.replace(other.model, attention="dense", sparse=Sparse())
        assert dataclasses.replace(other, model=plain, run=dense.run) == dense
    settings = [x.model.settings for x in (nsa, msa)]
    assert [x.block_size * x.num_selected for x in settings] == [1024, 1024]
