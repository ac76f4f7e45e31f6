"""Folders of safetensors: the right model, the same bits back, and one sentence for each fault."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model import checkpoints, independent
from tests.model.checkpoints import FIXTURES, KINDS
from xsake.data.tokenizer import read_tokenizer
from xsake.model import PRESETS, huggingface, weights

# What float32 may cost over two layers; logits have a deviation of 1.5.
CLOSE = 1e-4


def load(folder: Path, **options: Any) -> huggingface.Loaded:
    return huggingface.load(folder, tokenizer=False, **options)


def far(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


def reference(config: dict[str, Any], tensors: checkpoints.Tensors, tokens: Any) -> np.ndarray:
    return np.stack([independent.logits(config, tensors, row) for row in tokens])


# ------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind):
    tokens, logits = checkpoints.expected(kind)
    assert far(load(FIXTURES / kind).model(tokens), logits) < CLOSE


@pytest.mark.parametrize("kind", KINDS)
def test_the_independent_forward_equals_transformers(kind):
    tokens, logits = checkpoints.expected(kind)
    assert far(reference(*checkpoints.read(FIXTURES / kind), tokens), logits) < CLOSE


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt2", dict(activation_function="gelu")),
        ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=1000.0))),
        ("mistral", dict(sliding_window=6)),
        ("qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0))),
        ("qwen3", dict(layer_types=["sliding_attention"] * 2)),
    ],
)
def test_the_expected_logits_are_sensitive_to_small_config_changes(kind, change):
    """One wrong detail moves them at least ten times further than the tolerance."""
    config, tensors = checkpoints.read(FIXTURES / kind)
    tokens, logits = checkpoints.expected(kind)
    assert far(reference(config | change, tensors, tokens), logits) > 10 * CLOSE


def with_biases(tensors: checkpoints.Tensors, *modules: str) -> checkpoints.Tensors:
    rng = np.random.default_rng(0)
    return tensors | {
        name.replace(".weight", ".bias"): rng.normal(0, 0.3, x.shape[0]).astype(x.dtype)
        for name, x in tensors.items()
        if name.endswith("_proj.weight") and any(module in name for module in modules)
    }


def old_llama(config, tensors):
    """Spelled as before transformers 5, with every bias, a tied head and linear scaling."""
    config = config | dict(
        rope_theta=500.0,
        rope_scaling=dict(type="linear", factor=2),
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    )
    del config["rope_parameters"], tensors["lm_head.weight"], config["head_dim"]
    config |= dict(num_attention_heads=3)
    for name in [name for name in tensors if "q_proj" in name]:
        tensors[name] = tensors[name][:24]
    for name in [name for name in tensors if "o_proj" in name]:
        tensors[name] = np.ascontiguousarray(tensors[name][:, :24])
    config |= dict(num_key_value_heads=1)
    for name in [name for name in tensors if "k_proj" in name or "v_proj" in name]:
        tensors[name] = tensors[name][:8]
    return config, with_biases(tensors, "self_attn", "mlp")


def wide_open_mistral(config, tensors):
    return config | dict(sliding_window=None, hidden_act="gelu"), tensors


def qwen2_windows_by_number(config, tensors):
    """And the tied head stored once more, as some converters do."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    config = config | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    del config["layer_types"]
    return config, tensors


def qwen3_with_biases(config, tensors):
    return config | dict(attention_bias=True), with_biases(tensors, "self_attn")


def bare_gpt2(config, tensors):
    """As gpt2 itself is published: no prefix, and masks among the tensors."""
    tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    tensors |= {f"h.{i}.attn.bias": np.ones((1, 1, 8, 8), np.uint8) for i in range(2)}
    return config | dict(activation_function="relu"), tensors


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("llama", old_llama),
        ("mistral", wide_open_mistral),
        ("qwen2", qwen2_windows_by_number),
        ("qwen3", qwen3_with_biases),
        ("gpt2", bare_gpt2),
    ],
)
def test_variants_equal_the_independent_forward(kind, variant, tmp_path):
    config, tensors = variant(*checkpoints.read(FIXTURES / kind))
    folder = checkpoints.write(tmp_path / kind, config, tensors)
    tokens, _ = checkpoints.expected(kind)
    if variant is bare_gpt2:
        tensors = {"transformer." + name: x for name, x in tensors.items()}
    model = load(folder, implementation="reference").model
    assert far(model(tokens), reference(config, tensors, tokens)) < CLOSE


