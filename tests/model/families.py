"""One tiny config of every architecture that the transformer covers, and random weights for it."""

import dataclasses

import numpy as np
import pytest

from xsake.model import Config, Rope, Transformer, parameter_shapes

LLAMA = Config(
    vocab_size=97,
    context=512,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_size=8,
    mlp_width=48,
    rope=Rope(base=10_000.0, scaling="llama3", factor=4.0, original_context=32),
    eos=(96,),
)
FAMILIES = {
    "gpt2": dataclasses.replace(
        LLAMA,
        kv_heads=4,
        activation="gelu_tanh",
        gated=False,
        norm="layer",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
    ),
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, rope=Rope(base=1e6), tied=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_size=16, rope=Rope(base=1e6)),
    "mistral": dataclasses.replace(LLAMA, window=9, rope=Rope()),
    "mixed windows": dataclasses.replace(LLAMA, window=9, window_layers=(1,), rope=Rope()),
}

# The two that differ most from each other, and from the rest, in what their layers do; the rest of
# the families run in `make test-slow` where a claim does not depend on the family.
SOME_FAMILIES = [
    name if name in {"gpt2", "mixed windows"} else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
]


def weights(config, seed=0):
    """Random parameters of a size at which attention and every bias matter."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in parameter_shapes(config).items():
        draw = rng.standard_normal(shape).astype(np.float32)
        kind = name.rsplit(".", 1)[-1]
        if kind == "kernel":
            fan_in = np.prod(shape[1:-1]) if name == "layers.out.kernel" else config.width
            draw *= 1.5 / np.sqrt(fan_in)
        made[name] = {"scale": 1 + 0.1 * draw, "bias": 0.2 * draw}.get(kind, draw)
    return made


def random_model(config, seed=0, **options):
    return Transformer.of(config, weights(config, seed), **options)


def random_tokens(config, shape, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size - 1, shape, dtype=np.int32)
