"""Entropy and block mass as by-products of the forward, on one compute warpgroup (Hopper, sm90).

    a step    S ─ p, relative to the running maximum m ─┬─ Σ p log2 p         rescaled with l
                                                        ├─ a = Σ p of the block, Σ a log2 a
                                                        └─ log2 of the block's sum ─▶ global memory
    the end   2^(log2 of a block's sum - logsumexp) ─ sum over the 64 rows ─▶ mass of the block

What goes to global memory is 64 floats per step and warpgroup. A CTA of a persistent grid writes to
the same place for every work tile and reads it back when the work tile ends, so that it stays in
L2. The mass that leaves the kernel is in the order of the row block's list.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.bias_tile import store_rows
from xsake.backends.hopper.layouts import COLUMN, LOG2E, ROWS, TILE, round_up
from xsake.block_mask.lists import Lists

LEAST = -1e4  # in place of log2 0, whose product with 0 is NaN
GROUP = ROWS  # visits whose mass is summed at once


class Sums(NamedTuple):
    """Running sums over the keys of each row; p is relative to the running maximum m."""

    l: Any  # Σ p
    tokens: Any  # Σ p log2 p
    blocks: Any  # Σ a log2 a over blocks, with a = Σ p of a block

    def moved(self, m, base, shrink):
        """The same sums relative to `base` instead of m; shrink = 2^(m - base)."""
        change = jnp.where(m == -jnp.inf, 0.0, m - base)  # log2 of the factor of every p
        return Sums(
            self.l * shrink,
            (self.tokens + self.l * change) * shrink,
            (self.blocks + self.l * change) * shrink,
        )

    def entropies(self):
        """(entropy over keys, over blocks) in nats: ln l - Σ p ln p / l; 0 in rows without keys."""
        seen = self.l > 0
        l = jnp.where(seen, self.l, 1.0)
        return tuple(
            jnp.where(seen, (jnp.log2(l) - x / l) * (1 / LOG2E), 0.0)
            for x in (self.tokens, self.blocks)
        )


class StatisticsTile:
    """The statistics of a kernel's work tiles; `self` holds what is static."""

    def __init__(self, kernel, has_sinks):
        if kernel.splits > 1:
            raise ValueError(
                f"statistics need steps of whole blocks, not {kernel.splits} steps per block"
            )
        self.shape, self.consumers = kernel.shape, kernel.consumers
        self.ctas = kernel.scheduler.ctas
        self.has_sinks, self.interpret = has_sinks, kernel.interpret

    @property
    def visits(self) -> int:
        """The most visits of a work tile, in whole groups."""
        return round_up(self.shape.kv_blocks, GROUP)

    def out_type(self) -> tuple[Any, ...]:
        """Entropies of rows, mass by visit, and the logarithms that a CTA keeps for itself."""
        B, _, _, N, *_ = self.shape.sizes
        rows = jax.ShapeDtypeStruct((B, N, self.shape.padded_rows), jnp.float32)
        mass = (B, N, self.shape.row_blocks, self.consumers, self.visits)
        logs = (self.ctas, self.consumers, self.visits, ROWS)
        return rows, rows, *(jax.ShapeDtypeStruct(x, jnp.float32) for x in (mass, logs))

    def scratch(self) -> dict[str, Any]:
        """Shared memory for what is copied out."""
        rows = plgpu.SMEM((self.consumers, ROWS), jnp.float32)
        return dict(entropy_smem=rows, block_entropy_smem=rows, mass_smem=rows)

    def split(self, refs):
        """(the sinks in global memory or None, the refs that follow)."""
        return (refs[0], refs[1:]) if self.has_sinks else (None, refs)

    # A step

    def add(self, sums, x, p, m, base, shrink, may_be_empty):
        """(the sums with one more block, log2 of the block's sum); p = 2^x, relative to `base`."""
        tile = p.sum(axis=1)
        if may_be_empty:
            x = jnp.maximum(x, LEAST)
        log = jnp.log2(tile)
        before = sums.moved(m, base, shrink)
        after = Sums(
            before.l + tile,
            before.tokens + (p * x).sum(axis=1),
            before.blocks + tile * jnp.maximum(log, LEAST),
        )
        return after, base + log

    def keep(self, log, outs, wg, visit):
        """Writes the logarithms of a visit where this CTA finds them again."""
        store_rows(log, self.own_logs(outs, wg).at[visit], self.interpret)

    def own_logs(self, outs, wg):
        """This CTA's place for logarithms; both warpgroups share it where they have the same rows.

        [visits, 64]
        """
        logs = outs[-1]
        return logs.at[lax.axis_index("cta"), 0 if self.consumers == 1 else wg]

    # The end of a work tile

    def store_mass(self, tile, wg, first_row, outs, sinks, scratch):
        """The mass of every visited block, summed over the 64 rows; the logsumexp is in lse_smem.

        Sinks join the denominator, and rows past T have no mass.
        """
        base = plgpu.load(scratch.lse_smem.at[wg], layout=COLUMN, optimized=False) * LOG2E
        base = jnp.where(base == -jnp.inf, 0.0, base)  # of a row without keys, all logs are -inf
        if sinks is not None:
            sink = sinks[tile.n] * LOG2E
            larger = jnp.maximum(base, sink)
            base = larger + jnp.log2(1.0 + jnp.exp2(jnp.minimum(base, sink) - larger))
        T = self.shape.sizes.T
        if self.shape.padded_rows != T:
            row = first_row + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=COLUMN)
            base = jnp.where(row < T, base, jnp.inf)
        logs, mass = self.own_logs(outs, wg), outs[-2]

        @pl.loop(0, lax.div(tile.count + (GROUP - 1), jnp.int32(GROUP)))
        def _(group):
            visits = pl.ds(group * GROUP, GROUP)
            log = plgpu.load(logs.at[visits], layout=TILE, optimized=False)
            share = jnp.exp2(log - lax.broadcast_in_dim(base, log.shape, [1]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch.mass_smem[wg] = share.sum(axis=1)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                scratch.mass_smem.at[wg], mass.at[tile.b, tile.n, tile.i, wg, visits]
            )


def by_block(mass: Array, lists: Lists, T: int, block: int, kv_blocks: int) -> Array:
    """Mass [B, N, Tb, consumers, visits] in the order of the lists -> mean mass [B, N, Tb, Sb].

    Blocks that no list names, and slots past the end of a list, have mass 0.
    """
    B, N, Tb = mass.shape[:3]
    queries = jnp.minimum(T - jnp.arange(Tb) * block, block)
    mean = mass.sum(3)[..., :kv_blocks] / queries[:, None]
    visit = jnp.arange(kv_blocks, dtype=jnp.int32)
    at = jnp.minimum(lists.kv_start[..., None] + visit, lists.kv_index.shape[-1] - 1)
    index = jnp.take_along_axis(lists.kv_index[:, :, None], at, axis=-1)
    index = jnp.where(visit < lists.kv_count[..., None], index, kv_blocks)  # dropped below
    index = jnp.repeat(index, N // index.shape[1], axis=1)
    index = jnp.broadcast_to(index, (B, N, Tb, kv_blocks)).reshape(-1, kv_blocks)
    rows = jnp.arange(B * N * Tb)[:, None]
    found = jnp.zeros((B * N * Tb, kv_blocks), jnp.float32)
    found = found.at[rows, index].set(
        mean.reshape(-1, kv_blocks), mode="drop", unique_indices=True, indices_are_sorted=False
    )
    return found.reshape(B, N, Tb, kv_blocks)
