"""Attention time of each block selection method, on a model's own q, k and v.

tokens [T] ─ dense pass ─ q, k, v of every layer ─┬─ dense attention            ─ seconds
                                                  └─ select blocks, visit them ─ seconds
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from xsake import masks, selection
from xsake.attention import dot_product_attention
from xsake.bench.timing import Timing, time_calls
from xsake.block_mask import BlockMask
from xsake.evaluate.methods import SOURCES, Activations, Method, scores_of
from xsake.model.observer import Observer


def time_attention(
    subject: Observer, tokens: np.ndarray, methods: Sequence[Method], block: int, repeats: int = 3
) -> dict[str, Timing]:
    """Seconds of all layers' attention by method name, and of "dense", on tokens [T].

    The time includes the selection of blocks. Oracles are not meant to be timed: they compute dense
    attention in order to select.
    """
    qkv = tuple(x[:, 0] for x in activations(subject, tokens[None])[:3])
    calls: dict[str, Any] = {"dense": (_dense, qkv)}
    for method in methods:
        run = functools.partial(_sparse, source=SOURCES[int(method.source)], block=block)
        calls[method.name] = run, (method.counts, method.given, *qkv)
    return time_calls(calls, repeats)


def activations(subject: Observer, tokens: np.ndarray) -> tuple[Array, Array, Array, Array]:
    """q, k, v and the output projection of every layer, on tokens [B, T].

    (q, k, v [layers, B, T, heads, H], kernel [layers, N, H, width]).
    """
    model = nnx.merge(subject.graph, subject.weights)
    config = model.config

    def fold(layer: Any, seen: Any, carry: Any) -> Any:
        found = (seen.q, seen.k, seen.v, seen.kernel)
        return tuple(x.at[layer].set(y) for x, y in zip(carry, found, strict=True))

    empty = tuple(
        jnp.zeros((config.layers, *tokens.shape, heads, config.head_size), model.dtype)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    kernels = jnp.zeros((config.layers, config.heads, config.head_size, config.width))
    run = jax.jit(lambda weights, lines: subject.observe(weights, lines, fold, (*empty, kernels)))
    return run(subject.weights, jnp.asarray(tokens))


@jax.jit
def _dense(q: Array, k: Array, v: Array) -> Array:
    T = q.shape[1]
    mask = BlockMask.from_rule(masks.causal(), (T, T))

    def attend(x: Any) -> Array:
        q, k, v = x
        return dot_product_attention(q[None], k[None], v[None], mask=mask)

    return lax.map(attend, (q, k, v))


@functools.partial(jax.jit, static_argnames=("source", "block"))
def _sparse(
    counts: Array, given: Array, q: Array, k: Array, v: Array, *, source: str, block: int
) -> Array:
    def attend(x: Any) -> Array:
        counts, blocks, q, k, v = x
        if source != "given":
            scores = scores_of(source, Activations(q, k, v, None), block)
            blocks = selection.keep_top(scores, counts)
        mask = selection.to_mask(blocks, q.shape[0], block)
        return dot_product_attention(q[None], k[None], v[None], mask=mask)

    return lax.map(attend, (counts, given, q, k, v))
