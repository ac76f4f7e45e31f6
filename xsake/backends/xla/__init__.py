"""Plain JAX that visits live blocks only: any device, forward and backward, memory linear in T.

A row of blocks costs what it visits. Rows of all heads are sorted by how much they visit and taken
in chunks; a chunk loops to its longest row, nearly its shortest:

    rows (b, i, n), most blocks first        one chunk: the last W blocks with the rule, then
    ┌─────────┐ chunk 0   9 9 9 8            q [R, block_q, H] ─┐
    ├─────────┤ chunk 1   8 8 7 7            k[next W blocks] ──┴─ s ─ m, l, acc ← online softmax
    ├─────────┤ chunk 2   7 5 5 4            while all blocks are full; then to the longest row
    └─────────┘

The backward pass does the same with the transposed lists: a chunk of kv blocks visits the row
blocks that see it, recomputes p from the logsumexp, keeps dk and dv, and adds dq where it belongs;
or, where adding is not repeatable, dq has a pass of its own by rows.

Where XLA would run a chunk's products on one core, the forward goes by single visits (xla_chains).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake import _jax
from xsake.backends import Options, Sizes, accumulator, first_order_only
from xsake.backends.xla import cpu_jax_0_10 as xla_chains
from xsake.backends.xla.chunks import (
    BiasBlocks,
    Chunk,
    Steps,
    Visit,
    add,
    has_own_bias,
    put,
    take,
    work_order,
    zeros,
)
from xsake.backends.xla.cpu_exp import exp
from xsake.backends.xla.cpu_jax_0_10 import Turn, block_at, row_blocks, still_read, whole_blocks
from xsake.block_mask import BlockMask


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
    if options.deterministic and _jax.platform() == "gpu" and bias is not None:
        sizes = Sizes.of(q, k, v)
        if not has_own_bias(bias, sizes):
            return (
                f"adds the gradient of a bias {list(bias.shape)} by atomics on GPUs, which is not "
                "deterministic; options ask for deterministic, which needs a bias of all axes "
                f"{[sizes.B, sizes.N, sizes.T, sizes.S]}"
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
    steps = options.xla or Steps.of_device(_jax.platform(), options.deterministic, mask.block)
    settings = Settings(float(scale), soft_cap, steps)
    return _attention(settings, q, k, v, bias, mask)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when the loop is compiled."""

    scale: float
    soft_cap: float | None
    steps: Steps


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: Settings, q: Array, k: Array, v: Array, bias: Array | None, mask: BlockMask
) -> tuple[Array, Array]:
    out, logsumexp = _output(settings, q, k, v, bias, mask)
    return out.astype(q.dtype), logsumexp


def _attention_fwd(settings: Settings, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    run = first_order_only("xla", functools.partial(_output, settings))
    out, logsumexp = run(q, k, v, bias, mask)
    # the output is kept unrounded: delta is a difference of nearly equal numbers
    return (out.astype(q.dtype), logsumexp), (q, k, v, bias, mask, out, logsumexp)


def _attention_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    run = first_order_only("xla", functools.partial(_gradients, settings))
    dq, dk, dv, dbias = run(saved, cotangents)
    return dq, dk, dv, dbias, None


_attention.defvjp(_attention_fwd, _attention_bwd)


# ---------------------------------------------------------------------------------------- products


def _operand(x: Array) -> Array:
    """What products are fed: CPUs have no fast half-precision product, so they get float32."""
    return x.astype(jnp.float32) if _jax.platform() == "cpu" and x.dtype.itemsize < 4 else x


def _product(spec: str, a: Array, b: Array, dtype: Any) -> Array:
    """A batched product of blocks, summed in `dtype`; float32 is not rounded to less by a GPU."""
    exact = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else None
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=dtype, precision=exact)


def _sum_of_each(x: Array) -> Array:
    """Sums over the last axis, a short one."""
    if _jax.platform() != "cpu":
        return x.sum(-1)
    return x @ jnp.ones(x.shape[-1], x.dtype)  # XLA's own reduction is far slower on CPUs


def _scaled(x: Array, scale: float, dtype: Any) -> tuple[Array, float]:
    """(x, scale) with the scale moved into x where that loses nothing, so (scale · x, 1)."""
    return (x * scale, 1.0) if x.dtype == dtype else (x, scale)


def _logits(settings: Settings, q: Array, k: Array, scale: float, dtype: Any) -> Array:
    s = _product("...qh,...kh->...qk", q, k, dtype) * scale
    return s if settings.soft_cap is None else settings.soft_cap * jnp.tanh(s / settings.soft_cap)


# ----------------------------------------------------------------------------------------- forward


