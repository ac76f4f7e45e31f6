"""The backward over selected blocks on Hopper (sm90): kv blocks outside, gathered queries inside.

    sT = k qT ─ pT ─ dv += pT d_out
    dpT = v d_outT ─ dsT ─┬─ dk += dsT q
                          └─ ds k ─▶ a part of dq for every slot

The two compute warpgroups alternate over the tiles of lists.py, with their own sums of dk and dv,
which are added to global memory when the block changes: the order of these additions varies. A
token's parts of dq are added by merge.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import (
    COLUMN,
    LOG2E,
    PANEL,
    ROWS,
    TILE,
    slot_of,
    tiles,
)
from xsake.backends.hopper.ptx import opaque
from xsake.backends.hopper.selected.gather import Copies
from xsake.backends.hopper.selected.lists import TILE_ROWS, Tiles
from xsake.backends.hopper.selected.spans import KeyBlocks, Spans, launch, limits_of

COMPUTE_WGS = 2
STAGES = 4  # tiles in flight
LAG = 1  # tiles of small groups that are copied before a tile is reported
SUM_COLUMNS = 32  # of dk and dv that are staged at a time


def parts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    lists: Tiles,
    first: jax.Array,
    dk: Any,
    dv: Any,
    *,
    segments: int,
    most_tiles: int,
    scale: float,
) -> jax.Array:
    """For every slot its part of dq / scale, [slots · g, H]; adds dk / scale and dv to refs.

    q, k, v, lists and segments as in parts.py; d_out [B · T · K, g, Hv]; lse (base 2, +inf in slots
    without a token) and delta float32 [slots · g], of all segments; dk and dv float32 refs
    [B, S, K, H | Hv].
    """
    kernel = _Kernel(q, k, v, lists, scale, segments)
    return launch(
        kernel,
        "xsake_selected_backward",
        COMPUTE_WGS + 1,
        (
            q,
            k,
            v,
            d_out,
            lse,
            delta,
            lists.block,
            lists.rows,
            lists.limits,
            lists.starts,
            first.reshape(1),
            dk,
            dv,
        ),
        jax.ShapeDtypeStruct((most_tiles * TILE_ROWS, q.shape[-1]), q.dtype),
    )


class _Kernel:
    """The kernel body and its roles; `self` holds what is static."""

    def __init__(self, q, k, v, lists, scale, segments):
        self.group, self.H = q.shape[1:]
        self.copies = Copies(self.group)
        self.tokens = self.copies.tokens
        self.kv_heads, self.Hv = k.shape[2], v.shape[-1]
        self.kv_blocks = k.shape[1] // ROWS
        self.scale = scale
        self.tiles, self.segments = lists.block.size, segments
        self.ctas = min(_jax.multiprocessors(), self.tiles)

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        arrivals = self.copies.arrivals + 1
        return dict(
            q_smem=tiles(STAGES, ROWS, self.H, dtype=dtype),
            d_out_smem=tiles(STAGES, ROWS, self.Hv, dtype=dtype),
            statistics_smem=plgpu.SMEM((2 * STAGES, ROWS), jnp.float32),
            k_smem=tiles(1, ROWS, self.H, dtype=dtype),
            v_smem=tiles(1, ROWS, self.Hv, dtype=dtype),
            ds_smem=tiles(COMPUTE_WGS, ROWS, ROWS, dtype=dtype),
            dq_smem=tiles(COMPUTE_WGS, ROWS, self.H, dtype=dtype),
            sum_smem=tiles(COMPUTE_WGS, ROWS, SUM_COLUMNS, dtype=jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=STAGES, num_arrivals=arrivals),
            d_out_ready=plgpu.Barrier(num_barriers=STAGES, num_arrivals=arrivals),
            q_free=plgpu.Barrier(num_barriers=STAGES),
            d_out_free=plgpu.Barrier(num_barriers=STAGES),
            kv_ready=plgpu.Barrier(num_barriers=1, num_arrivals=2),
            kv_free=plgpu.Barrier(num_barriers=1, num_arrivals=COMPUTE_WGS),
        )

    def body(
        self, q, k, v, d_out, lse, delta, block, rows, limits, starts, first, dk, dv, dq, **scratch
    ):
        """One CTA: what its warpgroups do."""
        wg = lax.axis_index("wg")
        spans = Spans(starts, first[0], self.segments, self.ctas, self.tiles - 1)
        names = "k_smem", "v_smem", "kv_ready", "kv_free"
        keys = KeyBlocks(*(scratch.pop(x) for x in names), self.kv_blocks, self.kv_heads)

        @pl.when(wg < COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            self.compute(wg, spans, keys, block, limits, dq, dk, dv, scratch)

        @pl.when(wg == COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            self.memory(spans, keys, q, k, v, d_out, lse, delta, block, rows, **scratch)

    # Memory warpgroup

    def memory(
        self, spans, keys, q_gmem, k_gmem, v_gmem, d_out_gmem, lse_gmem, delta_gmem, block, rows,
        *, q_smem, d_out_smem, statistics_smem, q_ready, d_out_ready, q_free, d_out_free, **_,
    ):  # fmt: skip
        """Copies K and V once per block, and everything of the queries of every tile."""
        copy = plgpu.copy_gmem_to_smem

        def record(tile):
            return block[tile], self.copies.record(rows, tile * self.tokens)

        def arrive(t):
            slot = slot_of(t, STAGES)
            plgpu.barrier_arrive(q_ready.at[slot])
            plgpu.barrier_arrive(d_out_ready.at[slot])

        def load(tile, found, done, carry):
            (at, own_rows), (before, number, reported) = found, carry
            changed = at != before
            slot = slot_of(done, STAGES)
            values = pl.ds(tile * ROWS, ROWS)

            def fill(gmem, smem, value_gmem, value, ready, free):
                pl.when(done >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
                self.copies.copy(
                    gmem, smem.at[slot], ready.at[slot], rows, tile * self.tokens, found=own_rows
                )
                copy(value_gmem.at[values], statistics_smem.at[value], ready.at[slot])

            def load_keys():
                pl.when(changed)(lambda: keys.load(k_gmem, v_gmem, number, at))

            fill(q_gmem, q_smem, lse_gmem, slot, q_ready, q_free)
            if self.copies.by_tma:
                load_keys()
            fill(d_out_gmem, d_out_smem, delta_gmem, STAGES + slot, d_out_ready, d_out_free)
            self.copies.commit()
            if not self.copies.by_tma:
                reported = self.copies.report_before_keys(changed, done + 1, reported, LAG, arrive)
                load_keys()
            return at, number + changed.astype(jnp.int32), reported

        carry = jnp.int32(-1), jnp.int32(0), jnp.int32(0)
        total, (*_, reported) = spans.for_each_tile(record, load, carry)
        self.copies.report(total, reported, 0, arrive)

    # Compute warpgroups

    def compute(self, wg, spans, keys, block, limits, dq, dk, dv, scratch):
        """dk and dv of runs of tiles of the same block; dq of every second tile."""

        def segment(number, carry):
            begin, end = spans.span(number)

            def run(carry):
                first, done, loaded, before = carry
                at = block[first]
                last = lax.while_loop(
                    lambda tile: (tile < end) & (block[jnp.minimum(tile, end - 1)] == at),
                    lambda tile: tile + 1,
                    first,
                )
                # A segment may begin with the block of the last tile of the one before.
                pl.when(at != before)(lambda: keys.turn_to(loaded))
                loaded = loaded + (at != before).astype(jnp.int32)
                own = first + lax.rem(done + wg, jnp.int32(COMPUTE_WGS))  # its first tile

                def accumulate(dk_ref, dv_ref):
                    @pl.loop(0, lax.div(last - own + 1, jnp.int32(COMPUTE_WGS)))
                    def _(turn):
                        tile = own + COMPUTE_WGS * turn
                        self.tile(
                            wg, tile, done + tile - first, spans, keys, limits, dq,
                            dk_ref, dv_ref, scratch,
                        )  # fmt: skip

                    plgpu.wgmma_wait(0)
                    return dk_ref[...], dv_ref[...]

                sums = pl.run_scoped(
                    accumulate,
                    plgpu.ACC((ROWS, self.H), jnp.float32),
                    plgpu.ACC((ROWS, self.Hv), jnp.float32),
                )
                pl.when(own < last)(
                    lambda: self.add_sums(wg, keys.place(at), sums, dk, dv, scratch)
                )
                return last, done + last - first, loaded, at

            return lax.while_loop(lambda carry: carry[0] < end, run, (begin, *carry))[1:]

        carry = (jnp.int32(0), jnp.int32(0), jnp.int32(-1))
        lax.fori_loop(0, spans.segments, segment, carry)
        plgpu.wait_smem_to_gmem(0)

    def add_sums(self, wg, place, sums, dk, dv, scratch):
        """Adds dk and dv of a block to the sums in global memory."""
        staging = scratch["sum_smem"].at[wg]
        for total, gmem in zip(sums, (dk, dv), strict=True):
            for column in range(0, total.shape[1], SUM_COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staging[...] = total[:, column : column + SUM_COLUMNS]
                plgpu.commit_smem()
                columns = pl.ds(column, SUM_COLUMNS)
                plgpu.copy_smem_to_gmem(staging, gmem.at[*place, columns], reduction_op="add")

    def tile(self, wg, tile, done, spans, keys, limits, dq_gmem, dk_ref, dv_ref, scratch):
        """One tile, which is number `done` of this CTA."""
        q_smem, d_out_smem = scratch["q_smem"], scratch["d_out_smem"]
        k_smem, v_smem, ds_smem = keys.k_smem.at[0], keys.v_smem.at[0], scratch["ds_smem"]
        statistics, dq_smem = scratch["statistics_smem"], scratch["dq_smem"]
        slot = slot_of(done, STAGES)
        first_limit = limits[tile * self.tokens]
        plgpu.barrier_wait(scratch["q_ready"].at[slot])
        s = self.issue(k_smem, q_smem.at[slot].transpose((1, 0)))
        plgpu.barrier_wait(scratch["d_out_ready"].at[slot])
        dp = self.issue(v_smem, d_out_smem.at[slot].transpose((1, 0)))
        lse = self.per_query(statistics.at[slot])
        s = self.settle(s, 1)
        p = jnp.exp2(s * (self.scale * LOG2E) - lse)
        p = lax.cond(
            first_limit < ROWS, lambda: self.masked(p, limits, tile * self.tokens), lambda: p
        )
        delta = self.per_query(statistics.at[STAGES + slot])
        dp = self.settle(dp, 0)
        ds = (p * (dp - delta)).astype(ds_smem.dtype)
        plgpu.wgmma(dv_ref, p.astype(ds_smem.dtype), d_out_smem.at[slot])
        ds_smem[opaque(wg)] = ds
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous dq has been read
        plgpu.commit_smem()
        ds_rows = ds_smem.at[wg].transpose((1, 0))
        dq = self.issue(ds_rows, k_smem.at[:, pl.ds(0, PANEL)])
        plgpu.wgmma_wait(1)  # dv is done
        plgpu.barrier_arrive(scratch["d_out_free"].at[slot])
        plgpu.wgmma(dk_ref, ds, q_smem.at[slot])
        own = dq_smem.at[opaque(wg)]
        own[:, pl.ds(0, PANEL)] = self.settle(dq, 1).astype(own.dtype)
        for column in range(PANEL, self.H, PANEL):
            dq = self.issue(ds_rows, k_smem.at[:, pl.ds(column, PANEL)])
            own[:, pl.ds(column, PANEL)] = self.settle(dq, 0).astype(own.dtype)
        plgpu.wgmma_wait(0)  # dk is done
        plgpu.barrier_arrive(scratch["q_free"].at[slot])
        plgpu.commit_smem()
        rows = pl.ds((tile - spans.begin) * TILE_ROWS, TILE_ROWS)
        plgpu.copy_smem_to_gmem(own, dq_gmem.at[rows])

    def masked(self, p, limits, first):
        """pT with zeros in the keys from a token's limit on; `first` is the first token's slot."""
        limit = limits_of(limits, first, self.tokens, self.group, COLUMN)
        key = plgpu.broadcasted_iota(jnp.int32, p.shape, 0, layout=TILE)
        return jnp.where(key < lax.broadcast_in_dim(limit, p.shape, [1]), p, 0.0)

    def per_query(self, smem):
        """One value per query, repeated over the rows of a transposed tile."""
        values = plgpu.load(smem, layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(values, (ROWS, ROWS), [1])

    def issue(self, left, right):
        """Issues left @ right, both in shared memory; the result may be read after settle()."""

        def product(ref):
            plgpu.wgmma(ref, left, right)
            return plgpu.wgmma_accumulator_load(ref, wait_n=None)

        return pl.run_scoped(product, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))

    def settle(self, tile, wait_n):
        """An issued tile, once no more than `wait_n` later products are in flight."""
        plgpu.wgmma_wait(wait_n)
        return lax.optimization_barrier(tile)
