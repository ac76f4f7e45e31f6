"""Entropy and block mass as by-products of the forward, on one compute warpgroup (Hopper, sm90).

    a step    S ─ p, relative to the running maximum m ─┬─ a = Σ p of the block, Σ a log2 a
                                                        ├─ log2 of the block's sum, kept
                                                        └─ Σ p log2 p, if it is wanted
    the end   2^(log2 of a block's sum - logsumexp) ─ sum over the 64 rows ─▶ mass of the block

What is kept until a work tile ends is 64 floats per step and warpgroup: in shared memory where
there is space for all visits that a list may have, else in global memory. There a CTA of a
persistent grid has one buffer for all its work tiles, which stays in L2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, vector

from xsake.backends.hopper.barriers import sync_warpgroup
from xsake.backends.hopper.bias_tile import moved
from xsake.backends.hopper.interval_tile import scalar
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
    newest: Any = None  # a of the newest block, if its term is not in `blocks` yet

    def moved(self, m, base, shrink):
        """The same sums relative to `base` instead of m; shrink = 2^(m - base)."""
        # log2 of the factor of every p. Before the first key m is -inf and the sums are 0, whose
        # product with a number is 0.
        change = jnp.maximum(m, LOWEST) - base
        blocks, tokens = (
            None if x is None else (x + self.l * change) * shrink for x in self.without_l
        )
        return Sums(self.l * shrink, blocks, tokens)

    @property
    def without_l(self):
        """(blocks, tokens)."""
        return self.blocks, self.tokens

    def with_newest(self, tile):
        """The sums with a block whose p have the sum `tile`, but for its terms."""
        return self._replace(l=self.l + tile, newest=tile)

    def settled(self):
        """(the sums with the newest block's term, log2 of its sum)."""
        log = jnp.log2(self.newest)
        blocks = self.blocks + self.newest * jnp.maximum(log, LEAST)
        return self._replace(blocks=blocks, newest=None), log

    def entropies(self):
        """[over blocks, over keys] in nats: ln l - Σ p ln p / l; 0 in rows without keys."""
        seen = self.l > 0
        l = jnp.where(seen, self.l, 1.0)
        return [
            jnp.where(seen, (jnp.log2(l) - x / l) * (1 / LOG2E), 0.0)
            for x in self.without_l
            if x is not None
        ]


class StatisticsTile:
    """The statistics of a kernel's work tiles; `self` holds what is static."""

    def __init__(self, kernel, has_tokens, has_sinks, most_visits):
        if kernel.splits > 1:
            raise ValueError(
                f"statistics need steps of whole blocks, not {kernel.splits} steps per block"
            )
        self.shape, self.consumers = kernel.shape, kernel.consumers
        self.ctas = kernel.scheduler.ctas
        self.has_tokens, self.has_sinks = has_tokens, has_sinks
        self.interpret = kernel.interpret
        # of all visits of a work tile, of the rows of all warpgroups
        self.logs = jax.ShapeDtypeStruct(
            (self.consumers, round_up(max(most_visits, 1), VISITS), ROWS), jnp.float32
        )
        self.in_shared = False  # whether logarithms are in shared memory

    def out_type(self) -> tuple[Any, ...]:
        """Entropies of rows, mass of blocks, and the logarithms if they are in global memory."""
        B, _, _, N, *_ = self.shape.sizes
        rows = jax.ShapeDtypeStruct((B, N, self.shape.padded_rows), jnp.float32)
        blocks = round_up(self.shape.kv_blocks, THREADS)  # every thread clears as many
        mass = (B, N, self.shape.row_blocks, self.consumers, blocks)
        shapes: list[Any] = [mass] if self.in_shared else [mass, (self.ctas, *self.logs.shape)]
        arrays = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
        return *[rows] * self.entropies, *arrays

    @property
    def log_bytes(self) -> int:
        """The bytes of the logarithms of one work tile."""
        return self.logs.size * self.logs.dtype.itemsize

    @property
    def entropies(self) -> int:
        """How many entropies a row has."""
        return 2 if self.has_tokens else 1

    def scratch(self) -> dict[str, Any]:
        """Shared memory for logarithms, if they are there."""
        if not self.in_shared:
            return {}
        return dict(logs_smem=plgpu.SMEM(self.logs.shape, self.logs.dtype))

    def init(self, zeros):
        """The sums before the first step."""
        return Sums(zeros, zeros, zeros if self.has_tokens else None)

    def split(self, refs):
        """(the sinks in global memory or None, the refs that follow)."""
        return (refs[0], refs[1:]) if self.has_sinks else (None, refs)

    # A step

    def add(self, sums, x, p, m, base, shrink, may_be_empty):
        """The sums with one more block, not settled; p = 2^x, relative to `base`."""
        sums = sums.moved(m, base, shrink)
        if sums.tokens is not None:
            x = jnp.maximum(x, LEAST) if may_be_empty else x
            sums = sums._replace(tokens=sums.tokens + (p * x).sum(axis=1))
        return sums.with_newest(p.sum(axis=1))

    def settle(self, sums, m, outs, scratch, wg, visit):
        """The sums with the newest block's term, whose logarithm goes where this CTA finds it.

        With `overlap` this is done a step later: the products of that step hide it.
        """
        sums, log = sums.settled()
        kept = self.own_logs(outs, scratch, wg).at[visit]
        store_rows(m + log, kept, self.interpret, in_shared=self.in_shared)
        return sums

    def own_logs(self, outs, scratch, wg):
        """Where logarithms are kept; both warpgroups share it where they have the same rows.

        [visits, 64]
        """
        logs = scratch.logs_smem if self.in_shared else outs[-1].at[lax.axis_index("cta")]
        return logs.at[0 if self.consumers == 1 else wg]

    # The end of a work tile

    def own_mass(self, tile, outs, wg):
        """The sums over this warpgroup's rows of a work tile: one for every kv block."""
        mass = outs[-1 if self.in_shared else -2]
        return mass.at[tile.b, tile.n, tile.i, wg]

    def clear_mass(self, tile, outs, wg):
        """Zeros for blocks that no list names; a barrier must follow, before `store_mass`.

        Before the steps: a fence of shared memory would wait for these stores.
        """
        mass = self.own_mass(tile, outs, wg)
        layout = plgpu.Layout.WG_STRIDED(mass.shape, vec_size=1)
        mass[...] = plgpu.layout_cast(jnp.zeros(mass.shape, jnp.float32), layout)

    def store_mass(self, tile, visits, wg, first_row, index, outs, sinks, scratch):
        """The mass of the first `visits` blocks, summed over the 64 rows.

        The logsumexp is in rows_smem. Sinks join the denominator, and rows past T have no mass.
        """
        base = plgpu.load(scratch.rows_smem.at[0, wg], layout=COLUMN, optimized=False) * LOG2E
        base = jnp.where(base == -jnp.inf, 0.0, base)  # of a row without keys, all logs are -inf
        if sinks is not None:
            sink = sinks[tile.n] * LOG2E
            larger = jnp.maximum(base, sink)
            base = larger + jnp.log2(1.0 + jnp.exp2(jnp.minimum(base, sink) - larger))
        T = self.shape.sizes.T
        if self.shape.padded_rows != T:
            row = first_row + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=COLUMN)
            base = jnp.where(row < T, base, jnp.inf)
        logs, mass = self.own_logs(outs, scratch, wg), self.own_mass(tile, outs, wg)

        @pl.loop(0, lax.div(visits + (VISITS - 1), jnp.int32(VISITS)))
        def _(group):
            first = group * VISITS
            blocks = load_entries(index, tile.start + first, visits - first, self.interpret)
            log = plgpu.load(logs.at[pl.ds(first, VISITS)], layout=TILE, optimized=False)
            share = jnp.exp2(log - lax.broadcast_in_dim(base, log.shape, [1])).sum(axis=1)
            scatter_rows(share, mass, blocks, self.interpret)

        sync_warpgroup(self.interpret)  # the next tile's logarithms replace these