def test_bfloat16_computes_in_bfloat16():
    """Logits of a bfloat16 pass are near, and not equal to, those of float32."""
    tokens, logits = checkpoints.expected("llama")
    loaded = load(FIXTURES / "llama", dtype=jnp.bfloat16, implementation="reference")
    assert {x.dtype for x in loaded.model.parameters().values()} == {jnp.dtype("float32")}
    assert CLOSE < far(loaded.model(tokens), logits) < 0.5


def test_eos_of_generation_config_overrides_config(tmp_path):
    config, tensors = checkpoints.read(FIXTURES / "llama")
    folder = checkpoints.write(tmp_path, config, tensors)
    assert load(folder).config.eos == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load(folder).config.eos == (7, 2)
    assert load(folder).config.bos == 1


# ---------------------------------------------------------------------------------------- bad input


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "-"}))


def change_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(name: str) -> Any:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.pop(name))


def put(name: str, x: np.ndarray) -> Any:
    return lambda folder: change_tensors(folder, lambda tensors: tensors.update({name: x}))


def configure(**values: Any) -> Any:
    return lambda folder: change_config(folder, **values)


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)


def truncate_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama",')


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def rope(**values: Any) -> Any:
    return configure(rope_parameters=dict(rope_theta=1e4) | values)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (configure(model_type="mamba"), ValueError, r"config.json: model_type 'mamba' is not one"),
        (configure(model_type=["llama"]), ValueError, r"model_type \['llama'\] is not one of"),
        (
            configure(architectures=["MistralForSequenceClassification"]),
            ValueError,
            r"architectures \['MistralForSequenceClassification'\] is not \['MistralForCausalLM'\]",
        ),
        (configure(hidden_act="mish"), ValueError, r"config.json: activation 'mish' is not one of"),
        (rope(rope_type="dynamic"), ValueError, r"config.json: rope scaling 'dynamic' is not one"),
        (
            rope(rope_type="linear", factor=2.0, twist=3),
            ValueError,
            r"config.json: 'twist' of rope scaling is not supported",
        ),
        (configure(hidden_size="-"), ValueError, r"config.json lacks 'hidden_size'"),
        (configure(num_key_value_heads=3), ValueError, r"kv_heads = 3 does not divide heads = 4"),
        (
            configure(quantization_config={"bits": 4}),
            ValueError,
            r"config.json: quantization_config = {'bits': 4} is not supported",
        ),
        (drop(Q_PROJ), ValueError, rf"lacks the tensor '{Q_PROJ}', of the 21"),
        (configure(num_hidden_layers=3), ValueError, r"'model.layers.2.*' and 8 more, of the 30"),
        (
            configure(num_hidden_layers=1),
            ValueError,
            r"model.safetensors holds the tensor 'model.layers.1.* and 8 more, which its config",
        ),
        (
            put("model.extra.weight", np.zeros(3, np.float32)),
            ValueError,
            r"model.safetensors holds the tensor 'model.extra.weight', which its configuration",
        ),
        (
            put(Q_PROJ, np.zeros((24, 24), np.float32)),
            ValueError,
            rf"model.safetensors: the tensor '{Q_PROJ}' is \[24, 24\], .* makes it \[32, 24\]",
        ),
        (
            put(Q_PROJ, np.zeros((32, 24), np.int8)),
            ValueError,
            rf"the tensor '{Q_PROJ}' is stored as I8, which is not one of",
        ),
        (
            configure(tie_word_embeddings=True),
            ValueError,
            r"'lm_head.weight' differs from 'model.embed_tokens.weight', although .* ties them",
        ),
        (
            configure(num_hidden_layers=10**9),
            ValueError,
            r"num_hidden_layers = 1000000000, but the files hold 21 tensors only",
        ),
        (
            configure(
                model_type="qwen2",
                architectures=None,
                use_sliding_window=True,
                max_window_layers=0,
                num_hidden_layers=10**9,
            ),
            ValueError,
            r"num_hidden_layers = 1000000000, but the files hold 21 tensors only",
        ),
        (configure(num_attention_heads=0, head_dim=0), ValueError, r"config.json: .* by zero"),
        (rope(rope_theta=0), ValueError, r"config.json: rope base must be above 1, got 0"),
        (rope(rope_theta=math.nan), ValueError, r"config.json: rope base must be above 1, got nan"),
        (
            rope(rope_type="yarn", factor=2.0, beta_fast=0),
            ValueError,
            r"config.json: rope needs 0 < beta_slow < beta_fast, got 1.0 and 0.0",
        ),
        (deep_config, ValueError, r"config.json is nested too deeply to be read"),
        (truncate, ValueError, r"model.safetensors is truncated or not safetensors"),
        (truncate_header, ValueError, r"model.safetensors is truncated or not safetensors"),
        (no_weights, FileNotFoundError, r"has neither model.safetensors nor model.safetensors.ind"),
        (no_config, FileNotFoundError, r"has no config.json, so it is no checkpoint"),
        (half_a_config, ValueError, r"config.json is not JSON"),
    ],
)
def test_an_invalid_checkpoint_raises_a_one_line_error(
    damage, error, message, tmp_path, monkeypatch
):
    """And it is found before any weight is read."""
    folder = shutil.copytree(FIXTURES / "mistral", tmp_path / "checkpoint")
    damage(folder)
    monkeypatch.setattr(weights, "gather", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(error, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert "checkpoint" in str(caught.value)  # the folder


def test_an_undamaged_copy_is_loaded(tmp_path):
    """The baseline of the test above: the copy itself is valid."""
    load(shutil.copytree(FIXTURES / "mistral", tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"x": "gone.safetensors"}, r"index.json names the shard 'gone.safetensors', which is not"),
        ({"x": "../y.safetensors"}, r"names '../y.safetensors', which is not a file of this fold"),
        ({}, r"index.json has no weight_map"),
        ({"x": 3}, r"names 3, which is not a file of this folder"),
        (
            {"lm_head.weight": "model-00001-of-00003.safetensors"},
            r"index.json places the tensor 'lm_head.weight' in 'model-00001.*', which lacks it",
        ),
    ],
)
def test_an_index_must_name_files_that_are_there(names, message, tmp_path):
    folder = shutil.copytree(FIXTURES / "llama", tmp_path / "checkpoint")
    index = folder / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"] if names else {}
    index.write_text(json.dumps({"weight_map": placed | names}))
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        load(folder)


