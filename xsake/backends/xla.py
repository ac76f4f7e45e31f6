"""Plain JAX that visits live blocks only: any device, forward and backward, memory linear in T.

A row of blocks costs what it visits. Rows of all heads are sorted by how much they visit and taken
in chunks of some hundred query rows; a chunk loops to its longest row, nearly its shortest:

    rows (b, n, i), most blocks first        one chunk, step t while all blocks are full
    ┌─────────┐ chunk 0   9 9 9 8            q [R, block_q, H] ─┐
    ├─────────┤ chunk 1   8 8 7 7            k[list[t]]  ───────┴─ s ─ m, l, acc ← online softmax
    ├─────────┤ chunk 2   7 5 5 4            then the same with the rule, to the longest row
    └─────────┘

The backward pass does the same with the transposed lists: a chunk of kv blocks visits the row
blocks that see it, recomputes p from the logsumexp, keeps dk and dv, and adds dq where it belongs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends import Options, Sizes, accumulator, first_order_only, mask_place
from xsake.block_mask import BlockMask
from xsake.masks.rule import Leaf, Tokens


def why_not(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: BlockMask,
    *,
    soft_cap: float | None,
    options: Options,
) -> str | None:
    """Plain JAX runs everywhere; only a promise of bit-equal gradients is more than a GPU keeps."""
    if options.deterministic and _jax.platform() == "gpu":
        return (
            "adds dq by atomics on GPUs, which is not deterministic; options ask for deterministic"
        )
    return None


def forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: BlockMask,
    *,
    scale: float,
    soft_cap: float | None,
    options: Options,
) -> tuple[Array, Array]:
    """(out [B, T, N, Hv], logsumexp [B, T, N])."""
    settings = Settings(float(scale), soft_cap, options.xla_rows)
    return _attention(settings, q, k, v, bias, mask)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when the loop is compiled."""

    scale: float
    soft_cap: float | None
    rows: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings, q: Array, k: Array, v: Array, bias: Array | None, mask: BlockMask
) -> tuple[Array, Array]:
    out, logsumexp = _visit_rows(settings, q, k, v, bias, mask)
    return out.astype(q.dtype), logsumexp


def _attention_fwd(settings: Settings, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    run = first_order_only("xla", functools.partial(_visit_rows, settings))
    out, logsumexp = run(q, k, v, bias, mask)
    # the output is kept unrounded: delta is a difference of nearly equal numbers
    return (out.astype(q.dtype), logsumexp), (q, k, v, bias, mask, out, logsumexp)


def _attention_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    run = first_order_only("xla", functools.partial(_visit_columns, settings))
    dq, dk, dv, dbias = run(saved, cotangents)
    return dq, dk, dv, dbias, None


_attention.defvjp(_attention_fwd, _attention_bwd)


# ---------------------------------------------------------------------------------------- geometry


def _take(
    x: Array, b: Array, first: Array, n: Array, block: int, past: float | None = None
) -> Array:
    """x[b, first : first + block, n] for every row, [R, block, D], from x [B, L, N, D].

    Past the end: the last token again, or the number `past`.
    """
    at = b[:, None], first[:, None] + jnp.arange(block), n[:, None]
    return x.at[at].get(mode="clip") if past is None else x.at[at].get(mode="fill", fill_value=past)


_WINDOWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0, 2), scatter_dims_to_operand_dims=(0, 1, 2)
)


def _add(x: Array, b: Array, first: Array, n: Array, blocks: Array) -> Array:
    """Adds blocks [R, block, D] to x[b, first : first + block, n], in place inside a loop.

    The length of x [B, L, N, D] is a multiple of the block.
    """
    at = jnp.stack([b, first, n], axis=-1)
    return lax.scatter_add(
        x, at, blocks.astype(x.dtype), _WINDOWS, mode=lax.GatherScatterMode.FILL_OR_DROP
    )


def _in_order(x: Array, went: Array, sizes: Sizes, length: int) -> Array:
    """Blocks in the order they were worked on, [chunks, R, block, D] -> [B, length, N, D]."""
    # gathered by token, so that the result is written once, where it belongs
    block = jnp.moveaxis(went.reshape(sizes.B, sizes.N, -1), 1, 2)[:, :, None]
    tokens = x.reshape(-1, *x.shape[2:])[block, jnp.arange(x.shape[2])[:, None]]
    return tokens.reshape(sizes.B, -1, sizes.N, x.shape[-1])[:, :length]


