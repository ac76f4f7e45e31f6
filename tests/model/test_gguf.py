"""GGUF files: the parameters of the folder that they were made from, and plain refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.model import checkpoints, ggml, independent
from tests.model.checkpoints import FIXTURES, TOKENIZER, write_gguf
from tests.model.test_huggingface import with_biases
from xsake.model import Rope, gguf_file, huggingface, weights

KEYS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "mistral": {"llama.attention.sliding_window": 5},
    "qwen2": {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 16,
    },
    "qwen3": {},
}


def load(path: Path, **options: Any) -> huggingface.Loaded:
    return huggingface.load(path, **{"tokenizer": False} | options)


def tiny(path: Path, kind: str = "mistral", **options: Any) -> Path:
    return write_gguf(path / "tiny.gguf", *checkpoints.read(FIXTURES / kind), **options)


@pytest.mark.parametrize("kind", KEYS)
def test_the_parameters_are_those_of_the_folder_bit_for_bit(kind, tmp_path):
    """Names, transposes, the fused q, k, v of GPT-2 and the paired rows of Llama, undone."""
    folder = load(FIXTURES / kind)
    file = load(tiny(tmp_path, kind, keys=KEYS[kind]))
    for name, x in folder.model.parameters().items():
        np.testing.assert_array_equal(file.model.parameters()[name], x, err_msg=name)
    config, same = file.config, folder.config
    assert config.norm_epsilon == pytest.approx(same.norm_epsilon, rel=1e-6)  # a float32 there
    # GGUF lacks bos and eos (without a tokenizer), the windows of single layers, and the parameters
    # of Llama 3's RoPE scaling
    silent = dict(bos=None, eos=(), norm_epsilon=config.norm_epsilon)
    if kind == "qwen3":
        silent |= dict(window=None, window_layers=None)
    if kind == "llama":
        silent |= dict(rope=Rope(base=1000.0))
    assert config == dataclasses.replace(same, **silent)


def test_interleaved_biases_of_q_and_k_are_de_interleaved_too(tmp_path):
    config, tensors = checkpoints.read(FIXTURES / "llama")
    config, tensors = config | dict(attention_bias=True), with_biases(tensors, "self_attn")
    folder = load(checkpoints.write(tmp_path / "folder", config, tensors))
    file = load(write_gguf(tmp_path / "x.gguf", config, tensors))
    for name, x in folder.model.parameters().items():
        np.testing.assert_array_equal(file.model.parameters()[name], x, err_msg=name)


def test_llama_files_are_the_right_model(tmp_path):
    """The reference rotates the file's interleaved pairs; our model rotates half-split pairs."""
    config, tensors = checkpoints.read(FIXTURES / "mistral")
    path = tiny(tmp_path, keys=KEYS["mistral"])
    reader = gguf.GGUFReader(path)
    paired = {
        name: np.asarray(tensor.data)
        for name in tensors
        for tensor in reader.tensors
        if tensor.name
        == gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2).get_name(
            name, try_suffixes=(".weight",)
        )
    }
    tokens, logits = checkpoints.expected("mistral")
    turned = independent.logits(config, paired, tokens[0], interleaved=True)
    assert np.abs(turned - logits[0]).max() < 1e-4
    halved = independent.logits(config, paired, tokens[0])
    assert np.abs(halved - logits[0]).max() > 1e-2  # the layout changes the logits


@pytest.mark.parametrize("name", gguf_file.TYPES)
def test_every_type_is_read_as_ggml_defines_it(name, tmp_path):
    """Random bits in one matrix; the decoded values differ by float32's rounding at most."""
    config = wide_config()
    raw, values = ggml.draw(name, rows=2, columns=256)
    path = write_gguf(
        tmp_path / "x.gguf",
        config,
        wide_tensors(config),
        quantised={"blk.0.ffn_up.weight": (raw, gguf.GGMLQuantizationType[name])},
    )
    found = load(path).model.parameters()["layers.up.kernel"][0]
    np.testing.assert_allclose(np.asarray(found).T, values, rtol=1e-6, atol=1e-6)
    assert np.std(values) > 0.1


