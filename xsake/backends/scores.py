"""Scores of blocks by a kernel, where there is one: checks, and batching.

    q [B, T, N, H] ─ hopper_means.py ─ mean queries [B, R, N, H] ─┐
    k [B, S, K, H] ───────────────────────────────────────────────┴─ hopper_scores.py
                                                                       └─ scores [B, N, R, n]

`hads.select` has the same in plain JAX for every other device, type and size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake import _jax
from xsake.backends import own_copies

HEAD_SIZES = (64, 128, 256)
BLOCKS = (64, 128)
NEEDS_JAX = (0, 11)


def why_not(q: Any, k: Any, block: int) -> str | None:
    """The first thing that keeps the kernels from scoring q [..., T, N, H], k [..., S, K, H]."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16; this is {k.dtype}"
    if q.dtype != k.dtype:
        return f"takes queries and keys of one type; these are {q.dtype} and {k.dtype}"
    if k.shape[-1] not in HEAD_SIZES:
        return f"takes heads of 64, 128 and 256; these are {k.shape[-1]}"
    if block not in BLOCKS:
        return f"takes blocks of 64 and 128; these are {block}"
    return None


def mean_query(q: Array, k: Array, block: int) -> Array:
    """log Σ exp(q̄_i · k / √H) over the keys of each block: float32 [N, R, n].

    Args:
      q: [T, N, H], of which q̄ are the means of every `block`.
      k: [S, K, H]. Where it has as many blocks as q, row i sees blocks 0 … i alone, the others are
        -inf.
      block: tokens of a block; the last one may have fewer.

    `jax.vmap` over it is one launch for the whole batch. It has no derivative.
    """
    return _batchable(block)(q[None], k[None])[0]


@functools.lru_cache(maxsize=8)
def _batchable(block: int) -> Callable[[Array, Array], Array]:
    """The kernels, whose batching rule makes a mapped axis a part of B."""

    @jax.custom_batching.custom_vmap
    def batched(q: Array, k: Array) -> Array:
        from xsake.backends import hopper_means, hopper_scores

        q, k = own_copies(q, k)  # not tried without, as the attention kernels were
        scale = math.log2(math.e) / math.sqrt(k.shape[-1])
        queries = hopper_means.means(q, block, scale=scale)
        causal = queries.shape[1] == -(-k.shape[1] // block)
        return hopper_scores.scores(queries, k, block, causal=causal)

    @batched.def_vmap
    def wider(size: int, is_mapped: Any, q: Array, k: Array) -> tuple[Array, bool]:
        folded = [
            (x if mapped else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[-3:])
            for x, mapped in zip((q, k), is_mapped, strict=True)
        ]
        found = batched(*folded)
        return found.reshape(size, -1, *found.shape[1:]), True

    return batched
