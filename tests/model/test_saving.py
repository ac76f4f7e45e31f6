"""Saved folders: the same bits back, whole or not at all, and readable by transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from flax import nnx

from tests.model import checkpoints
from tests.model.checkpoints import FIXTURES, KINDS
from tests.model.test_huggingface import CLOSE, far, load
from xsake.model import PRESETS, Transformer, hf_config, huggingface


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_bytes", [1_000_000, 20_000])
def test_what_is_saved_is_what_was_loaded_bit_for_bit(kind, shard_bytes, tmp_path):
    """Tensors carry the names, types and bits that transformers wrote."""
    _, tensors = checkpoints.read(FIXTURES / kind)
    stored = tensors[next(iter(tensors))].dtype
    loaded = load(FIXTURES / kind, param_dtype=stored)
    huggingface.save(tmp_path / kind, loaded.model, shard_bytes=shard_bytes)
    files = list((tmp_path / kind).glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes == 1_000_000)
    assert all(file.stat().st_size < shard_bytes + 10_000 for file in files) or kind == "gpt2"
    _, again = checkpoints.read(tmp_path / kind)
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        assert again[name].dtype == x.dtype, name
        assert again[name].tobytes() == x.tobytes(), name
    reloaded = load(tmp_path / kind, param_dtype=stored)
    assert reloaded.config == loaded.config
    parameters = loaded.model.parameters()
    for name, x in reloaded.model.parameters().items():
        np.testing.assert_array_equal(x, parameters[name])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_configuration_that_reads_back(name):
    values = json.loads(json.dumps(hf_config.write(PRESETS[name])))
    assert hf_config.read(values, {}, "config.json") == PRESETS[name]


def test_the_tokenizer_is_saved_beside_the_model(tmp_path):
    loaded = huggingface.load(FIXTURES / "gpt2")
    huggingface.save(tmp_path / "gpt2", loaded.model, loaded.tokenizer)
    again = huggingface.load(tmp_path / "gpt2")
    assert again.tokenizer.encode("the age of wisdom") == loaded.tokenizer.encode(
        "the age of wisdom"
    )


def test_a_model_that_no_published_kind_can_hold_is_refused(tmp_path):
    config = dataclasses.replace(PRESETS["tiny"], norm="layer")
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"no model_type of .*'llama'.* has the norm"):
        huggingface.save(tmp_path / "x", model)
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_is_not_overwritten(tmp_path):
    loaded = load(FIXTURES / "gpt2")
    huggingface.save(tmp_path, loaded.model)
    with pytest.raises(FileExistsError, match="already holds a checkpoint; name another folder"):
        huggingface.save(tmp_path, loaded.model)


@pytest.mark.parametrize("shard_bytes", [1_000_000, 20_000])
def test_a_save_clears_what_an_interrupted_save_of_another_model_left(tmp_path, shard_bytes):
    """Its weights, its index and its eos would be this model's otherwise; other files stay."""
    left, loaded = tmp_path / "model", load(FIXTURES / "llama")
    for kind in ("llama", "mistral"):
        shutil.copytree(FIXTURES / kind, left, dirs_exist_ok=True)
    (left / "config.json").unlink()
    (left / "notes.txt").write_text("mine")
    huggingface.save(left, loaded.model, shard_bytes=shard_bytes)
    again = load(left)
    assert again.config == loaded.config
    for name, x in loaded.model.parameters().items():
        np.testing.assert_array_equal(again.model.parameters()[name], x)
    assert (left / "notes.txt").read_text() == "mine"
    assert not (left / huggingface.PART).exists()


def test_an_interrupted_save_leaves_nothing_and_a_replaced_one_is_the_new(tmp_path, monkeypatch):
    llama, mistral = (load(FIXTURES / kind) for kind in ("llama", "mistral"))

    def fail(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "_move_up", fail)
        with pytest.raises(OSError, match="no space"):
            huggingface.save(tmp_path / "model", llama.model)
    assert list((tmp_path / "model").iterdir()) == []
    huggingface.save(tmp_path / "model", llama.model)
    huggingface.save(tmp_path / "model", mistral.model, replace=True)
    assert load(tmp_path / "model").config == mistral.config
    plain = tmp_path / "plain"
    plain.touch()
    weights_file = tmp_path / "model" / "model.safetensors"
    assert weights_file.stat().st_mode == plain.stat().st_mode  # by the umask


# -------------------------------------------------------------------- tests that need transformers


@pytest.mark.filterwarnings("ignore")  # torch and transformers warn
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_is_saved(kind, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    huggingface.save(tmp_path / kind, load(FIXTURES / kind).model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / kind, dtype=torch.float32, attn_implementation="eager"
    )
    tokens, logits = checkpoints.expected(kind)
    with torch.no_grad():
        again = theirs(torch.from_numpy(tokens).long()).logits
    assert far(again.numpy(), logits) < CLOSE