def mean_mass(mass: Array, T: int, block: int, kv_blocks: int) -> Array:
    """The mean over the queries of row blocks of `block` tokens: [B, N, Tb, Sb].

    mass: sums over 64 rows each, [B, N, row blocks, consumers, blocks]; its row blocks may be
    others.
    """
    row_blocks, slices = -(-T // block), block // ROWS
    mass = mass.reshape(*mass.shape[:2], -1, mass.shape[-1])
    more = row_blocks * slices - mass.shape[2]
    mass = jnp.pad(mass, ((0, 0), (0, 0), (0, max(more, 0)), (0, 0)))
    mass = mass[:, :, : row_blocks * slices, :kv_blocks]
    mass = mass.reshape(*mass.shape[:2], row_blocks, slices, kv_blocks).sum(3)
    return mass / jnp.minimum(T - jnp.arange(row_blocks) * block, block)[:, None]


def load_entries(index, first, count, interpret):
    """index[first + row] for the rows below count, -1 for others: int32 [64], one for each row."""
    if interpret:
        found = [index[first + jnp.minimum(row, count - 1)] for row in range(ROWS)]
        return jnp.where(jnp.arange(ROWS) < count, jnp.stack(found), -1)
    lines = [
        ".reg .pred listed; setp.lt.s32 listed, $2, $3; mov.b32 $0, -1;",
        "@listed ld.global.b32 $0, [$1];",
    ]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ROW, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=ROW),
    )
    def emit(_, index, rows, first, count):
        first, count = (y.registers[()] for y in (first, count))
        registers = np.empty_like(rows.registers)
        for at in np.ndindex(registers.shape):
            row = scalar(rows.registers[at])
            address = moved(index, arith.addi(first, row), 4)
            entry = asm(lines, "=&r,l,r,r", [address, row, count])
            registers[at] = vector.broadcast(rows.registers[at].type, entry)
        return mgpu.FragmentedArray(_registers=registers, _layout=rows.layout, _is_signed=True)

    rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
    return emit(index, rows, first, count)


def scatter_rows(x, ref, at, interpret):
    """ref[at[row]] = x[row] for the rows whose `at` is not negative; ref and x are float32."""
    if interpret:

        @pl.loop(0, len(x))
        def _(row):
            @pl.when(at[row] >= 0)
            def _():
                ref[at[row]] = x[row]

        return
    lines = [
        *OWNER,
        ".reg .pred listed; .reg .b64 to; setp.ge.and.s32 listed, $1, 0, own;",
        "mad.wide.s32 to, $1, 4, $0; @listed st.global.f32 [to], $2;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW, ROW))
    def emit(_, ref, at, x):
        values = [own_row(y)[1] for y in (at, x)]
        asm(lines, "l,r,f", [moved(ref, i32(0), 4), *values])

    emit(ref, at, x)
