"""The bundled model and texts are complete and small."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import published
from xsake import shipped
from xsake.data import text
from xsake.data.documents import load_documents
from xsake.model import huggingface
from xsake.observe import sinks
from xsake.observe.events import RunStarted, Stopped
from xsake.train.config import PRESETS, Config


@pytest.fixture(scope="module")
def loaded():
    return huggingface.load(shipped.FOLDER)


def test_the_model_is_small_and_has_at_least_32_heads(loaded):
    config = loaded.config
    assert (shipped.FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    assert config.context >= 2048
    assert config.heads >= 8
    assert config.layers >= 4
    assert config.vocab_size <= 8192


@pytest.mark.parametrize("path", [shipped.CALIBRATION_TEXT, shipped.HELD_OUT_TEXT])
def test_a_text_is_one_document_and_round_trips_through_the_tokenizer(loaded, path):
    (document,) = text.documents([path])
    assert len(document) > 100_000
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(document[:5000])) == document[:5000]


def test_the_model_predicts_a_held_out_novel(loaded):
    """The loss is at least 1 nat below the unigram entropy of the text."""
    (book,) = text.documents([shipped.HELD_OUT_TEXT])
    share = np.bincount(loaded.tokenizer.encode(book)) / len(loaded.tokenizer.encode(book))
    entropy = -(share * np.log(np.maximum(share, 1e-30))).sum()
    tokens = load_documents([shipped.HELD_OUT_TEXT], loaded.tokenizer.encode, 512, 1)[0]
    log_p = jax.nn.log_softmax(loaded.model(tokens[None])[0, :-1])
    assert -log_p[jnp.arange(511), tokens[1:]].mean() < entropy - 1


def test_a_text_starts_with_bos_and_some_head_is_a_sink_on_it(loaded):
    """Over 512 tokens; uniform attention would give the first key 0.01 at most."""
    tokens = load_documents([shipped.HELD_OUT_TEXT], loaded.tokenizer.encode, 512, 1)[0]
    assert tokens[0] == loaded.config.bos
    assert loaded.config.bos not in tokens[1:]

    def fold(layer, seen, carry):
        logits = jnp.einsum("tnh,snh->nts", seen.q[0], seen.k[0]) / seen.q.shape[-1] ** 0.5
        p = jax.nn.softmax(jnp.where(np.tri(512, dtype=bool), logits, -jnp.inf))
        return jnp.maximum(carry, p[:, 128:, 0].mean(-1).max())

    assert loaded.model.observe(tokens[None], fold, jnp.zeros(())) > 0.3


def test_the_training_run_has_the_preset_settings_and_finished():
    config, preset = Config.read(shipped.FOLDER / "training.json"), PRESETS["shipped"]
    for name in ("model", "seed", "optimizer", "schedule", "compute"):
        assert getattr(config, name) == getattr(preset, name), name
    for name in ("length", "rows", "separate", "bos"):
        assert getattr(config.data, name) == getattr(preset.data, name), name
    assert config.hads.density is None
    events = sinks.read(shipped.FOLDER / "events.jsonl")
    (began,) = (event for event in events if isinstance(event, RunStarted))
    assert (began.steps, began.tokens_per_step) == (config.schedule.steps, 32 * 2048)
    assert isinstance(events[-1], Stopped)
    assert events[-1].reason == "finished"
    exported = json.loads((shipped.FOLDER / "config.json").read_text())
    assert exported["num_hidden_layers"] == config.model.layers


def test_the_published_table_is_what_the_result_file_gives():
    """`python -m tools.published` writes it; nobody edits it."""
    written = json.loads(shipped.PUBLISHED.read_text())
    result = Path(__file__).parent.parent / written["source"]
    assert published.excerpt(json.loads(result.read_text()), written["source"]) == written
