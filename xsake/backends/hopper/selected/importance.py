"""How important each kv block is to each token, from compressed keys, on Hopper (sm90).

    p[t, c] = Σ_heads of the group 2^(q · k_c - lse)        compressed key c: 32 tokens from 16 c on

    block j of 64 tokens overlaps with      c = 4j-1   4j   4j+1   4j+2   4j+3
    by this many times 16 tokens                   1    2      2      2      1

The kernel writes A_j = Σ_{c = 4j … 4j+3} p_c and E_j = p_{4j+3} for each token and block; the
importance is 2 A_j - E_j + E_{j-1} (top.py). p itself is never stored.

    memory warpgroup     Q of 32 tokens once; tiles of 64 compressed keys through a ring
    compute warpgroups   64 rows (4 tokens × 16 heads) at a time: S = Q Kᵀ ─ p ─ sums over heads
                         and keys by shuffles ─▶ one number for each lane
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from xsake.backends.hopper.layouts import LOG2E, ROW, ROWS, TILE, div_rem, slot_of, tiles
from xsake.backends.hopper.ptx import SCALAR, i32
from xsake.backends.hopper.selected.spans import over_columns, product

GROUP = 16  # query heads whose sum is taken; a warp's rows of a tile
TOKENS = ROWS // GROUP  # of a tile
STRIDE, LENGTH = 16, 32  # tokens from compressed key to compressed key, and of each
KEYS = 64  # compressed keys of a step
BLOCKS = KEYS * STRIDE // 64  # kv blocks of a step
COMPUTE_WGS = 4
TILES = 2  # of a compute warpgroup
UNIT = COMPUTE_WGS * TILES * TOKENS  # tokens of a CTA
STAGES = 4


def sums(
    q: jax.Array, keys: jax.Array, lse: jax.Array, first: jax.Array, *, length: int, scale: float
) -> jax.Array:
    """(A, E) of kv block j for `length` tokens from token `first` on: [B, K, length, blocks, 2].

    q [B · T · K, 16, H]; keys [B, C, K, H] with C a multiple of 64; lse float32 [B · K, tokens ·
    16] in base 2, +inf in rows without a visible key. `length` is a multiple of 32; tokens from T
    on have results too, of no use. Blocks that no token of a CTA sees are not written.
    """
    B, C, K, H = keys.shape
    T = q.shape[0] // (B * K)
    units = length // UNIT
    steps = C // KEYS

    def body(
        q_gmem, k_gmem, lse_gmem, first_gmem, out, *, q_smem, k_smem, q_ready, k_ready, k_free
    ):
        wg = lax.axis_index("wg")
        head, unit = div_rem(lax.axis_index("cta"), units)
        unit = units - 1 - unit  # late tokens, which see more keys, come first
        begin = first_gmem[0] + unit * UNIT
        b, k = div_rem(head, K)
        # Keys that the last token sees: key c if 16 c + 31 <= t
        seen = lax.div(jnp.maximum(begin + UNIT - LENGTH + STRIDE, 0), jnp.int32(STRIDE))
        count = jnp.minimum(lax.div(seen + (KEYS - 1), jnp.int32(KEYS)), steps)

        @pl.when(wg == COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            @pl.when(count > 0)
            def _():
                for i in range(UNIT):
                    t = jnp.minimum(begin + i, T - 1)
                    plgpu.copy_gmem_to_smem(
                        q_gmem.at[(b * T + t) * K + k],
                        q_smem.at[i // TOKENS, pl.ds(i % TOKENS * GROUP, GROUP)],
                        q_ready,
                    )

            @pl.loop(0, count)
            def _(step):
                slot = slot_of(step, STAGES)
                pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                rows = pl.ds(step * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(k_gmem.at[b, rows, k], k_smem.at[slot], k_ready.at[slot])

        @pl.when(wg < COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(104, action="increase")
            pl.when(count > 0)(lambda: plgpu.barrier_wait(q_ready))
            base = []
            for i in range(TILES):
                rows = pl.ds((begin + (wg * TILES + i) * TOKENS) * GROUP, ROWS)
                base.append(plgpu.load(lse_gmem.at[head, rows], layout=ROW, optimized=False))

            @pl.loop(0, count)
            def _(step):
                slot = slot_of(step, STAGES)
                plgpu.barrier_wait(k_ready.at[slot])
                for i in range(TILES):
                    t = begin + (wg * TILES + i) * TOKENS
                    s = product(q_smem.at[wg * TILES + i], k_smem.at[slot].transpose((1, 0)))
                    if i == TILES - 1:
                        plgpu.barrier_arrive(k_free.at[slot])
                    p = jnp.exp2(s * (scale * LOG2E) - over_columns(base[i], s))
                    last = step * KEYS + KEYS - 1
                    p = lax.cond(
                        last * STRIDE + LENGTH - 1 > t,
                        lambda p=p, t=t: _masked(p, t, step),
                        lambda p=p: p,
                    )
                    row = head * length + t - first_gmem[0]
                    _store(p, out, row, step * BLOCKS * 2)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B * K * length, steps * BLOCKS * 2), jnp.float32),
        scratch_types=dict(
            q_smem=tiles(COMPUTE_WGS * TILES, ROWS, H, dtype=q.dtype),
            k_smem=tiles(STAGES, KEYS, H, dtype=q.dtype),
            q_ready=plgpu.Barrier(num_arrivals=UNIT),
            k_ready=plgpu.Barrier(num_barriers=STAGES),
            k_free=plgpu.Barrier(num_barriers=STAGES, num_arrivals=COMPUTE_WGS),
        ),
        grid=(B * K * units,),
        grid_names=("cta",),
        num_threads=COMPUTE_WGS + 1,
        thread_name="wg",
        kernel_name="xsake_importance",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,  # the body has its own barriers
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(q, keys, lse, first.reshape(1)).reshape(B, K, length, steps * BLOCKS, 2)


def _masked(p, t, step):
    """p with zeros for compressed keys that end after the row's token; the first token is t."""
    token = t + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) // GROUP
    visible = (token - (LENGTH - 1) + STRIDE) // STRIDE - step * KEYS
    column = plgpu.broadcasted_iota(jnp.int32, p.shape, 1, layout=TILE)
    return jnp.where(column < over_columns(visible, p), p, 0.0)