def wide_config() -> dict[str, Any]:
    """Rows of 256, which the larger blocks need."""
    config, _ = checkpoints.read(FIXTURES / "llama")
    return config | dict(hidden_size=256, intermediate_size=2, num_hidden_layers=1, vocab_size=8)


def wide_tensors(config: dict[str, Any]) -> checkpoints.Tensors:
    _, tensors = checkpoints.read(FIXTURES / "llama")
    sizes = {24: 256, 40: 2, 96: 8}
    return {
        name: np.zeros([sizes.get(n, n) for n in x.shape], np.float32)
        for name, x in tensors.items()
        if "layers.1" not in name
    }


def test_the_scaling_of_llama_3_is_recognised(tmp_path):
    """The file holds a divisor per frequency; loading recovers the scaling parameters."""
    config, tensors = checkpoints.read(FIXTURES / "llama")
    scaling = dict(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    config["rope_parameters"] = scaling

    def frequencies(rope: dict[str, Any]) -> np.ndarray:
        cos, sin = independent.turns({"rope_parameters": rope}, 8, 2)
        return np.arctan2(sin, cos)[1, 0]  # the angles at position 1

    divisors = frequencies(dict(rope_theta=500_000.0)) / frequencies(scaling)
    assert 1 < divisors.max() <= 32.0001
    tensors["rope_freqs.weight"] = divisors.astype(np.float32)
    found = load(write_gguf(tmp_path / "x.gguf", config, tensors)).config.rope
    assert (found.scaling, found.original_context) == ("llama3", 8192)
    assert found.factor == pytest.approx(32, rel=1e-5)
    tensors["rope_freqs.weight"] = divisors.astype(np.float32)[::-1].copy()
    path = write_gguf(tmp_path / "y.gguf", config, tensors)
    with pytest.raises(ValueError, match=r"y.gguf: the tensor 'rope_freqs.weight' is not a scal"):
        load(path)


# ---------------------------------------------------------------------------------------- bad input


def test_every_truncation_raises_a_one_line_error(tmp_path, monkeypatch):
    """Wherever the file is cut: in its header, its metadata, its tensors' names or their data."""
    monkeypatch.setattr(weights, "gather", lambda *_: pytest.fail("weights were read"))
    whole = tiny(tmp_path, tokenizer=TOKENIZER).read_bytes()
    for length in [0, 3, 4, 8, 20, *range(24, len(whole) - 64, len(whole) // 50)]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut.gguf cannot be read as GGUF: it is trunc") as e:
            load(tmp_path / "cut.gguf")
        assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(architecture="mamba"), r"architecture 'mamba' is not one of \['gpt2', 'llama'"),
        (dict(keys={"llama.block_count": None}), r"tiny.gguf lacks the key 'llama.block_count'"),
        (dict(keys={"llama.expert_count": 8}), r"expert_count = 8: mixtures of experts are not"),
        (dict(keys={"llama.block_count": 3}), r"lacks the tensor 'blk.2.* and 8 more, of the 30"),
        (dict(keys={"llama.block_count": 1}), r"holds the tensor 'blk.1.* and 8 more, which"),
        (dict(keys={"llama.embedding_length": 32}), r"is \[\d+, 24\], but the .* \[\d+, 32\]"),
        (dict(keys={"llama.rope.dimension_count": 4}), r"rope.dimension_count = 4 must be the he"),
        (dict(keys={"llama.rope.scaling.type": "longrope"}), r"rope scaling 'longrope' is not one"),
        (dict(keys={"split.count": 2}), r"tiny.gguf is one part of a split GGUF; merge the parts"),
        (dict(keys={"split.count": "two"}), r"split.count must be a whole number, got 'two'"),
        (dict(keys={"llama.block_count": 2**31}), r"block_count = 2147483648, but the file holds"),
        (dict(keys={"llama.block_count": "two"}), r"block_count must be a whole number of at lea"),
        (dict(keys={"llama.attention.head_count": 0}), r"head_count must be a whole number of at"),
        (dict(keys={"llama.rope.freq_base": math.nan}), r"tiny.gguf: rope base must be above 1"),
    ],
)
def test_an_invalid_file_raises_a_one_line_error(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "gather", lambda *_: pytest.fail("weights were read"))
    path = tiny(tmp_path, **options)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert "tiny.gguf" in str(caught.value)


