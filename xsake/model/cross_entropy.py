"""Σ weight · -log p(target) from hidden states, for a chunk of the tokens at a time.

    hidden [M, width] ┐
    kernel [width, V] ┴─ logits ─ softmax p ─┬─ -log p(target)
                                             └─ (p - 1[target]) · weight ─┬─ · kernelᵀ   d_hidden
                                                                          └─ hiddenᵀ ·   d_kernel

The gradient with respect to the logits is known as soon as the logits are (softmax minus one-hot).
The forward therefore computes all gradients, and the backward only scales them by the cotangent.
Logits are computed once and never stored. Matmuls run in the model's dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def summed(
    at_once: int,
    hidden: Float[Array, "M width"],
    kernel: Float[Array, "width V"],
    targets: Int[Array, M],
    weights: Float[Array, M],
    soft_cap: float | None = None,
) -> Float[Array, ""]:
    """Σ weight · -log p(target), float32.

    Args:
      at_once: tokens whose logits are in memory at once; 0: all.
      hidden: hidden states; the inputs of the matmuls are cast to its dtype.
      kernel: the output head.
      targets: token ids.
      weights: one per token.
      soft_cap: logits become cap · tanh(logits / cap).
    """
    kernel = kernel.astype(hidden.dtype)

    def part(some: Any) -> Array:
        hidden, targets, weights = some
        return (_negative_log(_logits(hidden, kernel, soft_cap), targets)[0] * weights).sum()

    return lax.map(part, _parts(at_once, hidden, targets, weights)).sum()


def _summed_fwd(
    at_once: int, hidden: Any, kernel: Any, targets: Any, weights: Any, soft_cap: float | None
) -> Any:
    rounded = kernel.astype(hidden.dtype)

    def part(d_kernel: Array, some: Any) -> Any:
        hidden, targets, weights = some
        logits = _logits(hidden, rounded, soft_cap)
        lost, level = _negative_log(logits, targets)
        is_target = jnp.arange(logits.shape[1]) == targets[:, None]
        slope = (jnp.exp(logits - level[:, None]) - is_target) * weights[:, None]
        if soft_cap is not None:
            slope *= 1 - (logits / soft_cap) ** 2
        slope = slope.astype(hidden.dtype)
        d_hidden = jnp.matmul(slope, rounded.T, preferred_element_type=jnp.float32)
        more = jnp.matmul(hidden.T, slope, preferred_element_type=jnp.float32)
        return d_kernel + more, (lost, d_hidden.astype(hidden.dtype))

    parts = _parts(at_once, hidden, targets, weights)
    d_kernel, (lost, d_hidden) = lax.scan(part, jnp.zeros(kernel.shape, jnp.float32), parts)
    M = len(targets)
    lost, d_hidden = lost.reshape(-1)[:M], d_hidden.reshape(-1, hidden.shape[1])[:M]
    return (lost * weights).sum(), (d_hidden, d_kernel.astype(kernel.dtype), lost)


def _summed_bwd(at_once: int, soft_cap: float | None, saved: Any, cotangent: Array) -> Any:
    d_hidden, d_kernel, lost = saved
    scaled = [(cotangent * x).astype(x.dtype) for x in (d_hidden, d_kernel, lost)]
    no_slope = np.zeros(lost.shape, jax.dtypes.float0)  # cotangent of the integer targets
    return scaled[0], scaled[1], no_slope, scaled[2]


summed.defvjp(_summed_fwd, _summed_bwd)


def _parts(at_once: int, *arrays: Any) -> tuple[Array, ...]:
    """[M, …] -> [parts, at_once, …], padded with zeros, whose weight is 0."""
    M = len(arrays[0])
    at_once = max(min(at_once or M, M), 1)  # M is 0 for a text of one token
    padding = -M % at_once
    return tuple(
        jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)]).reshape(-1, at_once, *x.shape[1:])
        for x in arrays
    )


def _logits(hidden: Array, kernel: Array, soft_cap: float | None) -> Array:
    logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _negative_log(logits: Array, targets: Array) -> tuple[Array, Array]:
    """(-log p(target), logsumexp), float32 [R] each."""
    level = jax.nn.logsumexp(logits, axis=-1)
    return level - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0], level
