"""Means of blocks of queries on Hopper (sm90), in Pallas Mosaic GPU: one pass over Q.

    q [B, T, N, H] ─ tile of [block, 256] by TMA ─ sum over its rows ─▶ [B, R, N, H]

One warpgroup sums one tile. Several CTAs share an SM: the copy of one overlaps with the sum of
another.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import div_rem

WIDTH = 256  # columns of a tile, two per thread; the heads of a token are concatenated
UNROLL = 16  # rows that are added without a branch
LAYOUT = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=2)


def means(q: jax.Array, block: int, *, scale: float = 1.0, interpret: Any = False) -> jax.Array:
    """scale · the mean of every `block` tokens, in q's dtype: [B, R, N, H], R = ceil(T / block).

    A short last block is averaged over the tokens that it has.
    """
    B, T, N, H = q.shape
    R, tiles = pl.cdiv(T, block), pl.cdiv(N * H, WIDTH)
    if block % UNROLL:
        raise ValueError(f"a block of {block} tokens is not a multiple of {UNROLL}; choose another")

    def body(q_gmem, out_gmem, q_smem, out_smem, ready):
        b, rest = div_rem(lax.axis_index("cta"), R * tiles)
        i, tile = div_rem(rest, tiles)
        columns = pl.ds(tile * WIDTH, WIDTH)
        # Mosaic copies a contiguous tile in one piece and does not clip it at the array's bounds.
        # Rows past the last token are not added, and columns past the last are sliced off below.
        plgpu.copy_gmem_to_smem(q_gmem.at[b, pl.ds(i * block, block), columns], q_smem, ready)
        plgpu.barrier_wait(ready)

        def add(row, total):
            return total + plgpu.load(q_smem.at[row], layout=LAYOUT).astype(jnp.float32)

        def add_several(part, total):
            for r in range(UNROLL):
                total = add(part * UNROLL + r, total)
            return total

        size = jnp.minimum(T - i * block, block)
        parts = lax.div(size, jnp.int32(UNROLL))
        total = plgpu.layout_cast(jnp.zeros((WIDTH,), jnp.float32), LAYOUT)
        total = lax.fori_loop(0, parts, add_several, total)
        if T % UNROLL:
            total = lax.fori_loop(parts * UNROLL, size, add, total)
        out_smem[...] = (total * (scale / size.astype(jnp.float32))).astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[b, i, columns])
        plgpu.wait_smem_to_gmem(0)

    result = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, R, tiles * WIDTH), q.dtype),
        scratch_types=dict(
            q_smem=plgpu.SMEM((block, WIDTH), q.dtype),
            out_smem=plgpu.SMEM((WIDTH,), q.dtype),
            ready=plgpu.Barrier(),
        ),
        grid=(B * R * tiles,),
        grid_names=("cta",),
        kernel_name="xsake_means",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(q.reshape(B, T, N * H))
    return result[..., : N * H].reshape(B, R, N, H)
