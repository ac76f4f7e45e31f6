"""How much dropping one block changes each query's output, on Hopper (sm90), in Pallas Mosaic GPU.

    change[b, n, j, t] = ‖Σ_{k of block j} p_k (v_k - out)‖²,   p = exp(q_t · k / √H - logsumexp)

A CTA has 128 queries of one head, 64 for each of its two compute warpgroups:

    memory warpgroup     its tiles of Q; then K and V of every block, through a ring  (runs ahead)
    compute warpgroups   for each block: S = Q Kᵀ ─ p ─ U = p V ─ ‖U - (Σ p) out‖² ─▶ 64 values

What attention finds is given, out and the logsumexp, so that no block depends on another.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import (
    ALIGNED,
    COMPUTE_WGS,
    LOG2E,
    ROW,
    ROWS,
    TILE,
    div_rem,
    pad_tokens,
    round_up,
    slot_of,
    tiles,
)
from xsake.backends.hopper.row_store import store_rows
from xsake.backends.hopper.shape import check_sizes

CTA_ROWS = COMPUTE_WGS * ROWS
RING_BYTES = 96 << 10  # of shared memory for K and V
MOST_STAGES = 4  # blocks of keys in flight
REGISTERS, MEMORY_REGISTERS = 240, 24  # of a thread of a compute warpgroup, of the memory one


def changes(q, k, v, out, logsumexp, block, *, interpret=False):
    """float32 [B, N, n, T or more]; arbitrary where a query's row block does not see block j.

    Causal. Queries from T on have 0. At blocks of 64, sixteen heads and 32,768 tokens the result
    takes 1 GiB; its size grows with the square of T.

    Args:
      q: [B, T, N, H].
      k: [B, T, K, H] in q's dtype.
      v: bfloat16 [B, T, N, Hv]: values of every query head.
      out: float32 [B, T, N, Hv], the attention to `v`.
      logsumexp: float32 [B, T, N].
      block: 64 or 128 keys.
      interpret: plgpu.InterpretGPUParams, for machines without a GPU.
    """
    B, T, N, H = q.shape
    Hv = v.shape[-1]
    check_sizes((block,), H, Hv)
    rows = round_up(T, CTA_ROWS)
    # logits are in base 2; of padding +inf, which makes p 0
    ends = jnp.pad(
        jnp.moveaxis(logsumexp * LOG2E, 1, 2),
        ((0, 0), (0, 0), (0, rows - T)),
        constant_values=jnp.inf,
    )
    means = jnp.moveaxis(pad_tokens(out, rows), 1, 2)
    kernel = _Kernel(N, k.shape[2], T, H, Hv, block, q.dtype, bool(interpret))
    return plgpu.kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((B, N, kernel.blocks, rows), jnp.float32),
        scratch_types=kernel.scratch(),
        grid=(rows // CTA_ROWS * B * N,),
        grid_names=("cta",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="wg",
        kernel_name="xsake_sensitivity",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # rows are reduced inside a warp
            unsafe_no_auto_barriers=not interpret,  # the body has its own barriers
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(*(pad_tokens(x, round_up(T, ALIGNED)) for x in (q, k, v)), means, ends)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel body and its roles; `self` holds what is static."""

    N: int
    K: int
    T: int
    H: int
    Hv: int
    block: int
    dtype: Any
    interpret: bool

    @property
    def blocks(self) -> int:
        """Blocks of keys."""
        return pl.cdiv(self.T, self.block)

    @property
    def stages(self) -> int:
        """Blocks of keys in flight."""
        return min(MOST_STAGES, RING_BYTES // (2 * self.block * (self.H + self.Hv)))

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        return dict(
            q_smem=tiles(COMPUTE_WGS, ROWS, self.H, dtype=self.dtype),
            k_smem=tiles(self.stages, self.block, self.H, dtype=self.dtype),
            v_smem=tiles(self.stages, self.block, self.Hv, dtype=jnp.bfloat16),
            q_ready=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
            ready=plgpu.Barrier(num_barriers=self.stages, num_arrivals=2),  # k and v
            free=plgpu.Barrier(num_barriers=self.stages, num_arrivals=COMPUTE_WGS),
        )

    def body(self, q_gmem, k_gmem, v_gmem, means, ends, changes_gmem, **scratch):
        """One CTA: what its warpgroups do. CTAs with many blocks come first."""
        heads = q_gmem.shape[0] * self.N
        number, head = div_rem(lax.axis_index("cta"), heads)
        b, n = div_rem(head, self.N)
        first_row = (means.shape[2] // CTA_ROWS - 1 - number) * CTA_ROWS
        count = jnp.minimum(lax.div(first_row + CTA_ROWS - 1, self.block) + 1, self.blocks)
        wg = lax.axis_index("wg")

        @pl.when(wg < COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(REGISTERS, action="increase")
            rows = pl.ds(first_row + wg * ROWS, ROWS)
            given = tuple(
                plgpu.load(x.at[b, n, rows], layout=layout, optimized=False)
                for x, layout in ((means, TILE), (ends, ROW))
            )
            self.compute(wg, *given, changes_gmem.at[b, n], rows, count, **scratch)

        @pl.when(wg == COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            at = b, n, first_row, count
            self.memory(q_gmem, k_gmem, v_gmem, at, **scratch)

    def memory(self, q_gmem, k_gmem, v_gmem, at, *, q_smem, k_smem, v_smem, q_ready, ready, free):
        """Copies the tiles of Q, and the blocks as soon as their slots are free."""
        b, n, first_row, count = at
        h = lax.div(n, self.N // self.K)
        for i in range(COMPUTE_WGS):
            rows = pl.ds(first_row + i * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_gmem.at[b, rows, n], q_smem.at[i], q_ready)

        @pl.loop(0, count)
        def _(j):
            slot = slot_of(j, self.stages)
            pl.when(j >= self.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            keys = pl.ds(j * self.block, self.block)
            plgpu.copy_gmem_to_smem(k_gmem.at[b, keys, h], k_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(v_gmem.at[b, keys, n], v_smem.at[slot], ready.at[slot])

        if self.interpret:  # the interpreter requires a wait for every barrier phase

            @pl.loop(jnp.maximum(count - self.stages, 0), count)
            def _(j):
                plgpu.barrier_wait(free.at[slot_of(j, self.stages)])

    def compute(
        self, wg, mean, end, changes_gmem, rows, count,
        *, q_smem, k_smem, v_smem, q_ready, ready, free,
    ):  # fmt: skip
        """The changes of 64 queries by every block, also those that they do not see: 0."""
        plgpu.barrier_wait(q_ready)

        def over_columns(x, columns):
            return lax.broadcast_in_dim(x, (ROWS, columns), [0])

        def visit(j, *, masked):
            slot = slot_of(j, self.stages)
            plgpu.barrier_wait(ready.at[slot])

            def logits(s_ref):
                plgpu.wgmma(s_ref, q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
                return s_ref[...]

            s = pl.run_scoped(logits, plgpu.ACC((ROWS, self.block), jnp.float32))
            if masked:
                s = jnp.where(self.sees(s, rows.start, j), s, -jnp.inf)
            p = jnp.exp2(s * (LOG2E / math.sqrt(self.H)) - over_columns(end, self.block))
            p = p.astype(jnp.bfloat16)
            # of p as rounded: then an error of p is one of p (v - out), not of p v and p out apart
            mass = p.astype(jnp.float32).sum(axis=1)

            u = self.products(p, v_smem.at[slot])
            plgpu.barrier_arrive(free.at[slot])
            change = u - over_columns(mass, self.Hv) * mean
            store_rows((change * change).sum(axis=1), changes_gmem.at[j, rows], self.interpret)

        # blocks before the first query are seen by all
        full = jnp.minimum(lax.div(rows.start + 1, self.block), count)
        pl.loop(0, full)(functools.partial(visit, masked=False))
        pl.loop(full, count)(functools.partial(visit, masked=True))

    def products(self, p, v):
        """P V."""
        if self.interpret:  # the interpreter supports no operand in registers
            values = v[...]
            plgpu.commit_smem()
            return jnp.dot(p, values, preferred_element_type=jnp.float32)

        def product(u_ref):
            plgpu.wgmma(u_ref, p, v)
            return u_ref[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.Hv), jnp.float32))

    def sees(self, s, first_row, j):
        """Which keys of block j are not after a query."""
        row, column = (plgpu.broadcasted_iota(jnp.int32, s.shape, i, layout=TILE) for i in (0, 1))
        return j * self.block + column <= first_row + row