def value(kind: gguf.GGUFValueType, raw: bytes) -> bytes:
    return np.uint32(kind).tobytes() + raw


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (value(9, np.uint32(4).tobytes() + np.uint64(2**60).tobytes()), r"an array of 1152921504"),
        (value(9, np.uint32(8).tobytes() + np.uint64(2**20).tobytes()), r"an array of 1048576"),
        (value(9, (np.uint32(9).tobytes() + np.uint64(1).tobytes()) * 9_000), r"cannot be read"),
        (
            value(9, np.uint32(4).tobytes() + np.uint64(0).tobytes()),
            r"architecture \[\] is not one",
        ),
    ],
)
def test_a_small_file_that_promises_much_is_refused_at_once(field, message, tmp_path):
    """The length of an array is compared with the file, and its nesting is limited."""
    key = b"general.architecture"
    header = b"GGUF" + np.uint32(3).tobytes() + np.array([0, 1, len(key)], np.uint64).tobytes()
    (tmp_path / "tiny.gguf").write_bytes(header + key + field)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "tiny.gguf")
    assert "\n" not in str(caught.value)


def test_an_unsupported_quantisation_is_named(tmp_path):
    config = wide_config()
    kind = gguf.GGMLQuantizationType.IQ2_XXS
    raw = np.zeros((2, 66), np.uint8)
    path = write_gguf(
        tmp_path / "x.gguf",
        config,
        wide_tensors(config),
        quantised={"blk.0.ffn_up.weight": (raw, kind)},
    )
    with pytest.raises(
        ValueError, match=r"x.gguf: the tensor 'blk.0.ffn_up.weight' is stored as IQ2_XXS"
    ):
        load(path)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, r"tiny.gguf has no tokenizer; name a tokenizer.json with tokenizer="),
        (TOKENIZER | {"model": "llama"}, r"tokenizer.ggml.model 'llama' is not 'gpt2' \(byte-lev"),
        (TOKENIZER | {"merges": ["a"]}, r"merges must be two tokens and a space .*, got 'a'"),
        (
            TOKENIZER | {"merges": ["a b c"]},
            r"merges must be two tokens and a space .*, got 'a b c",
        ),
        (TOKENIZER | {"merges": ["a b"]}, r"tokenizer.ggml.merges do not fit its tokens"),
        (TOKENIZER | {"bos": 299}, r"tokenizer.ggml.bos_token_id 299 must be from 0 to 256"),
        (TOKENIZER | {"pre": "tekken"}, r"tokenizer.ggml.pre 'tekken' is not one of \['gpt-2', 'l"),
    ],
)
def test_unsupported_tokenizer_metadata_is_refused(tokenizer, message, tmp_path, monkeypatch):
    path = tiny(tmp_path, "gpt2", tokenizer=tokenizer)
    assert load(path).tokenizer is None
    monkeypatch.setattr(weights, "gather", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        load(path, tokenizer=True)


def test_a_file_becomes_a_folder(tmp_path):
    """GGUF → model → safetensors: the same parameters, the same tokenizer."""
    loaded = load(tiny(tmp_path, "gpt2", tokenizer=TOKENIZER), tokenizer=True)
    huggingface.save(tmp_path / "folder", loaded.model, loaded.tokenizer)
    again = load(tmp_path / "folder", tokenizer=True)
    assert again.config == loaded.config
    assert again.tokenizer.encode("so it goes") == loaded.tokenizer.encode("so it goes")
    for name, x in loaded.model.parameters().items():
        np.testing.assert_array_equal(again.model.parameters()[name], x)