def test_an_index_and_its_files_must_agree(tmp_path):
    """A tensor that the index leaves out, or a single file beside it, is of another save."""
    folder = shutil.copytree(FIXTURES / "llama", tmp_path / "checkpoint")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    placed = values["weight_map"]
    index.write_text(
        json.dumps({"weight_map": {k: v for k, v in placed.items() if "norm" not in k}})
    )
    with pytest.raises(ValueError, match=r"holds the tensor '.*norm.*', but .* does not name it"):
        load(folder)
    index.write_text(json.dumps(values))
    shutil.copy(FIXTURES / "mistral" / "model.safetensors", folder)
    with pytest.raises(ValueError, match=r"holds both model.safetensors and .*remove the one that"):
        load(folder)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_pickles_are_never_opened(tmp_path):
    folder = shutil.copytree(FIXTURES / "mistral", tmp_path / "checkpoint")
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(ValueError, match=r"pickled weights only \(pytorch_model.bin\), which can"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_missing_or_foreign_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*llama/tokenizer.json; name a tokenizer.js"):
        huggingface.load(FIXTURES / "llama")
    with pytest.raises(ValueError, match="has 300 entries, more than the model's vocab_size = 96"):
        huggingface.load(FIXTURES / "llama", tokenizer=FIXTURES / "gpt2" / "tokenizer.json")
    blank = json.loads((FIXTURES / "gpt2" / "tokenizer.json").read_text())
    blank["model"] |= {"vocab": {}, "merges": []}
    (tmp_path / "blank.json").write_text(json.dumps(blank | {"added_tokens": []}))
    with pytest.raises(ValueError, match="has no entries; for the model's vocab_size = 96"):
        huggingface.load(FIXTURES / "llama", tokenizer=tmp_path / "blank.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        huggingface.load(FIXTURES / "llama", tokenizer=tmp_path / "tokenizer.json")


def test_a_tokenizer_that_lacks_many_of_the_ids_is_said():
    """More than a vocabulary is padded by, which stays silent."""
    words = read_tokenizer(FIXTURES / "gpt2" / "tokenizer.json")
    padded, large = (dataclasses.replace(PRESETS["tiny"], vocab_size=n) for n in (512, 900))
    huggingface._check_vocabulary(words, padded, "x")
    with pytest.warns(UserWarning, match="has 300 entries, .* is 900: the ids from 300 on have no"):
        huggingface._check_vocabulary(words, large, "x")


def test_a_path_must_be_a_folder_or_a_gguf(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nowhere; name a folder or a .gg"):
        huggingface.load(tmp_path / "nowhere")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ValueError, match=r"model.onnx is neither a folder nor a .gguf file"):
        huggingface.load(tmp_path / "model.onnx")