class Online(NamedTuple):
    """What rows of queries have met so far: R rows of blocks, or one without that axis."""

    m: Array  # the largest logit, [R, block_q]
    l: Array  # the sum of exp(s - m)
    acc: Array  # the same times values, [R, block_q, Hv]

    def result(self) -> tuple[Array, Array]:
        """Output and logsumexp; 0 and -inf where nothing was met."""
        seen = self.l != 0  # acc may be anything elsewhere: it was fed blocks that are not its own
        l = jnp.where(seen, self.l, 1)
        out = jnp.where(seen[..., None], self.acc / l[..., None], 0)
        return out, jnp.where(seen, self.m + jnp.log(l), -jnp.inf)


def _meet(before: Online | None, s: Array, v_rows: Array) -> tuple[Online, Any]:
    """What rows have after blocks with logits s and these values; and what was made on the way."""
    m_new = s.max(-1) if before is None else jnp.maximum(before.m, s.max(-1))
    # one that has seen nothing yet has no maximum: 0 in its place, and p = exp(-inf) = 0
    level = jnp.where(m_new == -jnp.inf, 0, m_new)
    p = exp(s - level[..., None])
    pv = _product("...qk,...kh->...qh", p.astype(v_rows.dtype), v_rows, s.dtype)
    if before is None:
        return Online(m_new, _sum_of_each(p), pv), (p, pv)
    shrink = jnp.exp(before.m - level)  # rescales what was summed under the old maximum
    l = before.l * shrink + _sum_of_each(p)
    return Online(m_new, l, before.acc * shrink[..., None] + pv), (p, pv)


def _masked(s: Array, visit: Visit, mask: BlockMask, biases: BiasBlocks | None) -> Array:
    """The logits of a visit with bias, -inf where the rule forbids."""
    if biases is not None:
        s = s + biases.at(visit).astype(s.dtype)
    allowed = visit.allowed(mask)
    return s if allowed is None else jnp.where(allowed, s, -jnp.inf)


@functools.partial(jax.jit, static_argnums=0)
def _output(
    settings: Settings, q: Array, k: Array, v: Array, bias: Array | None, mask: BlockMask
) -> tuple[Array, Array]:
    """(out, logsumexp), not rounded to q's dtype."""
    sizes = Sizes.of(q, k, v)
    biases = None if bias is None else BiasBlocks(bias, mask, sizes)
    in_chains = xla_chains.fit(mask, sizes, settings.steps.chains)
    walk = _visit_chains if in_chains else _visit_rows
    return walk(settings, sizes, q, k, v, biases, mask)


def _visit_rows(
    settings: Settings,
    sizes: Sizes,
    q: Array,
    k: Array,
    v: Array,
    biases: BiasBlocks | None,
    mask: BlockMask,
) -> tuple[Array, Array]:
    """Chunks of rows of blocks, each with its own loop."""
    _, T, _, N, K, _, Hv = sizes
    bq, dtype, steps = mask.block[0], accumulator(q.dtype), settings.steps
    order = work_order(mask, sizes, steps.rows, steps.side_by_side)

    def rows(chunk: Chunk) -> tuple[Array, Array]:
        q_rows = _operand(take(q, chunk.b, chunk.tokens(bq), chunk.n))
        q_rows, scale = _scaled(q_rows, settings.scale, dtype)
        head = chunk.n * K // N

        def step(visit: Visit, state: Online | None) -> Online:
            k_rows, v_rows = (
                _operand(take(x, visit.b, visit.k_tokens(mask), head)) for x in (k, v)
            )
            s = _logits(settings, q_rows, k_rows, scale, dtype)
            return _meet(state, _masked(s, visit, mask, biases), v_rows)[0]

        out, lse = chunk.loop(mask, steps.width(mask), False, step, None).result()
        return out, lse[..., None]

    def put_rows(done: tuple[Array, ...], chunks: list[Chunk]) -> tuple[tuple[Array, ...], None]:
        for chunk, made in zip(chunks, [rows(chunk) for chunk in chunks], strict=True):
            done = tuple(put(x, chunk, blocks) for x, blocks in zip(done, made, strict=True))
        return done, None

    nothing = tuple(zeros(sizes, T, bq, size, dtype) for size in (Hv, 1))
    (out, lse), _ = lax.scan(put_rows, nothing, order)
    return out[:, :T], lse[:, :T, :, 0]


