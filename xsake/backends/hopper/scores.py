"""Scores of kv blocks on Hopper (sm90), in Pallas Mosaic GPU: every key against mean queries.

    score[b, n, i, j] = log Σ_{k of block j} exp(q̄_i · k / √H)

The mean queries of all query heads of a kv head lie one after another in tiles of 64 rows. A CTA
keeps some of these tiles in shared memory and streams blocks of keys, so that K is read about once:

    memory warpgroup     Q̄ tiles of a segment; K blocks through a ring           (runs ahead)
    compute warpgroups   for each block and each tile: S = Q̄ Kᵀ ─ exp2, sum, log2 ─▶ 64 scores

A score depends on one block alone: no state is carried from block to block, and the warpgroups
alternate over pairs of (tile, block). The schedule is static: `segments` splits the work into runs
of consecutive blocks that cost about the same.
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
from xsake.backends.hopper.layouts import (
    ALIGNED,
    LOG2E,
    ROWS,
    TILE,
    pad_tokens,
    round_up,
    slot_of,
    tiles,
)
from xsake.backends.hopper.row_store import store_rows
from xsake.backends.hopper.shape import check_sizes
from xsake.backends.hopper.votes import any_in_warp

SHARED_BYTES = 224 << 10  # of a CTA, for queries and keys; barriers have the rest
# Sums of powers of 2 between these are exact: with 128 keys, terms that a float32 does not hold are
# less than 2⁻²³ of the sum.
LEAST, MOST = 2.0**-96, 2.0**120
COLUMNS = 8  # of a tile, that slices begin and end with


@dataclasses.dataclass(frozen=True)
class ScoresTiling:
    """Tuning parameters; they do not change the results."""

    warpgroups: int = 4  # compute warpgroups
    q_bytes: int = 128 << 10  # of shared memory for tiles of mean queries, at most
    k_bytes: int = 96 << 10  # of shared memory for blocks of keys; two of them fit in any case
    q_groups: int = 2  # of tiles that fit; with 2, the next one is copied ahead


DEFAULT_TILING = ScoresTiling()


class Segment(NamedTuple):
    """A run of blocks that one CTA scores against one group of tiles."""

    b: Any  # batch row
    h: Any  # kv head
    group: Any  # index of the group of tiles
    first: Any  # index of the first block
    count: Any  # number of blocks; 0 marks the end of a CTA's segments


def scores(
    queries: jax.Array, k: jax.Array, block: int, *, causal: bool, parts: int = 1, **how: Any
) -> jax.Array:
    """Scores float32 [B, N, R, n] of n = ceil(S / block) blocks; the arguments are those of `sums`.

    Row i sees blocks 0 … i // parts if causal; the other scores are -inf.
    """
    found = sums(queries, k, block, causal=causal, parts=parts, **how)
    R = queries.shape[1]
    found = jnp.swapaxes(found, 2, 3)[:, :, :R]
    if not causal:
        return found
    # The kernel does not write blocks that no row of a tile sees.
    sees = jnp.arange(found.shape[3]) <= jnp.arange(R)[:, None] // parts
    return jnp.where(sees, found, -jnp.inf)


def sums(
    queries: jax.Array,
    k: jax.Array,
    block: int,
    *,
    causal: bool,
    parts: int = 1,
    keys_per_peak: int = 1,
    tiling: ScoresTiling = DEFAULT_TILING,
    interpret: Any = False,
) -> jax.Array:
    """The scores as the kernel writes them, float32 [B, N, n, R or more].

    Blocks that row i does not see have arbitrary values, as have the rows from R on.

    Args:
      queries: [B, R, N, H] in k's dtype, already multiplied by log2(e) / √H.
      k: [B, S, K, H]; the last block may be short.
      block: 64 or 128 keys.
      causal: row i sees blocks 0 … i // parts.
      parts: mean queries of one row block.
      keys_per_peak: keys, block / keys_per_peak apart, of which only the largest logit is summed;
        divides the block into parts of 8 keys or a multiple of that.
      tiling: tuning parameters.
      interpret: plgpu.InterpretGPUParams, for machines without a GPU.
    """
    shape = ScoresShape.of(queries, k, block, causal, parts, tiling)
    if keys_per_peak < 1 or block % (COLUMNS * keys_per_peak):
        raise ValueError(
            f"keys_per_peak is {keys_per_peak}; blocks of {block} must divide into as many parts, "
            f"each a multiple of {COLUMNS} keys"
        )
    B, _, N, _ = queries.shape
    q, k = (pad_tokens(x, round_up(x.shape[1], ALIGNED)) for x in (queries, k))
    table = segments(shape, _jax.multiprocessors())
    kernel = _Kernel(shape, keys_per_peak, tiling, interpret)
    return plgpu.kernel(
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
            unsafe_no_auto_barriers=not interpret,  # the body has its own barriers
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(q, k, jnp.asarray(table))


@dataclasses.dataclass(frozen=True)
class ScoresShape:
    """Static sizes of one call, and how its mean queries are grouped."""

    B: int
    R: int  # mean queries of each query head
    S: int
    N: int
    K: int
    H: int
    block: int
    causal: bool
    parts: int  # mean queries of one row block
    resident: int  # tiles in a group: those that a CTA keeps in shared memory at a time
    q_stages: int  # groups in shared memory
    stages: int  # blocks of keys in flight

    @property
    def head_tiles(self) -> int:
        """Tiles of 64 mean queries of one query head."""
        return pl.cdiv(self.R, ROWS)

    @property
    def tiles(self) -> int:
        """Tiles of all query heads of one kv head."""
        return self.head_tiles * (self.N // self.K)

    @property
    def groups(self) -> int:
        """Groups of tiles of one kv head."""
        return pl.cdiv(self.tiles, self.resident)

    @property
    def blocks(self) -> int:
        """Blocks of keys."""
        return pl.cdiv(self.S, self.block)

    @property
    def shared_elements(self) -> int:
        """Of shared memory, for queries and keys."""
        return (self.q_stages * self.resident * ROWS + self.stages * self.block) * self.H

    @classmethod
    def of(cls, queries, k, block, causal, parts, tiling):
        """The sizes of a call; raises where k or the block does not fit the queries."""
        B, R, N, H = queries.shape
        _, S, K, _ = k.shape
        if k.shape != (B, S, K, H) or N % K:
            raise ValueError(
                f"key is {list(k.shape)}; queries {list(queries.shape)} need "
                f"[{B}, S, K, {H}] with K dividing {N}"
            )
        if k.dtype != queries.dtype:
            raise ValueError(f"key is {k.dtype} and the queries are {queries.dtype}; cast them")
        check_sizes((block,), H)
        tile_bytes, block_bytes = (x * H * k.dtype.itemsize for x in (ROWS, block))
        stages = max(2, tiling.k_bytes // block_bytes)
        q_bytes = min(tiling.q_bytes, SHARED_BYTES - stages * block_bytes)
        tiles = pl.cdiv(R, ROWS) * (N // K)
        groups = pl.cdiv(tiles, max(1, q_bytes // tile_bytes // tiling.q_groups))
        resident = pl.cdiv(tiles, groups)
        return cls(
            B,
            R,
            S,
            N,
            K,
            H,
            block,
            causal,
            parts,
            resident,
            q_stages=min(2, max(1, q_bytes // (resident * tile_bytes))),
            stages=stages,
        )


@functools.lru_cache(maxsize=64)
def segments(shape: ScoresShape, multiprocessors: int) -> np.ndarray:
    """The segments of every CTA, int32 [CTAs, most segments of a CTA + 1, 5].

    The blocks of all groups of all kv heads, in one sequence, are split into parts of equal cost.
    """
    tile = np.arange(shape.groups * shape.resident)
    last_row = np.where(tile < shape.tiles, tile % shape.head_tiles * ROWS + ROWS - 1, -1)
    last_row = np.minimum(last_row, shape.R - 1).reshape(shape.groups, -1)
    block = np.arange(shape.blocks)
    # [groups, tiles, blocks]
    last_row = np.where(last_row < 0, -1, last_row // shape.parts)
    sees = last_row[..., None] >= (block if shape.causal else np.zeros_like(block))
    # Nanoseconds, roughly: an SM's share of memory bandwidth, its exponentials and products.
    read = shape.block * shape.H * 2 / 32
    compute = ROWS * shape.block / 16
    cost = np.where(sees.any(1), np.maximum(read, sees.sum(1) * compute), 0)  # [groups, blocks]
    heads = shape.B * shape.K
    group, first = np.nonzero(cost)
    flat = np.tile(cost[group, first], heads)
    cta = _split(flat, multiprocessors)
    head = np.repeat(np.arange(heads), len(group))
    head_group = head * shape.groups + np.tile(group, heads)
    begins = np.nonzero(np.diff(cta, prepend=-1) | np.diff(head_group, prepend=-1))[0]
    count = np.diff(begins, append=len(flat))
    cta, head_group, first = cta[begins], head_group[begins], np.tile(first, heads)[begins]
    rank = np.arange(len(cta)) - np.searchsorted(cta, cta)
    table = np.zeros((cta[-1] + 1, rank.max() + 2, len(Segment._fields)), np.int32)
    head, group = np.divmod(head_group, shape.groups)
    fields = (head // shape.K, head % shape.K, group, first, count)
    table[cta, rank] = np.stack(fields, -1)
    return table


def _split(costs: np.ndarray, parts: int) -> np.ndarray:
    """The part that each cost falls in: at most `parts` runs, whose largest sum is the smallest.

    Up to an error of a quarter of the least cost.
    """
    ends = np.cumsum(costs)

    def begins(most: float) -> list[int]:
        """Of runs that cost at most so much; one more than `parts` if those do not suffice."""
        found, done = [0], 0.0
        while len(found) <= parts and ends[-1] > done + most:
            found.append(int(np.searchsorted(ends, done + most, side="right")))
            done = ends[found[-1] - 1]
        return found

    mean, most = ends[-1] / parts, costs.max()
    least, enough = max(mean, most), mean + most
    while enough - least > costs.min() / 4:
        middle = (least + enough) / 2
        if len(begins(middle)) <= parts:
            enough = middle
        else:
            least = middle
    return np.searchsorted(begins(enough), np.arange(len(costs)), side="right") - 1


class _Kernel:
    """The kernel body and its roles; `self` holds what is static."""

    def __init__(self, shape, keys_per_peak, tiling, interpret):
        self.shape, self.keys_per_peak = shape, keys_per_peak
        self.warpgroups = tiling.warpgroups
        self.interpret = bool(interpret)

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers of a CTA."""
        shape = self.shape
        return dict(
            q_smem=tiles(shape.q_stages, shape.resident, ROWS, shape.H, dtype=dtype),
            k_smem=tiles(shape.stages, shape.block, shape.H, dtype=dtype),
            q_ready=plgpu.Barrier(num_barriers=shape.q_stages, num_arrivals=shape.resident),
            k_ready=plgpu.Barrier(num_barriers=shape.stages),
            q_free=plgpu.Barrier(num_barriers=shape.q_stages, num_arrivals=self.warpgroups),
            k_free=plgpu.Barrier(num_barriers=shape.stages, num_arrivals=self.warpgroups),
        )

    def body(self, q_gmem, k_gmem, table, scores_gmem, **scratch):
        """One CTA: what its warpgroups do."""
        wg = lax.axis_index("wg")

        @pl.when(wg < self.warpgroups)
        def _():
            self.compute(wg, table, scores_gmem, **scratch)

        @pl.when(wg == self.warpgroups)
        def _():
            self.memory(q_gmem, k_gmem, table, **scratch)

    def for_each_segment(self, table, visit):
        """done = visit(number, segment, done) for every segment, where `done` begins with 0.

        Returns the number of segments and the last `done`.
        """
        cta = lax.axis_index("cta")

        def record(number):
            return Segment(*(table[cta, number, field] for field in range(len(Segment._fields))))

        def body(state):
            number, segment, done = state
            done = visit(number, segment, done)
            return number + 1, record(number + 1), done

        zero = jnp.int32(0)
        number, _, done = lax.while_loop(
            lambda state: state[1].count > 0, body, (zero, record(zero), zero)
        )
        return number, done

    def rows_of(self, segment, tile):
        """(query head, first row) of a tile of the segment's kv head."""
        shape = self.shape
        head, tile = (f(tile, jnp.int32(shape.head_tiles)) for f in (lax.div, lax.rem))
        return segment.h * (shape.N // shape.K) + head, tile * ROWS

    # Memory warpgroup

    def memory(
        self, q_gmem, k_gmem, table, *, q_smem, k_smem, q_ready, k_ready, q_free, k_free, **_
    ):
        """Copies a group of tiles per segment and its blocks, as soon as their slots are free."""
        shape = self.shape

        def load(number, segment, done):
            def load_q():
                q_slot = slot_of(number, shape.q_stages)
                pl.when(number >= shape.q_stages)(lambda: plgpu.barrier_wait(q_free.at[q_slot]))
                for m in range(shape.resident):
                    # The last group may reach past the last tile; it repeats that tile then.
                    tile = jnp.minimum(segment.group * shape.resident + m, shape.tiles - 1)
                    n, first_row = self.rows_of(segment, tile)
                    plgpu.copy_gmem_to_smem(
                        q_gmem.at[segment.b, pl.ds(first_row, ROWS), n],
                        q_smem.at[q_slot, m],
                        q_ready.at[q_slot],
                    )

            @pl.loop(0, segment.count)
            def _(t):
                slot = slot_of(done + t, shape.stages)
                pl.when(done + t >= shape.stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                keys = pl.ds((segment.first + t) * shape.block, shape.block)
                plgpu.copy_gmem_to_smem(
                    k_gmem.at[segment.b, keys, segment.h], k_smem.at[slot], k_ready.at[slot]
                )
                pl.when(t == 0)(load_q)  # after K, whose slot may be free sooner

            return done + segment.count

        numbers, done = self.for_each_segment(table, load)
        if self.interpret:  # the interpreter requires a wait for every barrier phase
            for total, stages, free in (
                (numbers, shape.q_stages, q_free),
                (done, shape.stages, k_free),
            ):

                @pl.loop(jnp.maximum(total - stages, 0), total)
                def _(t, stages=stages, free=free):
                    plgpu.barrier_wait(free.at[slot_of(t, stages)])

    # Compute warpgroups

    def compute(self, wg, table, scores_gmem, *, q_smem, k_smem, q_ready, k_ready, q_free, k_free):
        """The scores of every pair of (tile, block) that is this warpgroup's."""
        shape, warpgroups = self.shape, self.warpgroups

        def visit(number, segment, done):
            q_slot = slot_of(number, shape.q_stages)
            plgpu.barrier_wait(q_ready.at[q_slot])

            @pl.loop(0, segment.count)
            def _(t):
                slot = slot_of(done + t, shape.stages)
                plgpu.barrier_wait(k_ready.at[slot])
                first = lax.rem(done + t + wg, jnp.int32(warpgroups))

                @pl.loop(0, lax.div(shape.resident - first + warpgroups - 1, jnp.int32(warpgroups)))
                def _(i):
                    m = first + i * warpgroups
                    tile = segment.group * shape.resident + m
                    operands = q_smem.at[q_slot, m], k_smem.at[slot]
                    self.score(segment, segment.first + t, tile, operands, scores_gmem)

                plgpu.barrier_arrive(k_free.at[slot])

            plgpu.barrier_arrive(q_free.at[q_slot])
            return done + segment.count

        self.for_each_segment(table, visit)

    def score(self, segment, j, tile, operands, scores_gmem):
        """Writes the 64 scores of a tile and block j, if some row sees it."""
        shape = self.shape
        n, first_row = self.rows_of(segment, tile)
        live = tile < shape.tiles
        if shape.causal:
            live &= first_row + ROWS > j * shape.parts

        @pl.when(live)
        def _():
            q, k = operands

            def product(s_ref):
                plgpu.wgmma(s_ref, q, k.transpose((1, 0)))
                return s_ref[...]

            s = pl.run_scoped(product, plgpu.ACC((ROWS, shape.block), jnp.float32))
            if rest := shape.S % shape.block:
                s = lax.cond(j == shape.blocks - 1, lambda: _without(s, rest), lambda: s)
            rows = scores_gmem.at[segment.b, n, j, pl.ds(first_row, ROWS)]
            store_rows(self.log_sum(self.peaks(s)), rows, self.interpret)

    def peaks(self, s):
        """The largest of every `keys_per_peak` columns: of one from each part of s."""
        width = s.shape[1] // self.keys_per_peak
        parts = (s[:, i : i + width] for i in range(0, s.shape[1], width))
        return functools.reduce(jnp.maximum, parts)

    def log_sum(self, s):
        """log Σ 2^s of every row.

        The maximum is subtracted where the plain sum may have overflowed or lost small terms only:
        it is a chain of dependent operations that the exponentials would have to wait for.
        """
        l = jnp.exp2(s).sum(axis=1)
        is_safe = (l > LEAST) & (l < MOST)  # not if it is NaN

        def shifted():
            m = s.max(axis=1)
            return m + jnp.log2(jnp.exp2(s - lax.broadcast_in_dim(m, s.shape, [0])).sum(axis=1))

        if self.interpret:
            found = lax.cond(is_safe.all(), lambda: jnp.log2(l), shifted)
        else:
            unsafe = any_in_warp(jnp.where(is_safe, 1.0, 0.0))
            found = lax.cond(unsafe, shifted, lambda: jnp.log2(l))
        return found * (1 / LOG2E)


def _without(s, rest):
    """s with -inf in all but the first `rest` columns."""
    column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=TILE)
    return jnp.where(column < rest, s, -jnp.inf)
