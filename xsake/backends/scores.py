"""Scores of blocks by a kernel, where there is one: checks, and batching.

    queries [B, R, N, H] ─┐
    k       [B, S, K, H] ─┴─ hopper_scores.py ─ scores [B, N, R, n]

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

HEAD_SIZES = (64, 128, 256)
BLOCKS = (64, 128)
NEEDS_JAX = (0, 11)


def why_not(k: Any, block: int) -> str | None:
    """The first thing that keeps the kernel from scoring blocks of these keys [..., S, K, H]."""
    if reason := _jax.why_no_hopper(NEEDS_JAX):
        return reason
    if k.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16; this is {k.dtype}"
    if k.shape[-1] not in HEAD_SIZES:
        return f"takes heads of 64, 128 and 256; these are {k.shape[-1]}"
    if block not in BLOCKS:
        return f"takes blocks of 64 and 128; these are {block}"
    return None


def summed_by_block(means: Array, k: Array, block: int, *, causal: bool) -> Array:
    """log Σ exp(q̄_i · k / √H) over the keys of each block: float32 [N, R, n].

    Args:
      means: mean queries [R, N, H].
      k: [S, K, H].
      block: keys of a block; the last one may have fewer.
      causal: row i sees blocks 0 … i alone, the others are -inf.

    `jax.vmap` over it is one kernel over the whole batch. It has no derivative.
    """
    scaled = (means * (math.log2(math.e) / math.sqrt(k.shape[-1]))).astype(k.dtype)
    return _batchable(block, causal)(scaled[None], k[None])[0]


@functools.lru_cache(maxsize=16)
def _batchable(block: int, causal: bool) -> Callable[[Array, Array], Array]:
    """The kernel, whose batching rule makes a mapped axis a part of B."""

    @jax.custom_batching.custom_vmap
    def batched(queries: Array, k: Array) -> Array:
        from xsake.backends import hopper_scores

        return hopper_scores.scores(queries, k, block, causal=causal)

    @batched.def_vmap
    def wider(size: int, is_mapped: Any, queries: Array, k: Array) -> tuple[Array, bool]:
        folded = [
            (x if mapped else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[-3:])
            for x, mapped in zip((queries, k), is_mapped, strict=True)
        ]
        found = batched(*folded)
        return found.reshape(size, -1, *found.shape[1:]), True

    return batched
