"""Entropy and block mass as by-products of the forward, on one compute warpgroup (Hopper, sm90).

    a step    S ─ p, relative to the running maximum m ─┬─ a = Σ p of the block, Σ a log2 a
                                                        ├─ log2 of the block's sum ─▶ global memory
                                                        └─ Σ p log2 p, if it is wanted
    the end   2^(log2 of a block's sum - logsumexp) ─ sum over the 64 rows ─▶ mass of the block

What goes to global memory is 64 floats per step and warpgroup. A CTA of a persistent grid writes to
the same place for every work tile and reads it back when the work tile ends, so that it stays in
L2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from xsake.backends.hopper.bias_tile import moved
from xsake.backends.hopper.layouts import COLUMN, LOG2E, ROW, ROWS, THREADS, TILE, round_up
from xsake.backends.hopper.ptx import SCALAR, asm, i32
from xsake.backends.hopper.row_store import OWNER, own_row, store_rows

LEAST, LOWEST = -1e4, -1e30  # in place of log2 0 and of -inf, whose products with 0 are NaN
VISITS = ROWS  # visits whose mass is summed at once: the rows of a tile


class Sums(NamedTuple):
    """Running sums over the keys of each row; p is relative to the running maximum m."""

    l: Any  # Σ p
    blocks: Any  # Σ a log2 a over blocks, with a = Σ p of a block
    tokens: Any = None  # Σ p log2 p, if it is wanted

    def moved(self, m, base, shrink):
        """The same sums relative to `base` instead of m; shrink = 2^(m - base)."""
        # log2 of the factor of every p. Before the first key m is -inf and the sums are 0, whose
        # product with a number is 0.
        change = jnp.maximum(m, LOWEST) - base
        rest = (None if x is None else (x + self.l * change) * shrink for x in self[1:])
        return Sums(self.l * shrink, *rest)

    def with_block(self, tile, log):
        """The sums with a block whose p have the sum `tile`, but for `tokens`; log = log2(tile)."""
        return Sums(self.l + tile, self.blocks + tile * jnp.maximum(log, LEAST), self.tokens)

    def entropies(self):
        """[over blocks, over keys] in nats: ln l - Σ p ln p / l; 0 in rows without keys."""
        seen = self.l > 0
        l = jnp.where(seen, self.l, 1.0)
        return [
            jnp.where(seen, (jnp.log2(l) - x / l) * (1 / LOG2E), 0.0)
            for x in self[1:]
            if x is not None
        ]


class StatisticsTile:
    """The statistics of a kernel's work tiles; `self` holds what is static."""

    def __init__(self, kernel, has_tokens, has_sinks):
        if kernel.splits > 1:
            raise ValueError(
                f"statistics need steps of whole blocks, not {kernel.splits} steps per block"
            )
        self.shape, self.consumers = kernel.shape, kernel.consumers
        self.ctas = kernel.scheduler.ctas
        self.has_tokens, self.has_sinks = has_tokens, has_sinks
        self.interpret = kernel.interpret

    def out_type(self) -> tuple[Any, ...]:
        """Entropies of rows, mass of blocks, and the logarithms that a CTA keeps for itself."""
        B, _, _, N, *_ = self.shape.sizes
        rows = jax.ShapeDtypeStruct((B, N, self.shape.padded_rows), jnp.float32)
        blocks = round_up(self.shape.kv_blocks, THREADS)  # every thread clears as many
        mass = (B, N, self.shape.row_blocks, self.consumers, blocks)
        logs = (self.ctas, self.consumers, round_up(self.shape.kv_blocks, VISITS), ROWS)
        arrays = (jax.ShapeDtypeStruct(x, jnp.float32) for x in (mass, logs))
        return *[rows] * (2 if self.has_tokens else 1), *arrays

    def scratch(self) -> dict[str, Any]:
        """Shared memory for what is copied out."""
        rows = plgpu.SMEM((self.consumers, ROWS), jnp.float32)
        found = dict(block_entropy_smem=rows)
        return found | (dict(entropy_smem=rows) if self.has_tokens else {})

    def init(self, zeros):
        """The sums before the first step."""
        return Sums(zeros, zeros, zeros if self.has_tokens else None)

    def split(self, refs):
        """(the sinks in global memory or None, the refs that follow)."""
        return (refs[0], refs[1:]) if self.has_sinks else (None, refs)

    # A step

    def add(self, sums, x, p, m, base, shrink, may_be_empty):
        """(the sums with one more block, log2 of the block's sum); p = 2^x, relative to `base`."""
        tile = p.sum(axis=1)
        log = jnp.log2(tile)
        sums = sums.moved(m, base, shrink)
        if sums.tokens is not None:
            x = jnp.maximum(x, LEAST) if may_be_empty else x
            sums = sums._replace(tokens=sums.tokens + (p * x).sum(axis=1))
        return sums.with_block(tile, log), base + log

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

    def own_mass(self, tile, outs, wg):
        """The sums over this warpgroup's rows of a work tile: one for every kv block."""
        return outs[-2].at[tile.b, tile.n, tile.i, wg]

    def clear_mass(self, tile, wg, outs):
        """Zeros for blocks that no list names; a barrier must follow, before `store_mass`."""
        mass = self.own_mass(tile, outs, wg)
        layout = plgpu.Layout.WG_STRIDED(mass.shape, vec_size=1)
        mass[...] = plgpu.layout_cast(jnp.zeros(mass.shape, jnp.float32), layout)

    def store_mass(self, tile, wg, first_row, index, outs, sinks, scratch):
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
        logs, mass = self.own_logs(outs, wg), self.own_mass(tile, outs, wg)

        @pl.loop(0, lax.div(tile.count + (VISITS - 1), jnp.int32(VISITS)))
        def _(group):
            first = group * VISITS
            log = plgpu.load(logs.at[pl.ds(first, VISITS)], layout=TILE, optimized=False)
            share = jnp.exp2(log - lax.broadcast_in_dim(base, log.shape, [1])).sum(axis=1)
            listed = index, tile.start + first, tile.count - first
            scatter_rows(share, mass, *listed, self.interpret)

        plgpu.commit_smem()  # a barrier: the next tile's logarithms replace these


def mean_mass(mass: Array, T: int, block: int, kv_blocks: int) -> Array:
    """Sums over rows [B, N, Tb, consumers, blocks] -> mean over queries [B, N, Tb, Sb]."""
    queries = jnp.minimum(T - jnp.arange(mass.shape[2]) * block, block)
    return mass[..., :kv_blocks].sum(3) / queries[:, None]


def scatter_rows(x, ref, index, first, count, interpret):
    """ref[index[first + row]] = x[row] for the rows below count; ref is float32, index int32."""
    if interpret:

        @pl.loop(0, jnp.minimum(count, len(x)))
        def _(row):
            ref[index[first + row]] = x[row]

        return
    lines = [
        *OWNER,
        ".reg .pred listed; .reg .b32 at; .reg .b64 to;",
        "setp.lt.and.s32 listed, $3, $4, own;",
        "@listed ld.global.b32 at, [$1]; @listed mad.wide.s32 to, at, 4, $0;",
        "@listed st.global.f32 [to], $2;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR, ROW))
    def emit(_, ref, index, first, count, x):
        row, value = own_row(x)
        first, count = (y.registers[()] for y in (first, count))
        entry = moved(index, arith.addi(first, row), 4)
        asm(lines, "l,l,f,r,r", [moved(ref, i32(0), 4), entry, value, row, count])

    emit(ref, index, first, count, x)
