"""Delta, the base-2 logsumexp and zeros for dq on Hopper (sm90): one pass over memory.

    out, d_out [B, T, N, Hv] ─ tiles of [64, Hv] by TMA ─┬─▶ delta = rowsum(out · d_out) - d_lse
    lse, d_lse [B, N, T] ────────────────────────────────┴─▶ lse in base 2
    zeros in shared memory ──────────────────────────────── TMA ─▶ dq in float32, to be added to

A unit of work is 64 tokens of one head. A CTA has one warpgroup and several units' tiles in flight;
two CTAs share an SM if Hv ≤ 128. The units are strided over the CTAs with the head index fastest,
so that together the CTAs read memory in order. Writes (mostly zeros) overlap with the next units'
reads.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import (
    ALIGNED,
    LOG2E,
    PANEL,
    ROW,
    ROWS,
    TILE,
    div_rem,
    slot_of,
    tiles,
)

ZERO_ROWS = 16  # rows of zeros in shared memory
SM_BYTES = 192 << 10  # bytes of out and d_out in flight on an SM
COMPILER_PARAMS = plgpu.CompilerParams(
    reduction_scratch_bytes=0,  # rows are reduced inside a warp
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)


def fits(out: jax.Array) -> bool:
    """Whether T is a multiple of 8; other lengths would have to be padded by a copy first."""
    return out.shape[1] % ALIGNED == 0


def statistics(
    out: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    d_lse: jax.Array | None,
    *,
    rows: int,
    zeros: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """lse in base 2 and delta, float32 [B, N, rows]; and zeros, float32 [B, T, N, zeros].

        lse2 = lse · log2 e        delta = Σ_h out · d_out - d_lse

    out and d_out are [B, T, N, Hv], lse and d_lse float32 [B, N, T]. `rows` is a multiple of 64 and
    at least T. Where a row is empty (lse = -inf) or past T, lse2 is +inf and delta 0.
    """
    delta_pass = DeltaPass(out, d_lse is not None, rows, zeros)
    ctas = min(delta_pass.units, _jax.multiprocessors() * delta_pass.per_sm)

    def body(*refs, ready, **smem):
        delta_pass.run(lax.axis_index("cta"), ctas, refs, smem, ready)

    return tuple(
        plgpu.kernel(
            body,
            out_type=delta_pass.out_type,
            scratch_types=dict(ready=delta_pass.barriers, **delta_pass.smem),
            grid=(ctas,),
            grid_names=("cta",),
            kernel_name="xsake_delta",
            compiler_params=COMPILER_PARAMS,
            **({"interpret": interpret} if interpret else {}),
        )(*operands(out, d_out, lse, d_lse))
    )


def operands(out, d_out, lse, d_lse):
    """The operands of DeltaPass.run."""
    return (out, d_out, lse) if d_lse is None else (out, d_out, lse, d_lse)


class DeltaPass:
    """The delta pass, which all CTAs of a launch run, or some: outputs, shared memory and body."""

    def __init__(self, out, has_d_lse, rows, zeros):
        B, T, N, Hv = out.shape
        if not fits(out):
            raise ValueError(f"{T} tokens are not a multiple of {ALIGNED}; pad them")
        if rows % ROWS or rows < T:
            raise ValueError(f"rows must be a multiple of {ROWS} and at least T = {T}, got {rows}")
        self.shape = B, T, N, Hv
        self.values = 1 + has_d_lse  # inputs with one value per row: lse, and d_lse if there is one
        self.zeros = zeros
        self.per_sm = 2 if Hv <= 128 else 1  # CTAs that share an SM
        self.stages = SM_BYTES // self.per_sm // (2 * ROWS * Hv * out.dtype.itemsize)
        self.blocks = rows // ROWS
        self.units = B * self.blocks * N
        out_type = [jax.ShapeDtypeStruct((B, N, rows), jnp.float32)] * 2
        self.smem = dict(
            tile_smem=tiles(self.stages, 2, ROWS, Hv, dtype=out.dtype),
            value_smem=plgpu.SMEM((self.stages, self.values, ROWS), jnp.float32),
            found_smem=plgpu.SMEM((2, 2, ROWS), jnp.float32),
        )
        if zeros is not None:
            out_type.append(jax.ShapeDtypeStruct((B, T, N, zeros), jnp.float32))
            self.smem["zero_smem"] = plgpu.SMEM((ZERO_ROWS, zeros), jnp.float32)
        self.out_type = tuple(out_type)
        self.barriers = plgpu.Barrier(num_arrivals=2 + self.values, num_barriers=self.stages)

    def run(self, cta, ctas, refs, smem, ready):
        """The units of CTA number `cta` of `ctas`."""
        _, T, N, Hv = self.shape
        stages, blocks = self.stages, self.blocks
        tile_smem, value_smem, found_smem = (
            smem[name] for name in ("tile_smem", "value_smem", "found_smem")
        )
        zero_smem = smem.get("zero_smem")
        out_gmem, d_out_gmem, *others = refs
        value_gmem, found_gmem = others[: self.values], others[self.values :]
        turns = lax.div(self.units - 1 - cta, jnp.int32(ctas)) + 1

        def unit(turn):
            block, n = div_rem(cta + turn * ctas, N)
            b, block = div_rem(block, blocks)
            return b, block * ROWS, n

        def load(turn):
            b, first, n = unit(turn)
            slot = slot_of(turn, stages)
            tokens = pl.ds(first, ROWS)  # TMA reads zeros past T
            for which, x in enumerate((out_gmem, d_out_gmem)):
                plgpu.copy_gmem_to_smem(
                    x.at[b, tokens, n], tile_smem.at[slot, which], ready.at[slot]
                )
            for which, x in enumerate(value_gmem):
                plgpu.copy_gmem_to_smem(
                    x.at[b, n, tokens], value_smem.at[slot, which], ready.at[slot]
                )

        def store_zeros(b, first, n):
            for row in range(0, ROWS, ZERO_ROWS):
                target = found_gmem[2].at[b, pl.ds(first + row, ZERO_ROWS), n]
                plgpu.copy_smem_to_gmem(zero_smem, target, commit_group=False)

        if self.zeros is not None:
            zero_smem[...] = jnp.zeros(zero_smem.shape, zero_smem.dtype)
            plgpu.commit_smem()
        pl.loop(0, jnp.minimum(turns, stages))(load)

        @pl.loop(0, turns)
        def compute(turn):
            b, first, n = unit(turn)
            slot = slot_of(turn, stages)
            if self.zeros is not None:
                store_zeros(b, first, n)
            plgpu.barrier_wait(ready.at[slot])

            def product(column):
                of_out, of_d_out = (
                    plgpu.load(
                        tile_smem.at[slot, which, :, pl.ds(column, PANEL)], layout=TILE
                    ).astype(jnp.float32)
                    for which in range(2)
                )
                return of_out * of_d_out

            products = map(product, range(0, Hv, PANEL))
            delta = functools.reduce(operator.add, products).sum(axis=1)
            lse, *d_lse = (
                plgpu.load(value_smem.at[slot, which], layout=ROW, optimized=False)
                for which in range(self.values)
            )
            if d_lse:
                delta = delta - d_lse[0]
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + first
            seen = (lse > -jnp.inf) & (row < T)
            # Two result buffers alternate: the copies of two turns ago must have read this one.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer = slot_of(turn, 2)
            found_smem[buffer, 0] = jnp.where(seen, lse * LOG2E, jnp.inf)
            found_smem[buffer, 1] = jnp.where(seen, delta, 0.0)
            plgpu.commit_smem()  # also orders the reads of the tiles before the copies that follow
            pl.when(turn + stages < turns)(lambda: load(turn + stages))
            for which in range(2):
                target = found_gmem[which].at[b, n, pl.ds(first, ROWS)]
                plgpu.copy_smem_to_gmem(found_smem.at[buffer, which], target, commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        plgpu.wait_smem_to_gmem(0)
