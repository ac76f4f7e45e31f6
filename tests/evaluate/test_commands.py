import sys

import numpy as np
import pytest
from flax import nnx

from xsake import cli
from xsake.hads import Plan
from xsake.model import Config, Transformer, huggingface


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["xsake", *map(str, words)])
    cli.main()


def test_calibrate_plan_evaluate(tmp_path, monkeypatch, capsys):
    """From a checkpoint and documents to a plan with its measured quality."""
    config = Config(
        vocab_size=32,
        context=128,
        layers=2,
        width=16,
        heads=2,
        kv_heads=1,
        head_size=8,
        mlp_width=16,
    )
    huggingface.save(tmp_path / "model", Transformer(config, rngs=nnx.Rngs(0)))
    documents = tmp_path / "documents.npy"
    np.save(documents, np.random.default_rng(0).integers(0, 32, (2, 64), dtype=np.int32))
    profile, plan = tmp_path / "profile", tmp_path / "plan"
    words = ["--text", documents, "--length", 64, "--documents", 2]
    run(
        monkeypatch, "calibrate", tmp_path / "model", *words, "--block", 16, "-o", profile,
        "--selectors", "static", "mean_query",
    )  # fmt: skip
    run(monkeypatch, "plan", profile, "--density", 0.8, "--policy", "kl", "-o", plan)
    run(monkeypatch, "evaluate", tmp_path / "model", "--plan", plan, *words)
    output = capsys.readouterr().out
    assert "budget correlation" in output
    assert "realised density 0.8000" in output
    assert "mean_query/kl" in output
    measured = Plan.load(plan).terms.validation
    assert '"perplexity_gap"' in measured
    assert '"documents": 2' in measured


def test_user_errors_are_one_sentence(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "plan", tmp_path / "none", "--density", 0.5, "-o", tmp_path / "plan")
    assert "cannot be read as a profile" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        run(monkeypatch, "evaluate", tmp_path / "none", "--text", tmp_path / "text.txt")
    assert "give either --plan, or --profile and --table" in capsys.readouterr().out
