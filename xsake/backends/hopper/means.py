"""Means of blocks of queries on Hopper (sm90), in Pallas Mosaic GPU: one pass over Q.

    q [B, T, N, H] ─ tile of [block, 256] by TMA ─ sum over its rows ─▶ [B, R, N, H]

One warpgroup has one tile; several CTAs share an SM, so that one's copy hides behind another's sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.items import split

WIDTH = 256  # columns of a tile, of all heads side by side: two for a thread
AT_ONCE = 16  # rows that are added without a branch
LAYOUT = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=2)


def means(q: jax.Array, block: int, *, scale: float = 1.0, interpret: Any = False) -> jax.Array:
    """scale · the mean of every `block` tokens, in q's type: [B, R, N, H], R = ceil(T / block).

    The mean of a short last block is over what it has.
    """
    B, T, N, H = q.shape
    R, tiles = pl.cdiv(T, block), pl.cdiv(N * H, WIDTH)
    if block % AT_ONCE:
        raise ValueError(f"a block of {block} tokens is not a multiple of {AT_ONCE}; make it one")

    def body(q_gmem, out_gmem, q_smem, out_smem, ready):
        b, rest = split(lax.axis_index("cta"), R * tiles)
        i, tile = split(rest, tiles)
        columns = pl.ds(tile * WIDTH, WIDTH)
        # Nothing past the last token is added, and columns past the last are cut off at the end:
        # Mosaic copies what lies side by side in one piece, not row by row, and drops nothing.
        plgpu.copy_gmem_to_smem(q_gmem.at[b, pl.ds(i * block, block), columns], q_smem, ready)
        plgpu.barrier_wait(ready)

        def add(row, total):
            return total + plgpu.load(q_smem.at[row], layout=LAYOUT).astype(jnp.float32)

        def add_several(part, total):
            for r in range(AT_ONCE):
                total = add(part * AT_ONCE + r, total)
            return total

        size = jnp.minimum(T - i * block, block)
        parts = lax.div(size, jnp.int32(AT_ONCE))
        total = plgpu.layout_cast(jnp.zeros((WIDTH,), jnp.float32), LAYOUT)
        total = lax.fori_loop(0, parts, add_several, total)
        if T % AT_ONCE:
            total = lax.fori_loop(parts * AT_ONCE, size, add, total)
        out_smem[...] = (total * (scale / size.astype(jnp.float32))).astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[b, i, columns])
        plgpu.wait_smem_to_gmem(0)

    found = plgpu.kernel(
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
    return found[..., : N * H].reshape(B, R, N, H)
