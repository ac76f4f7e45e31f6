"""Adds the parts of every token's output on Hopper (sm90): a weighted sum of gathered rows.

    parts [slots, g, Hv] ─ one TMA copy for each token and selection ─ Σ weight · part ─▶ out

A unit of work is 64 rows: the query heads of a kv head's group, of 64 / g neighbouring tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import ROW, ROWS, TILE, div_rem, slot_of, tiles
from xsake.backends.hopper.selected.spans import over_columns

PER_SM = 2
STAGES = 5


def merge(
    part: jax.Array, slots: jax.Array, weights: jax.Array, *, interpret: Any = False
) -> jax.Array:
    """Σ_s weights[..., s] · part[slots[..., s]]: [T, K, g, Hv] in part's dtype.

    part [slots, g, Hv]; slots int32 [T, K, n], 0 where the weight is 0; weights float32
    [K, n, T · g]. T is a multiple of 64 / g.
    """
    _, group, Hv = part.shape
    T, K, n = slots.shape
    tokens = ROWS // group
    runs = T // tokens
    units = K * runs
    ctas = min(_jax.multiprocessors() * PER_SM, units)

    def body(part_gmem, slots_gmem, weights_gmem, out_gmem, part_smem, out_smem, ready):
        cta = lax.axis_index("cta")
        turns = lax.div(units - 1 - cta, jnp.int32(ctas)) + 1

        def unit(turn):
            head, run = div_rem(cta + turn * ctas, runs)
            return head, run * tokens

        def load(step):
            turn, s = div_rem(step, n)
            head, first = unit(turn)
            slot = slot_of(step, STAGES)
            for i in range(tokens):
                row = slots_gmem[((first + i) * K + head) * n + s]
                plgpu.copy_gmem_to_smem(
                    part_gmem.at[row], part_smem.at[slot, pl.ds(i * group, group)], ready.at[slot]
                )

        steps = turns * n
        pl.loop(0, jnp.minimum(steps, STAGES))(load)

        @pl.loop(0, turns)
        def _(turn):
            head, first = unit(turn)

            def add(s, total):
                step = turn * n + s
                slot = slot_of(step, STAGES)
                weight = plgpu.load(
                    weights_gmem.at[head, s, pl.ds(first * group, ROWS)],
                    layout=ROW,
                    optimized=False,
                )
                plgpu.barrier_wait(ready.at[slot])
                x = plgpu.load(part_smem.at[slot], layout=TILE).astype(jnp.float32)
                plgpu.commit_smem()  # orders this read before the copy that follows
                pl.when(step + STAGES < steps)(lambda: load(step + STAGES))
                weight = over_columns(weight, x)
                return total + jnp.where(weight > 0, x * weight, 0.0)

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, Hv), jnp.float32), TILE)
            total = lax.fori_loop(0, n, add, zeros)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = total.astype(out_smem.dtype)
            plgpu.commit_smem()
            for i in range(tokens):
                plgpu.copy_smem_to_gmem(
                    out_smem.at[pl.ds(i * group, group)],
                    out_gmem.at[(first + i) * K + head],
                    commit_group=False,
                )
            plgpu.commit_smem_to_gmem_group()

        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T * K, group, Hv), part.dtype),
        scratch_types=dict(
            part_smem=tiles(STAGES, ROWS, Hv, dtype=part.dtype),
            out_smem=tiles(ROWS, Hv, dtype=part.dtype),
            ready=plgpu.Barrier(num_barriers=STAGES, num_arrivals=tokens),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name="xsake_merge",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(part, slots.reshape(-1), weights)
    return out.reshape(T, K, group, Hv)
