"""Adds the parts of every token's output on Hopper (sm90): a weighted sum of gathered rows.

    parts [slots, g, Hv] ─ a copy for each token and selection (gather.py) ─ Σ weight · part ─▶ out

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
from xsake.backends.hopper.selected.gather import Copies
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
    copies = Copies(group)
    tokens = copies.tokens
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
            own = (first * K + head) * n + s
            copies.copy(part_gmem, part_smem.at[slot], ready.at[slot], slots_gmem, own, K * n)

        def load_if(step):
            pl.when(step < steps)(lambda: load(step))
            copies.commit()

        def wait(slot):
            if copies.by_tma:
                plgpu.barrier_wait(ready.at[slot])
            else:
                copies.wait(STAGES - 1)

        steps = turns * n
        for step in range(STAGES):
            load_if(jnp.int32(step))

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
                wait(slot)
                x = plgpu.load(part_smem.at[slot], layout=TILE).astype(jnp.float32)
                plgpu.commit_smem()  # orders this read before the copy that follows
                load_if(step + STAGES)
                weight = over_columns(weight, x)
                return total + jnp.where(weight > 0, x * weight, 0.0)

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, Hv), jnp.float32), TILE)
            total = lax.fori_loop(0, n, add, zeros)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = total.astype(out_smem.dtype)
            plgpu.commit_smem()
            copies.store(out_smem, out_gmem, first, head, K)

        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        body,
        out_type=copies.stored(T, K, Hv, part.dtype),
        scratch_types=dict(
            part_smem=tiles(STAGES, ROWS, Hv, dtype=part.dtype),
            out_smem=tiles(ROWS, Hv, dtype=part.dtype),
            ready=plgpu.Barrier(num_barriers=STAGES, num_arrivals=copies.arrivals),
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
    return copies.by_token(out, T, K)
