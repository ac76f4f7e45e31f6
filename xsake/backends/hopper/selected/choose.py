"""NSA's choice of blocks on Hopper (sm90): importance.py and top.py, by chunks of tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends.hopper import limits
from xsake.backends.hopper.selected import BLOCK, LOG2E, why_not_arrays

GROUP = 16  # query heads that the kernel sums at a time; others are padded with zeros
STRIDE, LENGTH = 16, 32  # of compressed keys, in tokens
MAX_COUNT = 64  # blocks of a token: a thread holds them in registers
CHUNK = 8192  # tokens whose sums are held at a time
LANES = 128  # tokens of a CTA of top.py


def why_not(
    query: Any, keys: Any, *, block: int, pooled_block: int, stride: int, num_selected: int
) -> str | None:
    """The first thing that keeps the kernels from choosing blocks of this kind."""
    H, group = query.shape[-1], query.shape[2] // keys.shape[2]
    if reason := why_not_arrays(query, group, H):
        return reason
    if keys.dtype != query.dtype:
        return f"takes queries and keys of one type; these are {query.dtype} and {keys.dtype}"
    if (block, pooled_block, stride) != (BLOCK, LENGTH, STRIDE):
        return (
            f"takes blocks of {BLOCK} and pooled blocks of {LENGTH} every {STRIDE} tokens; these "
            f"are {block}, {pooled_block} and {stride}"
        )
    if group > GROUP:
        return f"takes up to {GROUP} query heads for each kv head; these are {group}"
    if num_selected > MAX_COUNT:
        return f"takes up to {MAX_COUNT} selected blocks; these are {num_selected}"
    return None


@_jax.without_x64
def choose(
    query: Array,
    keys: Array,
    logsumexp: Array,
    *,
    scale: float,
    num_selected: int,
    initial: int,
    local: int,
) -> Array:
    """int32 [B, T, K, num_selected], ascending, then -1.

    query [B, T, N, H], compressed keys [B, C, K, H], and the logsumexp [B, T, N] of the attention
    to them.
    """
    from xsake.backends.hopper.selected import importance, top

    B, T, N, H = query.shape
    _, C, K, _ = keys.shape
    group = N // K
    size = limits.padded_head_size(H)
    chunk = min(CHUNK, -(-T // LANES) * LANES)
    chunks = -(-T // chunk)
    rows = jnp.pad(query.reshape(B * T * K, group, H), ((0, 0), (0, GROUP - group), (0, size - H)))
    multiple = importance.KEYS
    padded = max(multiple, -(-C // multiple) * multiple)
    keys = jnp.pad(keys, ((0, 0), (0, padded - C), (0, 0), (0, size - H)))
    lse = jnp.where(logsumexp > -jnp.inf, logsumexp * LOG2E, jnp.inf).reshape(B, T, K, group)
    lse = jnp.pad(
        jnp.moveaxis(lse, 2, 1),
        ((0, 0), (0, 0), (0, chunks * chunk - T), (0, GROUP - group)),
        constant_values=jnp.inf,
    ).reshape(B * K, -1)

    def one(first: Array) -> Any:
        sums = importance.sums(rows, keys, lse, first, length=chunk, scale=scale)
        return top.top(
            sums, first, block_size=BLOCK, count=num_selected, initial=initial, local=local
        )

    found = lax.map(one, jnp.arange(chunks, dtype=jnp.int32) * chunk)  # [chunks, B, K, chunk, n]
    found = jnp.transpose(found, (1, 0, 3, 2, 4)).reshape(B, chunks * chunk, K, num_selected)
    return lax.stop_gradient(found[:, :T])
