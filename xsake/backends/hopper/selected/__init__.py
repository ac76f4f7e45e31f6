"""Attention over kv blocks that every token selects for itself, on Hopper GPUs (sm90).

    indices ─ lists.py ─ tiles by kv block ─┬─ parts.py ───── out, logsumexp ─┐
                                            └─ gradients.py ─ dk, dv, dq ─────┴─ merge.py

    blocks that the caller says every list has: finish.py computes them where it adds the parts

    q, compressed keys ─ importance.py ─ top.py ─ indices                      (choose.py)

A token's blocks are visited by different CTAs, and its parts are added at the end. The parts are
held for a chunk of tokens at a time, so that memory is linear in T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends import SelectedCall, unaliased
from xsake.backends.hopper import limits

LOG2E = math.log2(math.e)
BLOCK = 64  # keys of a kv block of the kernels; larger blocks are several of these
GROUPS = (2, 4, 8, 16, 32, 64)  # query heads of a kv head; others are padded with zeros
MAX_HEAD = 128
# Rows (tokens times heads of a group) of a kv head whose parts are computed together: fewer, and
# tiles are less full; more, and their queries do not stay in the L2 cache.
FORWARD_CHUNK, BACKWARD_CHUNK = 1 << 16, 1 << 17
MAX_PART_BYTES = 3 << 30  # of the parts of a chunk


def why_not(call: SelectedCall) -> str | None:
    """The first thing that keeps the kernels from running this call."""
    _, _, _, N, K, H, Hv = call.sizes
    if reason := why_not_arrays(call.q, N // K, max(H, Hv)):
        return reason
    if call.block % BLOCK:
        return f"takes blocks of a multiple of {BLOCK} tokens; these are {call.block}"
    if call.first is not None or call.last is not None:
        return (
            "takes one whole sequence in every batch row; these are packed into one or split over "
            "devices (packed ones can have a batch row each)"
        )
    if call.options.deterministic:
        return "adds dk and dv in any order; deterministic asks for one"
    return None


def why_not_arrays(q: Any, group: int, head_size: int) -> str | None:
    """The first thing about a query [B, T, N, H] that the kernels do not support."""
    if reason := _jax.why_no_hopper(limits.NEEDS_JAX):
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16; this is {q.dtype}"
    if head_size > MAX_HEAD:
        return f"takes heads of up to {MAX_HEAD}; these are {head_size}"
    if group > GROUPS[-1]:
        return f"takes up to {GROUPS[-1]} query heads for each kv head; these are {group}"
    if axes := _jax.varying_axes(q):
        return f"has no types for what varies over {axes[0]!r}; pass check_vma=False to shard_map"
    return None


@_jax.without_x64
@jax.jit
def forward(call: SelectedCall) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    from xsake.backends.hopper.selected import finish, merge, parts

    forced = call.forced if call.block == BLOCK else (0, 0)
    chunks = _Chunks(call, FORWARD_CHUNK, without=forced)
    q, k, v = chunks.rows(call.q), chunks.keys(call.k), chunks.keys(call.v)
    group = chunks.group

    def one(at: Array, begin: Array, slots: Array) -> tuple[Array, Array]:
        part, lse = parts.parts(q, k, v, chunks.tiles, at, scale=call.scale, **chunks.sizes)
        part = part.reshape(-1, group, part.shape[-1])
        own = jnp.where(slots[..., None] < 0, -jnp.inf, lse.reshape(-1, group)[slots])
        if not any(forced):
            total = jax.nn.logsumexp(own / LOG2E, axis=2)  # [chunk, K, g]
            base = jnp.where(total > -jnp.inf, total, 0.0)
            weights = jnp.exp2(own - base[:, :, None] * LOG2E)
            weights = jnp.transpose(weights, (1, 2, 0, 3)).reshape(*weights.shape[1:3], -1)
            return merge.merge(part, jnp.maximum(slots, 0), weights), total
        own = jnp.transpose(own, (1, 2, 0, 3)).reshape(*own.shape[1:3], -1)
        out, total = finish.finish(
            *(q, k, v, part, own, jnp.maximum(slots, 0), begin), forced=forced, scale=call.scale
        )
        return out, jnp.moveaxis(total.reshape(chunks.K, -1, group), 0, 1) / LOG2E

    out, total = chunks.map(one)
    return unaliased(chunks.tokens(out, call.sizes.Hv), chunks.tokens(total[..., None], 1)[..., 0])


@_jax.without_x64
@jax.jit
def backward(
    call: SelectedCall, out: Array, logsumexp: Array, d_out: Array, d_logsumexp: Array
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) from the results of `forward` and their cotangents."""
    from xsake.backends.hopper.selected import gradients, merge

    chunks = _Chunks(call, BACKWARD_CHUNK)
    _, _, S, _, _, H, Hv = call.sizes
    q, k, v = chunks.rows(call.q), chunks.keys(call.k), chunks.keys(call.v)
    d_rows = chunks.rows(d_out.astype(call.q.dtype))
    group, listed = chunks.group, chunks.tiles.rows
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1) - d_logsumexp
    lse, delta = (
        chunks.rows(x[..., None], pad_size=False)[..., 0][listed]
        for x in (logsumexp * LOG2E, delta)
    )
    # p = 2^(s - lse) is 0 for a slot without a token, and for a query that sees nothing.
    used = (chunks.tiles.limits > 0)[:, None] & (lse > -jnp.inf)
    lse, delta = (jnp.where(used, x, y).reshape(-1) for x, y in ((lse, jnp.inf), (delta, 0.0)))
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dk, dv = (jax.new_ref(_jax.own_copy(x, (q, k, v, d_rows, lse, delta))) for x in zeros)

    def one(at: Array, begin: Array, slots: Array) -> Array:
        part = gradients.parts(
            q, k, v, d_rows, lse, delta, chunks.tiles, at, dk, dv, scale=call.scale,
            **chunks.sizes,
        )  # fmt: skip
        weights = jnp.where(jnp.transpose(slots, (1, 2, 0)) < 0, 0.0, call.scale)
        weights = jnp.repeat(weights, group, axis=-1)
        part = part.reshape(-1, group, part.shape[-1])
        return merge.merge(part, jnp.maximum(slots, 0), weights)

    dq = chunks.tokens(chunks.map(one), H)
    d_keys = jax.freeze(dk)[:, :S, :, :H] * call.scale
    d_values = jax.freeze(dv)[:, :S, :, :Hv]
    return unaliased(dq, d_keys.astype(call.k.dtype), d_values.astype(call.v.dtype))


