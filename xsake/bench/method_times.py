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

from xsake import selection
from xsake.bench.timing import Timing, time_calls
from xsake.evaluate.methods import SOURCES, Activations, Method, best_blocks, scores_of
from xsake.model import Config
from xsake.model.attend import by_mask, softmax_of
from xsake.model.observer import Observer


def time_attention(
    subject: Observer, tokens: np.ndarray, methods: Sequence[Method], block: int, repeats: int = 3
) -> dict[str, Timing]:
    """Seconds of all layers' attention by method name, and of "dense", on tokens [T].

    The time includes the selection of blocks. Oracles are not meant to be timed: they compute dense
    attention in order to select. Those that need more than q, k and v are refused.
    """
    for method in methods:
        if SOURCES[int(method.source)] in ("sensitivity", "loss_sensitivity"):
            raise ValueError(
                f"{method.name} cannot be timed: it selects blocks by the output projection or by "
                "the gradient of the loss; leave it out"
            )
    config, given = inputs(subject, tokens)
    calls: dict[str, Any] = {"dense": (functools.partial(_dense, config=config), given)}
    for method in methods:
        source = SOURCES[int(method.source)]
        how: Any = {"source": source, "block": block, "limits": (method.band, method.top_p)}
        run = functools.partial(_sparse, config=config, **how)
        calls[method.name] = run, (method.counts, method.given, *given)
    return time_calls(calls, repeats)


def inputs(subject: Observer, tokens: np.ndarray) -> tuple[Config, tuple[Any, ...]]:
    """The model's config, and (q, k, v, sinks or None) of every layer on tokens [T]."""
    model = nnx.merge(subject.graph, subject.weights)
    sinks = [model.softmax(layer).sinks for layer in range(model.config.layers)]
    stacked = jnp.stack(sinks) if model.config.sinks else None
    return model.config, (*(x[:, 0] for x in activations(subject, tokens[None])[:3]), stacked)


def check_is_plain(config: Config) -> None:
    """Raises unless a model's attention is causal softmax(q kᵀ / √H), which some suites measure."""
    if config.soft_cap is not None or config.window is not None or config.sinks:
        raise ValueError(
            "this suite measures causal attention, but the model has soft_cap = "
            f"{config.soft_cap}, window = {config.window} and sinks = {config.sinks}; "
            "use a model without them, or `xsake evaluate`"
        )


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


@functools.partial(jax.jit, static_argnames="config")
def _dense(q: Array, k: Array, v: Array, sinks: Array | None, *, config: Config) -> Array:
    attend = by_mask(config, None, 1, q.shape[1])

    def one(x: Any) -> Array:
        layer, q, k, v, sinks = x
        return attend(layer, q[None], k[None], v[None], None, sinks)[0]

    return lax.map(one, (jnp.arange(config.layers), q, k, v, sinks))


@functools.partial(jax.jit, static_argnames=("config", "source", "block", "limits"))
def _sparse(
    counts: Array,
    given: Array,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    *,
    config: Config,
    source: str,
    block: int,
    limits: tuple[int, float | None] = (0, None),  # the method's band and top_p
) -> Array:
    T = q.shape[1]

    def one(x: Any) -> Array:
        layer, counts, blocks, q, k, v, sinks = x
        if source != "given":
            seen = Activations(q, k, v, None, softmax_of(config, layer, sinks))
            blocks = best_blocks(scores_of(source, seen, block), counts, *limits)
        attend = by_mask(config, selection.to_mask(blocks, T, block), 1, T)
        return attend(layer, q[None], k[None], v[None], None, sinks)[0]

    return lax.map(one, (jnp.arange(config.layers), counts, given, q, k, v, sinks))