def _store(p, out, row, column):
    """Sums p [64, 64] over 16 rows and 4 columns; stores A and E of 4 tokens, from `row` on.

    A thread holds columns 8i + 2(lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8 of its warp.
    Even lanes collect A, odd lanes E. Each exchange between lanes then halves the values that a
    lane holds: in the end lane l has number l of its token's 32.
    """

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType(), SCALAR, SCALAR))
    def emit(_, p, out, row, column):
        lane, warp = _lane_and_warp()
        odd = _bit_is_set(lane, 1)
        values = []
        for group in range(KEYS // 8):
            pairs = [p.registers[at] for at in _indices(p.registers.shape, group)]
            first, second = (_add(*(vector.extract(x, [], [i]) for x in pairs)) for i in range(2))
            both = _add(first, second)
            whole = _add(both, mgpu.utils.shfl_bfly(both, 1))
            values.append(arith.select(odd, second, whole))
        for distance in (16, 8, 4):
            half = len(values) // 2
            upper = _bit_is_set(lane, distance)
            kept = [arith.select(upper, values[i + half], values[i]) for i in range(half)]
            sent = [arith.select(upper, values[i], values[i + half]) for i in range(half)]
            values = [
                _add(x, mgpu.utils.shfl_bfly(y, distance)) for x, y in zip(kept, sent, strict=True)
            ]
        at = [
            arith.addi(row.registers[()], warp),
            arith.addi(column.registers[()], lane),
        ]
        memref.store(values[0], out, [arith.index_cast(ir.IndexType.get(), x) for x in at])

    emit(p, out, row, column)


def _indices(shape, group):
    """Where a thread's two registers of a group of 8 columns are."""
    return [at for at in np.ndindex(shape) if at[1] == group]


def _lane_and_warp():
    """(lane in its warp, warp in its warpgroup)."""
    thread = mgpu.utils.thread_idx()
    warp = arith.andi(arith.shrui(thread, i32(5)), i32(3))
    return arith.andi(thread, i32(31)), warp


def _bit_is_set(lane, bit):
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, i32(bit)), i32(0))


def _add(x, y):
    return arith.addf(x, y)