def _work_order(mask: BlockMask, sizes: Sizes, rows: int) -> tuple[Chunk, Array]:
    """All rows of blocks, most visits first, in chunks of about `rows` tokens; where each went."""
    per_chunk = max(1, rows // mask.block[0])
    B, N, blocks = sizes.B, sizes.N, mask.kv_count.shape[2]
    row = jnp.arange(B * N * blocks, dtype=jnp.int32)
    b, n, i = row // (N * blocks), row // blocks % N, row % blocks
    place = mask_place(mask, sizes, b, n) * blocks + i
    count, full = mask.kv_count.reshape(-1)[place], mask.full_count.reshape(-1)[place]
    order = jnp.lexsort((full, count))[::-1].astype(jnp.int32)
    went = jnp.zeros_like(order).at[order].set(row)
    padded = jnp.pad(order, (0, -order.shape[0] % per_chunk), constant_values=-1)
    return Chunk.of(mask, sizes, padded.reshape(-1, per_chunk)), went


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """R rows of blocks that are worked on together, int32 [R] each; all chunks: [chunks, R]."""

    b: Leaf
    n: Leaf
    i: Leaf
    first: Leaf  # where the row's list begins in the flat index
    count: Leaf
    full: Leaf

    @classmethod
    def of(cls, mask: BlockMask, sizes: Sizes, row: Array) -> Chunk:
        """Looks the rows up; -1 stands for a row that visits nothing."""
        blocks, entries = mask.kv_count.shape[2], mask.kv_index.shape[2]
        real, row = row >= 0, jnp.maximum(row, 0)
        b, n, i = row // (sizes.N * blocks), row // blocks % sizes.N, row % blocks
        place = mask_place(mask, sizes, b, n)
        at = place * blocks + i
        count = jnp.where(real, mask.kv_count.reshape(-1)[at], 0)
        full = jnp.where(real, mask.full_count.reshape(-1)[at], 0)
        return cls(b, n, i, place * entries + mask.kv_start.reshape(-1)[at], count, full)

    def block_at(self, mask: BlockMask, t: Array) -> Array:
        """The t-th block of every row; past its end a row repeats its last, never a foreign one."""
        t = jnp.clip(t, 0, jnp.maximum(self.count - 1, 0))
        return mask.kv_index.reshape(-1)[self.first + t]

    def loop(self, visit: Callable[..., Any], state: Any) -> Any:
        """Runs visit(t, needs_rule, state) over every block of the longest row.

        `needs_rule` is None while the block is full for every row, else bool [R].
        """
        full = lax.fori_loop(0, self.full.min(), lambda t, s: visit(t, None, s), state)
        return lax.fori_loop(
            self.full.min(), self.count.max(), lambda t, s: visit(t, t >= self.full, s), full
        )


def _allowed(mask: BlockMask, needs_rule: Array, b: Array, n: Array, i: Array, j: Array) -> Array:
    """Inside blocks (i, j): which token pairs, bool [R, block_q, block_k] by broadcasting."""
    (bq, bk), S = mask.block, mask.shape[1]
    q = (i[:, None] * bq + jnp.arange(bq))[:, :, None]
    k = (j[:, None] * bk + jnp.arange(bk))[:, None, :]
    allowed = ~needs_rule[:, None, None]
    if mask.rule is None:
        return allowed | (k < S)
    by_rule = mask.rule.allows(Tokens.at(b[:, None, None], n[:, None, None], q, k))
    return allowed | (by_rule if S % bk == 0 else by_rule & (k < S))


class BiasTiles:
    """A bias cut into blocks, so that a visit reads (and adds to) whole tiles."""

    def __init__(self, bias: Array, mask: BlockMask, dtype: Any) -> None:
        self.shape, self.block = bias.shape, mask.block
        cuts = [
            (d, blk) if d > 1 else (1, 1) for d, blk in zip(bias.shape[2:], mask.block, strict=True)
        ]
        (T, self.bq), (S, self.bk) = cuts
        padded = jnp.pad(bias, ((0, 0), (0, 0), (0, -T % self.bq), (0, -S % self.bk))).astype(dtype)
        nq, nk = padded.shape[2] // self.bq, padded.shape[3] // self.bk
        self.counts = (*bias.shape[:2], nq, nk)
        tiles = padded.reshape(*bias.shape[:2], nq, self.bq, nk, self.bk)
        self.tiles = jnp.moveaxis(tiles, 3, 4).reshape(-1, self.bq, self.bk)

    def place(self, *at: Array) -> Array:
        """The tile's number for (b, n, i, j); axes of size 1 are shared."""
        flat = jnp.zeros_like(at[0])
        for index, count in zip(at, self.counts, strict=True):
            flat = flat * count + (index if count > 1 else 0)
        return flat

    def reduce(self, ds: Array) -> Array:
        """A tile of logit gradients [R, block_q, block_k] summed over the axes that bias shares."""
        if self.bq == 1:
            ds = ds.sum(1, keepdims=True)
        return ds.sum(2, keepdims=True) if self.bk == 1 else ds

    def whole(self, tiles: Array) -> Array:
        """Tiles put together again to bias's shape."""
        B, N, nq, nk = self.counts
        x = jnp.moveaxis(tiles.reshape(B, N, nq, nk, self.bq, self.bk), 4, 3)
        x = x.reshape(B, N, nq * self.bq, nk * self.bk)
        return x[:, :, : self.shape[2], : self.shape[3]]


def _operand(x: Array) -> Array:
    """What products are fed: CPUs have no fast half-precision product, so they get float32."""
    return x.astype(jnp.float32) if _jax.platform() == "cpu" and x.dtype.itemsize < 4 else x


def _product(spec: str, a: Array, b: Array, dtype: Any) -> Array:
    """A batched product of blocks, summed in `dtype`."""
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=dtype)