class _Chunks:
    """A call cut into chunks of tokens, with arrays as the kernels take them."""

    def __init__(self, call: SelectedCall, rows: int, without: tuple[int, int] = (0, 0)):
        from xsake.backends.hopper.selected import lists

        self.B, self.T, S, N, self.K, H, Hv = call.sizes
        self.heads = N // self.K  # of a kv head
        self.group = next(x for x in GROUPS if x >= self.heads)
        self.size = max(limits.padded_head_size(x) for x in (H, Hv))
        self.tokens_of_tile = lists.TILE_ROWS // self.group
        indices = of_kernel_blocks(call.indices, call.block)
        if any(without):
            indices = without_forced(indices, *without)
        n, self.padded_keys = indices.shape[-1], -(-S // BLOCK) * BLOCK
        part_bytes = n * self.K * self.group * self.size * call.q.dtype.itemsize  # of a token
        chunk = min(rows // self.group, MAX_PART_BYTES // part_bytes, self.T)
        self.chunk = max(1, -(-chunk // lists.TILE_ROWS)) * lists.TILE_ROWS
        kv_blocks = self.padded_keys // BLOCK
        self.tiles = lists.tiles_of(indices, kv_blocks, BLOCK, self.tokens_of_tile, self.chunk)
        most = self.K * (-(-self.chunk * n // self.tokens_of_tile) + kv_blocks)
        self.sizes = dict(segments=self.K, most_tiles=most)

    def rows(self, x: Array, pad_size: bool = True) -> Array:
        """[B, T, N, size] -> [B · T · K, g, size], with zeros for heads and elements not there."""
        x = x.reshape(-1, self.heads, x.shape[-1])
        size = self.size - x.shape[-1] if pad_size else 0
        return _padded(x, (0, self.group - self.heads, size))

    def keys(self, x: Array) -> Array:
        """[B, S, K, size] with zeros for keys and elements not there."""
        return _padded(x, (0, self.padded_keys - x.shape[1], 0, self.size - x.shape[-1]))

    def tokens(self, x: Array, size: int) -> Array:
        """[chunks of all batch rows, chunk, K, g, …] -> [B, T, N, size]."""
        x = x.reshape(self.B, -1, *x.shape[2:])[:, : self.T, :, : self.heads, :size]
        return x.reshape(self.B, self.T, -1, size)

    def map(self, one: Callable[[Array, Array, Array], Any]) -> Any:
        """one(first segment, begin, slots [chunk, K, n]) for every chunk, stacked.

        begin is (batch row, first token). Slots are counted from the chunk's first tile; -1:
        nothing was selected.
        """
        past = ((0, 0), (0, -self.T % self.chunk), (0, 0), (0, 0))
        slots = jnp.pad(self.tiles.slots, past, constant_values=-1)
        slots = slots.reshape(-1, self.chunk, *slots.shape[2:])
        number = jnp.arange(len(slots), dtype=jnp.int32)
        chunks = len(slots) // self.B

        def step(carry: None, xs: tuple[Array, Array]) -> tuple[None, Any]:
            number, slots = xs
            at = number * self.K
            begin = jnp.stack([number // chunks, number % chunks * self.chunk])
            start = self.tiles.starts[at] * self.tokens_of_tile
            return carry, one(at, begin, jnp.where(slots < 0, -1, slots - start))

        return lax.scan(step, None, (number, slots))[1]


def of_kernel_blocks(indices: Array, block: int) -> Array:
    """Indices [B, T, K, n] of blocks as those of the kernels' blocks; -1: nothing, or after t."""
    if block == BLOCK:
        return indices
    parts = block // BLOCK
    split = indices[..., None] * parts + jnp.arange(parts, dtype=jnp.int32)
    t = jnp.arange(indices.shape[1], dtype=jnp.int32)[:, None, None, None]
    split = jnp.where((indices[..., None] >= 0) & (split * BLOCK <= t), split, -1)
    return split.reshape(*indices.shape[:-1], -1)


def without_forced(indices: Array, initial: int, local: int) -> Array:
    """Ascending indices [B, T, K, n] without blocks that every list has: [B, T, K, fewer].

    The first `initial` columns are initial blocks; the last `local` columns are local ones or
    nothing.
    """
    t = jnp.arange(indices.shape[1], dtype=jnp.int32)[:, None, None]
    rest = indices[..., initial : indices.shape[-1] - local]
    rest = jnp.where(rest > t // BLOCK - local, -1, rest)
    return rest if rest.shape[-1] else jnp.full_like(indices[..., :1], -1)


def _padded(x: Array, after: tuple[int, ...]) -> Array:
    return jnp.pad(x, [(0, n) for n in after]) if any(after) else x
