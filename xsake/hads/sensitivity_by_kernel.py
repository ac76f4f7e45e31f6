"""The sensitivity of block dropping by a kernel for Hopper GPUs: `statistics.block_sensitivity`.

    v · root ─ less its mean, scaled ─┐
    q, k ─────────────────────────────┴─ attention ─ out, logsumexp ─ hopper/sensitivity.py
                                         ─ mean over row blocks

The definition is plain JAX, which writes what every query gets from every block to memory; the
kernel writes one number for it. It has no derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake import _jax
from xsake.attention import dot_product_attention
from xsake.backends import unaliased
from xsake.backends.hopper.limits import BLOCKS, HEAD_SIZES, NEEDS_JAX, OBSERVED_HEAD_SIZE
from xsake.hads import row_blocks
from xsake.hads.chunks import Softmax


def why_not(q: Any, k: Any, v: Any, block: int, softmax: Softmax) -> str | None:
    """The first reason why the kernel cannot measure one layer's q [T, N, H], k and v."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if softmax.soft_cap is not None or softmax.window is not None:
        return "supports neither a soft cap nor a window, which may be traced"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"supports bfloat16 and float16; this is {q.dtype}"
    if q.dtype != k.dtype:
        return f"supports queries and keys of one type; these are {q.dtype} and {k.dtype}"
    sizes = [x for x in HEAD_SIZES if x <= OBSERVED_HEAD_SIZE]
    if not {q.shape[-1], v.shape[-1]} <= set(sizes):
        found = q.shape[-1], v.shape[-1]
        return f"supports heads of {' and '.join(map(str, sizes))}; these are {found}"
    if block not in BLOCKS:
        return f"supports blocks of {' and '.join(map(str, BLOCKS))}; these are {block}"
    return None


def block_sensitivity(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    values: Float[Array, "N T Hv"],
    block: int,
    softmax: Softmax,
) -> Float[Array, "N n n"]:
    """Mean over row block i of ‖u_j - m_j out‖², as in `statistics.measure`; 0 for j > i.

    p, the values and what attention makes of them are rounded to 16 bits. What all values of a head
    have in common drops out of the differences, so it is subtracted before; the rest is scaled to
    numbers of about 1, which float16 has, too.

    Args:
      q: queries.
      k: keys.
      values: those of every query head, times the root of its output projection.
      block: tokens per block.
      softmax: sinks; neither a soft cap nor a window.
    """
    values = values.astype(jnp.float32)
    center = values.mean(1, keepdims=True)
    values = values - center
    _, exponent = jnp.frexp(jnp.abs(values).max((1, 2)))  # [N]; of 0 it is 0

    def scaled(x: Array) -> Array:
        return jnp.swapaxes(jnp.ldexp(x, -exponent[:, None, None]), 0, 1)[None]

    sinks = () if softmax.sinks is None else (softmax.sinks[None], scaled(center))
    found = _measuring(block)(q[None], k[None], scaled(values).astype(jnp.bfloat16), *sinks)[0]
    return jnp.ldexp(found, 2 * exponent[:, None, None])


@functools.lru_cache(maxsize=8)
def _measuring(block: int, interpret: Any = False) -> Callable[..., Array]:
    """(q, k, values [B, T, N, Hv], sinks [B, N], center [B, 1, N, Hv]) -> [B, N, n, n].

    `center` was subtracted from the values; without sinks, neither is given. vmap folds into the
    batch.
    """

    @jax.custom_batching.custom_vmap
    @_jax.without_x64
    def measured(*given: Array) -> Array:
        from xsake.backends.hopper import sensitivity

        q, k, v, *of_sinks = given
        T = q.shape[1]
        repeated = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        how: Any = {"is_causal": True, "return_residual": True}
        out, logsumexp = dot_product_attention(q, repeated, v.astype(q.dtype), **how)
        out = out.astype(jnp.float32)
        if of_sinks:  # one more key, whose value was 0 and is now -center
            sinks, center = of_sinks
            both = jnp.logaddexp(logsumexp, sinks.astype(jnp.float32)[:, None])
            share = jnp.exp(logsumexp - both)[..., None]
            out, logsumexp = share * out - (1 - share) * center, both
        q, k, v = unaliased(q, k, v)
        found = sensitivity.changes(q, k, v, out, logsumexp, block, interpret=interpret)
        return _jax.vary(_row_means(found, T, block), _jax.varying_axes(*given))

    @measured.def_vmap
    def by_batch(size: int, is_mapped: Sequence[bool], *given: Array) -> tuple[Array, bool]:
        wide = _jax.folded(_jax.mapped(size, is_mapped, given))
        return _jax.unfolded(size, measured(*wide)), True

    return measured


def _row_means(changes: Float[Array, "B N n rows"], T: int, block: int) -> Float[Array, "B N n n"]:
    """The means over the queries of each row block, [row block, block]; 0 where j > i."""
    n = row_blocks.count_blocks(T, block)
    sums = changes[..., : n * block].reshape(*changes.shape[:3], n, block).sum(-1)
    counts = jnp.minimum(T - block * jnp.arange(n), block)
    return jnp.where(jnp.tri(n, dtype=bool), jnp.swapaxes(sums, 2, 3) / counts[:, None], 0)
