"""The query of each part of a row block that is furthest from the block's mean, on Hopper (sm90).

    q [B, T, N, H] ─ tile [block, H] ─┬─ mean ─ distance of every token ─ furthest of each part ─┐
                                      └──────────────────────────── scale · its query ◀──────────┘

One launch, which reads q once: a CTA of one warpgroup copies the row block of one head to shared
memory. Several CTAs share an SM: copies of some overlap with the arithmetic of others. The H / 8
lanes that have a token, an octet each, are a row group; each row group has consecutive tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.lanes import (
    OCTET,
    await_copies,
    copy_octets,
    div_rem_lanes,
    exchange,
    gather,
    gather_octets,
    lane_index,
    launch,
    scatter_octets,
    squared_distances,
    sum_octets,
)
from xsake.backends.hopper.layouts import THREADS, div_rem

SUMS = THREADS * OCTET  # an octet of column sums for each lane
NOT_REAL = -1.0  # in place of the squared distance of a token past the last


def outliers(q: Array, block: int, parts: int, *, scale: float = 1.0) -> Array:
    """scale · the query of each part that is furthest from the mean of its block, in q's dtype.

    Of equally distant ones it is the first; a part past the last token is 0. Where q is NaN or
    infinite, the query of a part is any one of its row block.

    Args:
      q: [B, T, N, H] of 16-bit floats, H 64, 128 or 256.
      block: tokens of a row block, 64 or 128; the last may be short.
      parts: of a row block, with a query each.
      scale: of the results.

    Returns:
      [B, R · parts, N, H] with R = ceil(T / block).
    """
    B, T, N, H = q.shape
    R = pl.cdiv(T, block)
    row = _RowBlock(q.shape, q.dtype, block, parts, scale)
    shape = (B, R * parts, N, H)
    (found,) = launch(
        row.body,
        "xsake_outliers",
        [jax.ShapeDtypeStruct((int(np.prod(shape)),), q.dtype)],
        {"row": B * R * N},
        [q.reshape(-1)],
        # With a block of 128 and H = 128, 36.5 KB: six CTAs fit on an SM.
        queries=plgpu.SMEM((block * H,), q.dtype),
        values=plgpu.SMEM((SUMS + max(H, THREADS),), jnp.float32),
    )
    return found.reshape(shape)


class _RowBlock:
    """The kernel body; `self` holds what is static."""

    def __init__(self, shape, dtype, block, parts, scale):
        _, self.T, self.N, self.H = shape
        self.dtype, self.block, self.parts, self.scale = dtype, block, parts, scale
        self.width = self.H // OCTET  # lanes of a row group
        self.groups = THREADS // self.width
        self.rows = block // self.groups  # tokens of a row group
        self.copies = THREADS // block  # lanes that get one token's distance

    def body(self, q, out, *, queries, values):
        """One row block of one head; the heads of a token are next to each other in memory."""
        block, head = div_rem(lax.axis_index("row"), self.N)
        b, i = div_rem(block, pl.cdiv(self.T, self.block))
        first = i * self.block
        size = jnp.minimum(self.T - first, self.block)
        sums, mean = values.at[pl.ds(0, SUMS)], values.at[pl.ds(SUMS, max(self.H, THREADS))]
        lane = lane_index()
        group, octet = div_rem_lanes(lane, self.width)
        row = group * self.rows  # of the lane's first token
        at = ((b * self.T + first + row) * self.N + head) * self.width + octet
        valid = size - row if self.T % self.block else None
        copy_octets(q, at, self.N * self.width, self.rows, queries, valid)
        await_copies()
        self._average(queries, lane, size, sums, mean)
        own = gather_octets(mean, octet)
        partial = squared_distances(queries, own, self.rows)
        distance = self._add_lanes(partial, lane)
        token = div_rem_lanes(lane, self.copies)[0]
        distances = sums.at[pl.ds(0, THREADS)]  # the sums have been read
        distances[...] = jnp.where(token < size, distance, NOT_REAL)
        plgpu.commit_smem()
        for step in range(pl.cdiv(self.parts, self.groups)):
            # Row groups without a part of their own repeat the last one.
            part = jnp.minimum(group + step * self.groups, self.parts - 1)
            owner, row = div_rem_lanes(self._furthest(distances, part), self.rows)
            x = gather_octets(queries, row * THREADS + owner * self.width + octet)
            scaled = (x.astype(jnp.float32) * self.scale).astype(self.dtype)
            at = (block * self.parts + part) * self.N + head
            scatter_octets(out, at * self.width + octet, scaled)

    def _average(self, queries, lane, size, sums, mean):
        """mean[h] = mean of column h over the real tokens; the others are 0 in `queries`."""
        sums[...] = sum_octets(queries, self.rows)
        plgpu.commit_smem()
        inverse = 1.0 / size.astype(jnp.float32)
        for column in range(0, self.H, THREADS):
            own = div_rem_lanes(lane + column, self.H)[1]
            total = gather(sums, own)
            for group in range(1, self.groups):
                total += gather(sums, own + group * self.H)
            mean[pl.ds(column, THREADS)] = total * inverse
        plgpu.commit_smem()

    def _add_lanes(self, partial, lane):
        """The sum over a row group of its lanes' partial[r]; `copies` lanes in turn get number r.

        Each exchange halves the numbers that a lane has, and its sums are of twice the lanes.
        """
        distance = self.width // 2
        while distance:
            half = len(partial) // 2
            kept = sent = partial
            if half:
                is_upper = (lane & distance) > 0
                pairs = list(zip(partial[:half], partial[half:], strict=True))
                kept = [jnp.where(is_upper, high, low) for low, high in pairs]
                sent = [jnp.where(is_upper, low, high) for low, high in pairs]
            partial = [x + exchange(y, distance) for x, y in zip(kept, sent, strict=True)]
            distance //= 2
        return partial[0]

    def _furthest(self, distances, part):
        """The number in the block of a part's first token with the largest distance."""
        size = self.block // self.parts
        furthest = part * size
        largest = gather(distances, furthest * self.copies)
        for more in range(1, size):
            token = part * size + more
            distance = gather(distances, token * self.copies)
            is_further = distance > largest
            largest = jnp.where(is_further, distance, largest)
            furthest = jnp.where(is_further, token, furthest)
        return furthest
