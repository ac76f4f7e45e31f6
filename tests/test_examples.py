"""The scripts in examples/ run, at small sizes, and do what they say."""

from __future__ import annotations

import pytest

from examples import (
    calibrate_and_generate,
    packed_documents,
    replace_attention,
    train_and_resume,
    train_nsa,
)

pytestmark = pytest.mark.second_python


def test_replacing_attention_keeps_the_loss():
    """The same loss with jax.nn and xsake; another one with a window, whose mask drops keys."""
    jax_nn, causal, window = replace_attention.main(length=64, width=32, layers=1, window=8)
    assert causal == pytest.approx(jax_nn, abs=1e-6)
    assert abs(window - jax_nn) > 1e-5


def test_packed_documents_equal_each_document_alone(capsys):
    assert packed_documents.main(lengths=(24, 24), window=6, sinks=2, block=16) < 1e-6
    assert "at_positions" in capsys.readouterr().out


def test_a_plan_is_made_measured_and_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gaps = calibrate_and_generate.main(length=64, block=16, density=0.8, documents=1, words=2)
    assert set(gaps) == {"HADS", "sink + window"}
    assert (tmp_path / "plan.safetensors").is_file()
    assert "It was a dark and stormy night" in capsys.readouterr().out


def test_a_crashed_run_continues_as_if_nothing_had_happened(tmp_path, capsys):
    assert train_and_resume.main(tmp_path, steps=8, length=96)
    assert "power cut at step 6\nresumed at step 4" in capsys.readouterr().out.replace(
        "step 2: new plan of density 0.60\n", ""
    )


def test_a_model_with_sparse_attention_is_trained_loaded_and_continues(tmp_path, capsys):
    """12 steps are enough for the loss to fall; the exported folder generates."""
    losses = train_nsa.main(tmp_path, steps=12, length=64, words=4)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.1
    assert "Cat number 3 sat on" in capsys.readouterr().out
