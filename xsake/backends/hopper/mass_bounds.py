"""The largest mass that each query may lose by dropped blocks, on Hopper (sm90).

    q tile ─┬─ max(q, 0) · most(keys of a block) ─┐
            └─ min(q, 0) · least(the same) ───────┴─ u ─ soft cap ─ + log of the block's keys, if
               dropped ─ logsumexp over blocks = D ─ sigmoid(D - logsumexp of the kept keys)

A CTA of one warpgroup has 64 queries of one head and all blocks, 64 at a time. Several CTAs share
an SM: copies of some overlap with the arithmetic of others.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import (
    ALIGNED,
    COLUMN,
    LOG2E,
    ROW,
    ROWS,
    TILE,
    pad_tokens,
    round_up,
    tiles,
)
from xsake.backends.hopper.row_store import store_rows

CHUNK = 64  # blocks of keys of one product


def mass_bounds(
    q: Array,
    most: Array,
    least: Array,
    logsumexp: Array,
    log_tokens: Array,
    row_block: int,
    *,
    scale: float,
    soft_cap: float | None = None,
    interpret: Any = False,
) -> Array:
    """sigmoid(log Σ exp(u + log_tokens) - logsumexp) of every query, float32 [B, N, T].

    0 where no block is dropped. A dropped block whose u is no finite number makes the sum infinite;
    a query that drops a block and whose logsumexp is inf or NaN has NaN.

    Args:
      q: [B, T, N, H] of 16-bit floats, H 64, 128 or 256.
      most: the largest value of every channel over a block's keys, [B, blocks, K, H] of q's dtype.
      least: the smallest one.
      logsumexp: float32 [B, N, T], of the kept keys.
      log_tokens: the logarithm of a dropped block's keys, -inf for a block that is not dropped:
        float32 [B, N, row blocks, blocks].
      row_block: tokens of a row block, a multiple of 64.
      scale: of the logits.
      soft_cap: of the logits.
      interpret: as of `pallas_call`.
    """
    B, T, N, H = q.shape
    blocks, K = most.shape[1:3]
    rows, columns = round_up(T, ROWS), round_up(blocks, CHUNK)
    pad = functools.partial(jnp.pad, constant_values=-jnp.inf)
    logsumexp = pad(logsumexp, ((0, 0), (0, 0), (0, rows - T)))
    log_tokens = pad(log_tokens * LOG2E, ((0, 0),) * 3 + ((0, columns - blocks),))
    q = pad_tokens(q, round_up(T, ALIGNED))
    most, least = (pad_tokens(x, round_up(blocks, ALIGNED)) for x in (most, least))
    kernel = _Kernel((N, K, H), row_block, columns // CHUNK, scale, soft_cap, interpret)
    found = plgpu.kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((B, N, rows), jnp.float32),
        scratch_types=dict(
            q_smem=tiles(ROWS, H, dtype=q.dtype),
            k_smem=tiles(2, CHUNK, H, dtype=q.dtype),
            q_ready=plgpu.Barrier(),
            k_ready=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(rows // ROWS, N, B),
        grid_names=("tile", "head", "row"),
        num_threads=1,
        thread_name="wg",
        kernel_name="xsake_mass_bounds",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # rows are reduced inside a warp
            unsafe_no_auto_barriers=not interpret,  # the body has its own barriers
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(q, most, least, logsumexp, log_tokens)
    return found[..., :T]


class _Kernel:
    """The kernel body; `self` holds what is static."""

    def __init__(self, sizes, row_block, chunks, scale, soft_cap, interpret):
        self.N, self.K, self.H = sizes
        self.row_block, self.chunks = row_block, chunks
        self.scale, self.soft_cap = scale, soft_cap
        self.interpret = bool(interpret)

    def body(self, q_gmem, most, least, logsumexp, log_tokens, out, *, q_smem, k_smem, **ready):
        """64 queries of one head."""
        tile, n, b = (lax.axis_index(name) for name in ("tile", "head", "row"))
        first = tile * ROWS
        plgpu.copy_gmem_to_smem(q_gmem.at[b, pl.ds(first, ROWS), n], q_smem, ready["q_ready"])
        h = lax.div(n, jnp.int32(self.N // self.K))
        of_rows = log_tokens.at[b, n, lax.div(first, jnp.int32(self.row_block))]

        def add_chunk(chunk, carry):
            columns = pl.ds(chunk * CHUNK, CHUNK)
            for which, keys in enumerate((most, least)):
                plgpu.copy_gmem_to_smem(keys.at[b, columns, h], k_smem.at[which], ready["k_ready"])
            tokens = plgpu.load(of_rows.at[columns], layout=COLUMN, optimized=False)
            pl.when(chunk == 0)(lambda: plgpu.barrier_wait(ready["q_ready"]))
            q = plgpu.load(q_smem, layout=TILE)
            plgpu.barrier_wait(ready["k_ready"])
            u = self.products((jnp.where(q < 0, 0, q), jnp.where(q < 0, q, 0)), k_smem)
            plgpu.commit_smem()  # a barrier: the next chunk replaces the keys
            return self.add(u, tokens, carry)

        nothing = (self.splat(-jnp.inf), self.splat(0.0))
        m, l = lax.fori_loop(0, self.chunks, add_chunk, nothing)
        rows = pl.ds(first, ROWS)
        kept = plgpu.load(logsumexp.at[b, n, rows], layout=ROW, optimized=False) * LOG2E
        store_rows(self.share(m, l, kept), out.at[b, n, rows], self.interpret)

    def splat(self, value):
        """One value for every row."""
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)

    def products(self, halves, k_smem):
        """Σ over both halves of q of half · keysᵀ, float32 [64, CHUNK]."""
        if self.interpret:  # it has no operands in registers
            keys = k_smem[...]
            plgpu.commit_smem()
            return sum(
                jnp.dot(half, own.T, preferred_element_type=jnp.float32)
                for half, own in zip(halves, keys, strict=True)
            )

        def product(u_ref):
            for which, half in enumerate(halves):
                plgpu.wgmma(u_ref, half, k_smem.at[which].transpose((1, 0)))
            return u_ref[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, CHUNK), jnp.float32))

    def add(self, u, tokens, carry):
        """(m, l) with 64 more blocks; m is the largest logarithm, in powers of 2.

        It is inf once a dropped block's u is no finite number.
        """
        m, l = carry
        tokens = lax.broadcast_in_dim(tokens, u.shape, [1])
        is_number = jnp.abs(u) < jnp.inf  # not if it is NaN
        if self.soft_cap is None:
            x = u * (self.scale * LOG2E)
        else:
            # as in forward_steps.logits; errs by 1e-7 of the soft cap
            growth = jnp.exp2(u * (2 * LOG2E * self.scale / self.soft_cap))
            x = (1.0 - 2.0 / (1.0 + growth)) * (self.soft_cap * LOG2E)
        x = jnp.where(is_number, x + tokens, jnp.inf)
        x = jnp.where(tokens == -jnp.inf, -jnp.inf, x)
        m_new = jnp.maximum(m, x.max(axis=1))
        base = jnp.where(jnp.abs(m_new) < jnp.inf, m_new, 0.0)
        p = jnp.exp2(x - lax.broadcast_in_dim(base, x.shape, [0]))
        return m_new, l * jnp.exp2(jnp.minimum(m, base) - base) + p.sum(axis=1)

    def share(self, m, l, kept):
        """sigmoid of the difference of both logsumexps, which are in powers of 2."""
        base = jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)
        total = jnp.where(m < jnp.inf, base + jnp.log2(l), jnp.inf)
        kept = jnp.where(kept == jnp.inf, jnp.nan, kept)  # then the sparse softmax is NaN
        return jnp.where(m > -jnp.inf, 1.0 / (1.0 + jnp.exp2(kept - total)), 0.0)
