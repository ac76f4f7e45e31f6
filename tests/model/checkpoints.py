"""Checkpoint folders and GGUF files for tests: read, changed and written without xsake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes  # noqa: F401  (NumPy learns bfloat16 from it, which safetensors needs)
import numpy as np
from safetensors.numpy import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

Tensors = dict[str, np.ndarray]


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """(config.json, every tensor as it is stored) of a folder."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [2, T], the logits [2, T, vocab] that transformers gives them)."""
    stored = load_file(FIXTURES / kind / "expected.safetensors")
    return stored["tokens"], stored["logits"]


# --------------------------------------------------------------------------------------------- GGUF

ARCHITECTURES = {
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
TOKENIZER = {"model": "gpt2", "pre": "gpt-2", "tokens": ["<|end|>", *BYTES], "eos": 0, "merges": []}


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    *,
    keys: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    quantised: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    architecture: str | None = None,
) -> Path:
    """What llama.cpp's converter makes of a folder.

    `keys` are added to the metadata; a key with the value None is removed from it. `quantised`
    tensors are raw bytes by their GGUF names, and replace those of the folder.
    """
    arch = ARCHITECTURES[config["model_type"]]
    name = architecture or gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name)
    for key, value in (_metadata(config, name) | (keys or {})).items():
        if value is not None:
            _add(writer, key, value)
    if tokenizer:
        _add_tokenizer(writer, tokenizer)
    quantised = quantised or {}
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    for theirs, x in tensors.items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if ours not in quantised:
            writer.add_tensor(ours or theirs, _converted(config, theirs, x.astype(np.float32)))
    for ours, (raw, kind) in quantised.items():
        writer.add_tensor(ours, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(config: dict[str, Any], name: str, x: np.ndarray) -> np.ndarray:
    """Conv1D's [in, out] becomes [out, in]; q and k of Llama get the interleaved RoPE layout."""
    if config["model_type"] == "gpt2" and "c_" in name and x.ndim == 2:
        return np.ascontiguousarray(x.T)
    of_q, of_k = "q_proj" in name, "k_proj" in name
    if config["model_type"] in ("llama", "mistral") and (of_q or of_k):
        heads = config["num_attention_heads" if of_q else "num_key_value_heads"]
        halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(x.shape))
    return x


def _metadata(config: dict[str, Any], name: str) -> dict[str, Any]:
    if config["model_type"] == "gpt2":
        return {
            f"{name}.context_length": config["n_positions"],
            f"{name}.block_count": config["n_layer"],
            f"{name}.embedding_length": config["n_embd"],
            f"{name}.feed_forward_length": 4 * config["n_embd"],
            f"{name}.attention.head_count": config["n_head"],
            f"{name}.attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }
    return {
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{name}.rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[type(value)](key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    tokens = values["tokens"]
    writer.add_tokenizer_model(values["model"])
    if "pre" in values:
        writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list(tokens)
    special = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([special[not token.startswith("<|")] for token in tokens])
    if values["merges"]:
        writer.add_token_merges(values["merges"])
    writer.add_eos_token_id(values["eos"])
    if "bos" in values:
        writer.add_bos_token_id(values["bos"])
        writer.add_add_bos_token(True)
