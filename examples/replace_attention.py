"""Replace jax.nn's attention in a Flax NNX model: the same loss, then fewer blocks.

python examples/replace_attention.py

The model calls its attention as attend(q, k, v). First this is jax.nn.dot_product_attention, then
xsake.dot_product_attention with the same arguments, then with a mask that skips blocks.

A model with nnx.MultiHeadAttention or linen.MultiHeadDotProductAttention needs one argument only:
attention_fn=xsake.integrations.flax.attention(rule).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import xsake
from xsake import BlockMask, masks

Attend = Callable[[Array, Array, Array], Array]  # q, k, v [B, T, heads, H] -> [B, T, N, H]


class Layer(nnx.Module):
    """A pre-norm decoder layer with grouped heads: N query heads share N / 2 key heads."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        size = width // heads
        self.norm_in, self.norm_mid = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.q = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.kv = nnx.LinearGeneral(width, (2, heads // 2, size), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Array, attend: Attend) -> Array:
        """Maps [B, T, width] to [B, T, width]."""
        y = self.norm_in(x)
        kv = self.kv(y)
        x = x + self.out(attend(self.q(y), kv[:, :, 0], kv[:, :, 1]))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mid(x))))


class Decoder(nnx.Module):
    """Embedding, layers, logits by the transposed embedding."""

    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, *, rngs: nnx.Rngs
    ) -> None:
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, rngs=rngs) for _ in range(layers)])

    def __call__(self, tokens: Array, attend: Attend) -> Array:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend)
        return self.embedding.attend(x)


def loss_and_gradient(model: Decoder, tokens: Array, attend: Attend) -> tuple[Array, Any]:
    """Next-token loss, and its gradient by every parameter."""

    def loss(model: Decoder) -> Array:
        logits = model(tokens[:, :-1], attend)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -chosen.mean()

    return nnx.value_and_grad(loss)(model)


def main(length: int = 1024, width: int = 256, layers: int = 2, window: int = 128) -> list[float]:
    """Prints loss and time with each attention; returns the losses."""
    model = Decoder(512, layers, width, 8, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (1, length + 1), 0, 512)
    rule = masks.causal() & (masks.first(16) | masks.sliding_window(window))
    mask = BlockMask.from_rule(rule, (length, length))
    ways: dict[str, Attend] = {
        "jax.nn, causal": functools.partial(jax.nn.dot_product_attention, is_causal=True),
        "xsake, causal": functools.partial(xsake.dot_product_attention, is_causal=True),
        f"xsake, density {float(mask.density()):.2f}": functools.partial(
            xsake.dot_product_attention, mask=mask
        ),
    }
    step: Any = nnx.jit(loss_and_gradient, static_argnames="attend")
    losses, gradients = [], []
    for name, attend in ways.items():
        jax.block_until_ready(step(model, tokens, attend))  # compiles
        began = time.perf_counter()
        loss, gradient = jax.block_until_ready(step(model, tokens, attend))
        seconds = time.perf_counter() - began
        print(f"{name:20}  loss {float(loss):.6f}  {1e3 * seconds:6.0f} ms forward and backward")
        losses.append(float(loss))
        gradients.append(gradient)
    difference = jax.tree.map(lambda a, b: abs(a - b).max(), *gradients[:2])
    largest = max(jax.tree.leaves(difference))
    print(f"largest difference of a gradient between jax.nn and xsake: {largest:.1e}")
    print(mask)
    return losses


if __name__ == "__main__":
    main()
