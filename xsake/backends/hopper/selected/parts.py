"""The forward over selected blocks on Hopper (sm90): kv blocks outside, gathered queries inside.

    tile of 64 rows = the query heads of some tokens that selected kv block j      (lists.py)

    memory warpgroup     K_j, V_j when the block changes; the queries of a tile (gather.py), ahead
    compute warpgroups   in turns, a tile each: S = Q Kᵀ ─ softmax ─ O = P V ─▶ for every slot a
                         part of the output and its logsumexp

merge.py adds the parts of a token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import LOG2E, ROW, TILE, slot_of, tiles
from xsake.backends.hopper.selected import BLOCK
from xsake.backends.hopper.selected.gather import Copies
from xsake.backends.hopper.selected.lists import TILE_ROWS, Tiles
from xsake.backends.hopper.selected.spans import (
    KeyBlocks,
    Spans,
    launch,
    limits_of,
    over_columns,
    product,
    values,
)

COMPUTE_WGS = 3
Q_STAGES = 6
KV_STAGES = 2
LAG = 3  # tiles of small groups that are copied before a tile is reported
REGISTERS = 152, 48  # of a compute warpgroup, of the memory warpgroup


def parts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: Tiles,
    first: jax.Array,
    *,
    segments: int,
    most_tiles: int,
    scale: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """For every slot: out [slots · g, Hv] in q's dtype, logsumexp in base 2, float32 [slots · g].

    q [B · T · K, g, H], k [B, S, K, H], v [B, S, K, Hv] with S a multiple of 64; g divides
    64. Segments first … first + segments - 1 are computed, which have at
    most `most_tiles` tiles; slots are counted from their first one.
    """
    kernel = _Kernel(q, k, v, lists, scale, segments, interpret)
    rows = most_tiles * TILE_ROWS
    return launch(
        kernel,
        "xsake_selected",
        COMPUTE_WGS + 1,
        (q, k, v, lists.block, lists.rows, lists.limits, lists.starts, first.reshape(1)),
        (
            jax.ShapeDtypeStruct((rows, v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        interpret,
    )


class _Kernel:
    """The kernel body and its roles; `self` holds what is static."""

    def __init__(self, q, k, v, lists, scale, segments, interpret):
        self.group, self.H = q.shape[1:]
        self.copies = Copies(self.group)
        self.tokens = self.copies.tokens
        self.kv_heads, self.Hv = k.shape[2], v.shape[-1]
        self.kv_blocks = k.shape[1] // BLOCK
        self.scale = scale
        self.tiles, self.segments = lists.block.size, segments
        self.ctas = min(_jax.multiprocessors(), self.tiles)
        self.interpret = bool(interpret)

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        return dict(
            q_smem=tiles(Q_STAGES, TILE_ROWS, self.H, dtype=dtype),
            k_smem=tiles(KV_STAGES, BLOCK, self.H, dtype=dtype),
            v_smem=tiles(KV_STAGES, BLOCK, self.Hv, dtype=dtype),
            out_smem=tiles(COMPUTE_WGS, TILE_ROWS, self.Hv, dtype=dtype),
            lse_smem=plgpu.SMEM((COMPUTE_WGS, TILE_ROWS), jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=Q_STAGES, num_arrivals=self.copies.arrivals),
            q_free=plgpu.Barrier(num_barriers=Q_STAGES),
            kv_ready=plgpu.Barrier(num_barriers=KV_STAGES, num_arrivals=2),
            kv_free=plgpu.Barrier(num_barriers=KV_STAGES, num_arrivals=COMPUTE_WGS),
        )

    def body(self, q, k, v, block, rows, limits, starts, first, out, lse, **scratch):
        """One CTA: what its warpgroups do."""
        wg = lax.axis_index("wg")
        spans = Spans(starts, first[0], self.segments, self.ctas, self.tiles - 1)
        names = "k_smem", "v_smem", "kv_ready", "kv_free"
        keys = KeyBlocks(*(scratch.pop(x) for x in names), self.kv_blocks, self.kv_heads)

        @pl.when(wg < COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            self.compute(wg, spans, keys, block, limits, out, lse, **scratch)

        @pl.when(wg == COMPUTE_WGS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self.memory(spans, keys, q, k, v, block, rows, **scratch)

    # Memory warpgroup

    def memory(
        self, spans, keys, q_gmem, k_gmem, v_gmem, block, rows, *, q_smem, q_ready, q_free, **_
    ):
        """Copies K and V once per block and the queries of every tile."""

        def record(tile):
            return block[tile], self.copies.record(rows, tile * self.tokens)

        def arrive(t):
            plgpu.barrier_arrive(q_ready.at[slot_of(t, Q_STAGES)])

        def load(tile, found, done, carry):
            (at, own_rows), (before, number, reported) = found, carry
            changed = at != before

            def load_keys():
                pl.when(changed)(lambda: keys.load(k_gmem, v_gmem, number, at))

            if self.copies.by_tma:
                load_keys()
            slot = slot_of(done, Q_STAGES)
            pl.when(done >= Q_STAGES)(lambda: plgpu.barrier_wait(q_free.at[slot]))
            self.copies.copy(
                q_gmem, q_smem.at[slot], q_ready.at[slot], rows, tile * self.tokens, found=own_rows
            )
            self.copies.commit()
            if not self.copies.by_tma:
                reported = self.copies.report_before_keys(changed, done + 1, reported, LAG, arrive)
                load_keys()
            return at, number + changed.astype(jnp.int32), reported

        carry = jnp.int32(-1), jnp.int32(0), jnp.int32(0)
        total, (_, number, reported) = spans.for_each_tile(record, load, carry)
        self.copies.report(total, reported, 0, arrive)
        if self.interpret:  # the interpreter requires a wait for every barrier phase
            for done, stages, free in ((total, Q_STAGES, q_free), (number, KV_STAGES, keys.free)):

                @pl.loop(jnp.maximum(done - stages, 0), done)
                def _(t, stages=stages, free=free):
                    plgpu.barrier_wait(free.at[slot_of(t, stages)])

    # Compute warpgroups

    def compute(self, wg, spans, keys, block, limits, out_gmem, lse_gmem, **scratch):
        """Every third tile."""

        def record(tile):
            return block[tile], limits[tile * self.tokens]

        def visit(tile, found, done, carry):
            (at, first_limit), (before, number) = found, carry
            pl.when(at != before)(lambda: keys.turn_to(number))
            number = number + (at != before).astype(jnp.int32)

            @pl.when(lax.rem(done, jnp.int32(COMPUTE_WGS)) == wg)
            def _():
                k, v = (x.at[slot_of(number - 1, keys.stages)] for x in (keys.k_smem, keys.v_smem))
                rows = pl.ds((tile - spans.begin) * TILE_ROWS, TILE_ROWS)
                target = out_gmem.at[rows], lse_gmem.at[rows]
                # Tokens rise: if the first sees the whole block, all do. Slots without a token
                # follow the last one; nobody reads their results.
                masked = first_limit < BLOCK
                self.tile(wg, done, k, v, limits, tile * self.tokens, masked, target, **scratch)

            return at, number

        _, (_, number) = spans.for_each_tile(record, visit, (jnp.int32(-1), jnp.int32(0)))
        pl.when(number > 0)(lambda: keys.release(number - 1))
        plgpu.wait_smem_to_gmem(0)

    def tile(
        self, wg, done, k, v, limits, first, masked, target,
        *, q_smem, q_ready, q_free, out_smem, lse_smem,
    ):  # fmt: skip
        """Scores, softmax and values of one tile, and one store."""
        slot = slot_of(done, Q_STAGES)
        plgpu.barrier_wait(q_ready.at[slot])
        s = product(q_smem.at[slot], k.transpose((1, 0)))
        plgpu.barrier_arrive(q_free.at[slot])
        s = lax.cond(masked, lambda: self.masked(s, limits, first), lambda: s)
        m = s.max(axis=1) * (self.scale * LOG2E)
        base = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp2(s * (self.scale * LOG2E) - over_columns(base, s))
        l = p.sum(axis=1)
        out = values(p.astype(q_smem.dtype), v, self.interpret)
        seen = l > 0
        one = jnp.where(seen, l, 1.0)
        out = out * over_columns(jnp.where(seen, 1 / one, 0.0), out)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous copies have read the buffers
        out_smem[wg] = out.astype(out_smem.dtype)
        lse_smem[wg] = m + jnp.log2(one)
        plgpu.commit_smem()
        out_gmem, lse_gmem = target
        plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_gmem, commit_group=False)
        plgpu.copy_smem_to_gmem(out_smem.at[wg], out_gmem)

    def masked(self, s, limits, first):
        """s with -inf in the columns from a token's limit on; `first` is the first token's slot."""
        limit = limits_of(limits, first, self.tokens, self.group, ROW)
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=TILE)
        return jnp.where(column < over_columns(limit, s), s, -jnp.inf)