def _scaled(x: Array, scale: float, dtype: Any) -> tuple[Array, float]:
    """(x, scale) with the scale moved into x where that loses nothing, so (scale · x, 1)."""
    return (x * scale, 1.0) if x.dtype == dtype else (x, scale)


def _logits(settings: Settings, q: Array, k: Array, scale: float, dtype: Any) -> Array:
    s = _product("rqh,rkh->rqk", q, k, dtype) * scale
    return s if settings.soft_cap is None else settings.soft_cap * jnp.tanh(s / settings.soft_cap)


# ----------------------------------------------------------------------------------------- forward


@functools.partial(jax.jit, static_argnums=0)
def _visit_rows(
    settings: Settings, q: Array, k: Array, v: Array, bias: Array | None, mask: BlockMask
) -> tuple[Array, Array]:
    sizes, dtype = Sizes.of(q, k, v), accumulator(q.dtype)
    B, T, _, N, K, _, Hv = sizes
    bq, bk = mask.block
    tiles = None if bias is None else BiasTiles(bias, mask, dtype)
    order, went = _work_order(mask, sizes, settings.rows)

    def rows(chunk: Chunk) -> tuple[Array, Array]:
        b, n, i = chunk.b, chunk.n, chunk.i
        q_rows, scale = _scaled(_operand(_take(q, b, i * bq, n, bq)), settings.scale, dtype)
        head = n * K // N

        def visit(t: Array, needs_rule: Array | None, state: Any) -> Any:
            m, l, acc = state  # running maximum, running sum, unnormalised output
            j = chunk.block_at(mask, t)
            s = _logits(settings, q_rows, _operand(_take(k, b, j * bk, head, bk)), scale, dtype)
            if tiles is not None:
                s = s + tiles.tiles[tiles.place(b, n, i, j)]
            if needs_rule is not None:
                s = jnp.where(_allowed(mask, needs_rule, b, n, i, j), s, -jnp.inf)
            # A row that has ended keeps its maximum and gets p = exp(s - inf) = 0. One that has
            # seen nothing yet has no maximum: 0 in its place, and again p = 0.
            live = (t < chunk.count)[:, None]
            m_new = jnp.where(live, jnp.maximum(m, s.max(-1)), m)
            level = jnp.where(live, jnp.where(m_new == -jnp.inf, 0, m_new), jnp.inf)
            shrink = jnp.where(live, jnp.exp(m - level), 1)  # rescales sums under the old maximum
            p = jnp.exp(s - level[..., None])
            v_rows = _operand(_take(v, b, j * bk, head, bk))
            pv = _product("rqk,rkh->rqh", p.astype(v_rows.dtype), v_rows, dtype)
            return m_new, l * shrink + p.sum(-1), acc * shrink[..., None] + pv

        R = b.shape[0]
        m = jnp.full((R, bq), -jnp.inf, dtype)
        start = m, jnp.zeros((R, bq), dtype), jnp.zeros((R, bq, Hv), dtype)
        m, l, acc = chunk.loop(visit, start)
        # l is 0 where nothing was seen; a row without blocks was fed blocks that are not its own
        seen = (l != 0) & (chunk.count > 0)[:, None]
        out = jnp.where(seen[..., None], acc / jnp.where(seen, l, 1)[..., None], 0)
        lse = jnp.where(seen, m + jnp.log(jnp.where(seen, l, 1)), -jnp.inf)
        return out, lse[..., None]

    out, lse = (_in_order(x, went, sizes, T) for x in lax.map(rows, order))
    return out, lse[..., 0]