def _visit_chains(
    settings: Settings,
    sizes: Sizes,
    q: Array,
    k: Array,
    v: Array,
    biases: BiasBlocks | None,
    mask: BlockMask,
) -> tuple[Array, Array]:
    """Single visits, as many at once as there are chains, each with its own products."""
    B, T, _, N, K, _, Hv = sizes
    (bq, bk), dtype, chains = mask.block, accumulator(q.dtype), settings.steps.chains
    q, scale = _scaled(whole_blocks(_operand(q), bq), settings.scale, dtype)
    k, v = (whole_blocks(_operand(x), bk) for x in (k, v))

    def step(turn: Turn, rows: Online) -> tuple[Online, Any]:
        before = Online(*(x[turn.row] for x in rows))
        met, all_made = [], []
        for c in range(chains):
            b, n, i, j = (x[c] for x in (turn.b, turn.n, turn.i, turn.j))
            q_rows = block_at(q, b, i, n, bq)
            k_rows, v_rows = (block_at(x, b, j, n * K // N, bk) for x in (k, v))
            s = _logits(settings, q_rows, k_rows, scale, dtype)
            masked = _masked(s[None], turn.of_chain(c), mask, biases)[0]
            after, made = _meet(Online(*(x[c] for x in before)), masked, v_rows)
            met.append(after)
            if turn.needs_rule or biases is not None:  # otherwise it is s
                made = masked, *made
            all_made.append((q_rows, k_rows, v_rows, s, *made))
        after = Online(*map(jnp.stack, zip(*met, strict=True)))
        rows = Online(*(x.at[turn.row].set(y) for x, y in zip(rows, after, strict=True)))
        return rows, all_made

    some = row_blocks(mask, sizes) + 1  # the last one is nobody's
    nothing = Online(
        jnp.full((some, bq), -jnp.inf, dtype),
        jnp.zeros((some, bq), dtype),
        jnp.zeros((some, bq, Hv), dtype),
    )
    rows, made = xla_chains.loop(mask, sizes, chains, step, nothing)
    out, lse = rows._replace(l=still_read(rows.l, made)).result()
    blocks = mask.kv_count.shape[2]

    def by_token(x: Array) -> Array:
        x = x[:-1].reshape(B, N, blocks, bq, -1).transpose(0, 2, 3, 1, 4)
        return x.reshape(B, blocks * bq, N, -1)[:, :T]

    return by_token(out), by_token(lse)[..., 0]


# ---------------------------------------------------------------------------------------- backward


@functools.partial(jax.jit, static_argnums=0)
def _gradients(settings: Settings, saved: Any, cotangents: Any) -> Any:
    """(dq, dk, dv, dbias)."""
    q, k, v, bias, mask, out, logsumexp = saved
    d_out, d_logsumexp = cotangents
    sizes, dtype = Sizes.of(q, k, v), accumulator(q.dtype)

    # ds = p · (dp - delta); a gradient of the logsumexp only shifts delta.
    empty = logsumexp == -jnp.inf
    delta = _sum_of_each(d_out.astype(dtype) * out) - d_logsumexp
    delta = jnp.where(empty, 0, delta)[..., None]
    # p = exp(s - level) is 0 in an empty row, and past the last one
    level = jnp.where(empty, jnp.inf, logsumexp)[..., None]
    biases = None if bias is None else BiasBlocks(bias, mask, sizes)
    given = Given(settings, sizes, q, k, v, d_out.astype(q.dtype), level, delta, mask, biases)
    dq, dk, dv, dbias = _visit_columns(given)
    if dq is None:
        dq = _visit_rows_again(given)
    d_bias = None if biases is None or dbias is None else biases.whole(dbias)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_bias


def _plus(total: Array | None, more: Array) -> Array:
    """The first step has no total yet."""
    return more if total is None else total + more


@dataclasses.dataclass(frozen=True)
class Given:
    """What both ways through the backward pass read."""

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
        """What sums are kept in."""
        return accumulator(self.q.dtype)

    def q_side(self, b: Array, tokens: Array, n: Array) -> tuple[Array, Array, Array, Array]:
        """(q, d_out, level, delta) of query tokens [R, Q]; past T, p is 0."""
        q, d_out = (_operand(take(x, b, tokens, n)) for x in (self.q, self.d_out))
        level = take(self.level, b, tokens, n, past=jnp.inf)
        return q, d_out, level, take(self.delta, b, tokens, n)

    def k_side(self, b: Array, tokens: Array, n: Array) -> tuple[Array, Array]:
        """(k, v) of key tokens [R, S'] as query head n sees them."""
        head = n * self.sizes.K // self.sizes.N
        k, v = (_operand(take(x, b, tokens, head)) for x in (self.k, self.v))
        return k, v

    def p_and_ds(
        self, visit: Visit, q_side: Any, k_side: Any, scale: float
    ) -> tuple[Array, Array, Array]:
        """(p, ds, ds before the soft cap) of a visit, [R, Q, S'], 0 where nothing is seen."""
        (q, d_out, level, delta), (k, v) = q_side, k_side
        capped = _logits(self.settings, q, k, scale, self.dtype)
        s = capped if self.biases is None else capped + self.biases.at(visit).astype(self.dtype)
        p = exp(s - level)
        ds = p * (_product("rqh,rkh->rqk", d_out, v, self.dtype) - delta)
        allowed = visit.allowed(self.mask)
        if allowed is not None:
            p, ds = jnp.where(allowed, p, 0), jnp.where(allowed, ds, 0)
        cap = self.settings.soft_cap
        return p, ds if cap is None else ds * (1 - (capped / cap) ** 2), ds


def _visit_columns(given: Given) -> tuple[Array | None, Array, Array, Array | None]:
    """(dq, dk, dv, dbias), float32; dq is None where it is taken by rows."""
    settings, sizes, mask, dtype = given.settings, given.sizes, given.mask, given.dtype
    B, T, S, N, K, H, Hv = sizes
    bq, bk = mask.block
    columns, biases = mask.transpose(), given.biases
    (order,) = work_order(columns, sizes, settings.steps.rows)

    def column_chunk(carry: Any, chunk: Chunk) -> tuple[Any, None]:
        *sums, dk_done, dv_done = carry
        k_rows, v_rows = given.k_side(chunk.b, chunk.tokens(bk), chunk.n)
        k_rows, scale = _scaled(k_rows, settings.scale, dtype)

        def step(visit: Visit, state: Any) -> Any:
            dq, dbias, dk, dv = state
            q_side = given.q_side(visit.b, visit.q_tokens(mask), visit.n)
            p, ds, ds_bias = given.p_and_ds(visit, q_side, (k_rows, v_rows), scale)
            q_rows, do_rows, *_ = q_side
            if biases is not None:
                dbias = biases.add(dbias, visit, ds_bias)
            ds, p = ds.astype(q_rows.dtype), p.astype(q_rows.dtype)
            if dq is not None:
                dq_rows = _product("rqk,rkh->rqh", ds, k_rows, dtype) * scale
                dq_rows = dq_rows.reshape(*visit.i.shape, bq, H)
                if visit.live is not None:
                    dq_rows = jnp.where(visit.live[..., None, None], dq_rows, 0)
                dq = add(dq, visit.b, visit.i * bq, visit.n, dq_rows)
            dk = _plus(dk, _product("rqk,rqh->rkh", ds, q_rows, dtype))
            return dq, dbias, dk, _plus(dv, _product("rqk,rqh->rkh", p, do_rows, dtype))

        width = settings.steps.width(columns)
        dq, dbias, dk, dv = chunk.loop(columns, width, True, step, (*sums, None, None))
        some = (chunk.count > 0)[:, None, None]
        dk_done = put(dk_done, chunk, jnp.where(some, dk * settings.scale, 0))
        return (dq, dbias, dk_done, put(dv_done, chunk, jnp.where(some, dv, 0))), None

    dq = None if settings.steps.dq_by_rows else zeros(sizes, T, bq, H, dtype)
    dbias = None if biases is None else jnp.zeros(biases.padded.shape, dtype)
    nothing: Any = dq, dbias, *(zeros(sizes, S, bk, size, dtype) for size in (H, Hv))
    (dq, dbias, *by_head), _ = lax.scan(column_chunk, nothing, order)
    # what the query heads of a group gave to their kv head
    dk, dv = (x[:, :S].reshape(B, S, K, N // K, -1).sum(3) for x in by_head)
    return None if dq is None else dq[:, :T], dk, dv, dbias


def _visit_rows_again(given: Given) -> Array:
    """dq [B, T, N, H] in float32, each row of blocks by the lists that the forward pass visits."""
    settings, sizes, mask, dtype = given.settings, given.sizes, given.mask, given.dtype
    bq = mask.block[0]
    (order,) = work_order(mask, sizes, settings.steps.rows)

    def rows(done: Array, chunk: Chunk) -> tuple[Array, None]:
        q_rows, *others = given.q_side(chunk.b, chunk.tokens(bq), chunk.n)
        q_rows, scale = _scaled(q_rows, settings.scale, dtype)

        def step(visit: Visit, dq: Array | None) -> Array:
            k_side = given.k_side(visit.b, visit.k_tokens(mask), visit.n)
            _, ds, _ = given.p_and_ds(visit, (q_rows, *others), k_side, scale)
            return _plus(dq, _product("rqk,rkh->rqh", ds.astype(q_rows.dtype), k_side[0], dtype))

        dq = chunk.loop(mask, settings.steps.width(mask), False, step, None)
        some = (chunk.count > 0)[:, None, None]
        return put(done, chunk, jnp.where(some, dq * settings.scale, 0)), None

    nothing = zeros(sizes, sizes.T, bq, sizes.H, dtype)
    return lax.scan(rows, nothing, order)[0][:, : sizes.T]
