"""GPT-2 and the Llama family in NumPy float64, from their published definitions.

It shares no code with xsake: it reads `config.json` as published and tensors under their Hugging
Face names, and writes every formula out. Slow and plain on purpose.

    x = embedding[tokens] (+ position[t])
    for each layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = norm(x) @ headᵀ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def logits(config: Mapping[str, Any], tensors: Tensors, tokens: Any, **options: Any) -> np.ndarray:
    """[T, vocab] float64 for tokens [T]."""
    x = hidden(config, tensors, tokens, **options)
    return x @ head(config, tensors).T


def head(config: Mapping[str, Any], tensors: Tensors) -> np.ndarray:
    """[vocab, width]: the output head, which is the embedding where the two are tied."""
    if config["model_type"] == "gpt2":
        return f64(tensors["transformer.wte.weight"])
    tied = config.get("tie_word_embeddings", False)
    return f64(tensors["model.embed_tokens.weight" if tied else "lm_head.weight"])


def hidden(
    config: Mapping[str, Any], tensors: Tensors, tokens: Any, *, interleaved: bool = False
) -> np.ndarray:
    """What enters the output head, [T, width].

    `interleaved` rotates the pairs (2i, 2i + 1), as for weights of Meta and llama.cpp, instead of
    (i, i + H/2), as for those of Hugging Face.
    """
    tokens = np.asarray(tokens)
    if config["model_type"] == "gpt2":
        return gpt2(config, tensors, tokens)
    return llama(config, tensors, tokens, interleaved)


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


# ---------------------------------------------------------------- GPT-2


def gpt2(config: Mapping[str, Any], tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Radford et al. 2019. A weight is stored [in, out]; q, k, v lie side by side in one matrix."""
    T, N, D = len(tokens), config["n_head"], config["n_embd"]
    epsilon = config["layer_norm_epsilon"]
    act = ACTIVATIONS[config["activation_function"]]

    def w(name: str) -> np.ndarray:
        return f64(tensors["transformer." + name])

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + epsilon) * w(name + ".weight") + w(name + ".bias")

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w(name + ".weight") + w(name + ".bias")

    x = w("wte.weight")[tokens] + w("wpe.weight")[:T]
    see = np.arange(T)[:, None] >= np.arange(T)[None, :]
    for i in range(config["n_layer"]):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.reshape(T, N, D // N) for part in np.split(qkv, 3, axis=-1))
        x = x + linear(attention(q, k, v, see), f"h.{i}.attn.c_proj")
        up = act(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        x = x + linear(up, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f")


# ---------------------------------------------------------------- Llama, Mistral, Qwen2, Qwen3


def llama(
    config: Mapping[str, Any], tensors: Tensors, tokens: np.ndarray, interleaved: bool
) -> np.ndarray:
    """Touvron et al. 2023. A weight is stored [out, in]; a bias is added where the file has one."""
    T, N = len(tokens), config["num_attention_heads"]
    K = config.get("num_key_value_heads") or N
    H = config.get("head_dim") or config["hidden_size"] // N
    act = ACTIVATIONS[config["hidden_act"]]
    cos, sin = turns(config, H, T)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + config["rms_norm_eps"]) * f64(tensors[name + ".weight"])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ f64(tensors[name + ".weight"]).T
        return y + f64(tensors[name + ".bias"]) if name + ".bias" in tensors else y

    def rotate(x: np.ndarray) -> np.ndarray:
        one, two = (
            (slice(0, None, 2), slice(1, None, 2))
            if interleaved
            else (
                slice(0, H // 2),
                slice(H // 2, H),
            )
        )
        turned = np.empty_like(x)
        turned[..., one] = x[..., one] * cos - x[..., two] * sin
        turned[..., two] = x[..., two] * cos + x[..., one] * sin
        return turned

    x = f64(tensors["model.embed_tokens.weight"][tokens])
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm")
        q = linear(y, at + "self_attn.q_proj").reshape(T, N, H)
        k = linear(y, at + "self_attn.k_proj").reshape(T, K, H)
        v = linear(y, at + "self_attn.v_proj").reshape(T, K, H)
        if at + "self_attn.q_norm.weight" in tensors:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k = rotate(q), rotate(k)
        o = attention(q, k, v, sees(config, i, T))
        x = x + linear(o, at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm")
        gate, up = linear(y, at + "mlp.gate_proj"), linear(y, at + "mlp.up_proj")
        x = x + linear(act(gate) * up, at + "mlp.down_proj")
    return norm(x, "model.norm")


def sees(config: Mapping[str, Any], layer: int, T: int) -> np.ndarray:
    """Bool [T, T]: a query sees itself and, under a window of w, the w - 1 keys before it."""
    back = np.arange(T)[:, None] - np.arange(T)[None, :]
    window = config.get("sliding_window")
    if config["model_type"] in ("qwen2", "qwen3"):
        kinds = config.get("layer_types")
        slides = (
            kinds[layer] == "sliding_attention"
            if kinds
            else config.get("use_sliding_window", False) and layer >= config["max_window_layers"]
        )
        window = window if slides else None
    elif config["model_type"] == "llama":
        window = None
    return (back >= 0) & (back < (window or T))


def turns(config: Mapping[str, Any], H: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), [T, 1, H/2] each, under the scaling that the configuration names."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = rope.get("original_max_position_embeddings")
    frequency = np.array([base ** (-2 * i / H) for i in range(H // 2)])
    magnitude = 1.0
    if kind == "linear":
        frequency = frequency / rope["factor"]
    elif kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for i, f in enumerate(frequency):
            wavelength = 2 * math.pi / f
            if wavelength > original / low:
                frequency[i] = f / rope["factor"]
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency[i] = (1 - smooth) * f / rope["factor"] + smooth * f
    elif kind == "yarn":
        # Peng et al. 2023, section 3.2: a ramp over the pairs from beta_fast to beta_slow rotations

        def pair(rotations: float) -> float:
            return H * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

        first = max(math.floor(pair(rope.get("beta_fast") or 32)), 0)
        last = min(math.ceil(pair(rope.get("beta_slow") or 1)), H - 1)
        for i, f in enumerate(frequency):
            ramp = min(max((i - first) / ((last - first) or 0.001), 0), 1)
            frequency[i] = f / rope["factor"] * ramp + f * (1 - ramp)
        magnitude = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1
    elif kind != "default":
        raise ValueError(f"no definition of rope_type {kind!r} here")
    angle = np.arange(T)[:, None, None] * frequency
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


# ---------------------------------------------------------------- what both use


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, see: np.ndarray) -> np.ndarray:
    """softmax(q kᵀ / √H) v, head by head: q [T, N, H], k and v [T, K, H] → [T, N·H]."""
    T, N, H = q.shape
    out = np.empty_like(q)
    for n in range(N):
        of = n * k.shape[1] // N
        scores = np.where(see, q[:, n] @ k[:, of].T / math.sqrt(H), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, n] = weights / weights.sum(-1, keepdims=True) @ v[:, of]
    return out.reshape(T, N * H)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "silu": silu,
}