# ---------------------------------------------------------------------------------------- backward


@functools.partial(jax.jit, static_argnums=0)
def _visit_columns(settings: Settings, saved: Any, cotangents: Any) -> Any:
    q, k, v, bias, mask, out, logsumexp = saved
    d_out, d_logsumexp = cotangents
    sizes, dtype = Sizes.of(q, k, v), accumulator(q.dtype)
    B, T, S, N, K, H, Hv = sizes
    bq, bk = mask.block
    columns = mask.transpose()

    # ds = p · (dp - delta); a gradient of the logsumexp only shifts delta.
    empty = logsumexp == -jnp.inf
    # (a sum over a short axis, written as a product: XLA's own reduction is far slower on CPUs)
    delta = (d_out.astype(dtype) * out) @ jnp.ones(Hv, dtype) - d_logsumexp
    delta = jnp.where(empty, 0, delta)[..., None]
    # p = exp(s - level) is 0 in an empty row, and past the last one
    level = jnp.where(empty, jnp.inf, logsumexp)[..., None]
    d_out = d_out.astype(q.dtype)
    tiles = None if bias is None else BiasTiles(bias, mask, dtype)
    order, went = _work_order(columns, sizes, settings.rows)

    def column_chunk(carry: Any, chunk: Chunk) -> tuple[Any, Any]:
        b, n, j = chunk.b, chunk.n, chunk.i
        head = n * K // N
        k_rows, v_rows = (_operand(_take(x, b, j * bk, head, bk)) for x in (k, v))
        k_rows, scale = _scaled(k_rows, settings.scale, dtype)

        def visit(t: Array, needs_rule: Array | None, state: Any) -> Any:
            dq, dbias, dk, dv = state
            i = chunk.block_at(columns, t)
            at = b, i * bq, n
            q_rows, do_rows = (_operand(_take(x, *at, bq)) for x in (q, d_out))
            capped = _logits(settings, q_rows, k_rows, scale, dtype)
            s = capped if tiles is None else capped + tiles.tiles[tiles.place(b, n, i, j)]
            live = (t < chunk.count)[:, None, None]
            ended = jnp.where(live, _take(level, *at, bq, past=jnp.inf), jnp.inf)
            p = jnp.exp(s - ended)
            ds = p * (_product("rqh,rkh->rqk", do_rows, v_rows, dtype) - _take(delta, *at, bq))
            if needs_rule is not None:
                allowed = _allowed(mask, needs_rule, b, n, i, j)
                p, ds = jnp.where(allowed, p, 0), jnp.where(allowed, ds, 0)
            if tiles is not None:
                shares = jnp.where(live, tiles.reduce(ds), 0)
                dbias = dbias.at[tiles.place(b, n, i, j)].add(shares)
            if settings.soft_cap is not None:
                ds = ds * (1 - (capped / settings.soft_cap) ** 2)
            ds, p = ds.astype(q_rows.dtype), p.astype(q_rows.dtype)
            dq_rows = _product("rqk,rkh->rqh", ds, k_rows, dtype) * scale
            dq = _add(dq, *at, jnp.where(live, dq_rows, 0))
            dk = dk + _product("rqk,rqh->rkh", ds, q_rows, dtype)
            return dq, dbias, dk, dv + _product("rqk,rqh->rkh", p, do_rows, dtype)

        R = b.shape[0]
        zeros = jnp.zeros((R, bk, H), dtype), jnp.zeros((R, bk, Hv), dtype)
        dq, dbias, dk, dv = chunk.loop(visit, (*carry, *zeros))
        some = (chunk.count > 0)[:, None, None]
        return (dq, dbias), (jnp.where(some, dk * settings.scale, 0), jnp.where(some, dv, 0))

    dq = jnp.zeros((B, T + -T % bq, N, H), dtype)
    dbias: Any = None if tiles is None else jnp.zeros_like(tiles.tiles)
    (dq, dbias), columns_done = lax.scan(column_chunk, (dq, dbias), order)
    # what the query heads of a group gave to their kv head
    dk, dv = (
        _in_order(x, went, sizes, S).reshape(B, S, K, N // K, -1).sum(3) for x in columns_done
    )
    d_bias = None if tiles is None else tiles.whole(dbias).astype(bias.dtype)
    return dq[:, :T].astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_bias
