"""Lists by kv block of the tokens that selected it, in tiles of 64 rows.

    indices [B, T, K, n]            what each token selected; -1: nothing
      │ sorted by (batch row, chunk of tokens, kv head, kv block), then by token
      ▼
    block 3   t0 t1 t2 t3 │ t4 t5 .. ..                     a tile holds the query heads of
    block 4   t0 t1 t2 ..                                            `tokens` tokens: 64 rows

A slot is a place of a token in a tile. A segment is all tiles of one batch row, chunk and kv head.
The multiprocessors work on one segment at a time and share its tiles evenly, so that its queries
stay in the L2 cache while block after block gathers some of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

TILE_ROWS = 64  # of one warpgroup


class Tiles(NamedTuple):
    """Tiles of gathered tokens; a slot without a token repeats the first one, with limit 0."""

    block: Array  # int32 [tiles]: (b · K + kv head) · kv blocks + kv block
    rows: Array  # int32 [tiles · tokens]: (b · T + t) · K + kv head
    limits: Array  # int32 [tiles · tokens]: how many keys of the block the token sees
    starts: Array  # int32 [segments + 1]: where the tiles of each segment begin
    slots: Array  # int32 [B, T, K, n]: the slot of every selection; -1: nothing was selected


def tiles_of(indices: Array, kv_blocks: int, block_size: int, tokens: int, chunk: int) -> Tiles:
    """The tiles of clean indices [B, T, K, n]: unique, causal, in range; -1 is nothing."""
    B, T, K, n = indices.shape
    chunks = -(-T // chunk)
    segments = B * chunks * K
    lists = segments * kv_blocks
    b, t, k = (
        jnp.arange(size, dtype=jnp.int32).reshape(shape)
        for size, shape in ((B, (B, 1, 1, 1)), (T, (1, T, 1, 1)), (K, (1, 1, K, 1)))
    )
    segment = (b * chunks + t // chunk) * K + k
    key = jnp.where(indices < 0, lists, segment * kv_blocks + indices).reshape(-1)
    if lists < 1 << 16:  # fewer passes over the keys
        key = key.astype(jnp.uint16)
    key, pair = jax.lax.sort_key_val(key, jnp.arange(key.size, dtype=jnp.int32))
    starts = _search(key, jnp.arange(lists + 1, dtype=key.dtype), "left")
    sizes = jnp.diff(starts)
    ends = jnp.cumsum(-(-sizes // tokens)).astype(jnp.int32)  # in tiles
    begins = ends + sizes // -tokens
    total = -(-key.size // tokens) + lists
    tile = jnp.arange(total, dtype=jnp.int32)
    at = jnp.minimum(_search(ends, tile, "right"), lists - 1)  # the list of every tile
    local = (tile - begins[at])[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)
    valid = (local < sizes[at][:, None]) & (tile < ends[-1])[:, None]
    source = pair[jnp.where(valid, starts[at][:, None] + local, 0)]
    row = source // n
    block = at % kv_blocks
    seen = row // K % T - block[:, None] * block_size + 1
    slot = jnp.arange(total * tokens, dtype=jnp.int32).reshape(valid.shape)
    slots = jnp.full(key.size, -1, jnp.int32)
    slots = slots.at[jnp.where(valid, source, key.size)].set(slot, mode="drop", unique_indices=True)
    head = at // kv_blocks
    head = head // (chunks * K) * K + head % K
    return Tiles(
        head * kv_blocks + block,
        jnp.where(valid, row, row[:, :1]).reshape(-1),
        jnp.where(valid, jnp.minimum(seen, block_size), 0).reshape(-1),
        jnp.concatenate([jnp.zeros(1, jnp.int32), ends[kv_blocks - 1 :: kv_blocks]]),
        slots.reshape(indices.shape),
    )


def _search(rising: Array, values: Array, side: str) -> Array:
    """`jnp.searchsorted` as one program, not a loop of programs."""
    found = jnp.searchsorted(rising, values, side=side, method="scan_unrolled")
    return found.astype(jnp.int32)
