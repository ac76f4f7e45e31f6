"""Lists of the best kv blocks from their scores, on Hopper (sm90): one CTA for each row block.

    sums [B, N, n, queries] ─ softmax over blocks ─ mean square over parts ─ ranks ─ lists
                                                        counts [B|1, N, n] ─┘

In plain JAX each arrow is one launch or several, and for short texts the launches are most of what
a selection takes. A lane has a part and some of its blocks, then a block and all parts. The weights
of a row block's blocks are in shared memory, and every lane compares its own with all of them: for
some hundred blocks that is less work than a sort.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.lanes import (
    LANES,
    count_in_warp,
    div_rem_lanes,
    every_lane,
    for_each,
    gather,
    lane_index,
    launch,
    scatter,
)
from xsake.backends.hopper.layouts import LOG2E, THREADS, WARP, div_rem, round_up
from xsake.block_mask.lists import Lists

LOWEST = -1e30  # in place of NaN and -inf
PAST = -1e38  # after the diagonal: below every block that a row block may visit
HIGHEST = 1e38  # rounding of huge logits may put a share above 1
FORCED = 3e38
# Added to the base-2 logarithm of squared shares: those from 2⁻²⁴⁶ to 1 fit into a float32.
SHIFT = 120.0


def best_blocks(
    sums: Array, counts: Array, *, length: int, block: int, parts: int, band: int
) -> Lists:
    """Lists of the counts[b, n, i] best blocks of each row block, forced ones first; causal.

    The same blocks as `selection.keep_top` selects, but for the rounding of nearly equal scores.
    Blocks whose share is below 2⁻¹²³ in every part are equal here: the earlier one comes first.

    Args:
      sums: float32 [B, N, n, at least n · parts]: log Σ exp(q · k / √H) over the keys of each
        block, for the `parts` queries of every row block; what a query does not see may be NaN.
      counts: int32 [B|1, N, n]; raised to the number of forced blocks, lowered to that of allowed
        ones.
      length: tokens; the last block may be short.
      block: tokens of a block.
      parts: queries of a row block; 1, or a power of two up to 128.
      band: forced blocks before the diagonal.
    """
    B, N, n, queries = sums.shape
    capacity = n * (n + 1) // 2
    shapes = [(B, N, n)] * 3 + [(B, N, capacity)]
    row = _RowBlocks(B, N, n, queries, len(counts), length, block, parts, band, capacity)
    padded = round_up(n, THREADS)
    results = launch(
        row.body,
        "xsake_best_blocks",
        [jax.ShapeDtypeStruct((int(np.prod(shape)),), jnp.int32) for shape in shapes],
        {"row": B * N * n},
        (sums.reshape(-1), counts.reshape(-1)),
        approx_math=True,
        weights=plgpu.SMEM((padded,), jnp.float32),
        ranks=plgpu.SMEM((padded,), jnp.int32),
        kept=plgpu.SMEM((padded,), jnp.int32),
        parts_max=plgpu.SMEM((THREADS,), jnp.float32),
        parts_sum=plgpu.SMEM((THREADS,), jnp.float32),
        totals=plgpu.SMEM((THREADS,), jnp.float32),
    )
    arrays = (x.reshape(shape) for x, shape in zip(results, shapes, strict=True))
    return Lists._make([*arrays, None])


class _RowBlocks:
    """The kernel body; `self` holds what is static."""

    def __init__(self, B, N, n, queries, count_batch, length, block, parts, band, capacity):
        self.B, self.N, self.n, self.queries = B, N, n, queries
        self.count_batch = count_batch
        self.length, self.block, self.parts, self.band = length, block, parts, band
        self.capacity = capacity

    def body(
        self, sums, counts, starts, listed, full, index,
        *, weights, ranks, kept, parts_max, parts_sum, totals,
    ):  # fmt: skip
        """One row block of one head; the longest ones begin first."""
        i, head = div_rem(lax.axis_index("row"), self.B * self.N)
        i = self.n - 1 - i
        chunks = lax.div(i, jnp.int32(THREADS)) + 1
        first = head * (self.n * self.queries) + i * self.parts  # of block 0, part 0
        # Loaded here, long before they are used: a load takes as long as the sums below.
        before, count = self._counts(counts, head, i)
        if self.parts > 1:
            self._normalise(sums, first, i, parts_max, parts_sum, totals)

        @pl.loop(0, chunks)
        def _(chunk):
            j = chunk * THREADS + lane_index()
            weight = self._weight(sums, first + jnp.minimum(j, i) * self.queries, i, totals)
            weight = jnp.minimum(jnp.where(weight > LOWEST, weight, LOWEST), HIGHEST)
            is_forced = (j == 0) | (j >= i - self.band)
            weight = jnp.where(is_forced, FORCED, weight)
            weights[pl.ds(chunk * THREADS, THREADS)] = jnp.where(j <= i, weight, PAST)

        plgpu.commit_smem()
        start = before.sum()

        @pl.loop(0, chunks)
        def _(chunk):
            j = chunk * THREADS + lane_index()
            here = pl.ds(chunk * THREADS, THREADS)
            own = plgpu.load(weights.at[here], layout=LANES)

            def compare(others, rank):
                loaded = [weights[other] for other in others]
                for other, weight in zip(others, loaded, strict=True):
                    is_before = (weight > own) | ((weight == own) & (other < j))
                    rank += jnp.where(is_before, 1, 0)
                return rank

            rank = for_each(i + 1, compare, every_lane(0))
            is_kept = jnp.where((rank < count) & (j <= i), 1, 0)
            earlier, together = count_in_warp(is_kept)
            ranks[here] = jnp.where(is_kept > 0, earlier, -1)
            kept[here] = together

        plgpu.commit_smem()

        @pl.loop(0, chunks)
        def _(chunk):
            j = chunk * THREADS + lane_index()
            rank = plgpu.load(ranks.at[pl.ds(chunk * THREADS, THREADS)], layout=LANES)
            at = start + rank
            for end in range(WARP, round_up(self.n, THREADS), WARP):
                # Warps of chunks that are not there are read by no lane that is kept.
                at += jnp.where(j >= end, kept[end - WARP], 0)
            scatter(index, jnp.where(rank >= 0, head * self.capacity + at, -1), j)

        self._write(starts, listed, full, index, head, i, start, count)

    def _normalise(self, sums, first, i, parts_max, parts_sum, totals):
        """totals[p] = base-2 logarithm of the sum of part p over the blocks 0 … i.

        Lane g · parts + p has blocks g, g + groups, … of part p.
        """
        groups = THREADS // self.parts
        group, part = div_rem_lanes(lane_index(), self.parts)

        def add(turns, state):
            blocks = [turn * groups + group for turn in turns]
            loaded = [gather(sums, first + jnp.minimum(j, i) * self.queries + part) for j in blocks]
            largest, total = state
            for j, x in zip(blocks, loaded, strict=True):
                x = jnp.where(j <= i, x * LOG2E, largest)
                larger = jnp.maximum(largest, x)
                own = jnp.where(j <= i, jnp.exp2(x - larger), 0.0)
                largest, total = larger, total * jnp.exp2(largest - larger) + own
            return largest, total

        zero = every_lane(0).astype(jnp.float32)
        turns = lax.div(i, jnp.int32(groups)) + 1
        parts_max[...], parts_sum[...] = for_each(turns, add, (zero + LOWEST, zero))
        plgpu.commit_smem()
        each = [
            (gather(parts_max, g * self.parts + part), gather(parts_sum, g * self.parts + part))
            for g in range(groups)
        ]
        largest = each[0][0]
        for other, _ in each[1:]:
            largest = jnp.maximum(largest, other)
        total = zero
        for other, own in each:
            total += own * jnp.exp2(other - largest)
        totals[...] = largest + jnp.log2(total)
        plgpu.commit_smem()

    def _weight(self, sums, at, i, totals):
        """What each lane's block is ranked by: its score, or the sum of its squared shares."""
        if self.parts == 1:
            return gather(sums, at)
        size = self.block // self.parts
        real = lax.div(self.length - i * self.block + (size - 1), jnp.int32(size))  # parts
        real = every_lane(0) + real
        loaded = [gather(sums, at + part) for part in range(self.parts)]
        weight = every_lane(0).astype(jnp.float32)
        for part, x in enumerate(loaded):
            square = jnp.exp2(2 * (x * LOG2E - totals[part]) + SHIFT)
            weight += jnp.where(part < real, square, 0.0)
        return weight

    def _counts(self, counts, head, i):
        """(its lanes' part of the sum of the counts of earlier row blocks, the count of this)."""
        row = 0 if self.count_batch == 1 else lax.div(head, jnp.int32(self.N))
        offset = (row * self.N + lax.rem(head, jnp.int32(self.N))) * self.n

        def clipped(rows):
            found = gather(counts, offset + jnp.minimum(rows, self.n - 1))
            return jnp.minimum(jnp.maximum(found, self.band + 2), rows + 1)

        def add(chunk, before):
            rows = chunk * THREADS + lane_index()
            return before + jnp.where(rows < i, clipped(rows), 0)

        chunks = lax.div(i, jnp.int32(THREADS)) + 1
        return lax.fori_loop(0, chunks, add, every_lane(0)), clipped(every_lane(0) + i)

    def _write(self, starts, listed, full, index, head, i, start, count):
        """The row block's extent, by lane 0; after the last row block the tail of the lists."""
        lane = lane_index()
        at = jnp.where(lane == 0, head * self.n + i, -1)
        scatter(starts, at, every_lane(0) + start)
        scatter(listed, at, count)
        scatter(full, at, count - 1)  # all but the diagonal

        # Entries past the lists are never read, but must be valid indices.
        @pl.when(i == self.n - 1)
        def _():
            first = start + count.max()

            @pl.loop(lax.div(first, jnp.int32(THREADS)), pl.cdiv(self.capacity, THREADS))
            def _(chunk):
                entry = chunk * THREADS + lane
                unused = (entry >= first) & (entry < self.capacity)
                scatter(index, jnp.where(unused, head * self.capacity + entry, -1), every_lane(0))
