"""The backward: chunks of kv blocks visit the row blocks that see them, by the transposed lists.

    p = exp(s - level), recomputed      dv += pᵀ d_out
    ds = p · (d_out vᵀ - delta)         dk += dsᵀ q       dq += ds k, scatter-added

On GPUs the order of a scatter-add varies. With `deterministic`, dq is therefore computed there in a
separate pass over row blocks, with two more products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake.backends import Sizes, accumulator, kv_head
from xsake.backends.cpu_exp import exp
from xsake.backends.products import logits, operand, product, scaled, sum_last
from xsake.backends.xla.bias import BiasBlocks
from xsake.backends.xla.chunks import Chunk, Visit, add, put, take, work_order, zeros
from xsake.backends.xla.settings import Settings
from xsake.block_mask import BlockMask


@functools.partial(jax.jit, static_argnums=0)
@jax.named_scope("xsake_backward")
def gradients(settings: Settings, saved: Any, cotangents: Any) -> Any:
    """(dq, dk, dv, dbias) from what the forward saved and the cotangents of its results."""
    q, k, v, bias, mask, out, logsumexp = saved
    d_out, d_logsumexp = cotangents
    sizes, dtype = Sizes.of(q, k, v), accumulator(q.dtype)

    # ds = p · (dp - delta); a gradient of the logsumexp only shifts delta.
    empty = logsumexp == -jnp.inf
    delta = sum_last(d_out.astype(dtype) * out) - d_logsumexp
    delta = jnp.where(empty, 0, delta)[..., None]
    # p = exp(s - level) is 0 for an empty query, and past the last one
    level = jnp.where(empty, jnp.inf, logsumexp)[..., None]
    biases = None if bias is None else BiasBlocks(bias, mask, sizes)
    given = Given(settings, sizes, q, k, v, d_out.astype(q.dtype), level, delta, mask, biases)
    dq, dk, dv, dbias = _visit_columns(given)
    if dq is None:
        dq = _dq_by_rows(given)
    d_bias = None if biases is None or dbias is None else biases.whole(dbias)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_bias


class QuerySide(NamedTuple):
    """What the backward reads of some queries, [R, Q, …] each."""

    q: Array
    d_out: Array
    level: Array
    delta: Array


class KeySide(NamedTuple):
    """What it reads of some keys, [R, S', …] each."""

    k: Array
    v: Array


@dataclasses.dataclass(frozen=True)
class Given:
    """What both passes of the backward read."""

    settings: Settings
    sizes: Sizes
    q: Array
    k: Array
    v: Array
    d_out: Array
    level: Array  # [B, T, N, 1]: p = exp(s - level)
    delta: Array  # [B, T, N, 1]: ds = p · (dp - delta)
    mask: BlockMask
    biases: BiasBlocks | None

    @property
    def dtype(self) -> Any:
        """The dtype of sums."""
        return accumulator(self.q.dtype)

    def query_side(self, b: Array, tokens: Array, n: Array) -> QuerySide:
        """Query tokens [R, Q] of head n; past T, p is 0."""
        q, d_out = (operand(take(x, b, tokens, n)) for x in (self.q, self.d_out))
        level = take(self.level, b, tokens, n, past=jnp.inf)
        return QuerySide(q, d_out, level, take(self.delta, b, tokens, n))

    def key_side(self, b: Array, tokens: Array, n: Array) -> KeySide:
        """Key tokens [R, S'] as query head n sees them."""
        head = kv_head(n, self.sizes)
        k, v = (operand(take(x, b, tokens, head)) for x in (self.k, self.v))
        return KeySide(k, v)

    def p_and_ds(
        self, visit: Visit, queries: QuerySide, keys: KeySide, scale: float
    ) -> tuple[Array, Array, Array]:
        """(p, ds, d_capped) of a visit, [R, Q, S'] each, 0 where nothing is seen.

        ds and d_capped are the gradients of the logits before and after the soft cap.
        """
        capped = logits(queries.q, keys.k, scale, self.settings.soft_cap, self.dtype)
        s = capped if self.biases is None else capped + self.biases.at(visit).astype(self.dtype)
        p = exp(s - queries.level)
        dp = product("rqh,rkh->rqk", queries.d_out, keys.v, self.dtype)
        ds = p * (dp - queries.delta)
        allowed = visit.allowed(self.mask)
        if allowed is not None:
            p, ds = jnp.where(allowed, p, 0), jnp.where(allowed, ds, 0)
        cap = self.settings.soft_cap
        return p, ds if cap is None else ds * (1 - (capped / cap) ** 2), ds


class Sums(NamedTuple):
    """What a pass over kv blocks adds to."""

    dq: Array | None  # None: it has a pass of its own
    dbias: Array | None
    dk: Array | None  # of one chunk; None before a first step outside the loop
    dv: Array | None


def _plus(total: Array | None, more: Array) -> Array:
    """total + more; a first step outside the loop has no total yet."""
    return more if total is None else total + more


def _no_sum(settings: Settings, shape: tuple[int, ...], dtype: Any) -> Array | None:
    """A sum before the first visit."""
    return jnp.zeros(shape, dtype) if settings.steps.one_loop else None


@jax.named_scope("dk_dv")
def _visit_columns(given: Given) -> tuple[Array | None, Array, Array, Array | None]:
    """(dq, dk, dv, dbias), float32; dq is None where it has a pass of its own."""
    settings, sizes, mask, dtype = given.settings, given.sizes, given.mask, given.dtype
    B, T, S, N, K, H, Hv = sizes
    bq, bk = mask.block
    columns, biases = mask.transpose(), given.biases
    (order,) = work_order(columns, sizes, settings.steps)

    def column_chunk(carry: Any, chunk: Chunk) -> tuple[Any, None]:
        dq, dbias, dk_done, dv_done = carry
        keys = given.key_side(chunk.b, chunk.tokens(bk), chunk.n)
        k_rows, scale = scaled(keys.k, settings.scale, dtype)
        keys = keys._replace(k=k_rows)

        def step(visit: Visit, sums: Sums) -> Sums:
            return _add_visit(given, visit, keys, scale, sums)

        dk, dv = (_no_sum(settings, (len(chunk.b), bk, size), dtype) for size in (H, Hv))
        sums = chunk.loop(columns, settings.steps, True, step, Sums(dq, dbias, dk, dv))
        some = (chunk.count > 0)[:, None, None]
        dk_done = put(dk_done, chunk, jnp.where(some, sums.dk * settings.scale, 0))
        return (
            sums.dq,
            sums.dbias,
            dk_done,
            put(dv_done, chunk, jnp.where(some, sums.dv, 0)),
        ), None

    dq = None if settings.steps.dq_by_rows else zeros(sizes, T, bq, H, dtype, given.q)
    dbias = None if biases is None else jnp.zeros_like(biases.padded, dtype)
    nothing: Any = dq, dbias, *(zeros(sizes, S, bk, size, dtype, given.q) for size in (H, Hv))
    (dq, dbias, *by_head), _ = lax.scan(column_chunk, nothing, order)
    # dk and dv of a kv head are the sums over its query heads
    dk, dv = (x[:, :S].reshape(B, S, K, N // K, -1).sum(3) for x in by_head)
    return None if dq is None else dq[:, :T], dk, dv, dbias


def _add_visit(given: Given, visit: Visit, keys: KeySide, scale: float, sums: Sums) -> Sums:
    """What the row blocks of one visit give to dq, dbias, dk and dv."""
    mask, dtype, biases = given.mask, given.dtype, given.biases
    bq, H = mask.block[0], given.sizes.H
    dq, dbias, dk, dv = sums
    queries = given.query_side(visit.b, visit.q_tokens(mask), visit.n)
    p, ds, ds_bias = given.p_and_ds(visit, queries, keys, scale)
    if biases is not None and dbias is not None:
        dbias = biases.add(dbias, visit, ds_bias)
    ds, p = ds.astype(queries.q.dtype), p.astype(queries.q.dtype)
    if dq is not None:
        dq_rows = product("rqk,rkh->rqh", ds, keys.k, dtype) * scale
        dq_rows = dq_rows.reshape(*visit.i.shape, bq, H)
        if visit.live is not None:
            dq_rows = jnp.where(visit.live[..., None, None], dq_rows, 0)
        dq = add(dq, visit.b, visit.i * bq, visit.n, dq_rows)
    dk = _plus(dk, product("rqk,rqh->rkh", ds, queries.q, dtype))
    return Sums(dq, dbias, dk, _plus(dv, product("rqk,rqh->rkh", p, queries.d_out, dtype)))


@jax.named_scope("dq")
def _dq_by_rows(given: Given) -> Array:
    """dq [B, T, N, H] in float32, each row block by the list that the forward visits."""
    settings, sizes, mask, dtype = given.settings, given.sizes, given.mask, given.dtype
    bq = mask.block[0]
    (order,) = work_order(mask, sizes, settings.steps)

    def rows(done: Array, chunk: Chunk) -> tuple[Array, None]:
        queries = given.query_side(chunk.b, chunk.tokens(bq), chunk.n)
        q_rows, scale = scaled(queries.q, settings.scale, dtype)
        queries = queries._replace(q=q_rows)

        def step(visit: Visit, dq: Array | None) -> Array:
            keys = given.key_side(visit.b, visit.k_tokens(mask), visit.n)
            _, ds, _ = given.p_and_ds(visit, queries, keys, scale)
            return _plus(dq, product("rqk,rkh->rqh", ds.astype(q_rows.dtype), keys.k, dtype))

        before = _no_sum(settings, (len(chunk.b), bq, sizes.H), dtype)
        dq = chunk.loop(mask, settings.steps, False, step, before)
        some = (chunk.count > 0)[:, None, None]
        return put(done, chunk, jnp.where(some, dq * settings.scale, 0)), None

    nothing = zeros(sizes, sizes.T, bq, sizes.H, dtype, given.q)
    return lax.scan(rows, nothing, order)[0][:, : sizes.T]
