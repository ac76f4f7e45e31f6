"""Scores of blocks on Hopper (sm90), in Pallas Mosaic GPU: every key against rows of mean queries.

    score[b, n, i, j] = log Σ_{k of block j} exp(q̄_i · k / √H)

Rows of queries come in tiles of 64, those of all query heads of a kv head one after another. A CTA
keeps some tiles in shared memory and lets blocks of keys pass by, so that K is read about once:

    memory warpgroup     Q̄ tiles of a segment; K blocks through a ring           (runs ahead)
    compute warpgroups   for each block and each tile: S = Q̄ Kᵀ ─ max, exp2, sum, log2 ─▶ 64 numbers

A score depends on one block alone: nothing is carried from block to block, and warpgroups take
pairs of (tile, block) in turns. Which CTA takes which blocks is known from the sizes: `segments`
cuts the whole work into runs of consecutive blocks that take about the same time.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake import _jax
from xsake.backends.hopper.layouts import ALIGNED, LOG2E, ROWS, TILE, pad_tokens, round_up, slot_of, tiles
from xsake.backends.hopper.shape import check_sizes


@dataclasses.dataclass(frozen=True)
class ScoresTiling:
    """What may change the speed, never the values."""

    warpgroups: int = 3  # that compute
    q_bytes: int = 64 << 10  # of shared memory for tiles of queries
    k_bytes: int = 128 << 10  # for blocks of keys


DEFAULT_TILING = ScoresTiling()


class Segment(NamedTuple):
    """A run of blocks that one CTA scores against one group of tiles."""

    b: Any  # batch row
    h: Any  # kv head
    group: Any  # of tiles
    first: Any  # block
    count: Any  # of blocks; 0: nothing follows


def scores(
    queries: jax.Array,
    k: jax.Array,
    block: int,
    *,
    causal: bool,
    tiling: ScoresTiling = DEFAULT_TILING,
    interpret: Any = False,
) -> jax.Array:
    """Scores float32 [B, N, R, n] of n = ceil(S / block) blocks.

    Args:
      queries: [B, R, N, H] in k's type, already times log2(e) / √H.
      k: [B, S, K, H]; keys past S do not count in the last block.
      block: 64 or 128 keys.
      causal: row i sees blocks 0 … i, the others are -inf.
      tiling: how.
      interpret: plgpu.InterpretGPUParams, for machines without a GPU.
    """
    shape = _Shape.of(queries, k, block, causal, tiling)
    B, R, N, _ = queries.shape
    # Shared memory is tiled by 8 rows, and Mosaic wants the same of what it copies.
    q, k = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0))) for x in (queries, k))
    table = segments(shape, tiling)
    kernel = _Kernel(shape, tiling, interpret)
    found = plgpu.kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((B, N, shape.blocks, shape.head_tiles * ROWS), jnp.float32),
        scratch_types=kernel.scratch(k.dtype),
        grid=(table.shape[0],),
        grid_names=("cta",),
        num_threads=tiling.warpgroups + 1,
        thread_name="wg",
        kernel_name="xsake_scores",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # rows are reduced inside a warp
            unsafe_no_auto_barriers=not interpret,  # no thread reads what it wrote
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(q, k, jnp.asarray(table))
    found = jnp.swapaxes(found, 2, 3)[:, :, :R]
    if not causal:
        return found
    # what no row of a tile sees was not written
    return jnp.where(jnp.arange(shape.blocks) <= jnp.arange(R)[:, None], found, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Static sizes, checked."""

    batch: int
    rows: int  # of each query head
    keys: int
    heads: int
    kv_heads: int
    size: int
    block: int
    causal: bool
    resident: int  # tiles of 64 rows that a CTA keeps at a time: a group
    q_stages: int  # groups in shared memory
    stages: int  # blocks of keys in flight

    @property
    def head_tiles(self) -> int:
        """Tiles of a query head."""
        return pl.cdiv(self.rows, ROWS)

    @property
    def tiles(self) -> int:
        """Tiles of a kv head: those of all its query heads."""
        return self.head_tiles * (self.heads // self.kv_heads)

    @property
    def groups(self) -> int:
        return pl.cdiv(self.tiles, self.resident)

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.keys, self.block)

    @classmethod
    def of(cls, queries, k, block, causal, tiling):
        batch, rows, heads, size = queries.shape
        _, keys, kv_heads, _ = k.shape
        if k.shape != (batch, keys, kv_heads, size) or heads % kv_heads:
            raise ValueError(
                f"key is {list(k.shape)}; queries {list(queries.shape)} ask for "
                f"[{batch}, S, K, {size}] with K dividing {heads}"
            )
        if k.dtype != queries.dtype:
            raise ValueError(f"key is {k.dtype} and the queries are {queries.dtype}; cast them")
        check_sizes((block,), size)
        tile_bytes, block_bytes = (x * size * k.dtype.itemsize for x in (ROWS, block))
        tiles = pl.cdiv(rows, ROWS) * (heads // kv_heads)
        groups = pl.cdiv(tiles, max(1, tiling.q_bytes // tile_bytes))
        resident = pl.cdiv(tiles, groups)
        return cls(
            batch,
            rows,
            keys,
            heads,
            kv_heads,
            size,
            block,
            causal,
            resident,
            q_stages=min(2, max(1, tiling.q_bytes // (resident * tile_bytes))),
            stages=max(2, tiling.k_bytes // block_bytes),
        )


@functools.lru_cache(maxsize=64)
def segments(shape: _Shape, tiling: ScoresTiling) -> np.ndarray:
    """What every CTA does, int32 [CTAs, most segments of one + 1, 5]: rows of Segment.

    The blocks of all groups of all kv heads, in one row, are cut where a CTA has its share.
    """
    tile = np.arange(shape.groups * shape.resident)
    last_row = np.where(tile < shape.tiles, tile % shape.head_tiles * ROWS + ROWS - 1, -1)
    last_row = np.minimum(last_row, shape.rows - 1).reshape(shape.groups, -1)
    number = np.arange(shape.blocks)
    # [groups, tiles, blocks]
    sees = last_row[..., None] >= (number if shape.causal else np.zeros_like(number))
    # Nanoseconds, roughly: an SM's share of memory bandwidth against its exponentials and products
    read = shape.block * shape.size * 2 / 32
    compute = ROWS * shape.block / 16
    cost = np.where(sees.any(1), np.maximum(read, sees.sum(1) * compute), 0)  # [groups, blocks]
    heads = shape.batch * shape.kv_heads
    group, first = np.nonzero(cost)
    flat = np.tile(cost[group, first], heads)
    ends = np.cumsum(flat)
    ctas = min(_jax.multiprocessors(), len(flat))
    cta = np.minimum((ends - flat / 2) * ctas // ends[-1], ctas - 1).astype(int)
    head = np.repeat(np.arange(heads), len(group))
    item = head * shape.groups + np.tile(group, heads)
    begins = np.nonzero(np.diff(cta, prepend=-1) | np.diff(item, prepend=-1))[0]
    count = np.diff(begins, append=len(flat))
    cta, item, first = cta[begins], item[begins], np.tile(first, heads)[begins]
    place = np.arange(len(cta)) - np.searchsorted(cta, cta)
    table = np.zeros((ctas, place.max() + 2, len(Segment._fields)), np.int32)
    head, group = np.divmod(item, shape.groups)
    fields = (head // shape.kv_heads, head % shape.kv_heads, group, first, count)
    table[cta, place] = np.stack(fields, -1)
    return table


class _Kernel:
    """The kernel body and its roles; `self` holds what is static."""

    def __init__(self, shape, tiling, interpret):
        self.shape = shape
        self.warpgroups = tiling.warpgroups
        self.interpret = bool(interpret)

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        shape = self.shape
        return dict(
            q_smem=tiles(shape.q_stages, shape.resident, ROWS, shape.size, dtype=dtype),
            k_smem=tiles(shape.stages, shape.block, shape.size, dtype=dtype),
            scores_smem=plgpu.SMEM((self.warpgroups, ROWS), jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=shape.q_stages, num_arrivals=shape.resident),
            k_ready=plgpu.Barrier(num_barriers=shape.stages),
            q_free=plgpu.Barrier(num_barriers=shape.q_stages, num_arrivals=self.warpgroups),
            k_free=plgpu.Barrier(num_barriers=shape.stages, num_arrivals=self.warpgroups),
        )

    def body(self, q_gmem, k_gmem, table, scores_gmem, **scratch):
        wg = lax.axis_index("wg")

        @pl.when(wg < self.warpgroups)
        def _():
            self.compute(wg, table, scores_gmem, **scratch)

        @pl.when(wg == self.warpgroups)
        def _():
            self.memory(q_gmem, k_gmem, table, **scratch)

    def for_each_segment(self, table, visit):
        """done = visit(number, segment, done) for every segment: (segments, blocks) in all."""
        cta = lax.axis_index("cta")

        def record(number):
            return Segment(*(table[cta, number, field] for field in range(len(Segment._fields))))

        def body(carry):
            number, segment, done = carry
            done = visit(number, segment, done)
            return number + 1, record(number + 1), done

        zero = jnp.int32(0)
        number, _, done = lax.while_loop(
            lambda carry: carry[1].count > 0, body, (zero, record(zero), zero)
        )
        return number, done

    def place_of(self, segment, tile):
        """(query head, first row) of a tile of the segment's kv head."""
        shape = self.shape
        head, tile = (f(tile, jnp.int32(shape.head_tiles)) for f in (lax.div, lax.rem))
        return segment.h * (shape.heads // shape.kv_heads) + head, tile * ROWS

    # Memory warpgroup

    def memory(
        self, q_gmem, k_gmem, table, *, q_smem, k_smem, q_ready, k_ready, q_free, k_free, **_
    ):
        """Copies a group of tiles per segment and its blocks, as soon as there is room."""
        shape = self.shape

        def load(number, segment, done):
            def load_q():
                place = slot(number, shape.q_stages)
                pl.when(number >= shape.q_stages)(lambda: plgpu.barrier_wait(q_free.at[place]))
                for m in range(shape.resident):
                    # A group may reach past the last tile, which it then has twice.
                    tile = jnp.minimum(segment.group * shape.resident + m, shape.tiles - 1)
                    n, first_row = self.place_of(segment, tile)
                    plgpu.copy_gmem_to_smem(
                        q_gmem.at[segment.b, pl.ds(first_row, ROWS), n],
                        q_smem.at[place, m],
                        q_ready.at[place],
                    )

            @pl.loop(0, segment.count)
            def _(t):
                place = slot(done + t, shape.stages)
                pl.when(done + t >= shape.stages)(lambda: plgpu.barrier_wait(k_free.at[place]))
                keys = pl.ds((segment.first + t) * shape.block, shape.block)
                plgpu.copy_gmem_to_smem(
                    k_gmem.at[segment.b, keys, segment.h], k_smem.at[place], k_ready.at[place]
                )
                pl.when(t == 0)(load_q)  # for which there may be room later

            return done + segment.count

        numbers, done = self.for_each_segment(table, load)
        if self.interpret:  # it wants every completed phase observed
            for total, stages, free in (
                (numbers, shape.q_stages, q_free),
                (done, shape.stages, k_free),
            ):

                @pl.loop(jnp.maximum(total - stages, 0), total)
                def _(t, stages=stages, free=free):
                    plgpu.barrier_wait(free.at[slot(t, stages)])

    # Compute warpgroups

    def compute(
        self, wg, table, scores_gmem,
        *, q_smem, k_smem, scores_smem, q_ready, k_ready, q_free, k_free,
    ):  # fmt: skip
        """Every so many'th pair of (tile, block)."""
        shape, warpgroups = self.shape, self.warpgroups

        def visit(number, segment, done):
            q_place = slot(number, shape.q_stages)
            plgpu.barrier_wait(q_ready.at[q_place])

            @pl.loop(0, segment.count)
            def _(t):
                place = slot(done + t, shape.stages)
                plgpu.barrier_wait(k_ready.at[place])
                first = lax.rem(done + t + wg, jnp.int32(warpgroups))

                @pl.loop(0, lax.div(shape.resident - first + warpgroups - 1, jnp.int32(warpgroups)))
                def _(turn):
                    m = first + turn * warpgroups
                    self.score(
                        segment,
                        segment.first + t,
                        segment.group * shape.resident + m,
                        q_smem.at[q_place, m],
                        k_smem.at[place],
                        scores_smem.at[wg],
                        scores_gmem,
                    )

                plgpu.barrier_arrive(k_free.at[place])

            plgpu.barrier_arrive(q_free.at[q_place])
            return done + segment.count

        self.for_each_segment(table, visit)
        plgpu.wait_smem_to_gmem(0)

    def score(self, segment, j, tile, q, k, scores_smem, scores_gmem):
        """The 64 scores of one tile and block j, if there is a row that sees it."""
        shape = self.shape
        n, first_row = self.place_of(segment, tile)
        live = tile < shape.tiles
        if shape.causal:
            live &= first_row + ROWS > j

        @pl.when(live)
        def _():
            def product(s_ref):
                plgpu.wgmma(s_ref, q, k.transpose((1, 0)))
                return s_ref[...]

            s = pl.run_scoped(product, plgpu.ACC((ROWS, shape.block), jnp.float32))
            if rest := shape.keys % shape.block:
                s = lax.cond(j == shape.blocks - 1, lambda: _without(s, rest), lambda: s)
            m = s.max(axis=1)
            l = jnp.exp2(s - lax.broadcast_in_dim(m, s.shape, [0])).sum(axis=1)
            # The copy before this one must have read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scores_smem[...] = (m + jnp.log2(l)) * (1 / LOG2E)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                scores_smem, scores_gmem.at[segment.b, n, j, pl.ds(first_row, ROWS)]
            )


def _without(s, rest):
    """s with -inf in all but the first `rest` columns."""
    column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=TILE)
    return jnp.where(column < rest, s, -jnp.inf)


def slot(t, stages):
    """The place in a ring of what came as number t."""
    return lax.rem(jnp.int32(t), jnp.int32(stages))
